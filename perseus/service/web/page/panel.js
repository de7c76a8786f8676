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

/**
 * A number's cell in a table whose rows are laid out as no table's are on a narrow screen: there its name stands
 * before it, and "–" is left out. Roles are said for that reason.
 */
export function numberCell(name, text, { kind = "", title = false } = {}) {
  return el("td", { role: "cell", class: `number ${kind} ${text === "–" ? "unknown" : ""}`, "data-name": name, title }, text);
}

/** Such a table, in a frame that scrolls; `headers` and `rows` have their roles already. */
export function cardTable(label, headers, rows) {
  return el(
    "div",
    { class: "scroll jobs panel", tabindex: 0, role: "group", "aria-label": label },
    el("table", { class: "figures", role: "table" }, el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, headers)), rows),
  );
}
