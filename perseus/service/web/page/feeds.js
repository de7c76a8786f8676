/** The feeds with a limit: the power cap and the power drawn of each, and the jobs that it slows down. */

import { CallError, call } from "./api.js";
import { el, put } from "./dom.js";
import * as n from "./numbers.js";
import { cardTable, numberCell } from "./panel.js";

const ASK_EVERY_MS = 2_000;
const COLUMNS = ["feed", "limit", "power cap", "judged mean", "drawn", "under plans", "others", "limit kept", "slowed jobs"];

export class Feeds {
  /** Slot 0's coordinator knows feeds whole, others their shares of them. */
  constructor({ slot }) {
    this._rows = el("tbody", { role: "rowgroup" });
    const headers = COLUMNS.map((name, at) => el("th", { scope: "col", role: "columnheader", class: at > 0 && at < 7 ? "number" : false }, at === 0 && slot ? `feed, share of slot ${slot}` : name));
    this.element = cardTable("Feeds with a limit", headers, this._rows);
    this.element.hidden = true;
    this._isClosed = false;
    this._ask();
  }

  close() {
    this._isClosed = true;
    clearTimeout(this._timer);
  }

  /** Ask, and again after a while; without an answer, hide the table rather than show old values. */
  async _ask() {
    let feeds = [];
    try {
      feeds = (await call("PowerService", "ListFeeds", {})).feeds ?? [];
    } catch (error) {
      if (!(error instanceof CallError)) throw error;
    }
    if (this._isClosed) return;
    const limited = feeds.filter((feed) => feed.limit_w !== undefined || feed.is_above_power_cap);
    put(this._rows, limited.map(row));
    this.element.hidden = limited.length === 0;
    this._timer = setTimeout(() => this._ask(), ASK_EVERY_MS);
  }
}

function row(feed) {
  const paused = feed.job_ids_to_pause ?? [];
  const toPause = paused.length ? ` Keeping it would require pausing ${paused.join(", ")}.` : "";
  const conflicts = feed.conflicting_gpu_count ? ` Conflicting readings of ${n.count(feed.conflicting_gpu_count, "GPU")}.` : "";
  const judged = feed.judged_mean_w !== undefined;
  const [name, tone, meaning] = complianceState(feed);
  return el(
    "tr",
    { role: "row" },
    el("th", { scope: "row", role: "rowheader" }, feed.feed),
    numberCell("limit", feed.limit_w === undefined ? "–" : n.watts(feed.limit_w)),
    numberCell("power cap", feed.power_cap_w === undefined ? "–" : n.watts(feed.power_cap_w)),
    numberCell("judged", judged ? `${n.watts(feed.judged_mean_w)} in ${n.fixed(feed.judged_s)} s` : "–", {
      kind: "strong",
      title: "mean since the limit has had to be kept, over at most a minute or three iterations: it decides whether the limit is kept",
    }),
    numberCell("drawn", n.watts(feed.measured_w), { title: "mean over the longer of a minute and three iterations" }),
    numberCell("under plans", n.watts(feed.managed_w)),
    numberCell("others", n.watts(feed.unmanaged_w)),
    el("td", { role: "cell", class: "reason" }, el("span", { class: `state ${tone}`, title: meaning }, name), toPause, conflicts),
    el("td", { role: "cell", class: "reason" }, (feed.slowed_job_ids ?? []).join(", ")),
  );
}

function complianceState(feed) {
  if (feed.is_above_power_cap) return ["above power cap", "trouble", "More than the power cap was drawn all along for a minute or three iterations."];
  if (!feed.is_compliant) return ["not kept", "trouble", "The power exceeds the limit, or will."];
  if (feed.is_in_transition) return ["on its way", "busy", "The power cap is on its way to the limit, or reached it a few seconds ago."];
  if (!(feed.judged_mean_w <= feed.limit_w)) return ["not judged yet", "busy", "The mean does not cover a minute or three iterations yet."];
  return ["kept", "run", "Plans and measurements keep the limit."];
}
