/** The controls of a job, for users who may control it: the same calls as gRPC's. */

import { CallError, call } from "./api.js";
import { el, put, setText } from "./dom.js";
import * as n from "./numbers.js";
import { panel } from "./panel.js";
import { measuredScale, policy } from "./words.js";

const DAY_MS = 24 * 3600 * 1000;

const ITERATIONS = { name: "iterations", unit: "iterations", value: 1000, min: 1, step: 1 };

/** The time available for least carbon or cost: an extra share over a horizon, or until a time. */
const EXTRA_TIME = {
  fields: [
    { name: "extra time", unit: "% more time", value: 5, min: 0, max: 1000 },
    { name: "horizon", before: "over", unit: "h", value: 24, min: 1, max: 366 * 24 },
  ],
  time: ([percent, horizon_h]) => ({ extra_time: { percent, horizon_s: horizon_h * 3600 } }),
};
const WORK_UNTIL = {
  fields: [
    ITERATIONS,
    { name: "time", before: "until (UTC)", unit: "UTC", after: "", type: "datetime-local", value: () => minute(Date.now() + DAY_MS) },
  ],
  time: ([iteration_count, until]) => ({ work_until: { iteration_count, end_time: new Date(`${until}Z`).toISOString() } }),
};

const POLICIES = {
  no_slowdown: { words: "No slowdown", fields: [], rule: () => ({ no_slowdown: {} }) },
  max_slowdown_percent: {
    words: "Slower than stock by at most",
    fields: [{ name: "percent", unit: "%", value: 5, min: 0, max: 100 }],
    rule: ([percent]) => ({ max_slowdown_percent: percent }),
  },
  deadline: {
    words: "Iterations by a deadline",
    fields: [
      ITERATIONS,
      { name: "within", unit: "s", value: 3600, min: 0.001 },
    ],
    rule: ([iteration_count, time_s]) => ({ deadline: { iteration_count, time_s } }),
  },
  max_average_power_w: {
    words: "Average power of a pipeline at most",
    fields: [{ name: "power", unit: "W", value: 2000, min: 0.001 }],
    rule: ([max_average_power_w]) => ({ max_average_power_w }),
  },
  carbon_within: { words: "Least carbon, within extra time", ...leastSignal("least_carbon", EXTRA_TIME) },
  carbon_until: { words: "Least carbon, until a time", ...leastSignal("least_carbon", WORK_UNTIL) },
  cost_within: { words: "Least cost, within extra time", ...leastSignal("least_cost", EXTRA_TIME) },
  cost_until: { words: "Least cost, until a time", ...leastSignal("least_cost", WORK_UNTIL) },
};

export class ControlsPanel {
  /** @param {(job: object) => void} onJob called with the job, FULL, that an answer contains */
  constructor(jobId, onJob) {
    this._jobId = jobId;
    this._onJob = onJob;
    this._stragglersKey = "";
    this._outcome = el("p", { class: "outcome", role: "status" });
    this._current = el("p", { class: "note" });
    this._stragglers = el("ul", { class: "stragglers" });
    this._baseline = button("Measure baseline again", () => this._measureBaseline());
    this._resume = button("Resume", () => this._send("ResumeJob", {}, "The job resumes from the baseline."));
    this._finish = button("Finish job…", () => this._askToFinish(), "danger");
    this._dialog = this._makeDialog();
    this.element = panel(
      "Controls",
      el(
        "div",
        { class: "controls" },
        this._outcome,
        this._makePolicy(),
        this._makeStraggler(),
        el(
          "fieldset",
          {},
          el("legend", {}, "Course"),
          el("div", { class: "row" }, this._baseline, this._resume, this._finish),
        ),
        this._dialog,
      ),
    );
  }

  /** Show the job; `full` is the job with its stragglers. */
  update(job, full) {
    const state = job.state;
    const hasEnded = state === "JOB_STATE_FINISHED";
    setText(this._current, `Now: ${policy(job.policy)}.`);
    this._baseline.disabled = state !== "JOB_STATE_PLANNED";
    this._resume.disabled = state !== "JOB_STATE_STOCK";
    this._finish.disabled = hasEnded;
    this._pipeline.max = String(job.parallelism.pipeline_count - 1);
    this._showStragglers(job, full ? full.stragglers : []);
  }

  _showStragglers(job, stragglers) {
    const key = JSON.stringify(stragglers);
    if (key === this._stragglersKey) return;
    this._stragglersKey = key;
    put(
      this._stragglers,
      stragglers.map(({ pipeline = 0, iteration_time_s = 0, is_detected = false }) => {
        const time = iteration_time_s ? `: T′ ${n.seconds(measuredScale(job, iteration_time_s))}` : "";
        const text = `Pipeline ${pipeline}, ${is_detected ? "detected" : "reported"}${time}`;
        const clear = button("Clear", () => this._clear(pipeline));
        clear.setAttribute("aria-label", `Clear straggler, pipeline ${pipeline}`);
        // A detected straggler ends by itself; only reports can be cleared.
        return el("li", {}, el("span", {}, text), is_detected ? null : clear);
      }),
    );
  }

  _makePolicy() {
    const fields = el("span", { class: "row" });
    const select = el(
      "select",
      { id: "policy", onchange: () => showFields() },
      Object.entries(POLICIES).map(([key, { words }]) => el("option", { value: key }, words)),
    );
    const showFields = () =>
      put(
        fields,
        POLICIES[select.value].fields.map(({ name, before, unit, after = ` ${unit}`, type = "number", value, min, max, step = "any" }) =>
          el(
            "label",
            { class: "field inline" },
            before ? `${before} ` : "",
            el("input", {
              type,
              "aria-label": `${name}, ${unit}`,
              value: typeof value === "function" ? value() : value,
              ...(type === "number" ? { min, max, step } : {}),
              required: true,
            }),
            after,
          ),
        ),
      );
    showFields();
    const submit = (event) => {
      event.preventDefault();
      const { rule } = POLICIES[select.value];
      const values = [...fields.querySelectorAll("input")].map((input) => (input.type === "number" ? Number(input.value) : input.value));
      this._send("SetPolicy", { policy: rule(values) }, "The policy is set.");
    };
    return el(
      "form",
      { onsubmit: submit },
      el(
        "fieldset",
        {},
        el("legend", {}, "Policy"),
        this._current,
        el("label", { class: "unseen", for: "policy" }, "Policy"),
        el("div", { class: "row" }, select, fields, el("button", { type: "submit" }, "Set policy")),
      ),
    );
  }

  _makeStraggler() {
    this._pipeline = el("input", { type: "number", min: 0, value: 0, required: true, id: "straggler-pipeline" });
    const amount = el("input", { type: "number", "aria-label": "How slow", value: 1.2, min: 0, step: "any", required: true });
    const unit = el(
      "select",
      { "aria-label": "How slow, in" },
      el("option", { value: "slowdown_factor" }, "× T_min"),
      el("option", { value: "iteration_time_s" }, "s an iteration"),
    );
    const submit = (event) => {
      event.preventDefault();
      const pipeline = Number(this._pipeline.value);
      const request = { pipeline, [unit.value]: Number(amount.value) };
      this._send("ReportStraggler", request, `Pipeline ${pipeline} is reported as slow.`);
    };
    return el(
      "form",
      { onsubmit: submit },
      el(
        "fieldset",
        {},
        el("legend", {}, "Stragglers"),
        this._stragglers,
        el(
          "div",
          { class: "row" },
          el("label", { class: "field inline", for: "straggler-pipeline" }, "pipeline ", this._pipeline),
          amount,
          unit,
          el("button", { type: "submit" }, "Report straggler"),
        ),
      ),
    );
  }

  _makeDialog() {
    const cancel = button("Keep it running", () => this._dialog.close());
    const confirm = button(
      "Finish the job",
      () => {
        this._dialog.close();
        this._send("FinishJob", {}, "The job has ended; its GPUs go back to stock.");
      },
      "danger",
    );
    return el(
      "dialog",
      { "aria-labelledby": "finish-title" },
      el("h3", { id: "finish-title" }, "Finish this job?"),
      el("p", {}, "Every GPU of ", el("strong", {}, this._jobId), " goes back to stock, and Perseus leaves the job alone. Training itself continues. A run that has ended can't be resumed."),
      el("div", { class: "row end" }, cancel, confirm),
    );
  }

  _askToFinish() {
    this._dialog.showModal();
  }

  _clear(pipeline) {
    this._send("ClearStraggler", { pipeline }, `Pipeline ${pipeline} is cleared.`);
  }

  _measureBaseline() {
    // Random numbers instead of a UUID, which browsers make over HTTPS only.
    const words = crypto.getRandomValues(new Uint32Array(4));
    const request_id = `page-${[...words].map((word) => word.toString(16).padStart(8, "0")).join("")}`;
    this._send("MeasureBaseline", { request_id }, "All ranks go to stock for a few iterations.");
  }

  async _send(method, request, done) {
    this._outcome.className = "outcome";
    setText(this._outcome, "…");
    try {
      const { job } = await call("JobService", method, { job_id: this._jobId, ...request });
      setText(this._outcome, done);
      this._outcome.classList.add("well");
      if (job) this._onJob(job);
    } catch (error) {
      if (!(error instanceof CallError)) throw error;
      setText(this._outcome, capitalised(error.message));
      this._outcome.classList.add("wrong");
    }
  }
}

/** A policy that follows a signal within an available time. */
function leastSignal(rule, { fields, time }) {
  return { fields, rule: (values) => ({ [rule]: time(values) }) };
}

/** A time in UTC in the format of form fields, without seconds. */
function minute(time_ms) {
  return new Date(time_ms).toISOString().slice(0, 16);
}

function button(text, onclick, kind = "") {
  return el("button", { type: "button", class: kind || false, onclick }, text);
}

function capitalised(text) {
  const whole = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(whole) ? whole : `${whole}.`;
}
