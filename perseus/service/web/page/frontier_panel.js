/**
 * The iteration time–energy frontier of one pipeline, with the points that matter for the job.
 *
 * Drawn as SVG: a hundred points at most, and every mark is also a row of the table beneath.
 */

import { CallError, call } from "./api.js";
import { el, put, setText, svg } from "./dom.js";
import * as n from "./numbers.js";
import { panel, waiting } from "./panel.js";
import { measuredScale } from "./words.js";

const HEIGHT = 316;
const MARGIN = { top: 78, right: 18, bottom: 40, left: 62 };
const LABEL_ROW = 15;
const MAX_BEYOND = 1.25;
const ASK_AGAIN_MS = 10_000;

export class FrontierPanel {
  constructor(jobId) {
    this._jobId = jobId;
    this._frontier = null;
    this._key = "";
    this._job = null;
    this._svg = svg("svg", { class: "frontier", role: "img", "aria-label": "Iteration time and energy of a pipeline; the table shows the same" });
    this._rows = el("tbody", {});
    this._caption = el("p", { class: "note" });
    this._advice = el("p", { class: "note", hidden: true });
    this._advised = { key: "", dueAt: 0 };
    this._body = el("div", {}, waiting("There is no frontier yet."));
    this._content = el(
      "div",
      {},
      this._svg,
      el(
        "div",
        { class: "scroll", tabindex: 0, role: "group", "aria-label": "Places on the frontier" },
        el(
          "table",
          { class: "figures" },
          el(
            "thead",
            {},
            el("tr", {}, ["", "iteration time", "energy", "Δ time", "Δ energy"].map((name, at) => el(at ? "th" : "td", at ? { scope: "col" } : {}, name))),
          ),
          this._rows,
        ),
      ),
      this._caption,
      this._advice,
    );
    this.element = panel("Frontier", this._body);
    new ResizeObserver(() => this._draw()).observe(this.element);
  }

  /** Show the job; `full` is the job with its stragglers and each pipeline's planned time. */
  async update(job, full) {
    this._job = full;
    const key = `${job.run_number}/${job.t_min_s}/${job.t_star_s}/${job.t_slow_s}/${job.iteration_overhead_s}`;
    if (!job.t_min_s) {
      this._frontier = null;
      this._key = key;
      put(this._body, waiting(emptyReason(job)));
      return;
    }
    if (key !== this._key) {
      this._key = key;
      try {
        const { frontier } = await call("FrontierService", "GetFrontier", { job_id: this._jobId });
        this._frontier = asMeasured(frontier, job);
      } catch (error) {
        this._key = ""; // the next update asks again
        if (!(error instanceof CallError)) throw error;
        if (!this._frontier) put(this._body, waiting(error.message));
        return;
      }
      if (!this._content.isConnected) put(this._body, this._content);
    }
    this._draw();
    await this._advise(key);
  }

  /** Show what moving layers would bring; the coordinator computes it once, which may take longer than a call. */
  async _advise(key) {
    const isKnown = this._job?.spec?.stage_work?.some((work) => work.layer_counts?.length);
    if (this._advised.key !== key) this._advice.hidden = true;
    if (!isKnown || this._advised.key === key || Date.now() < this._advised.dueAt) return;
    this._advised.dueAt = Infinity;
    try {
      const { rebalancing } = await call("FrontierService", "GetRebalancing", { job_id: this._jobId });
      this._advised = { key, dueAt: 0 };
      setText(this._advice, adviceText(rebalancing));
      this._advice.hidden = false;
    } catch (error) {
      if (!(error instanceof CallError)) throw error;
      this._advised.dueAt = Date.now() + ASK_AGAIN_MS;
    }
  }

  _draw() {
    if (!this._frontier || !this._job || !this._content.isConnected) return;
    const width = this._svg.clientWidth;
    if (width === 0) return;
    const places = placesOf(this._frontier, this._job);
    this._fillTable(places);
    const scale = scaleOf(this._frontier, places, width);
    this._svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    put(this._svg, axes(scale, width), curve(this._frontier, scale), marks(places, scale, width));
    setText(
      this._caption,
      "Predicted for one pipeline, including blocking power. Times include what is measured outside computations; energies do not. " +
        "Changes are relative to all computations at their highest clocks.",
    );
  }

  _fillTable(places) {
    const { baseline } = this._frontier;
    put(
      this._rows,
      places.map(({ name, time_s, energy_j, tone }) =>
        el(
          "tr",
          { class: tone },
          el("th", { scope: "row" }, subscript(name)),
          el("td", {}, n.seconds(time_s)),
          el("td", {}, energy_j === null ? "–" : n.joules(energy_j)),
          el("td", {}, n.change(100 * (time_s / baseline.iteration_time_s - 1))),
          el("td", {}, energy_j === null ? "–" : n.change(100 * (energy_j / baseline.energy_j - 1))),
        ),
      ),
    );
  }
}

function emptyReason(job) {
  const reasons = {
    JOB_STATE_WAITING: "The frontier needs measurements of all ranks, and some have not joined yet.",
    JOB_STATE_BASELINE: "The stock baseline is measured first; then clocks are tried, and the frontier follows from them.",
    JOB_STATE_PROFILING: "Clocks are tried while training continues; the frontier follows from their times and energies.",
    JOB_STATE_SOLVING: "The frontier is being solved.",
  };
  return reasons[job.state] ?? "This run has no frontier.";
}

/** What moving layers would bring, and what that assumes. */
function adviceText({ stock, steps = [], other }) {
  const last = steps.at(-1) ?? other;
  const saved = (cost) => `${n.fixed(100 * (1 - cost.energy_j / stock.energy_j), 1)} %`;
  const assumed = "All layers count as equal; memory is not considered.";
  if (!steps.length) {
    const best = last ? `, at most from ${saved(last.clocks_alone)} to ${saved(last.plan)} of stock’s energy` : "";
    return `Moving layers between stages would hardly save anything beside clocks${best}. ${assumed}`;
  }
  const places = steps.map(({ move }) => move);
  const hasChunks = places.some((move) => move.from_chunk || move.to_chunk);
  const place = (stage, chunk) => (hasChunks ? `${stage}/${chunk}` : `${stage}`);
  const moves = places.map((move) => `${place(move.from_stage, move.from_chunk)} to ${place(move.to_stage, move.to_chunk)}`);
  const shortest = n.change(100 * (last.fastest.iteration_time_s / stock.iteration_time_s - 1));
  return (
    `Moving a layer from stage ${moves.join(", then ")} would save ${saved(last.plan)} of stock’s energy, ` +
    `clocks alone ${saved(last.clocks_alone)} in the same time; the shortest iteration would change by ${shortest}. ${assumed}`
  );
}

/** A frontier with its times as iterations of a job are measured. */
function asMeasured(frontier, job) {
  const shift = (name) => ({ [name]: measuredScale(job, frontier[name]) });
  const shifted = (point) => ({ ...point, iteration_time_s: measuredScale(job, point.iteration_time_s) });
  return {
    ...frontier,
    ...shift("t_min_s"),
    ...shift("t_star_s"),
    ...shift("t_slow_s"),
    baseline: shifted(frontier.baseline),
    points: frontier.points.map(shifted),
  };
}

/** The slowest realised plan that is not slower than a time. */
function pointAt(frontier, time_s) {
  const within = frontier.points.filter((point) => point.iteration_time_s <= time_s * (1 + 1e-9));
  return within.at(-1) ?? frontier.points[0];
}

/** The points marked on the frontier, fastest first. */
function placesOf(frontier, job) {
  const at = (time_s) => pointAt(frontier, time_s).energy_j;
  const { baseline } = frontier;
  const places = [
    { name: "all at the highest clock", short: "stock", time_s: baseline.iteration_time_s, energy_j: baseline.energy_j, tone: "stock" },
    { name: "T_min", short: "T_min", time_s: frontier.t_min_s, energy_j: at(frontier.t_min_s), tone: "limit" },
    { name: "T*", short: "T*", time_s: frontier.t_star_s, energy_j: at(frontier.t_star_s), tone: "limit" },
    { name: "T_slow", short: "T_slow", time_s: frontier.t_slow_s, energy_j: at(frontier.t_slow_s), tone: "limit" },
  ];
  const groups = new Map();
  for (const [pipeline, planned_s] of job.planned_iteration_time_s.entries()) {
    const time_s = measuredScale(job, planned_s);
    groups.set(time_s, [...(groups.get(time_s) ?? []), pipeline]);
  }
  const isPlanned = job.state === "JOB_STATE_PLANNED";
  for (const [time_s, pipelines] of isPlanned ? groups : []) {
    const whose = groups.size > 1 ? `: pipeline ${n.ranges(pipelines)}` : "";
    places.push({ name: `in force${whose}`, short: "in force", time_s, energy_j: at(time_s), tone: "force" });
  }
  for (const straggler of job.stragglers) {
    if (!straggler.iteration_time_s) continue;
    const how = straggler.is_detected ? "detected" : "reported";
    const name = `T′, pipeline ${straggler.pipeline}, ${how}`;
    places.push({ name, short: "T′", time_s: measuredScale(job, straggler.iteration_time_s), energy_j: null, tone: "straggler" });
  }
  return places.sort((one, other) => one.time_s - other.time_s);
}

function scaleOf(frontier, places, width) {
  const { points, baseline, t_min_s, t_slow_s } = frontier;
  // A far-out straggler would leave no room for the frontier, so it is shown at the edge.
  const farthest = t_slow_s + (t_slow_s - t_min_s) * (MAX_BEYOND - 1) + 1e-9;
  const wanted = Math.max(...places.map(({ time_s }) => time_s));
  const high_s = Math.max(t_slow_s, Math.min(wanted, farthest * MAX_BEYOND));
  const low_s = Math.min(t_min_s, baseline.iteration_time_s);
  const pad_s = 0.04 * Math.max(high_s - low_s, 1e-3 * high_s);
  const energies = [...points.flatMap((point) => [point.energy_j, point.bound_energy_j]), baseline.energy_j];
  const [low_j, high_j] = [Math.min(...energies), Math.max(...energies)];
  const pad_j = 0.08 * Math.max(high_j - low_j, 1e-3 * high_j);
  const map = (from, to, first, last) => (value) => first + ((value - from) / (to - from)) * (last - first);
  return {
    times: [low_s - pad_s, high_s + pad_s],
    energies: [low_j - pad_j, high_j + pad_j],
    x: map(low_s - pad_s, high_s + pad_s, MARGIN.left, width - MARGIN.right),
    y: map(low_j - pad_j, high_j + pad_j, HEIGHT - MARGIN.bottom, MARGIN.top),
    edge_s: high_s,
  };
}

function axes(scale, width) {
  const bottom = HEIGHT - MARGIN.bottom;
  const times = n.ticks(...scale.times, Math.max(3, width / 110));
  const energies = n.ticks(...scale.energies, 5);
  const decimals = Math.max(0, -Math.floor(Math.log10((times[1] ?? 1) - (times[0] ?? 0)) + 1e-9));
  return [
    energies.map((energy_j) => [
      svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: scale.y(energy_j), y2: scale.y(energy_j) }),
      svg("text", { class: "tick", x: MARGIN.left - 8, y: scale.y(energy_j) + 4, "text-anchor": "end" }, n.joules(energy_j)),
    ]),
    times.map((time_s) =>
      svg("text", { class: "tick", x: scale.x(time_s), y: bottom + 18, "text-anchor": "middle" }, n.fixed(time_s, decimals)),
    ),
    svg("line", { class: "axis", x1: MARGIN.left, x2: width - MARGIN.right, y1: bottom, y2: bottom }),
    svg("text", { class: "tick", x: width - MARGIN.right, y: HEIGHT - 6, "text-anchor": "end" }, "iteration time, s"),
    svg("text", { class: "tick", x: 0, y: 12 }, "energy of a pipeline"),
  ];
}

function curve({ points }, scale) {
  const path = (energy) => points.map((point, at) => `${at ? "L" : "M"}${scale.x(point.iteration_time_s)} ${scale.y(energy(point))}`).join("");
  return [
    svg("path", { class: "bound", d: path((point) => point.bound_energy_j) }),
    svg("path", { class: "realised", d: path((point) => point.energy_j) }),
    points.map((point) =>
      svg(
        "circle",
        { class: "point", cx: scale.x(point.iteration_time_s), cy: scale.y(point.energy_j), r: 2.2 },
        svg("title", {}, `${n.seconds(point.iteration_time_s)}, ${n.joules(point.energy_j)}`),
      ),
    ),
  ];
}

/** Vertical lines with their names above, in as many rows as they need not to overlap. */
function marks(places, scale, width) {
  const bottom = HEIGHT - MARGIN.bottom;
  const rowEnds = [];
  const drawn = places.map(({ short, time_s, energy_j, tone }) => {
    const isOutside = time_s > scale.edge_s;
    const x = scale.x(Math.min(time_s, scale.edge_s));
    const text = isOutside ? `${short} ${n.seconds(time_s)} →` : short;
    const reach = text.length * 3.6 + 4;
    const middle = Math.min(width - reach, Math.max(reach, x));
    let row = rowEnds.findIndex((end) => end < middle - reach);
    if (row < 0) row = rowEnds.length;
    rowEnds[row] = middle + reach;
    const top = MARGIN.top - 8 - (row % 3) * LABEL_ROW;
    return {
      line: svg("line", { class: tone, x1: x, x2: x, y1: top + 4, y2: bottom }),
      dot: energy_j === null ? null : dot(tone, x, scale.y(energy_j)),
      text: svg("text", { class: tone, x: middle, y: top, "text-anchor": "middle" }, lowered(text)),
    };
  });
  // Text lies above all lines.
  return svg("g", { class: "marks" }, ["line", "dot", "text"].map((part) => drawn.map((each) => each[part])));
}

/** "T_min" with its index as a subscript. */
function lowered(text) {
  const [symbol, index] = text.split("_");
  return index ? [symbol, svg("tspan", { class: "index", dy: 3 }, index)] : symbol;
}

function subscript(text) {
  const [symbol, index] = text.split("_");
  return index ? [symbol, el("sub", {}, index)] : symbol;
}

function dot(tone, x, y) {
  if (tone === "stock") return svg("rect", { class: tone, x: x - 4, y: y - 4, width: 8, height: 8 });
  return svg("circle", { class: tone, cx: x, cy: y, r: tone === "force" ? 6 : 3.5 });
}
