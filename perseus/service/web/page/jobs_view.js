/** All jobs: their state, and their savings. */

import { CallError, otherSlots } from "./api.js";
import { el, put, setText } from "./dom.js";
import { EventStream } from "./event_stream.js";
import { Feeds } from "./feeds.js";
import * as n from "./numbers.js";
import { cardTable, figure, nextStep, numberCell, waiting } from "./panel.js";
import { jobLink, jobState, layout, measuredScale, profiling, rankCount } from "./words.js";

const ASK_OTHERS_EVERY_MS = 5_000;
const COLUMNS = [
  { name: "job", key: (job) => job.job_id },
  { name: "state", key: (job) => jobState(job).name },
  { name: "ranks", key: (job) => rankCount(job.parallelism), isNumber: true },
  { name: "iteration", key: (job) => job.figures?.iteration_time_s ?? -1, isNumber: true },
  { name: "power", key: (job) => job.figures?.power_w ?? -1, isNumber: true },
  { name: "energy saved", key: (job) => job.figures?.saving?.energy_percent ?? -Infinity, isNumber: true },
  { name: "slowdown", key: (job) => job.figures?.saving?.slowdown_percent ?? -Infinity, isNumber: true },
  { name: "status", key: (job) => job.state_reason },
];

export class JobsView {
  constructor(app) {
    this.title = "Jobs";
    this._jobs = new Map();
    this._isWhole = false;
    this._slot = app.session.slot;
    this._others = []; // jobs of other slots, as they are stored
    this._hiddenCount = 0;
    this._slots = el("p", { class: "note slots", hidden: true });
    this._sort = { column: COLUMNS[0], isDown: false };
    this._rows = el("tbody", { role: "rowgroup" });
    this._figures = Object.fromEntries(["jobs", "under a plan", "power now", "energy saved"].map((name) => [name, figure(name)]));
    this._filter = el("input", { type: "search", placeholder: "Filter by name or state", "aria-label": "Filter jobs", oninput: () => this._show() });
    this._headers = COLUMNS.map((column) => this._header(column));
    this._table = cardTable("Table of jobs", this._headers, this._rows);
    this._empty = waiting("Waiting for the coordinator…");
    this._feeds = new Feeds(app.session);
    this.element = el(
      "div",
      {},
      el("div", { class: "heading" }, el("h1", {}, "Jobs"), this._filter),
      el("dl", { class: "figures-row" }, Object.values(this._figures).map(({ element }) => element)),
      this._slots,
      this._feeds.element,
      this._empty,
      this._table,
    );
    this._table.hidden = true;
    this._stream = new EventStream(
      () => "api/watch/jobs",
      ["jobs"],
      (_, update) => this._take(update),
      app.onStream,
      app.mayGoOn,
    );
    if (app.session.slot_count > 1) this._askOthers();
  }

  close() {
    this._isClosed = true;
    clearTimeout(this._timer);
    this._stream.close();
    this._feeds.close();
  }

  _take({ is_whole: isWhole, jobs, removed }) {
    if (isWhole) this._jobs.clear();
    for (const job of jobs) this._jobs.set(job.job_id, job);
    for (const jobId of removed) this._jobs.delete(jobId);
    this._isWhole = true;
    this._show();
  }

  /** Ask for the jobs of other slots, and again after a while; without an answer, show none rather than old ones. */
  async _askOthers() {
    let slots = null;
    try {
      slots = await otherSlots();
    } catch (error) {
      if (!(error instanceof CallError)) throw error;
    }
    if (this._isClosed) return;
    const others = (slots ?? []).filter(({ slot }) => slot !== this._slot);
    this._others = others.flatMap((holder) => holder.listed.jobs.map((job) => ({ ...job, holder })));
    this._hiddenCount = others.reduce((sum, { job_count: count, listed }) => sum + count - listed.jobs.length, 0);
    this._slots.hidden = false;
    put(this._slots, `This coordinator serves slot ${this._slot}. `, slots ? others.map(slotNote) : "Jobs of other slots are not known at present.");
    this._show();
    this._timer = setTimeout(() => this._askOthers(), ASK_OTHERS_EVERY_MS);
  }

  _header(column) {
    const onclick = () => {
      const isSame = this._sort.column === column;
      this._sort = { column, isDown: isSame ? !this._sort.isDown : Boolean(column.isNumber) };
      this._show();
    };
    return el("th", { scope: "col", role: "columnheader", class: column.isNumber ? "number" : false }, el("button", { type: "button", class: "sort", onclick }, column.name));
  }

  _show() {
    if (!this._isWhole) return;
    const all = [...this._jobs.values(), ...this._others];
    const words = this._filter.value.trim().toLowerCase();
    const { column, isDown } = this._sort;
    const shown = all
      .filter((job) => `${job.job_id} ${jobState(job).name}`.toLowerCase().includes(words))
      .sort((one, other) => (isDown ? -1 : 1) * compare(column.key(one), column.key(other)) || compare(one.job_id, other.job_id));
    for (const [at, header] of this._headers.entries()) {
      if (COLUMNS[at] === column) header.setAttribute("aria-sort", isDown ? "descending" : "ascending");
      else header.removeAttribute("aria-sort");
    }
    const focused = this._rows.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    put(this._rows, shown.map(row));
    if (focused) [...this._rows.querySelectorAll("a")].find((link) => link.getAttribute("href") === focused)?.focus();
    this._table.hidden = shown.length === 0;
    this._empty.hidden = shown.length > 0;
    setText(
      this._empty,
      all.length
        ? "No job matches by name or state."
        : "No jobs yet. Training registers a job automatically, through the hook in the training script and the agent on its node.",
    );
    this._sum(all);
  }

  _sum(all) {
    const set = (name, value, note) => {
      setText(this._figures[name].value, value);
      setText(this._figures[name].note, note);
    };
    const running = all.filter((job) => job.state !== "JOB_STATE_FINISHED");
    const planned = running.filter((job) => job.state === "JOB_STATE_PLANNED");
    const inTrouble = running.filter((job) => jobState(job).tone === "trouble");
    const own = this._slots.hidden ? "" : ` of slot ${this._slot}`;
    const measured = running.filter((job) => job.figures?.power_w !== undefined);
    const power_w = measured.reduce((sum, job) => sum + job.figures.power_w, 0);
    set("jobs", n.fixed(all.length + this._hiddenCount), running.length === all.length ? "" : `${n.fixed(all.length - running.length)} finished`);
    set("under a plan", n.fixed(planned.length), inTrouble.length ? `${n.fixed(inTrouble.length)} returned to stock` : "");
    set("power now", measured.length ? n.watts(power_w) : "–", measured.length ? `of ${n.count(measured.length, "job")}${own}` : "not measured yet");
    // Weighted by each job's power at stock, so that large jobs count more.
    const saving = measured.filter((job) => job.figures.saving?.energy_percent !== undefined);
    const stock_w = (job) => job.figures.power_w / (1 - job.figures.saving.energy_percent / 100);
    const total_w = saving.reduce((sum, job) => sum + stock_w(job), 0);
    const saved_w = saving.reduce((sum, job) => sum + stock_w(job) - job.figures.power_w, 0);
    set("energy saved", total_w > 0 ? n.percent((100 * saved_w) / total_w) : "–", total_w > 0 ? `of ${n.count(saving.length, "job")}${own} under a plan` : "no job is under a plan yet");
  }
}

/** Who serves another slot, and which of its jobs are not listed. */
function slotNote({ slot, is_served: isServed, address, page_url: pageUrl, job_count: count, listed }) {
  const hidden = count > listed.jobs.length ? `, ${n.fixed(count - listed.jobs.length)} of its ${n.fixed(count)} jobs are not listed here` : "";
  if (!isServed) return el("span", { class: "attention" }, `Nobody serves slot ${slot}: its jobs return to stock until a coordinator takes it over${hidden}. `);
  const where = address || "an unknown address";
  return [`Slot ${slot} is served at `, pageUrl ? el("a", { href: `${pageUrl}/` }, where) : where, `${hidden}. `];
}

function row(job) {
  const { holder } = job; // of a job of another slot: what is measured is on its page
  const state = jobState(job);
  const { iteration_time_s, power_w, saving } = job.figures ?? {};
  const counts = job.rank_counts;
  const progress = job.profiling_progress;
  const straggling = job.straggler_count ? n.count(job.straggler_count, "straggler") : "";
  const held = job.budget_target_iteration_time_s === undefined ? "" : `slowed to ${n.seconds(measuredScale(job, job.budget_target_iteration_time_s))} by a power budget`;
  const goesOn = [progress ? profiling(progress) : job.state_reason, straggling, held].filter(Boolean).join("; ");
  const isAttention = state.tone === "trouble" || job.straggler_count > 0;
  return el(
    "tr",
    { role: "row" },
    el("th", { scope: "row", role: "rowheader" }, holder && !holder.page_url ? job.job_id : el("a", { href: jobLink(job.job_id, holder?.page_url) }, job.job_id)),
    el("td", { role: "cell" }, el("span", { class: `state ${state.tone}`, title: state.meaning }, state.name)),
    numberCell("ranks", counts ? `${n.fixed(counts.connected_count)} of ${n.fixed(rankCount(job.parallelism))}` : n.fixed(rankCount(job.parallelism)) , {
      title: `pipelines × stages × tensor: ${layout(job.parallelism)}`,
    }),
    numberCell("iteration", iteration_time_s === undefined ? "–" : n.seconds(iteration_time_s)),
    numberCell("power", power_w === undefined ? "–" : n.watts(power_w)),
    numberCell("saved", saving?.energy_percent === undefined ? "–" : n.withError(saving.energy_percent, saving.energy_margin_percent), { kind: "strong" }),
    numberCell("slowdown", saving === undefined ? "–" : n.change(saving.slowdown_percent)),
    el(
      "td",
      { role: "cell", class: `reason ${isAttention ? "attention" : ""}` },
      goesOn,
      holder ? el("p", { class: "note" }, `slot ${holder.slot}, ${holder.is_served ? `served at ${holder.address || "an unknown address"}` : "which nobody serves"}`) : null,
      job.next_step ? el("p", { class: "note" }, nextStep(job.next_step)) : null,
    ),
  );
}

function compare(one, other) {
  if (typeof one === "string") return one.localeCompare(other);
  return one === other ? 0 : one < other ? -1 : 1;
}
