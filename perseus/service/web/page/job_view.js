/** The view of one job. */

import { CallError, call, pages } from "./api.js";
import { ControlsPanel } from "./controls_panel.js";
import { el, put, setText } from "./dom.js";
import { EventsPanel } from "./events_panel.js";
import { EventStream } from "./event_stream.js";
import { FrontierPanel } from "./frontier_panel.js";
import { IterationsPanel } from "./iterations_panel.js";
import { JobModel } from "./job_model.js";
import { LedgerPanel } from "./ledger_panel.js";
import * as n from "./numbers.js";
import { figure, nextStep } from "./panel.js";
import { PeriodsPanel } from "./periods_panel.js";
import { RanksPanel } from "./ranks_panel.js";
import { TimelinePanel } from "./timeline_panel.js";
import { jobLink, jobState, layout, measuredScale, signalTarget, policy, profiling, profilingCost, rankCount } from "./words.js";

const SHOW_EVERY_MS = 250;
const ASK_EVERY_MS = 1_000;
const ASK_AGAIN_MS = 10_000;

export class JobView {
  constructor(app, jobId) {
    this.title = jobId;
    this._jobId = jobId;
    this._model = new JobModel();
    this._full = null;
    this._report = null;
    this._statement = null;
    this._askedAt = 0;
    this._askedKey = "";
    this._isAsking = false;
    this._isDue = false;
    this._makeHead();
    this._frontier = new FrontierPanel(jobId);
    this._iterations = new IterationsPanel();
    this._timeline = new TimelinePanel(jobId);
    this._ranks = new RanksPanel(jobId);
    this._periods = new PeriodsPanel();
    this._ledger = new LedgerPanel();
    this._events = new EventsPanel();
    this._controls = app.session.may_control ? new ControlsPanel(jobId, (job) => this._takeFull(job)) : null;
    this._panels = el(
      "div",
      { class: "panels" },
      el("div", { class: "pair" }, this._frontier.element, this._iterations.element),
      this._timeline.element,
      this._ranks.element,
      el("div", { class: "pair uneven" }, this._periods.element, this._controls?.element),
      el("div", { class: "pair" }, this._ledger.element, this._events.element),
    );
    this._missing = el("p", { class: "empty", hidden: true });
    this.element = el("div", {}, this._head, this._missing, this._panels);
    this._timer = setInterval(() => this._ask(), ASK_EVERY_MS);
    this._watch(app);
    this._isThere();
  }

  _watch(app) {
    this._hasEnded = false;
    this._stream = new EventStream(
      () => this._address(),
      ["updates"],
      (_, update) => this._take(update),
      (state) => {
        this._hasEnded = state.hasEnded;
        app.onStream(state);
      },
      async () => (await app.mayGoOn()) && this._isThere(),
    );
    this._watchAgain = () => this._watch(app);
  }

  close() {
    clearInterval(this._timer);
    this._stream.close();
    this._timeline.close();
    this._ranks.close();
  }

  _makeHead() {
    this._state = el("span", { class: "state" });
    this._reason = el("p", { class: "reason" });
    this._nextStep = el("p", { class: "reason", hidden: true });
    this._shownStep = "";
    this._facts = el("p", { class: "note" });
    this._progress = el("progress", { max: 1, value: 0, "aria-label": "Profiling" });
    this._progressText = el("span", {});
    this._profiling = el("p", { class: "profiling", hidden: true }, this._progress, this._progressText);
    const names = ["iteration time", "energy per iteration", "power", "energy saved", "stragglers", "ranks", "policy"];
    this._figures = Object.fromEntries(names.map((name) => [name, figure(name)]));
    this._head = el(
      "div",
      {},
      el("div", { class: "heading" }, el("h1", {}, this._jobId), this._state),
      this._reason,
      this._nextStep,
      this._facts,
      this._profiling,
      el("dl", { class: "figures-row" }, Object.values(this._figures).map(({ element }) => element)),
    );
  }

  _address() {
    const { job, lastSequence } = this._model;
    const from = lastSequence ? `?after_sequence=${lastSequence}&run_number=${job.run_number}` : "";
    return `api/watch/jobs/${encodeURIComponent(this._jobId)}${from}`;
  }

  /** Whether the job exists; shows a message if not, because a stream can't say why it fails to open. */
  async _isThere() {
    try {
      this._takeFull((await call("JobService", "GetJob", { job_id: this._jobId })).job);
      this._panels.hidden = false;
      this._missing.hidden = true;
    } catch (error) {
      if (!(error instanceof CallError)) throw error;
      const { address, page_url: pageUrl, slot } = error.metadata;
      const isElsewhere = error.reason === "SERVED_ELSEWHERE";
      if (error.code !== "NOT_FOUND" && !isElsewhere) return error.code !== "OFFLINE";
      if (pageUrl) {
        location.replace(jobLink(this._jobId, pageUrl));
        return false;
      }
      const holder = address ? `the coordinator at ${address} serves; where its page is, is unknown` : "nobody serves at present";
      setText(this._missing, isElsewhere ? `Job “${this._jobId}” belongs to slot ${slot}, which ${holder}.` : `There is no job “${this._jobId}”.`);
      this._missing.hidden = false;
      this._panels.hidden = true;
    }
    return true;
  }

  _take({ updates }) {
    for (const update of updates) this._model.take(update);
    this._scheduleShow();
  }

  _takeFull(job) {
    const known = this._model.job;
    const isOtherRun = job.run_number !== known?.run_number;
    if (isOtherRun || Number(job.last_event_sequence) >= Number(known.last_event_sequence)) this._model.take({ job });
    this._full = job;
    // A run's stream ends with the run; the next run has its own.
    if (isOtherRun && this._hasEnded) this._watchAgain();
    this._scheduleShow();
  }

  _scheduleShow() {
    if (this._isDue) return;
    this._isDue = true;
    setTimeout(() => {
      this._isDue = false;
      this._show();
    }, SHOW_EVERY_MS);
  }

  /** Ask for what the stream does not contain, when the job has changed, or after a while. */
  async _ask() {
    const { job } = this._model;
    if (!job || this._isAsking || document.visibilityState !== "visible") return;
    const key = [job.run_number, job.state, job.straggler_count, job.min_planned_iteration_time_s, job.max_planned_iteration_time_s, job.figures?.straggler_iteration_time_s].join("/");
    const isOther = key !== this._askedKey;
    if (!isOther && Date.now() - this._askedAt < ASK_AGAIN_MS) return;
    this._isAsking = true;
    try {
      this._takeFull((await call("JobService", "GetJob", { job_id: this._jobId })).job);
      this._report = await pages("JobService", "GetReport", { job_id: this._jobId, page_size: 1000 }, "periods");
      this._statement = await pages("LedgerService", "ListLedgerEntries", { job_id: this._jobId, page_size: 1000 }, "entries");
      this._askedKey = key;
    } catch (error) {
      if (!(error instanceof CallError)) throw error;
    } finally {
      this._askedAt = Date.now();
      this._isAsking = false;
    }
    this._scheduleShow();
  }

  _show() {
    const { job } = this._model;
    if (!job) return;
    this._showHead(job);
    this._showFigures(job);
    this._frontier.update(job, this._full);
    this._iterations.update(this._model, this._report);
    this._timeline.update(this._model);
    this._periods.update(this._report);
    this._ledger.update(job, this._statement);
    this._events.update(this._model);
    this._controls?.update(job, this._full);
  }

  _showHead(job) {
    const state = jobState(job);
    setText(this._state, state.name);
    this._state.className = `state ${state.tone}`;
    this._state.title = state.meaning;
    setText(this._reason, job.state_reason);
    this._reason.classList.toggle("attention", state.tone === "trouble");
    this._showNextStep(job.next_step ?? "");
    const facts = [
      `run ${job.run_number}`,
      `${layout(job.parallelism)} pipelines × stages × tensor`,
      `registered ${n.clock(job.create_time)}`,
      job.finish_time ? `finished ${n.clock(job.finish_time)}` : "",
      job.set_latency_s ? `setting a clock takes ${n.milliseconds(job.set_latency_s)}` : "",
      Number(job.thinned_batch_count) ? `${job.thinned_batch_count} batches of telemetry thinned under load` : "",
      Number(job.profiling_cost.iteration_count) ? `profiling took ${profilingCost(job.profiling_cost)}` : "",
      ...(job.labels ?? []).map(({ key, value }) => `${key}=${value}`),
    ];
    setText(this._facts, facts.filter(Boolean).join("  ·  "));
    const progress = job.profiling_progress;
    this._profiling.hidden = !progress;
    if (progress) {
      this._progress.max = progress.max_clock_count || 1;
      this._progress.value = progress.tried_clock_count;
      setText(this._progressText, profiling(progress));
    }
  }

  /** Show what to do next; leave it alone, for copying, while it is the same. */
  _showNextStep(text) {
    if (text === this._shownStep) return;
    this._shownStep = text;
    this._nextStep.hidden = !text;
    put(this._nextStep, nextStep(text));
  }

  _showFigures(job) {
    const set = (name, value, note = "", isAttention = false) => {
      const { value: shown, note: noteElement, element } = this._figures[name];
      setText(shown, value);
      setText(noteElement, note);
      element.classList.toggle("attention", isAttention);
    };
    const { baseline, figures = {}, rank_counts: counts } = job;
    const isBaseline = Boolean(baseline?.iteration_time_s);
    const predicted = figures.predicted_iteration_time_s;
    const stock_s = isBaseline ? `stock ${n.seconds(baseline.iteration_time_s)}` : "no baseline yet";
    set("iteration time", n.seconds(figures.iteration_time_s), predicted === undefined ? stock_s : `predicted ${n.seconds(predicted)}, ${stock_s}`);
    set("energy per iteration", n.joules(figures.energy_j), baseline?.energy_j ? `stock ${n.joules(baseline.energy_j)}` : "");
    set("power", n.watts(figures.power_w), baseline?.energy_j ? `stock ${n.watts(baseline.energy_j / baseline.iteration_time_s)}` : "");
    const { saving } = figures;
    set(
      "energy saved",
      saving?.energy_percent === undefined ? "–" : n.withError(saving.energy_percent, saving.energy_margin_percent),
      saving === undefined ? "known once iterations run under plans" : `slowdown ${n.change(saving.slowdown_percent)}`,
    );
    const target_s = figures.straggler_iteration_time_s;
    set("stragglers", n.fixed(job.straggler_count), target_s === undefined ? "" : `T′ ${n.seconds(measuredScale(job, target_s))}`, job.straggler_count > 0);
    const trouble = [
      [counts.expected_count, "expected"],
      [counts.disconnected_count, "disconnected"],
      [counts.lost_count, "lost"],
      [counts.finished_count, "finished"],
    ].filter(([count]) => count > 0);
    set(
      "ranks",
      `${n.fixed(counts.connected_count)} of ${n.fixed(rankCount(job.parallelism))}`,
      trouble.map(([count, name]) => `${n.fixed(count)} ${name}`).join(", ") || "connected",
      counts.disconnected_count + counts.lost_count > 0,
    );
    const rule = policy(job.policy);
    const limit_s = job.no_slowdown_time?.iteration_time_s;
    const note = signalTarget(job) || (limit_s ? `no slowdown up to ${n.seconds(measuredScale(job, limit_s))}` : "");
    set("policy", rule.charAt(0).toUpperCase() + rule.slice(1), note);
  }
}
