/** The layout of a job's ranks: stages down, pipelines across, in bands as wide as the space allows. */

const LABEL_WIDTH = 54;
const BAND_LABEL = 18;
const BAND_GAP = 8;
const CELL_LIMITS = [11, 30];

/** Tensor ranks share their stage's cell, in a small block. */
export class RanksGrid {
  /** @param {[number, number, number]} shape pipelines, stages, tensors */
  constructor(shape) {
    [this.pipelines, this.stages, this.tensors] = shape;
    this.across = Math.ceil(Math.sqrt(this.tensors));
    this.down = Math.ceil(this.tensors / this.across);
    this._cells = new Map();
  }

  /** Fit the grid into a width, CSS pixels; return its height. */
  fit(width) {
    const room = Math.max(1, width - LABEL_WIDTH);
    const min = Math.max(CELL_LIMITS[0], 5 * this.across + 2);
    const max = Math.max(CELL_LIMITS[1], 9 * this.across + 2);
    this.size = Math.max(min, Math.min(max, Math.floor(room / Math.max(1, this.pipelines))));
    this.perBand = Math.max(1, Math.min(this.pipelines, Math.floor(room / this.size)));
    this.bands = Math.ceil(this.pipelines / this.perBand);
    this.bandHeight = BAND_LABEL + this.stages * this.size + BAND_GAP;
    return this.bands * this.bandHeight;
  }

  index({ pipeline, stage, tensor }) {
    return (pipeline * this.stages + stage) * this.tensors + tensor;
  }

  box({ pipeline, stage, tensor }) {
    if (pipeline >= this.pipelines || stage >= this.stages || tensor >= this.tensors) return null;
    const band = Math.floor(pipeline / this.perBand);
    const inner = this.size - 2;
    const width = inner / this.across;
    const height = inner / this.down;
    return {
      x: LABEL_WIDTH + (pipeline % this.perBand) * this.size + (tensor % this.across) * width,
      y: band * this.bandHeight + BAND_LABEL + stage * this.size + Math.floor(tensor / this.across) * height,
      width: width - (this.across > 1 ? 0.5 : 0),
      height: height - (this.down > 1 ? 0.5 : 0),
    };
  }

  at(x, y) {
    const band = Math.floor(y / this.bandHeight);
    const column = Math.floor((x - LABEL_WIDTH) / this.size);
    const row = Math.floor((y - band * this.bandHeight - BAND_LABEL) / this.size);
    const pipeline = band * this.perBand + column;
    const isInside = column >= 0 && column < this.perBand && row >= 0 && row < this.stages && pipeline < this.pipelines;
    if (!isInside || band >= this.bands) return null;
    const inner = this.size - 2;
    const dx = x - LABEL_WIDTH - column * this.size;
    const dy = y - band * this.bandHeight - BAND_LABEL - row * this.size;
    const tensorColumn = Math.min(this.across - 1, Math.floor((dx / inner) * this.across));
    const tensorRow = Math.min(this.down - 1, Math.floor((dy / inner) * this.down));
    return this.cell(pipeline, row, Math.min(this.tensors - 1, tensorRow * this.across + tensorColumn));
  }

  /** Left and right move along the tensor ranks and on to the next pipeline, up and down along the stages. */
  next(cell, key) {
    if (!cell) return this.cell(0, 0, 0);
    const { pipeline, stage, tensor } = cell;
    const flat = pipeline * this.tensors + tensor;
    const last = this.pipelines * this.tensors - 1;
    const to = { ArrowLeft: flat - 1, ArrowRight: flat + 1, Home: 0, End: last }[key];
    if (to !== undefined) {
      const kept = Math.min(last, Math.max(0, to));
      return this.cell(Math.floor(kept / this.tensors), stage, kept % this.tensors);
    }
    const row = stage + (key === "ArrowUp" ? -1 : 1);
    const other = pipeline + (key === "ArrowUp" ? -this.perBand : this.perBand);
    if (row >= 0 && row < this.stages) return this.cell(pipeline, row, tensor);
    if (other < 0 || other >= this.pipelines) return cell;
    return this.cell(other, row < 0 ? this.stages - 1 : 0, tensor);
  }

  /** Cells are compared by identity, so each is made once. */
  cell(pipeline, stage, tensor) {
    const key = (pipeline * this.stages + stage) * this.tensors + tensor;
    let found = this._cells.get(key);
    if (!found) this._cells.set(key, (found = { pipeline, stage, tensor }));
    return found;
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {object} look `paint(context, index, box)` draws a rank; the theme's `ink` and `muted`
   */
  draw(context, width, height, look, selected) {
    context.clearRect(0, 0, width, height);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    for (let band = 0; band < this.bands; band += 1) this._drawLabels(context, look, band);
    for (let pipeline = 0; pipeline < this.pipelines; pipeline += 1)
      for (let stage = 0; stage < this.stages; stage += 1)
        for (let tensor = 0; tensor < this.tensors; tensor += 1) {
          const place = { pipeline, stage, tensor };
          look.paint(context, this.index(place), this.box(place));
        }
    const box = selected && this.box(selected);
    if (!box) return;
    context.strokeStyle = look.ink;
    context.lineWidth = 2;
    context.strokeRect(box.x - 1, box.y - 1, box.width + 2, box.height + 2);
  }

  _drawLabels(context, look, band) {
    const top = band * this.bandHeight;
    context.fillStyle = look.muted;
    context.textAlign = "left";
    const every = Math.max(1, Math.ceil(13 / this.size));
    for (let stage = 0; stage < this.stages; stage += every)
      context.fillText(`st. ${stage}`, 0, top + BAND_LABEL + (stage + 0.5) * this.size - 1);
    context.textAlign = "center";
    const step = [1, 2, 4, 8, 16, 32].find((each) => each * this.size >= 26) ?? 64;
    const first = band * this.perBand;
    const end = Math.min(this.pipelines, first + this.perBand);
    for (let pipeline = first; pipeline < end; pipeline += 1)
      if ((pipeline - first) % step === 0)
        context.fillText(String(pipeline), LABEL_WIDTH + (pipeline - first + 0.5) * this.size - 1, top + 9);
    if (band === 0) {
      context.textAlign = "left";
      context.fillText("pipeline", 0, top + 9);
    }
  }
}
