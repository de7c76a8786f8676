/** The page: its session, the view shown, and whether that view is live. */

import { CallError, session } from "./api.js";
import { el, put, setText } from "./dom.js";
import { JobView } from "./job_view.js";
import { JobsView } from "./jobs_view.js";
import { LedgerView } from "./ledger_view.js";
import { LoginView } from "./login_view.js";
import * as n from "./numbers.js";

const content = document.getElementById("content");
const trail = document.getElementById("trail");
const who = document.getElementById("who");
const release = document.getElementById("release");
const streamState = document.getElementById("stream-state");

const app = {
  session: null,
  /** Called by a view's stream. */
  onStream: (state) => showStream(state),
  /** Called by a stream before it is opened again: an ended session leads to the login. */
  mayGoOn: async () => {
    const found = await session.show();
    if (isLoggedIn(found)) return true;
    // Stream and calls may notice at the same time.
    if (!(view instanceof LoginView)) enter(found, "The session has ended.");
    return false;
  },
};

let view = null;
let stream = null;
let retrying = 0;

document.addEventListener("session-ended", () => app.mayGoOn().catch(() => {})); // the stream shows a missing answer
window.addEventListener("hashchange", () => route(true));
setInterval(() => stream && showStream(stream), 1_000);
start();

async function start() {
  clearTimeout(retrying);
  try {
    enter(await session.show());
  } catch (error) {
    if (!(error instanceof CallError)) throw error;
    put(content, el("p", { class: "empty" }, `${error.message} Trying again…`));
    retrying = setTimeout(start, 2_000);
  }
}

const isLoggedIn = (found) => !found.requires_login || found.name !== "";

function enter(found, why = "") {
  app.session = found;
  put(release, found.release && `perseus ${found.release}`);
  if (!isLoggedIn(found)) {
    put(who);
    put(trail);
    show(new LoginView((next) => enter(next), why));
    document.getElementById("token").focus();
    return;
  }
  const leave = el("button", { type: "button", class: "quiet", onclick: logout }, "Log out");
  const name = el("span", { title: found.may_control ? "may control jobs" : "may only read" }, `${found.name} (${found.scope})`);
  const slot = el("span", { title: "this coordinator serves one slot of the fleet's jobs" }, `slot ${found.slot} of ${found.slot_count}`);
  put(who, found.slot_count > 1 && slot, found.requires_login ? [name, leave] : el("span", { class: "unlocked" }, "no login required"));
  route(false);
}

async function logout() {
  try {
    await session.logout();
  } catch (error) {
    if (!(error instanceof CallError)) throw error;
  }
  start();
}

function route(isMoved) {
  if (!app.session || !isLoggedIn(app.session)) return;
  const matched = /^#\/jobs\/([^/]+)$/.exec(location.hash);
  const jobId = matched && decoded(matched[1]);
  const isLedger = location.hash === "#/ledger";
  const link = (href, name, isHere) => el("a", { href, "aria-current": isHere ? "page" : false }, name);
  put(
    trail,
    link("#/", "Jobs", !isLedger && !jobId),
    jobId ? el("span", { "aria-current": "page" }, jobId) : null,
    link("#/ledger", "Ledger", isLedger),
  );
  show(jobId ? new JobView(app, jobId) : isLedger ? new LedgerView(app) : new JobsView(app));
  // Moves the focus for keyboards and screen readers.
  if (isMoved) {
    content.focus();
    window.scrollTo(0, 0);
  }
}

function show(next) {
  view?.close();
  view = next;
  stream = null;
  streamState.className = "stream";
  setText(streamState, "");
  document.title = `${next.title} · Perseus`;
  content.classList.remove("stale");
  put(content, next.element);
}

function showStream(state) {
  stream = state;
  const isStale = !state.isLive && !state.hasEnded;
  streamState.className = `stream ${state.hasEnded ? "ended" : isStale ? "stale" : "live"}`;
  content.classList.toggle("stale", isStale && state.heardAt !== null);
  if (state.hasEnded) setText(streamState, "the run has ended");
  else if (state.isLive) setText(streamState, "live");
  else if (state.heardAt === null) setText(streamState, "connecting…");
  else setText(streamState, `stale since ${n.clock(state.heardAt)}, reconnecting…`);
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
