/** Energy used and saved by all jobs in a period, for those who pay for it. */

import { CallError, pages } from "./api.js";
import { el, put, setText } from "./dom.js";
import { PERIODS, UNKNOWN, assumptions, byJob, caveats, known, period, periodWords, savedEnergy } from "./ledger.js";
import * as n from "./numbers.js";
import { cardTable, choice, figure, numberCell, waiting } from "./panel.js";

const ASK_EVERY_MS = 30_000;
const ASK_AGAIN_MS = 2_000;
const MAX_PAGES = 2;
const COLUMNS = ["job", "runs", "used", "saved, ± 95 %", "saved, %", "cost", "cost saved", "CO₂", "CO₂ saved"];

export class LedgerView {
  constructor(app) {
    this.title = "Ledger";
    this._app = app;
    this._period = "month";
    this._asked = 0;
    this._heardAt = null;
    this._figures = Object.fromEntries(["used", "saved", "cost", "CO₂", "profiling"].map((name) => [name, figure(name)]));
    this._rows = el("tbody", { role: "rowgroup" });
    const headers = COLUMNS.map((name, at) => el("th", { scope: "col", role: "columnheader", class: at ? "number" : false }, name));
    this._table = cardTable("Energy used and saved by jobs", headers, this._rows);
    this._when = el("p", { class: "note", role: "status" });
    this._empty = waiting("Waiting for the coordinator…");
    this._notes = el("p", { class: "note" });
    this._content = el(
      "div",
      { hidden: true },
      el("dl", { class: "figures-row" }, Object.values(this._figures).map(({ element }) => element)),
      this._table,
      this._notes,
    );
    this.element = el(
      "div",
      { class: "ledger" },
      el(
        "div",
        { class: "heading" },
        el("h1", {}, "Ledger"),
        choice("ledger-period", "Period", PERIODS, this._period, (name) => {
          this._period = name;
          this._ask();
        }),
      ),
      this._when,
      this._empty,
      this._content,
    );
    this._ask();
  }

  close() {
    clearTimeout(this._timer);
    this._asked = -1;
  }

  /** Ask, and again after a while; drop answers to earlier requests. */
  async _ask() {
    clearTimeout(this._timer);
    const asked = (this._asked += 1);
    const wanted = period(this._period, Date.now());
    let statement;
    try {
      statement = await pages("LedgerService", "ListLedgerEntries", request(wanted), "entries", MAX_PAGES);
    } catch (error) {
      if (!(error instanceof CallError)) throw error;
    }
    if (asked !== this._asked) return;
    if (statement) {
      this._heardAt = Date.now();
      this._show(wanted, statement);
    }
    this._app.onStream({ isLive: Boolean(statement), hasEnded: false, heardAt: this._heardAt });
    this._timer = setTimeout(() => this._ask(), statement ? ASK_EVERY_MS : ASK_AGAIN_MS);
  }

  _show(wanted, { entries, total, next_page_token: more }) {
    const { slot, slot_count: slotCount } = this._app.session;
    setText(this._when, periodWords(wanted) + (slotCount > 1 ? `; of the jobs of slot ${slot}` : ""));
    const isEmpty = entries.length === 0;
    this._empty.hidden = !isEmpty;
    this._content.hidden = isEmpty;
    setText(this._empty, "The ledger has no energy in this period.");
    if (isEmpty) return;
    const jobs = byJob(entries);
    const focused = this._rows.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    const runs = more ? "" : n.fixed(entries.length);
    put(this._rows, jobs.map(jobRows), row({ name: "total", runs, account: total, kind: "total" }));
    if (focused) [...this._rows.querySelectorAll("a")].find((link) => link.getAttribute("href") === focused)?.focus();
    this._sum(total);
    const notes = [
      more ? `Only the first ${n.fixed(entries.length)} runs are listed; the total covers all.` : "",
      "GPUs only, including gaps and profiling, against each run's stock baseline. ± is half a 95 % interval; for several runs, only the total has one.",
      ...caveats(total),
      `Assumed: ${assumptions(total).map((each) => each.join(" ")).join("; ")}.`,
    ];
    setText(this._notes, notes.filter(Boolean).join(" "));
  }

  _sum(total) {
    const set = (name, value, note = "") => {
      setText(this._figures[name].value, value);
      setText(this._figures[name].note, note);
    };
    const saved = (value, words) => (value === undefined ? `saved: ${UNKNOWN}` : `${words(value)} saved`);
    const uncompared = total.uncompared_energy_kwh;
    set("used", n.kilowattHours(total.energy_kwh), uncompared > 0 ? `uncompared: ${n.kilowattHours(uncompared)}` : "all of it compared");
    set("saved", savedEnergy(total), total.saved_percent === undefined ? "against stock" : `${n.percent(total.saved_percent)} of stock`);
    set("cost", known(total.cost, n.money), total.cost === undefined ? "no price is set" : saved(total.saved_cost, n.money));
    set("CO₂", known(total.carbon_g, n.grams), total.carbon_g === undefined ? "no carbon intensity is set" : saved(total.saved_carbon_g, n.grams));
    const extra = total.profiling_extra_energy_kwh;
    set("profiling", n.kilowattHours(total.profiling_energy_kwh), extra === undefined ? "" : `${n.signedKilowattHours(extra)} against stock`);
  }
}

function request({ start_ms, end_ms }) {
  const asked = { page_size: 1000, start_time: new Date(start_ms).toISOString() };
  return end_ms === null ? asked : { ...asked, end_time: new Date(end_ms).toISOString() };
}

/** A job's row, followed by those of its runs if there are several. */
function jobRows({ jobId, isDeleted, entries, account }) {
  const link = isDeleted ? jobId : el("a", { href: `#/jobs/${encodeURIComponent(jobId)}` }, jobId);
  const name = isDeleted ? [jobId, " ", el("span", { class: "state done" }, "deleted")] : link;
  const isOne = entries.length === 1;
  const runs = isOne ? `run ${entries[0].run_number}` : n.fixed(entries.length);
  const own = isOne ? [] : entries.map((entry) => row({ name: `run ${entry.run_number}`, account: entry.account, kind: "run" }));
  return [row({ name, runs, account }), ...own];
}

function row({ name, runs = "", account, kind = false }) {
  const { saved_percent: percent } = account;
  return el(
    "tr",
    { role: "row", class: kind },
    el("th", { scope: "row", role: "rowheader" }, name),
    numberCell(runs.startsWith("run") ? false : "runs", runs, { kind: runs ? "" : "unknown" }),
    numberCell("used", n.kilowattHours(account.energy_kwh)),
    numberCell("saved", savedEnergy(account), { kind: "strong" }),
    numberCell("of stock", known(percent, n.percent), { kind: "last" }),
    numberCell("cost", known(account.cost, n.money)),
    numberCell("cost saved", known(account.saved_cost, n.money)),
    numberCell("CO₂", known(account.carbon_g, n.grams)),
    numberCell("CO₂ saved", known(account.saved_carbon_g, n.grams)),
  );
}
