/** The frames that everything on the page stands in. */

import { el } from "./dom.js";

/** A panel with its heading, and what belongs beside the heading. */
export function panel(title, body, ...tools) {
  const id = `panel-${title.toLowerCase().replaceAll(" ", "-")}`;
  return el(
    "section",
    { class: "panel", "aria-labelledby": id, id: `${id}-section` },
    el("header", {}, el("h2", { id }, title), tools.length ? el("div", { class: "tools" }, tools) : null),
    body,
  );
}

/** What stands where there is nothing yet: in a sentence, why. */
export function waiting(text) {
  return el("p", { class: "waiting" }, text);
}

/** One of a few, side by side; radio buttons, so that the arrow keys choose. */
export function choice(name, label, options, chosen, onChoose) {
  return el(
    "fieldset",
    { class: "choice" },
    el("legend", { class: "unseen" }, label),
    options.map(([value, words]) =>
      el(
        "label",
        {},
        el("input", { type: "radio", name, value, checked: value === chosen, onchange: () => onChoose(value) }),
        el("span", {}, words),
      ),
    ),
  );
}

/** A figure with its name and what there is to say of it. */
export function figure(name) {
  const value = el("dd", { class: "value" }, "–");
  const note = el("dd", { class: "aside" });
  return { element: el("div", { class: "figure" }, el("dt", {}, name), value, note), value, note };
}
