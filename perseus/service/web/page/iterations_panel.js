/** Iteration time and energy, one chart above the other, with changes marked on both. */

import uPlot from "./vendor/uplot/uPlot.esm.js";
import { el, put, setText } from "./dom.js";
import * as n from "./numbers.js";
import { choice, panel, waiting } from "./panel.js";
import { onThemeChange, themeColour } from "./scales.js";

const HEIGHT = 206;
const RECENT = 200;
const FIGURES = [
  { key: "time_s", title: "iteration time", format: n.seconds, mean: "iteration_time_s" },
  { key: "energy_j", title: "energy, all GPUs", format: n.joules, mean: "energy_j" },
];

export class IterationsPanel {
  constructor() {
    this._charts = null;
    this._iterations = [];
    this._periods = [];
    this._marks = [];
    this._baseline = null;
    this._readout = el("p", { class: "readout", "aria-live": "off" });
    this._grounds = FIGURES.map(() => el("div", { class: "chart", role: "img" }));
    this._keys = el(
      "p",
      { class: "note keys" },
      el("span", { class: "key key-measured" }, "measured"),
      el("span", { class: "key key-mean" }, "mean of a period"),
      el("span", { class: "key key-baseline" }, "stock baseline"),
      el("span", { class: "key key-plan" }, "plan in force"),
      el("span", { class: "key key-straggler" }, "straggler found"),
    );
    this._body = el("div", {}, waiting("No iteration has been measured yet."));
    this._content = el("div", {}, this._grounds, this._readout, this._keys);
    this._isRecent = true;
    const reach = [
      ["recent", `last ${RECENT}`],
      ["all", "all"],
    ];
    const onReach = (key) => {
      this._isRecent = key === "recent";
      this._make();
    };
    this.element = panel("Iterations", this._body, choice("iterations-reach", "Iterations shown", reach, "recent", onReach));
    new ResizeObserver(() => this._resize()).observe(this.element);
    onThemeChange(() => this._make());
  }

  /** Show the model; `report` has the means of periods before the page was opened. */
  update(model, report) {
    this._iterations = model.iterations();
    this._periods = report?.periods ?? [];
    this._baseline = model.job?.baseline ?? null;
    this._marks = marksOf(model);
    if (this._iterations.length === 0 && this._periods.length === 0) return;
    if (!this._content.isConnected) put(this._body, this._content);
    if (!this._charts) this._make();
    const data = this._data();
    for (const [at, chart] of this._charts.entries()) chart.setData([data.numbers, data.means[at], data.measured[at]]);
    this._describe();
  }

  _make() {
    if (!this._content.isConnected) return;
    for (const chart of this._charts ?? []) chart.destroy();
    const data = this._data();
    this._charts = FIGURES.map((figure, at) => {
      const options = this._options(figure, at, this._grounds[at].clientWidth || 300);
      return new uPlot(options, [data.numbers, data.means[at], data.measured[at]], this._grounds[at]);
    });
  }

  _resize() {
    for (const [at, chart] of (this._charts ?? []).entries()) {
      const width = this._grounds[at].clientWidth;
      if (width > 0 && width !== chart.width) chart.setSize({ width, height: HEIGHT });
    }
  }

  /** One row for each observed iteration, and two for each period, at its ends. */
  _data() {
    const rows = new Map();
    const row = (number) => {
      if (!rows.has(number)) rows.set(number, { means: [undefined, undefined], measured: [undefined, undefined] });
      return rows.get(number);
    };
    for (const period of this._periods) {
      const means = FIGURES.map(({ mean }) => period[mean] || null);
      const [first, last] = [Number(period.first_iteration), Number(period.last_iteration)];
      row(first).means = means;
      row(Math.max(first, last)).means = means;
    }
    for (const each of this._iterations) row(each.number).measured = FIGURES.map(({ key }) => each[key] || null);
    const numbers = [...rows.keys()].sort((one, other) => one - other);
    const column = (kind, at) => numbers.map((number) => rows.get(number)[kind][at]);
    return {
      numbers,
      means: FIGURES.map((_, at) => column("means", at)),
      measured: FIGURES.map((_, at) => column("measured", at)),
    };
  }

  _options(figure, at, width) {
    const muted = themeColour("--muted");
    const axis = {
      stroke: muted,
      font: "11px system-ui, sans-serif",
      grid: { stroke: themeColour("--line"), width: 1 },
      ticks: { show: false },
    };
    return {
      width,
      height: HEIGHT,
      legend: { show: false },
      cursor: { sync: { key: "iterations" }, drag: { x: true, y: false }, points: { size: 7 } },
      scales: { x: { time: false, range: (_, low, high) => this._reach(low, high) }, y: { range: (_, low, high) => this._range(at, low, high) } },
      axes: [
        { ...axis, size: at === 0 ? 8 : 32, values: (_, splits) => splits.map((value) => (at === 0 ? "" : n.fixed(value))) },
        { ...axis, size: 62, values: (_, splits) => splits.map(figure.format) },
      ],
      series: [
        {},
        { label: "mean", stroke: themeColour("--line-strong"), width: 3, points: { show: false } },
        { label: figure.title, stroke: themeColour("--accent"), width: 1.5, points: { show: false } },
      ],
      hooks: {
        draw: [(chart) => this._drawMarks(chart, at)],
        setCursor: [(chart) => this._read(chart)],
      },
    };
  }

  _reach(low, high) {
    return [this._isRecent ? Math.max(low, high - RECENT) : low, Math.max(high, low + 1)];
  }

  _range(at, low, high) {
    const baseline = this._baselineOf(at);
    const values = [low, high, baseline].filter((value) => Number.isFinite(value) && value > 0);
    if (values.length === 0) return [0, 1];
    const [min, max] = [Math.min(...values), Math.max(...values)];
    const pad = Math.max(0.08 * (max - min), 0.01 * max);
    return [Math.max(0, min - pad), max + pad];
  }

  _baselineOf(at) {
    const { iteration_time_s, energy_j } = this._baseline ?? {};
    return at === 0 ? iteration_time_s : energy_j;
  }

  _drawMarks(chart, at) {
    const { ctx: context, bbox } = chart;
    const ratio = uPlot.pxRatio;
    context.save();
    context.beginPath();
    context.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    context.clip();
    context.lineWidth = ratio;
    const baseline = this._baselineOf(at);
    if (baseline > 0) {
      const y = chart.valToPos(baseline, "y", true);
      context.strokeStyle = themeColour("--ink");
      context.setLineDash([5 * ratio, 4 * ratio]);
      line(context, bbox.left, y, bbox.left + bbox.width, y);
      context.setLineDash([]);
    }
    for (const mark of this._marks) {
      const x = chart.valToPos(mark.iteration, "x", true);
      context.strokeStyle = themeColour(mark.colour);
      context.fillStyle = themeColour(mark.colour);
      context.globalAlpha = mark.isFaint ? 0.35 : 1;
      line(context, x, mark.isFaint ? bbox.top + bbox.height - 7 * ratio : bbox.top, x, bbox.top + bbox.height);
      if (!mark.isFaint) triangle(context, x, bbox.top, 5 * ratio);
    }
    context.restore();
  }

  _read(chart) {
    const index = chart.cursor.idx;
    const number = index === null || index === undefined ? undefined : chart.data[0][index];
    const found = this._iterations.find((each) => each.number === number);
    if (!found) {
      this._describe();
      return;
    }
    const marks = this._marks.filter((mark) => mark.iteration === number).map((mark) => mark.words);
    setText(this._readout, `${sentence(found)}${marks.length ? ` ${[...new Set(marks)].join("; ")}.` : ""}`);
  }

  _describe() {
    const last = this._iterations.at(-1);
    const text = last ? `Latest: ${sentence(last)}` : "No iteration has ended since this page was opened.";
    setText(this._readout, text);
    for (const [at, { title, format, key }] of FIGURES.entries()) {
      const latest = last ? `, latest ${format(last[key])}` : "";
      this._grounds[at].setAttribute("aria-label", `Chart of ${title} by iteration${latest}`);
      this._grounds[at].dataset.title = title;
    }
  }
}

function sentence({ number, time_s, energy_j, versions }) {
  const plans = [...versions].map((each) => (each === 0 ? "stock" : `version ${each}`)).join(", ");
  return `iteration ${n.fixed(number)}: ${n.seconds(time_s)}, ${n.joules(energy_j)}, ${n.watts(energy_j / time_s)}, under ${plans}.`;
}

/** One mark for all pipelines that changed at the same iteration; clocks held to measure are faint. */
function marksOf(model) {
  const marks = new Map();
  for (const { iteration, kind } of model.switches()) {
    const isPlan = kind === "plan";
    marks.set(`${iteration}/${kind}`, {
      iteration,
      colour: isPlan ? "--accent" : "--muted",
      isFaint: !isPlan,
      words: isPlan ? "A plan comes into force" : kind === "hold" ? "Clocks are held to measure" : "Stock comes into force",
    });
  }
  for (const { iteration, pipeline, isSlow } of model.findings())
    marks.set(`${iteration}/${pipeline}/${isSlow}`, {
      iteration,
      colour: "--warn",
      isFaint: !isSlow,
      words: isSlow ? `Pipeline ${pipeline} is found to be slow` : `Pipeline ${pipeline} is no longer slow`,
    });
  return [...marks.values()];
}

function line(context, x, y, toX, toY) {
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(toX, toY);
  context.stroke();
}

function triangle(context, x, y, size) {
  context.beginPath();
  context.moveTo(x - size, y);
  context.lineTo(x + size, y);
  context.lineTo(x, y + 1.4 * size);
  context.fill();
}
