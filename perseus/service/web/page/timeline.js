/** The layout of measured iterations' computations: stage below stage, iteration below iteration. */

import { ticks } from "./numbers.js";

const LABEL_WIDTH = 62;
const RIGHT = 16;
const TITLE_HEIGHT = 26;
const AXIS_HEIGHT = 24;
const LANE_GAP = 10;
const ROW_LIMITS = [7, 24];
const ROWS_HEIGHT = 300;

/** Where each computation of some iterations is drawn. */
export class TimelineLayout {
  /**
   * @param {{title: string, entries: object[], iteration_time_s: number}[]} lanes
   */
  constructor(lanes) {
    this.lanes = lanes.map((lane) => ({ ...lane, stages: byStage(lane.entries) }));
    const times = this.lanes.flatMap((lane) => [
      lane.iteration_time_s,
      ...lane.entries.map((entry) => entry.start_s + entry.duration_s),
    ]);
    this.end_s = Math.max(1e-9, ...times);
    const rows = this.lanes.reduce((sum, lane) => sum + lane.stages.length, 0);
    const [min, max] = ROW_LIMITS;
    this.row = Math.max(min, Math.min(max, Math.floor(ROWS_HEIGHT / Math.max(1, rows))));
    this.tops = [];
    let top = 0;
    for (const lane of this.lanes) {
      this.tops.push(top + TITLE_HEIGHT);
      top += TITLE_HEIGHT + lane.stages.length * this.row + LANE_GAP;
    }
    this.height = top + AXIS_HEIGHT;
  }

  x(time_s, width) {
    return LABEL_WIDTH + (time_s / this.end_s) * (width - LABEL_WIDTH - RIGHT);
  }

  box({ lane, stage, index }, width) {
    const entry = this.entry({ lane, stage, index });
    if (!entry) return null;
    const left = this.x(entry.start_s, width);
    const right = this.x(entry.start_s + entry.duration_s, width);
    return { x: left, y: this.tops[lane] + stage * this.row, width: Math.max(1, right - left), height: this.row - 1 };
  }

  entry({ lane, stage, index }) {
    return this.lanes[lane]?.stages[stage]?.[index];
  }

  at(x, y, width) {
    for (const [lane, { stages }] of this.lanes.entries()) {
      const stage = Math.floor((y - this.tops[lane]) / this.row);
      if (stage < 0 || stage >= stages.length) continue;
      const time_s = ((x - LABEL_WIDTH) / (width - LABEL_WIDTH - RIGHT)) * this.end_s;
      const index = stages[stage].findIndex(
        (entry) => entry.start_s <= time_s && time_s < entry.start_s + entry.duration_s,
      );
      if (index >= 0) return this.cell(lane, stage, index);
    }
    return null;
  }

  /** Left and right move along a stage; up and down to the concurrent computation of the next stage or iteration. */
  next(cell, key) {
    if (!cell) return this.lanes[0]?.stages[0]?.length ? this.cell(0, 0, 0) : null;
    const row = this.lanes[cell.lane].stages[cell.stage];
    const to = { ArrowLeft: cell.index - 1, ArrowRight: cell.index + 1, Home: 0, End: row.length - 1 }[key];
    if (to !== undefined) return this.cell(cell.lane, cell.stage, Math.min(row.length - 1, Math.max(0, to)));
    const rows = this.lanes.flatMap((lane, at) => lane.stages.map((_, stage) => [at, stage]));
    const here = rows.findIndex(([lane, stage]) => lane === cell.lane && stage === cell.stage);
    const there = rows[here + (key === "ArrowUp" ? -1 : 1)];
    if (!there) return cell;
    const entry = row[cell.index];
    const middle_s = entry.start_s + entry.duration_s / 2;
    const entries = this.lanes[there[0]].stages[there[1]];
    const distances = entries.map((each) => Math.abs(each.start_s + each.duration_s / 2 - middle_s));
    return this.cell(...there, distances.indexOf(Math.min(...distances)));
  }

  /** Cells are compared by identity, so each is made once. */
  cell(lane, stage, index) {
    this._cells ??= new Map();
    const key = `${lane}/${stage}/${index}`;
    if (!this._cells.has(key)) this._cells.set(key, { lane, stage, index });
    return this._cells.get(key);
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {object} look `colourOf(entry)`, `letterOf(entry)`, `inkOn(colour)`, `time(seconds)`, `trackOf(lane, stage)`, and the theme's
   *   `ink`, `muted`, `line` and `accent`
   */
  draw(context, width, height, look, selected) {
    context.clearRect(0, 0, width, height);
    context.textBaseline = "middle";
    this._drawAxis(context, width, look);
    for (const [at, lane] of this.lanes.entries()) this._drawLane(context, width, look, lane, at);
    const box = selected && this.box(selected, width);
    if (box) {
      context.strokeStyle = look.ink;
      context.lineWidth = 2;
      context.strokeRect(box.x - 1, box.y - 1, box.width + 2, box.height + 2);
    }
  }

  _drawAxis(context, width, look) {
    const top = this.height - AXIS_HEIGHT;
    context.font = "11px system-ui, sans-serif";
    context.strokeStyle = look.line;
    context.fillStyle = look.muted;
    context.lineWidth = 1;
    context.textAlign = "center";
    for (const time_s of ticks(0, this.end_s, width / 110)) {
      const x = Math.round(this.x(time_s, width)) + 0.5;
      context.beginPath();
      context.moveTo(x, TITLE_HEIGHT - 4);
      context.lineTo(x, top);
      context.stroke();
      context.fillText(look.time(time_s), Math.min(x, width - 20), top + 12);
    }
  }

  _drawLane(context, width, look, lane, at) {
    const top = this.tops[at];
    const end = this.x(lane.iteration_time_s, width);
    context.textAlign = "left";
    context.fillStyle = look.ink;
    context.font = "600 12px system-ui, sans-serif";
    context.fillText(lane.title, 0, top - 13);
    context.font = "11px system-ui, sans-serif";
    for (const [stage, entries] of lane.stages.entries()) {
      const y = top + stage * this.row;
      if (this.row >= 12 || stage % Math.ceil(12 / this.row) === 0) {
        context.fillStyle = look.muted;
        context.fillText(`stage ${stage}`, 0, y + this.row / 2);
      }
      context.fillStyle = look.trackOf(lane, stage);
      context.fillRect(LABEL_WIDTH, y, Math.max(0, end - LABEL_WIDTH), this.row - 1);
      for (let index = 0; index < entries.length; index += 1) this._drawEntry(context, width, look, { lane: at, stage, index });
    }
    context.strokeStyle = look.accent;
    context.lineWidth = 2;
    context.beginPath();
    context.moveTo(end, top - 3);
    context.lineTo(end, top + lane.stages.length * this.row + 2);
    context.stroke();
  }

  _drawEntry(context, width, look, cell) {
    const entry = this.entry(cell);
    const box = this.box(cell, width);
    const colour = look.colourOf(entry);
    context.fillStyle = colour;
    context.fillRect(box.x, box.y, Math.max(0.75, box.width - (box.width > 3 ? 1 : 0)), box.height);
    const text = look.letterOf(entry);
    if (box.width < 9 + 6.5 * text.length || this.row < 13) return;
    context.fillStyle = look.inkOn(colour);
    context.textAlign = "center";
    context.fillText(text, box.x + box.width / 2, box.y + box.height / 2 + 0.5);
    context.textAlign = "left";
  }
}

function byStage(entries) {
  const count = entries.reduce((max, entry) => Math.max(max, entry.stage + 1), 0);
  const stages = Array.from({ length: count }, () => []);
  for (const entry of entries) stages[entry.stage].push(entry);
  for (const stage of stages) stage.sort((one, other) => one.start_s - other.start_s);
  return stages;
}
