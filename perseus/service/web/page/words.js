/** The coordinator's messages in words. Fields that protobuf leaves out are zero or empty. */

import * as n from "./numbers.js";

/** States of a job: name, meaning, and tone ("run", "busy", "idle", "trouble" or "done"). */
export const JOB_STATES = {
  JOB_STATE_WAITING: { name: "waiting", tone: "idle", meaning: "Some ranks have not joined yet." },
  JOB_STATE_BASELINE: { name: "baseline", tone: "busy", meaning: "All ranks run at stock; the iteration is measured." },
  JOB_STATE_PROFILING: {
    name: "profiling",
    tone: "busy",
    meaning: "Ranks hold one clock after another while training continues; every computation is measured.",
  },
  JOB_STATE_SOLVING: { name: "solving", tone: "busy", meaning: "The frontier is being solved; ranks run at stock." },
  JOB_STATE_PLANNED: { name: "planned", tone: "run", meaning: "Plans are in force, or offered." },
  JOB_STATE_STOCK: { name: "stock", tone: "trouble", meaning: "The job was returned to stock." },
  JOB_STATE_FINISHED: { name: "finished", tone: "done", meaning: "The job has ended." },
};

/** A job's state; a newer coordinator may have more of them. */
export function jobState(job) {
  const known = JOB_STATES[job.state];
  return known ?? { name: bare(job.state, "JOB_STATE_"), tone: "idle", meaning: "" };
}

/** States of a rank, in the order of listings. */
export const RANK_STATES = {
  RANK_STATE_EXPECTED: "expected",
  RANK_STATE_CONNECTED: "connected",
  RANK_STATE_DISCONNECTED: "disconnected",
  RANK_STATE_LOST: "lost",
  RANK_STATE_FINISHED: "finished",
};

const KINDS = {
  COMPUTATION_KIND_FORWARD: ["forward", "F"],
  COMPUTATION_KIND_BACKWARD: ["backward", "B"],
  COMPUTATION_KIND_BACKWARD_INPUT: ["backward, inputs", "BI"],
  COMPUTATION_KIND_BACKWARD_WEIGHT: ["backward, weights", "BW"],
  COMPUTATION_KIND_RECOMPUTATION: ["recomputation", "R"],
  COMPUTATION_KIND_FIXED: ["fixed time", "·"],
};

/** A computation's kind in words, and as a letter. */
export function kind(name) {
  const [words, letter] = KINDS[name] ?? [bare(name, "COMPUTATION_KIND_"), "?"];
  return { words, letter };
}

/** "2 × 4 × 1". */
export function layout(parallelism = {}) {
  const { pipeline_count = 0, stage_count = 0, tensor_count = 0 } = parallelism;
  return `${pipeline_count} × ${stage_count} × ${tensor_count}`;
}

/** Ranks of a job. */
export function rankCount({ pipeline_count = 0, stage_count = 0, tensor_count = 0 } = {}) {
  return pipeline_count * stage_count * tensor_count;
}

/** The address of a job's view, on the page of another coordinator if it is given. */
export const jobLink = (jobId, pageUrl = "") => `${pageUrl && `${pageUrl}/`}#/jobs/${encodeURIComponent(jobId)}`;

/** A job's operating policy. */
export function policy(rule = {}) {
  if (rule.max_slowdown_percent !== undefined) return `at most ${rule.max_slowdown_percent} % slower than stock`;
  if (rule.deadline)
    return `${n.count(Number(rule.deadline.iteration_count), "iteration")} within ${n.span(rule.deadline.time_s)}`;
  if (rule.max_average_power_w !== undefined) return `at most ${n.watts(rule.max_average_power_w)} a pipeline`;
  if (rule.least_carbon) return `least carbon ${timeFor(rule.least_carbon)}`;
  if (rule.least_cost) return `least cost ${timeFor(rule.least_cost)}`;
  return "no slowdown";
}

/** The time available for least carbon or cost. */
function timeFor({ extra_time: extra, work_until: work }) {
  if (extra) return `within ${extra.percent ?? 0} % more time over ${n.span(extra.horizon_s)}`;
  return work ? `for ${n.count(Number(work.iteration_count), "iteration")} until ${work.end_time}` : "";
}

/** A time on the frontier's scale as an iteration of the job is measured. */
export const measuredScale = (job, time_s) => time_s + (job.iteration_overhead_s ?? 0);

/** A job's target from its signal, and its progress; "" without a signal. */
export function signalTarget(job) {
  const target = job.signal_target;
  if (!target) return "";
  const why = {
    SIGNAL_TARGET_STATE_NO_SIGNAL: "the signal is unknown: no slowdown",
    SIGNAL_TARGET_STATE_LATE: "the work can't be done in time: no slowdown",
    SIGNAL_TARGET_STATE_DONE: "the work is done, or its time is over: no slowdown",
  }[target.state];
  const time = target.iteration_time_s === undefined ? "no slowdown now" : `iterations of ${n.seconds(measuredScale(job, target.iteration_time_s))}`;
  const done = `${target.done_count ?? 0} of ${n.count(Math.round(target.iteration_count), "iteration")}`;
  return `${why ?? time}; ${done}`;
}

/** A plan's version; "stock" for 0. */
export const version = (value) => (Number(value) === 0 ? "stock" : `plan ${value}`);

/** The progress of profiling, and its longest remaining time. */
export function profiling(progress) {
  const tried = `${progress.tried_clock_count} of at most ${n.count(progress.max_clock_count, "clock")} tried`;
  return progress.remaining_s === undefined ? tried : `${tried}, done within ${n.span(progress.remaining_s)}`;
}

/** The cost of profiling against as many iterations at stock. */
export function profilingCost(cost) {
  const time = n.signed(cost.extra_time_s, 1);
  return (
    `${n.count(Number(cost.iteration_count), "iteration")} in ${n.span(cost.time_s)}: ` +
    `${time} s and ${(cost.extra_energy_j) > 0 ? "+" : ""}${n.joules(cost.extra_energy_j)} against stock`
  );
}

/** Groups of events for the filter; an event belongs to the first that contains its type. */
export const EVENT_GROUPS = [
  {
    name: "trouble",
    types: [
      "PREDICTION_VIOLATED", "SOLVE_FAILED", "SOLVE_RETRIED", "STALLED", "QUARANTINED", "GPU_ERROR", "EVENTS_DROPPED",
      "CLOCK_CAPPED", "FOREIGN_CLOCK", "GPU_LIMITS_CHANGED", "MEASUREMENTS_UNEXPLAINED", "PLAN_REFUSED",
    ],
  },
  {
    name: "stragglers",
    types: ["STRAGGLER_REPORTED", "STRAGGLER_CLEARED", "STRAGGLER_DETECTED", "STRAGGLER_WITHDRAWN"],
  },
  { name: "plans", types: ["SOLVED", "PLAN_OFFERED", "PLAN_IN_FORCE", "POLICY_SET", "PROFILE_CORRECTED", "BUDGET_TARGET_SET", "SIGNAL_TARGET_SET"] },
  { name: "profiling", types: ["CLOCK_PROFILED", "CLOCK_GIVEN_UP", "PROFILE_ADOPTED", "PROFILING_ENDED", "BASELINE_REQUESTED"] },
  { name: "ranks", types: ["RANK_CHANGED"] },
  { name: "job", types: ["REGISTERED", "STATE_CHANGED", "RESUMED", "STALL_ENDED"] },
];

/** An event's type without its prefix, and its group. */
export function eventType(event) {
  const type = String(event.type).replace("JOB_EVENT_TYPE_", "");
  const group = EVENT_GROUPS.find((each) => each.types.includes(type));
  return { type, group: group?.name ?? "job" };
}

const OWN = new Set(["sequence", "create_time", "type", "message"]);

/** An event's details as pairs of name and value, for any type of event. */
export function details(event) {
  const details = Object.entries(event).find(([key]) => !OWN.has(key))?.[1];
  return details ? facts(details) : [];
}

const REASONS = [
  [0x4, "power cap"],
  [0x8, "hardware slowdown"],
  [0x20, "heat"],
  [0x40, "heat (hardware)"],
  [0x80, "power brake"],
];

/** The reasons why a GPU was below its clock, from NVML's bits. */
export function clockReasons(bits) {
  return REASONS.filter(([bit]) => (bits & bit) !== 0).map(([, name]) => name).join(", ");
}

const UNITS = [
  ["_s", (value) => n.seconds(value)],
  ["_j", (value) => n.joules(value)],
  ["_w", (value) => n.watts(value)],
  ["_mhz", (value) => (value === 0 ? "stock" : `${n.fixed(value)} MHz`)],
  ["_percent", (value) => n.percent(value, 2)],
  ["_count", (value) => n.fixed(value)],
];

/** A message's fields, with nested ones after a comma; the suffix of a name gives the unit. */
export function facts(message, prefix = "") {
  return Object.entries(message).flatMap(([key, value]) => {
    if (value === "" || (Array.isArray(value) && value.length === 0)) return [];
    const unit = UNITS.find(([suffix]) => key.endsWith(suffix));
    const name = prefix + (unit ? key.slice(0, -unit[0].length) : key).replaceAll("_", " ");
    if (key === "rank") return [[prefix + "rank", place(value)]];
    if (key === "clock_event_reasons") return [[`${prefix}held by`, clockReasons(value) || "nothing"]];
    if (Array.isArray(value)) {
      if (value.some((each) => typeof each === "object"))
        return value.flatMap((each, at) => facts(each, `${name} ${at}, `));
      return [[name, value.map((each) => one(key, each, unit)).join(", ")]];
    }
    if (value !== null && typeof value === "object") return facts(value, `${name}, `);
    return [[name, one(key, value, unit)]];
  });
}

function one(key, value, unit) {
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (unit && value !== "" && Number.isFinite(Number(value))) return unit[1](Number(value));
  if (typeof value === "number") return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(4)));
  if (key.endsWith("_time")) return n.clock(value);
  // Values of enumerations: their own name follows that of their type.
  const spoken = /^[A-Z][A-Z0-9]*(_[A-Z0-9]+)+$/.test(value);
  return spoken ? value.replace(/^.*?_(STATE|REASON|KIND|LIMIT|PART)_/, "").toLowerCase().replaceAll("_", " ") : String(value);
}

/** A rank's place in its job. */
export function place({ pipeline = 0, stage = 0, tensor = 0 } = {}) {
  return `pipeline ${pipeline}, stage ${stage}, tensor ${tensor}`;
}

/** A value of an enumeration in words, without its type's name. */
function bare(name, prefix) {
  return name.replace(prefix, "").toLowerCase().replaceAll("_", " ");
}
