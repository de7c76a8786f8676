/**
 * A canvas of many cells that can also be read without seeing it.
 *
 * It is as sharp as the screen, is drawn again when its width or the theme changes, and has one selected cell at a
 * time: selected by the pointer, or with the arrow keys while it has the focus. A tip beside the cell describes it;
 * if it was selected by key, the text is also spoken.
 */

import { el, put } from "./dom.js";
import { onThemeChange } from "./scales.js";

export class Picture {
  /**
   * @param {string} label describes the picture for those who don't see it
   * @param {object} content
   *   `height(width)` in CSS pixels; `draw(context, width, height, selected)`;
   *   `at(x, y)` the cell at a point, or null; `box(cell)` its {x, y, width, height};
   *   `next(cell, key)` the cell that an arrow key, Home or End leads to; `lines(cell)` its description, a title first;
   *   `choose(cell)` (optional) called when the cell is clicked, or Enter is pressed on it.
   */
  constructor(label, content) {
    this._content = content;
    this._selected = null;
    this.canvas = el("canvas", {
      tabindex: 0,
      role: "application",
      "aria-roledescription": "picture",
      "aria-label": `${label} Arrow keys move between cells.`,
    });
    this._tip = el("div", { class: "tip", hidden: true, "aria-hidden": "true" });
    this._spoken = el("span", { class: "unseen", "aria-live": "polite" });
    this._ground = el("div", { class: "ground" }, this.canvas);
    // The tip is outside of the scrolling element, where nothing cuts it off.
    this._scroller = el("div", { class: "scroll" }, this._ground);
    this._scroller.addEventListener("scroll", () => this._selected && this._showTip());
    this.element = el("div", { class: "picture" }, this._scroller, this._tip, this._spoken);
    this._listen();
    new ResizeObserver(() => this.draw()).observe(this._ground);
    onThemeChange(() => this.draw());
  }

  /** Draw everything again; the selected cell stays selected if it still exists. */
  draw() {
    const width = this._ground.clientWidth;
    if (width === 0) return;
    const height = Math.max(1, Math.ceil(this._content.height(width)));
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.height = `${height}px`;
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    if (this._selected && !this._content.box(this._selected)) this._select(null);
    this._content.draw(context, width, height, this._selected);
    if (this._selected) this._showTip();
  }

  _listen() {
    const { canvas } = this;
    canvas.addEventListener("pointermove", (event) => this._select(this._cellOf(event)));
    canvas.addEventListener("pointerleave", () => {
      if (document.activeElement !== canvas) this._select(null);
    });
    canvas.addEventListener("click", (event) => {
      const cell = this._cellOf(event);
      this._select(cell);
      if (cell) this._content.choose?.(cell);
    });
    canvas.addEventListener("blur", () => this._select(null));
    canvas.addEventListener("keydown", (event) => this._key(event));
  }

  _key(event) {
    if (event.key === "Escape") {
      this._select(null);
    } else if (event.key === "Enter" && this._selected) {
      this._content.choose?.(this._selected);
    } else if (/^(Arrow(Up|Down|Left|Right)|Home|End)$/.test(event.key)) {
      const cell = this._content.next(this._selected, event.key);
      if (cell) {
        this._select(cell);
        this._spoken.textContent = this._content.lines(cell).join(", ");
        this._reveal(cell);
      }
    } else {
      return;
    }
    event.preventDefault();
  }

  _cellOf(event) {
    const bounds = this.canvas.getBoundingClientRect();
    return this._content.at(event.clientX - bounds.left, event.clientY - bounds.top);
  }

  _select(cell) {
    if (cell === this._selected) return;
    this._selected = cell;
    if (!cell) this._tip.hidden = true;
    this.draw();
  }

  _showTip() {
    const box = this._content.box(this._selected);
    if (!box) return;
    const [title, ...lines] = this._content.lines(this._selected);
    put(this._tip, el("strong", {}, title), lines.map((line) => el("span", {}, line)));
    this._tip.hidden = false;
    const { offsetWidth, offsetHeight } = this._tip;
    const middle = box.x + box.width / 2 - this._scroller.scrollLeft;
    const max = this._scroller.clientWidth - offsetWidth;
    this._tip.style.left = `${Math.max(0, Math.min(max, middle - offsetWidth / 2))}px`;
    this._tip.style.top = `${box.y - offsetHeight - 6}px`;
  }

  _reveal(cell) {
    const box = this._content.box(cell);
    const scroller = this._scroller;
    if (!box || scroller.scrollWidth <= scroller.clientWidth) return;
    if (box.x < scroller.scrollLeft) scroller.scrollLeft = box.x - 40;
    else if (box.x + box.width > scroller.scrollLeft + scroller.clientWidth)
      scroller.scrollLeft = box.x + box.width - scroller.clientWidth + 40;
  }
}

/** A legend: a strip of a ramp's colours between the values at its ends. */
export function legend(colour, low, high, format) {
  const steps = Array.from({ length: 9 }, (_, at) => colour(low + ((high - low) * at) / 8));
  const strip = el("span", { class: "strip" });
  strip.style.background = `linear-gradient(to right, ${steps.join(", ")})`;
  return el("span", { class: "legend" }, el("span", {}, format(low)), strip, el("span", {}, format(high)));
}
