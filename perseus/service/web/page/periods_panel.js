/** The measured periods: the evidence for the savings. */

import { el, put } from "./dom.js";
import * as n from "./numbers.js";
import { panel, waiting } from "./panel.js";
import { jobState } from "./words.js";

// The most important columns come first: on a narrow screen the rest needs scrolling.
const COLUMNS = ["period", "saved", "slowdown", "iteration time", "energy", "iterations", "plan"];

export class PeriodsPanel {
  constructor() {
    this._report = null;
    this._rows = el("tbody", {});
    this._body = el("div", {}, waiting("Nothing has been measured yet."));
    this._content = el(
      "div",
      { class: "scroll tall", tabindex: 0, role: "group", "aria-label": "Measured periods" },
      el("table", { class: "figures" }, el("thead", {}, el("tr", {}, COLUMNS.map((name) => el("th", { scope: "col" }, name)))), this._rows),
    );
    this.element = panel("Measured", this._body, el("span", { class: "legend" }, "mean ± half its 95 % interval, against the preceding stock baseline"));
  }

  /** Show a report, if it has changed. */
  update(report) {
    if (!report || report === this._report || report.periods.length === 0) return;
    this._report = report;
    put(this._rows, [...report.periods].reverse().map(row));
    if (!this._content.isConnected) put(this._body, this._content);
  }
}

function row(period) {
  const { saving } = period;
  const isSingle = period.iteration_count < 2;
  const versions = [...new Set(period.plan_versions.map(Number))].sort((one, other) => one - other);
  const plans = versions.length > 3 ? `${versions[0]} … ${versions.at(-1)}` : versions.map((each) => each || "stock").join(", ");
  const [first, last] = [Number(period.first_iteration), Number(period.last_iteration)];
  const cells = [
    saving?.energy_percent === undefined ? "–" : n.withError(saving.energy_percent, saving.energy_margin_percent),
    saving ? changeOf(saving.slowdown_percent, saving.slowdown_margin_percent) : "–",
    `${n.fixed(period.iteration_time_s, 3)}${isSingle ? "" : ` ± ${n.fixed(period.iteration_time_margin_s, 3)}`} s`,
    period.energy_j ? energy(period.energy_j, isSingle ? null : period.energy_margin_j) : "–",
    `${n.fixed(first)}–${n.fixed(last)}`,
    plans,
  ];
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, `${period.number} ${jobState(period).name}${period.has_straggler ? ", straggler" : ""}`),
    cells.map((text, at) => el("td", { class: at === 0 ? "strong" : false }, text)),
  );
}

/** Mean and margin in the mean's unit. */
function energy(mean_j, error_j) {
  const shown = n.joules(mean_j);
  if (error_j === null) return shown;
  const unit = shown.split(" ").at(-1);
  const factor = { GJ: 1e9, MJ: 1e6, kJ: 1e3, J: 1 }[unit];
  const digits = (shown.split(".")[1] ?? " ").split(" ")[0].length;
  return `${shown.slice(0, -unit.length - 1)} ± ${n.fixed(error_j / factor, digits)} ${unit}`;
}

function changeOf(mean, error) {
  const shown = n.signed(mean, 1);
  return error === undefined ? `${shown} %` : `${shown} ± ${n.fixed(error, 1)} %`;
}
