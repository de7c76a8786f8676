/** The last measured iteration of a pipeline, under its present clocks and, above it, at stock. */

import { CallError, call } from "./api.js";
import { el, put, setText } from "./dom.js";
import * as n from "./numbers.js";
import { choice, panel, waiting } from "./panel.js";
import { Picture, legend } from "./picture.js";
import { inkOn, onThemeChange, ramp, themeColour } from "./scales.js";
import { TimelineLayout } from "./timeline.js";
import { kind } from "./words.js";

const REFRESH_MS = 4_000;
const NO_STOCK =
  "The stock baseline's iteration is kept only until the coordinator restarts; measure the baseline again to get one.";
const COLOURS = {
  power: { words: "power", ramp: "heat", value: (entry) => entry.power_w ?? 0, format: n.watts },
  clock: { words: "clock", ramp: "cool", value: (entry) => entry.clock_mhz, format: (mhz) => `${n.fixed(mhz)} MHz` },
};

export class TimelinePanel {
  constructor(jobId) {
    this._jobId = jobId;
    this._pipeline = 0;
    this._colour = "power";
    this._lanes = [];
    this._job = null;
    this._stockKey = "";
    this._stock = null;
    this._layout = new TimelineLayout([]);
    // Above the picture, not beside the choices: its width changes, and buttons must not move.
    this._legend = el("div", { class: "legends" });
    this._picture = new Picture("Computations of the last iteration, stage by stage, at stock and now.", {
      height: () => this._layout.height,
      draw: (context, width, height, selected) => {
        this._layout.draw(context, width, height, this._look(), selected);
      },
      at: (x, y) => this._layout.at(x, y, this._picture.canvas.clientWidth),
      box: (cell) => this._layout.box(cell, this._picture.canvas.clientWidth),
      next: (cell, key) => this._layout.next(cell, key),
      lines: (cell) => this._lines(cell),
    });
    this._pipelineField = el("input", { type: "number", min: 0, max: 0, value: 0, id: "timeline-pipeline" });
    this._pipelineField.addEventListener("change", () => this._take(Number(this._pipelineField.value)));
    this._held = el("input", { type: "checkbox" });
    this._table = el("tbody", {});
    this._note = el("p", { class: "note" });
    this._body = el("div", {}, waiting("No iteration is complete yet."));
    this._content = el(
      "div",
      {},
      this._legend,
      this._picture.element,
      this._note,
      el(
        "details",
        { ontoggle: () => this._fillTable() },
        el("summary", {}, "As a table"),
        el(
          "div",
          { class: "scroll", tabindex: 0, role: "group", "aria-label": "Computations as a table" },
          el(
            "table",
            { class: "figures" },
            el(
              "thead",
              {},
              el("tr", {}, ["iteration", "stage", "computation", "start", "duration", "clock", "power"].map((name) => el("th", { scope: "col" }, name))),
            ),
            this._table,
          ),
        ),
      ),
    );
    this.element = panel(
      "Timeline",
      this._body,
      choice("timeline-colour", "Colour by", Object.entries(COLOURS).map(([key, { words }]) => [key, words]), this._colour, (key) => {
        this._colour = key;
        this._show();
      }),
      el("label", { class: "field inline", for: "timeline-pipeline" }, "pipeline ", this._pipelineField),
      el("label", { class: "field inline" }, this._held, " hold"),
    );
    onThemeChange(() => this._show());
    this._timer = setInterval(() => this._refresh(), REFRESH_MS);
  }

  close() {
    clearInterval(this._timer);
  }

  /** Show the job. */
  update(model) {
    const last = Math.max(0, model.pipelineCount - 1);
    this._pipelineField.max = String(last);
    const isFirst = !this._job?.figures?.iteration_time_s;
    this._job = model.job;
    if (isFirst) this._refresh();
  }

  _take(pipeline) {
    this._pipeline = Math.min(Number(this._pipelineField.max), Math.max(0, Math.trunc(pipeline) || 0));
    this._pipelineField.value = String(this._pipeline);
    this._refresh();
  }

  async _refresh() {
    // Before the first iteration there is nothing to ask for.
    if (!this._job?.figures?.iteration_time_s || this._held.checked || document.visibilityState !== "visible") return;
    const pipeline = this._pipeline;
    const [before, now] = await Promise.all([this._stockTimeline(), this._timeline({ pipeline })]);
    if (pipeline !== this._pipeline || this._held.checked) return;
    this._lanes = [before && lane("Stock baseline", "at stock", before), now && lane("Now", "now", now)].filter(Boolean);
    this._show();
  }

  /** The baseline's timeline: requested once, and again when the baseline changes or its power becomes known. */
  async _stockTimeline() {
    const { run_number, baseline, t_min_s } = this._job;
    const key = baseline?.has_timeline ? `${run_number}/${baseline.iteration_time_s}/${t_min_s}` : "";
    if (key !== this._stockKey) {
      this._stockKey = key;
      this._stock = key ? await this._timeline({ from_baseline: true }) : null;
    }
    return this._stock;
  }

  async _timeline(request) {
    try {
      const found = await call("JobService", "GetTimeline", { job_id: this._jobId, ...request });
      return found.entries?.length ? found : null;
    } catch (error) {
      if (error instanceof CallError) return null; // there is none yet, or the stream shows that nobody answers
      throw error;
    }
  }

  _show() {
    if (this._lanes.length === 0) return;
    this._layout = new TimelineLayout(this._lanes);
    const { value, format, ramp: name } = COLOURS[this._colour];
    const blocking = this._colour === "power" ? this._lanes.flatMap((each) => each.blocking_power_w ?? []) : [];
    const values = [...this._lanes.flatMap((each) => each.entries.map(value)), ...blocking].filter((each) => each > 0);
    const [low, high] = values.length ? [Math.min(...values), Math.max(...values)] : [0, 1];
    this._colourOf = ramp(name, low, high);
    if (values.length) put(this._legend, legend(this._colourOf, low, high, format));
    else put(this._legend, el("span", { class: "legend" }, `${COLOURS[this._colour].words} not known yet`));
    const isWaitingColoured = blocking.length > 0 ? " Between its computations a stage draws its blocking power." : "";
    const { baseline } = this._job;
    const isStockLost = baseline && !baseline.has_timeline ? ` ${NO_STOCK}` : "";
    setText(this._note, `Each stage's times count from its own start of the iteration.${isWaitingColoured}${isStockLost}`);
    if (!this._content.isConnected) put(this._body, this._content);
    this._picture.draw();
    this._fillTable();
  }

  _look() {
    const { value } = COLOURS[this._colour];
    return {
      colourOf: (entry) => (value(entry) > 0 ? this._colourOf(value(entry)) : this._colourOf(-Infinity)),
      letterOf: (entry) => `${kind(entry.computation.kind).letter}${entry.computation.microbatch}`,
      inkOn,
      time: (time_s) => `${Number(time_s.toFixed(3))} s`,
      ink: themeColour("--ink"),
      muted: themeColour("--muted"),
      line: themeColour("--line"),
      trackOf: (each, stage) => {
        const power_w = this._colour === "power" ? each.blocking_power_w?.[stage] : 0;
        return power_w ? this._colourOf(power_w) : themeColour("--track");
      },
      accent: themeColour("--accent"),
    };
  }

  _lines(cell) {
    const entry = this._layout.entry(cell);
    const { computation = {} } = entry;
    const chunk = computation.chunk ? `, chunk ${computation.chunk}` : "";
    return [
      `${kind(computation.kind).words} of microbatch ${computation.microbatch}${chunk}`,
      `stage ${cell.stage}, ${this._lanes[cell.lane].short}`,
      `${n.milliseconds(entry.duration_s)}, begins at ${n.milliseconds(entry.start_s)}`,
      `${entry.clock_mhz ? `${n.fixed(entry.clock_mhz)} MHz` : "stock clocks"}${entry.power_w ? `, ${n.watts(entry.power_w)}` : ""}`,
    ];
  }

  _fillTable() {
    if (!this._table.closest("details").open) return;
    const rows = this._lanes.flatMap((lane) => lane.entries.map((entry) => [lane, entry]));
    put(
      this._table,
      rows.map(([lane, entry]) =>
        el(
          "tr",
          {},
          el("td", {}, `${lane.iteration}, ${lane.short}`),
          el("td", {}, String(entry.stage)),
          el("td", {}, `${kind(entry.computation.kind).words} ${entry.computation.microbatch}`),
          el("td", {}, n.milliseconds(entry.start_s)),
          el("td", {}, n.milliseconds(entry.duration_s)),
          el("td", {}, entry.clock_mhz ? `${n.fixed(entry.clock_mhz)} MHz` : "stock"),
          el("td", {}, entry.power_w ? n.watts(entry.power_w) : "–"),
        ),
      ),
    );
  }
}

function lane(name, short, timeline) {
  const title = `${name}: iteration ${timeline.iteration} of pipeline ${timeline.pipeline}, ${n.seconds(timeline.iteration_time_s)}`;
  return { title, short, ...timeline };
}
