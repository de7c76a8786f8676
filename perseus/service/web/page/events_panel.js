/** The events of a job, newest first: each with its message, and its details on request. */

import { el, put, setText } from "./dom.js";
import * as n from "./numbers.js";
import { panel, waiting } from "./panel.js";
import { EVENT_GROUPS, eventType, details } from "./words.js";

const SHOWN_AT_FIRST = 60;
const SHOWN_MORE = 200;

export class EventsPanel {
  constructor() {
    this._most = SHOWN_AT_FIRST;
    this._group = "";
    this._key = "";
    this._items = new Map();
    this._model = null;
    this._list = el("ol", { class: "events", tabindex: 0, "aria-label": "Events, newest first" });
    this._more = el("button", { type: "button", class: "quiet", hidden: true, onclick: () => this._showMore() }, "Show earlier events");
    this._gap = el("p", { class: "note", hidden: true });
    this._body = el("div", {}, waiting("Nothing has happened yet."));
    this._content = el("div", {}, this._gap, this._list, this._more);
    const filter = el(
      "select",
      {
        "aria-label": "Which events",
        onchange: () => {
          this._group = filter.value;
          this._show();
        },
      },
      el("option", { value: "" }, "all events"),
      EVENT_GROUPS.map(({ name }) => el("option", { value: name }, name)),
    );
    this.element = panel("Events", this._body, filter);
  }

  update(model) {
    this._model = model;
    this._show();
  }

  _showMore() {
    this._most += SHOWN_MORE;
    this._show();
  }

  _show() {
    const model = this._model;
    if (!model || model.events.length === 0) return;
    const key = `${model.job?.run_number}/${model.lastSequence}/${this._group}/${this._most}`;
    if (key === this._key) return;
    this._key = key;
    const wanted = model.events.filter((event) => !this._group || eventType(event).group === this._group);
    const shown = wanted.slice(-this._most).reverse();
    const kept = new Map(shown.map((event) => [event, this._items.get(event) ?? item(event)]));
    this._items = kept;
    put(this._list, shown.length ? [...kept.values()] : el("li", {}, el("p", { class: "waiting" }, "There is none of these.")));
    this._more.hidden = wanted.length <= this._most;
    this._gap.hidden = model.missedEvents === 0;
    setText(this._gap, `${n.count(model.missedEvents, "event")} before these ${model.missedEvents === 1 ? "is" : "are"} no longer stored.`);
    if (!this._content.isConnected) put(this._body, this._content);
  }
}

function item(event) {
  const { type, group } = eventType(event);
  const facts = details(event);
  const message = el("span", { class: "message" }, event.message);
  const head = [
    el("time", { datetime: event.create_time, title: event.create_time }, n.clock(event.create_time)),
    message,
  ];
  const kind = el("span", { class: "kind" }, type.toLowerCase().replaceAll("_", " "));
  if (facts.length === 0) return el("li", { class: `event ${group}` }, el("p", { class: "head" }, head, kind));
  const list = el("dl", { class: "facts" });
  const disclosure = el("details", {}, el("summary", { class: "head" }, head, kind), list);
  disclosure.addEventListener("toggle", () => {
    if (!disclosure.open || list.childElementCount) return;
    put(list, el("div", {}, el("dt", {}, "event"), el("dd", {}, `no. ${event.sequence}`)), facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  });
  return el("li", { class: `event ${group}` }, disclosure);
}
