/** Energy used and saved by this run and by the job, for those who pay for it. */

import { el, put } from "./dom.js";
import { assumptions, byJob, caveats, known, savedEnergy } from "./ledger.js";
import * as n from "./numbers.js";
import { panel, waiting } from "./panel.js";

export class LedgerPanel {
  constructor() {
    this._key = null;
    this._body = el("div", {}, waiting("Nothing has been counted yet."));
    this.element = panel("Ledger", this._body, el("a", { class: "legend", href: "#/ledger" }, "all jobs"));
  }

  /** Show the ledger's entries of the job, if they have changed. */
  update(job, statement) {
    if (!statement) return;
    const own = statement.entries.filter((entry) => !entry.is_deleted);
    const key = JSON.stringify([job.run_number, own]);
    if (key === this._key) return;
    this._key = key;
    const [whole] = byJob(own);
    if (!whole) {
      put(this._body, waiting("Nothing has been counted yet."));
      return;
    }
    // Only the coordinator knows the interval of several runs, but it also counts deleted jobs of the same name.
    const account = own.length === statement.entries.length ? statement.total : whole.account;
    const run = own.find((entry) => entry.run_number === job.run_number)?.account;
    const isOnly = run && own.length === 1;
    const columns = isOnly ? [run] : [run, account];
    const names = isOnly ? ["this run, the only one"] : ["this run", `all ${n.count(own.length, "run")}`];
    put(
      this._body,
      el(
        "div",
        { class: "scroll", tabindex: 0, role: "group", "aria-label": "Energy used and saved" },
        el(
          "table",
          { class: "figures" },
          el("thead", {}, el("tr", {}, el("td", {}), names.map((name) => el("th", { scope: "col" }, name)))),
          el("tbody", {}, rows(columns)),
        ),
      ),
      el("p", { class: "note" }, ["GPUs only, including gaps and profiling. ± is half a 95 % interval.", ...caveats(account)].join(" ")),
    );
  }
}

const ROWS = [
  ["used", (account) => n.kilowattHours(account.energy_kwh)],
  ["saved against stock", savedEnergy],
  ["saved, percent", (account) => known(account.saved_percent, n.percent)],
  ["cost", (account) => known(account.cost, n.money)],
  ["cost saved", (account) => known(account.saved_cost, n.money)],
  ["CO₂", (account) => known(account.carbon_g, n.grams)],
  ["CO₂ saved", (account) => known(account.saved_carbon_g, n.grams)],
  ["used for profiling", (account) => n.kilowattHours(account.profiling_energy_kwh)],
  ["profiling beyond stock", beyondStock],
  ["uncompared", (account) => n.kilowattHours(account.uncompared_energy_kwh)],
  ["iterations", (account) => n.fixed(Number(account.iteration_count))],
  ["assumed: price per kWh", (account) => assumptions(account)[0][1]],
  ["assumed: CO₂ per kWh", (account) => assumptions(account)[1][1]],
];

/** The energy of profiling beyond as many iterations at stock; zero where there was no profiling. */
function beyondStock({ profiling_energy_kwh: used, profiling_extra_energy_kwh: extra }) {
  return used === 0 ? n.kilowattHours(0) : known(extra, n.signedKilowattHours);
}

const EXPLAINED = {
  uncompared: "energy whose saving is unknown: there was no baseline to compare it with, or not all GPUs were measured",
};

function rows(accounts) {
  return ROWS.map(([name, words], at) =>
    el(
      "tr",
      {},
      el("th", { scope: "row", title: EXPLAINED[name] }, name),
      // A run that has not counted anything yet has no account.
      accounts.map((account) => el("td", { class: at === 1 ? "strong" : false }, account ? words(account) : "nothing yet")),
    ),
  );
}
