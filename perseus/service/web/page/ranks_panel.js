/** The ranks of a job as a grid, and one stage's ranks in detail. */

import { CallError, call, ranks } from "./api.js";
import { el, put, setText } from "./dom.js";
import * as n from "./numbers.js";
import { choice, panel, waiting } from "./panel.js";
import { Picture, legend } from "./picture.js";
import { RanksGrid } from "./ranks_grid.js";
import { onThemeChange, ramp, themeColour } from "./scales.js";
import { RANK_STATES, clockReasons, version } from "./words.js";

const REFRESH_MS = 3_000;
const MIN_SLOWNESS_RANGE = 0.1;

const FIGURES = {
  clock_mhz: { words: "clock", ramp: "cool", format: (mhz) => (mhz === 0 ? "stock" : `${n.fixed(mhz)} MHz`) },
  slowness: { words: "slowness", ramp: "heat", format: (factor) => `${n.fixed(factor, 2)}\u00a0×` },
  power_w: { words: "power", ramp: "heat", format: n.watts },
};

const STATE_LOOKS = {
  connected: { fill: "--rank-connected" },
  expected: { stroke: "--line-strong" },
  disconnected: { fill: "--warn-soft", stroke: "--warn", mark: "/" },
  lost: { fill: "--bad-soft", stroke: "--bad", mark: "×" },
  finished: { fill: "--line-strong" },
};

export class RanksPanel {
  constructor(jobId) {
    this._jobId = jobId;
    this._colour = "state";
    this._columns = null;
    this._grid = new RanksGrid([0, 1, 1]);
    // Above the picture, not beside the choices: its width changes, and buttons must not move.
    this._legend = el("div", { class: "legends" });
    this._picture = new Picture("All ranks: stages down, pipelines across.", {
      height: (width) => this._grid.fit(width),
      draw: (context, width, height, selected) => this._grid.draw(context, width, height, this._look(), selected),
      at: (x, y) => this._grid.at(x, y),
      box: (cell) => this._grid.box(cell),
      next: (cell, key) => this._grid.next(cell, key),
      lines: (cell) => this._lines(cell),
      choose: (cell) => this._choose(cell.pipeline, cell.stage),
    });
    this._pipelineField = numberField("pipeline");
    this._stageField = numberField("stage");
    for (const field of [this._pipelineField, this._stageField])
      field.addEventListener("change", () => this._choose(Number(this._pipelineField.value), Number(this._stageField.value)));
    this._rows = el("tbody", {});
    this._body = el("div", {}, waiting("No ranks are known yet."));
    this._summary = el("p", { class: "note" });
    this._content = el("div", {}, this._legend, this._picture.element, this._summary, this._details());
    this.element = panel(
      "Ranks",
      this._body,
      choice(
        "ranks-colour",
        "Colour by",
        [["state", "state"], ...Object.entries(FIGURES).map(([key, { words }]) => [key, words])],
        this._colour,
        (key) => {
          this._colour = key;
          this._show();
        },
      ),
    );
    onThemeChange(() => this._show());
    this._timer = setInterval(() => this._refresh(), REFRESH_MS);
    this._refresh();
  }

  close() {
    clearInterval(this._timer);
  }

  async _refresh() {
    if (document.visibilityState !== "visible") return;
    try {
      this._columns = await ranks(this._jobId);
    } catch (error) {
      if (error instanceof CallError) return; // the next refresh asks again; the stream shows that nobody answers
      throw error;
    }
    const [pipelines, stages, tensors] = this._columns.shape;
    const { _grid: grid } = this;
    if (grid.pipelines !== pipelines || grid.stages !== stages || grid.tensors !== tensors)
      this._grid = new RanksGrid(this._columns.shape);
    this._pipelineField.max = String(pipelines - 1);
    this._stageField.max = String(stages - 1);
    this._show();
  }

  _show() {
    if (!this._columns) return;
    const figure = FIGURES[this._colour];
    if (figure) {
      const known = this._columns[this._colour].filter((value) => value !== null && (value > 0 || this._colour !== "clock_mhz"));
      let [low, high] = [Infinity, -Infinity];
      for (const value of known) [low, high] = [Math.min(low, value), Math.max(high, value)];
      // From 1 on: a rank as fast as its peers has the palest colour.
      if (this._colour === "slowness") [low, high] = [1, Math.max(1 + MIN_SLOWNESS_RANGE, high)];
      this._colourOf = ramp(figure.ramp, low, high);
      put(
        this._legend,
        known.length ? legend(this._colourOf, low, high, figure.format) : el("span", { class: "legend" }, "not known yet"),
      );
    } else {
      put(this._legend, el("span", { class: "legend" }, this._stateLegend()));
    }
    setText(this._summary, this._sentence());
    if (!this._content.isConnected) put(this._body, this._content);
    this._picture.draw();
  }

  _stateLegend() {
    const present = new Set(this._columns.state.map((index) => this._stateName(index)));
    return Object.values(RANK_STATES)
      .filter((name) => present.has(name))
      .map((name) => el("span", { class: `key key-${name}` }, name));
  }

  _stateName(index) {
    return RANK_STATES[`RANK_STATE_${this._columns.states[index]}`] ?? String(this._columns.states[index]).toLowerCase();
  }

  _sentence() {
    const counts = new Map();
    for (const index of this._columns.state) {
      const name = this._stateName(index);
      counts.set(name, (counts.get(name) ?? 0) + 1);
    }
    const states = [...counts].map(([name, number]) => `${n.fixed(number)} ${name}`).join(", ");
    let slowest = -1;
    for (const [index, value] of this._columns.slowness.entries())
      if (value !== null && (slowest < 0 || value > this._columns.slowness[slowest])) slowest = index;
    if (slowest < 0 || this._columns.slowness[slowest] <= 1) return `${states}.`;
    const perPipeline = this._grid.stages * this._grid.tensors;
    const at = `pipeline ${Math.floor(slowest / perPipeline)}, stage ${Math.floor(slowest / this._grid.tensors) % this._grid.stages}`;
    return `${states}. Slowest: ${at}, ${FIGURES.slowness.format(this._columns.slowness[slowest])} the expected time.`;
  }

  _look() {
    const columns = this._columns;
    const colours = Object.fromEntries(
      Object.entries(STATE_LOOKS).map(([name, { fill, stroke, mark }]) => [
        name,
        { fill: fill && themeColour(fill), stroke: stroke && themeColour(stroke), mark },
      ]),
    );
    const none = themeColour("--track");
    const line = themeColour("--line-strong");
    const states = columns.states.map((_, index) => colours[this._stateName(index)] ?? colours.expected);
    const values = this._colour === "state" ? null : columns[this._colour];
    return {
      ink: themeColour("--ink"),
      muted: themeColour("--muted"),
      paint: (context, index, box) => {
        if (values === null) {
          paintState(context, states[columns.state[index]], box);
          return;
        }
        const value = values[index];
        const isStock = this._colour === "clock_mhz" && value === 0;
        context.fillStyle = value === null || isStock ? none : this._colourOf(value);
        context.fillRect(box.x, box.y, box.width, box.height);
        if (value === null) outline(context, line, box);
      },
    };
  }

  _lines(cell) {
    const index = this._grid.index(cell);
    const figures = Object.entries(FIGURES)
      .filter(([key]) => this._columns[key][index] !== null)
      .map(([key, { words, format }]) => `${words} ${format(this._columns[key][index])}`);
    const iteration = this._columns.iteration[index];
    return [
      `pipeline ${cell.pipeline}, stage ${cell.stage}${this._grid.tensors > 1 ? `, tensor ${cell.tensor}` : ""}`,
      this._stateName(this._columns.state[index]) + (iteration === null ? "" : `, iteration ${n.fixed(Number(iteration))}`),
      ...figures,
    ];
  }

  _details() {
    const columns = ["tensor", "state", "host", "GPU", "iteration", "offered", "in force", "on clock", "limits"];
    return el(
      "details",
      { ontoggle: (event) => event.target.open && this._fill() },
      el("summary", {}, "The ranks of a stage in detail"),
      el(
        "div",
        { class: "row" },
        el("label", { class: "field inline" }, "pipeline ", this._pipelineField),
        el("label", { class: "field inline" }, "stage ", this._stageField),
      ),
      el(
        "div",
        { class: "scroll", tabindex: 0, role: "group", "aria-label": "Ranks of a stage" },
        el(
          "table",
          { class: "figures" },
          el("thead", {}, el("tr", {}, columns.map((name) => el("th", { scope: "col" }, name)))),
          this._rows,
        ),
      ),
    );
  }

  _choose(pipeline, stage) {
    this._pipelineField.value = String(pipeline);
    this._stageField.value = String(stage);
    const details = this._rows.closest("details");
    if (details.open) this._fill();
    else details.open = true;
  }

  async _fill() {
    const request = {
      job_id: this._jobId,
      pipeline: Number(this._pipelineField.value),
      stage: Number(this._stageField.value),
      page_size: 256,
    };
    try {
      const { ranks: found = [] } = await call("JobService", "ListRanks", request);
      put(this._rows, found.map(row));
    } catch (error) {
      if (!(error instanceof CallError)) throw error;
      put(this._rows, el("tr", {}, el("td", { colspan: 9 }, error.message)));
    }
  }
}

function row(rank) {
  const { computation_time_s = 0, on_clock_time_s = 0 } = rank.clocks ?? {};
  const held = clockReasons(rank.clock_event_reasons);
  const limits = [
    rank.power_limit_w ? n.watts(rank.power_limit_w) : "",
    held ? `held by ${held}` : "",
    rank.capped_clock_mhz ? `reaches ${n.fixed(rank.capped_clock_mhz)} MHz` : "",
    rank.foreign_clock ? `held at ${n.fixed(rank.foreign_clock.clock_mhz)} MHz by another client` : "",
  ];
  const cells = [
    rank.coordinates.tensor,
    RANK_STATES[rank.state] ?? rank.state,
    rank.hostname || "–",
    [rank.gpu_model, rank.gpu_uuid].filter(Boolean).join(" ") || "–",
    Number(rank.iteration) < 0 ? "–" : n.fixed(Number(rank.iteration)),
    version(rank.offered_version),
    version(rank.in_force_version),
    computation_time_s > 0 ? n.percent((100 * on_clock_time_s) / computation_time_s) : "–",
    limits.filter(Boolean).join("; ") || "–",
  ];
  return el("tr", {}, cells.map((text) => el("td", {}, String(text))));
}

function paintState(context, { fill, stroke, mark }, box) {
  if (fill) {
    context.fillStyle = fill;
    context.fillRect(box.x, box.y, box.width, box.height);
  }
  if (!stroke) return;
  outline(context, stroke, box);
  if (!mark || box.width < 6) return;
    // A shape in addition to the colour: the two kinds of trouble differ without it, too.
  context.beginPath();
  context.moveTo(box.x + 2, box.y + box.height - 2);
  context.lineTo(box.x + box.width - 2, box.y + 2);
  if (mark === "×") {
    context.moveTo(box.x + 2, box.y + 2);
    context.lineTo(box.x + box.width - 2, box.y + box.height - 2);
  }
  context.stroke();
}

function outline(context, colour, box) {
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.strokeRect(box.x + 0.5, box.y + 0.5, box.width - 1, box.height - 1);
}

function numberField(name) {
  return el("input", { type: "number", min: 0, value: 0, "aria-label": name });
}
