/** The frames of everything on the page. */

import { el } from "./dom.js";

/** A panel with its heading, and tools beside the heading. */
export function panel(title, body, ...tools) {
  const id = `panel-${title.toLowerCase().replaceAll(" ", "-")}`;
  return el(
    "section",
    { class: "panel", "aria-labelledby": id, id: `${id}-section` },
    el("header", {}, el("h2", { id }, title), tools.length ? el("div", { class: "tools" }, tools) : null),
    body,
  );
}

/** A sentence in place of content that is not there yet. */
export function waiting(text) {
  return el("p", { class: "waiting" }, text);
}

/** What to do next about a job, with the commands that the coordinator puts between backquotes. */
export function nextStep(text) {
  return ["Next step: ", text.split("`").map((part, at) => (at % 2 ? el("code", {}, part) : part))];
}

/** A choice of one of a few options, side by side; radio buttons, so that arrow keys work. */
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

/** A figure with its name and a note. */
export function figure(name) {
  const value = el("dd", { class: "value" }, "–");
  const note = el("dd", { class: "aside" });
  return { element: el("div", { class: "figure" }, el("dt", {}, name), value, note), value, note };
}

/**
 * A number's cell in a table whose rows become cards on a narrow screen: there its name precedes it, and "–" is left
 * out. Roles are explicit because the cards' layout would lose them.
 */
export function numberCell(name, text, { kind = "", title = false } = {}) {
  return el("td", { role: "cell", class: `number ${kind} ${text === "–" ? "unknown" : ""}`, "data-name": name, title }, text);
}

/** Such a table, in a frame that scrolls; `headers` and `rows` must have their roles already. */
export function cardTable(label, headers, rows) {
  return el(
    "div",
    { class: "scroll jobs panel", tabindex: 0, role: "group", "aria-label": label },
    el("table", { class: "figures", role: "table" }, el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, headers)), rows),
  );
}
