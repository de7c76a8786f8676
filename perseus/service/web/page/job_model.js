/**
 * The state of a watched job: its snapshot, its events, its iterations. Pure: updates in, values out.
 */

const MAX_EVENTS = 5_000;
const MAX_ITERATIONS = 2_000;
const OVERTAKEN_BY = 2;

export class JobModel {
  constructor() {
    this.job = null;
    this.events = [];
    this.isCaughtUp = false;
    this.missedIterations = 0;
    this.missedEvents = 0;
    this._lastSequence = 0;
    this._iterations = new Map();
  }

  /** Take one update of the watch. */
  take(update) {
    if (update.job) this._takeJob(update.job);
    else if (update.event) this._takeEvent(update.event);
    else if (update.iteration) this._takeIteration(update.iteration);
    else if (update.caught_up) this.isCaughtUp = true;
    else if (update.gap) {
      const { first_missed_sequence = 0, last_missed_sequence = 0, missed_iteration_count = 0 } = update.gap;
      this.missedIterations += Number(missed_iteration_count);
      if (Number(first_missed_sequence)) {
        this.missedEvents += Number(last_missed_sequence) - Number(first_missed_sequence) + 1;
      }
    }
  }

  /** Sequence of the last known event; a reconnected watch continues after it. */
  get lastSequence() {
    return this._lastSequence;
  }

  get pipelineCount() {
    return this.job ? this.job.parallelism.pipeline_count : 0;
  }

  /**
   * Iterations of the whole job, in order: `time_s` of the slowest pipeline, `energy_j` over all of them.
   *
   * An iteration counts once all pipelines have reported it, or others are ahead by two: then some reports were left
   * out for a slow reader, and the energy is scaled up to all pipelines.
   */
  iterations() {
    let newest = -1;
    for (const number of this._iterations.keys()) newest = Math.max(newest, number);
    return [...this._iterations.values()]
      .filter((each) => each.reported.size >= this.pipelineCount || each.number + OVERTAKEN_BY <= newest)
      .sort((one, other) => one.number - other.number)
      .map((each) => ({
        number: each.number,
        time_s: each.time_s,
        energy_j: (each.energy_j * this.pipelineCount) / Math.max(1, each.reported.size),
        versions: each.versions,
      }));
  }

  /** Mean power over the last iterations, watts; NaN before the first. */
  power_w(over = 8) {
    const last = this.iterations().slice(-over);
    const time_s = last.reduce((sum, each) => sum + each.time_s, 0);
    return time_s > 0 ? last.reduce((sum, each) => sum + each.energy_j, 0) / time_s : NaN;
  }

  /** Where clocks came into force, by pipeline: `kind` is "plan", "hold" or "stock". */
  switches() {
    return this._changes("JOB_EVENT_TYPE_PLAN_IN_FORCE", (event) => {
      const clocks = event.pipeline_clocks;
      const kind = clocks.plan ? "plan" : clocks.hold ? "hold" : "stock";
      return {
        iteration: Number(clocks.start_iteration),
        kind,
        pipeline: clocks.pipeline,
        version: Number(clocks.version),
      };
    });
  }

  /** Where telemetry revealed a straggler, or the end of one. */
  findings() {
    const found = (type, isSlow) =>
      this._changes(type, (event) => ({
        iteration: Number(event.straggler_finding.iteration),
        pipeline: event.straggler_finding.pipeline,
        isSlow,
      }));
    return [
      ...found("JOB_EVENT_TYPE_STRAGGLER_DETECTED", true),
      ...found("JOB_EVENT_TYPE_STRAGGLER_WITHDRAWN", false),
    ];
  }

  _changes(type, read) {
    return this.events.filter((event) => event.type === type).map(read);
  }

  _takeJob(job) {
    const isOtherRun = this.job && (job.run_number !== this.job.run_number || job.epoch !== this.job.epoch);
    if (isOtherRun) {
      this.events = [];
      this._lastSequence = 0;
      this._iterations.clear();
    }
    this.job = job;
  }

  _takeEvent(event) {
    const sequence = Number(event.sequence);
    if (sequence <= this._lastSequence) return; // sent again after a reconnect
    this._lastSequence = sequence;
    this.events.push(event);
    if (this.events.length > MAX_EVENTS) this.events.splice(0, this.events.length - MAX_EVENTS);
  }

  _takeIteration(summary) {
    const number = Number(summary.iteration);
    const pipeline = summary.pipeline;
    let found = this._iterations.get(number);
    // Trainers that went back to a checkpoint report the same numbers again.
    if (found?.reported.has(pipeline)) {
      this._iterations.delete(number);
      found = undefined;
    }
    if (!found) {
      found = { number, time_s: 0, energy_j: 0, versions: new Set(), reported: new Set() };
      this._iterations.set(number, found);
      if (this._iterations.size > MAX_ITERATIONS) this._iterations.delete(this._iterations.keys().next().value);
    }
    found.reported.add(pipeline);
    found.time_s = Math.max(found.time_s, summary.iteration_time_s);
    found.energy_j += summary.energy_j;
    found.versions.add(Number(summary.plan_version));
  }
}
