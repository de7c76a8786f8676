"""The metrics that there are: every name, what it means, and how many series it can have. Pure.

Rules. Base units (seconds, joules, watts, hertz, bytes, ratios from 0 to 1), each in the name. Labels have
few values: a job's identifier, one of an enumeration, a GPU of the node. What grows with a job's ranks is in
`RANK`, and only where the operator asks for it. `job_id`, not `job`: that label is Prometheus' own. A figure
that is not known is left out, rather than told as 0. Counters count since their process was started.

`docs/metrics.md` is made from this (`document`), and tests hold what is scraped against it.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field


class Kind(enum.Enum):
    """What Prometheus calls the type of a metric."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. A counter's name ends in `_total`."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Section:
    """What belongs together, and what is said of it on the page: the metrics that were made by it."""

    title: str
    text: str = ""
    _metrics: list[Metric] = field(default_factory=list)

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._metrics)

    def gauge(self, name: str, text: str, *labels: str) -> Metric:
        """Make a gauge."""
        return self._make(f"perseus_{name}", Kind.GAUGE, text, labels)

    def counter(self, name: str, text: str, *labels: str) -> Metric:
        """Make a counter."""
        return self._make(f"perseus_{name}_total", Kind.COUNTER, text, labels)

    def histogram(self, name: str, text: str, *labels: str) -> Metric:
        """Make a histogram."""
        return self._make(f"perseus_{name}", Kind.HISTOGRAM, text, labels)

    def _make(self, name: str, kind: Kind, text: str, labels: tuple[str, ...]) -> Metric:
        self._metrics.append(Metric(name, kind, text, labels))
        return self._metrics[-1]


BOTH = Section("Both processes")

BUILD_INFO = BOTH.gauge("build_info", "Always 1; the label says which version runs.", "version")
CERTIFICATE_EXPIRY = BOTH.gauge(
    "certificate_expiry_timestamp_seconds",
    "Unix time at which a certificate in use expires, by its file; of CAs, the last of them.",
    "file",
)


SERVER = Section(
    "The coordinator", "A fixed number of series, and one for each reason of refusals that came about."
)

SERVING = SERVER.gauge("coordinator_serving", "1 while health says SERVING, 0 while the coordinator is late.")
JOBS = SERVER.gauge("jobs", "Jobs by the state of their latest run.", "state")
UNREADABLE_JOBS = SERVER.gauge("unreadable_jobs", "Jobs whose latest run can't be read from the store.")
HIDDEN_JOBS = SERVER.gauge(
    "hidden_jobs", "Unfinished jobs without series of their own, as there are too many; the newest have them."
)
JOB_FAULTS = SERVER.counter(
    "job_faults", "Faults of the coordinator that put a job aside, by what it failed at.", "part"
)

LOOP_LAG = SERVER.gauge("loop_lag_seconds", "By how much the event loop's last turn of a second was late.")
LOOP_LATE = SERVER.counter("loop_late_seconds", "Time by which the event loop's turns of a second were late.")
AGENT_STREAMS = SERVER.gauge("agent_streams", "Agents with a stream.")
WATCH_STREAMS = SERVER.gauge("watch_streams", "Watchers of jobs.")
BATCHES = SERVER.counter(
    "telemetry_batches",
    "Batches of telemetry: taken, repeated (taken before, and sent again) or refused.",
    "outcome",
)
REFUSALS = SERVER.counter(
    "refusals", "Calls, streams and messages refused, by the stable reason (see errors.md).", "reason"
)
THROTTLED_STREAMS = SERVER.gauge(
    "throttled_streams", "Streams that wait until there is room for what they say."
)

STORE_LATE = SERVER.gauge("store_late_seconds", "For how long the oldest work has waited to be stored.")
STORE_WAITING = SERVER.gauge("store_waiting", "Work that waits to be stored and carried out.")
STORE_COMMIT = SERVER.histogram("store_commit_seconds", "What commits took, from asking for them.")
STORE_ENTRIES = SERVER.counter("store_entries", "Records written.")
STORE_SIZE = SERVER.gauge("store_size_bytes", "Size of the database, as of the last minute.")

SOLVER_QUEUE = SERVER.gauge("solver_queue", "Problems that wait for a solver's process.", "pool")
SOLVER_BUSY = SERVER.gauge("solver_busy", "Problems that a solver's process is at.", "pool")
SOLVES = SERVER.histogram("solver_seconds", "What problems took, from asking to the answer.", "pool")
SOLVER_FAILURES = SERVER.counter("solver_failures", "Problems that came to nothing.", "pool")
SOLVER_CRASHES = SERVER.counter("solver_crashes", "Solver's processes that died.", "pool")


LEDGER = Section(
    "The ledger",
    "All jobs together, at most a minute old; what one run has used is a question for [the ledger](power.md#the-ledger)"
    " itself. Cost and carbon are told where their rates are known. Hours that were forgotten "
    "(`keep_ledger_days`) leave with the coordinator's next start.",
)

LEDGER_ENERGY = LEDGER.gauge(
    "ledger_energy_joules", "Energy in the ledger: of all jobs, also those that ended or were deleted."
)
LEDGER_SAVED_ENERGY = LEDGER.gauge(
    "ledger_saved_energy_joules", "Saved of it against stock baselines; below 0 where more was used."
)
LEDGER_COST = LEDGER.gauge("ledger_cost", "What that energy cost, in the currency of the prices.")
LEDGER_SAVED_COST = LEDGER.gauge("ledger_saved_cost", "What the energy saved would have cost.")
LEDGER_CARBON = LEDGER.gauge("ledger_carbon_grams", "Carbon dioxide that the energy stands for.")
LEDGER_SAVED_CARBON = LEDGER.gauge(
    "ledger_saved_carbon_grams", "Carbon dioxide that the energy saved stands for."
)


FEED = Section("Each feed", "Of the feeds in the coordinator's settings, and `default`.")

FEED_LIMIT = FEED.gauge("feed_limit_watts", "The lowest limit in force, while there is one.", "feed")
FEED_POWER_CAP = FEED.gauge(
    "feed_power_cap_watts", "What may be drawn now: on its way to a limit it follows the ramps.", "feed"
)
FEED_POWER = FEED.gauge(
    "feed_power_watts", "What is drawn: the mean over the longer of a minute and three iterations.", "feed"
)
FEED_MANAGED = FEED.gauge("feed_managed_watts", "What jobs under plans are expected to draw.", "feed")
FEED_UNMANAGED = FEED.gauge(
    "feed_unmanaged_watts", "What jobs without plans, and GPUs without a rank, drew lately.", "feed"
)
FEED_COMPLIANT = FEED.gauge(
    "feed_compliant", "1 while plans and what is measured keep the limit, or it can't be judged.", "feed"
)
FEED_TRANSITION = FEED.gauge("feed_in_transition", "1 while what may be drawn is on its way.", "feed")
FEED_HELD_JOBS = FEED.gauge("feed_held_jobs", "Jobs that a power budget holds back.", "feed")


SIGNAL = Section("Each signal", "Of the signals of carbon and price in the coordinator's settings.")

SIGNAL_KNOWN = SIGNAL.gauge(
    "signal_known", "1 while a value of it counts, 0 while nothing is known of it.", "signal"
)
SIGNAL_FAILURES = SIGNAL.counter(
    "signal_failures", "How often it could not be read from its source.", "signal"
)


JOB = Section(
    "Each job",
    "Of jobs that have not finished, the 1,000 newest at most: some 50 series for each, however many ranks "
    "it has. A new run of a job begins its counters anew.",
)

JOB_STATE = JOB.gauge("job_state", "1 for the state that the job is in, 0 for the others.", "job_id", "state")
JOB_RUN = JOB.gauge("job_run_number", "Which run of the job it is, from 1.", "job_id")
JOB_RANKS = JOB.gauge("job_ranks", "Ranks by whether an agent serves them.", "job_id", "state")
JOB_STALLED = JOB.gauge("job_stalled", "1 while the job does not get on, by why.", "job_id", "reason")
JOB_ITERATIONS = JOB.counter(
    "job_iterations", "Iterations that all ranks have reported.", "job_id", "regular"
)
JOB_TIME = JOB.counter("job_seconds", "Time of these iterations and of the gaps between them.", "job_id")
JOB_ENERGY = JOB.counter("job_energy_joules", "Energy of these iterations and gaps, of all GPUs.", "job_id")
JOB_SAVED_ENERGY = JOB.gauge(
    "job_saved_energy_joules",
    "Energy of these iterations that was saved against the stock baseline; below 0 where more was used.",
    "job_id",
)
JOB_ITERATION_TIME = JOB.gauge("job_iteration_seconds", "Time of the latest iteration.", "job_id")
JOB_ITERATION_ENERGY = JOB.gauge("job_iteration_energy_joules", "Energy of the latest iteration.", "job_id")
JOB_POWER = JOB.gauge("job_power_watts", "Power of all GPUs over the latest iteration.", "job_id")
JOB_BASELINE_TIME = JOB.gauge("job_baseline_seconds", "Time of an iteration at stock.", "job_id")
JOB_BASELINE_ENERGY = JOB.gauge("job_baseline_energy_joules", "Energy of an iteration at stock.", "job_id")
JOB_MEASURED = JOB.gauge(
    "job_measured_seconds", "Mean iteration time since the clocks in force came into force.", "job_id"
)
JOB_PREDICTED = JOB.gauge(
    "job_predicted_seconds", "Iteration time that the plans promise; known while planned.", "job_id"
)
JOB_SAVING = JOB.gauge(
    "job_saving_ratio",
    "Energy saved of the stock baseline's, as measured since the clocks in force came into force.",
    "job_id",
)
JOB_SAVING_ERROR = JOB.gauge("job_saving_error_ratio", "Standard error of that saving.", "job_id")
JOB_SLOWDOWN = JOB.gauge(
    "job_slowdown_ratio", "By how much iterations exceed the stock baseline, measured likewise.", "job_id"
)
JOB_FRONTIER = JOB.gauge(
    "job_frontier_seconds", "Iteration times of the frontier: T_min, T* and T_slow.", "job_id", "point"
)
JOB_STRAGGLERS = JOB.gauge(
    "job_stragglers", "Pipelines known to be slow, by who said so.", "job_id", "source"
)
JOB_STRAGGLER_TIME = JOB.gauge(
    "job_straggler_seconds", "Iteration time T' of the slowest of them, on the frontier's scale.", "job_id"
)
JOB_BUDGET_TARGET_TIME = JOB.gauge(
    "job_budget_target_seconds",
    "Iteration time that a power budget makes the job take, while one does.",
    "job_id",
)
JOB_PROFILED = JOB.gauge("job_profiled_clocks", "Clocks measured of the stage with the fewest.", "job_id")
JOB_PROFILING_ITERATIONS = JOB.gauge(
    "job_profiling_iterations", "Iterations that profiling has taken, of the whole run.", "job_id"
)
JOB_PROFILING_TIME = JOB.gauge("job_profiling_seconds", "Time that they took.", "job_id")
JOB_PROFILING_EXTRA_TIME = JOB.gauge(
    "job_profiling_extra_seconds", "Time that they took beyond stock.", "job_id"
)
JOB_PROFILING_EXTRA_ENERGY = JOB.gauge(
    "job_profiling_extra_energy_joules", "Energy that they took beyond stock; below 0 if less.", "job_id"
)
JOB_PROFILING_BUDGET = JOB.gauge(
    "job_profiling_budget_used_ratio",
    "Share of profiling's budget that is used, of what is used most.",
    "job_id",
)
JOB_PROFILING_TRIED = JOB.gauge(
    "job_profiling_tried_clocks",
    "While profiling: clocks tried of the stage with the most, those given up included.",
    "job_id",
)
JOB_PROFILING_MAX = JOB.gauge(
    "job_profiling_max_clocks", "While profiling: clocks that are tried of a stage at most.", "job_id"
)
JOB_PROFILING_LEFT = JOB.gauge(
    "job_profiling_remaining_seconds",
    "While profiling: time until it is over at the latest, at the present pace.",
    "job_id",
)
JOB_PLAN_SWITCHES = JOB.counter("job_plan_switches", "Times that pipelines were given other plans.", "job_id")
JOB_PREDICTION_VIOLATIONS = JOB.counter(
    "job_prediction_violations", "Times that the guard found plans' promises broken.", "job_id"
)
JOB_DETECTED = JOB.counter("job_stragglers_detected", "Times that a pipeline was found to be slow.", "job_id")
JOB_GPU_ERRORS = JOB.counter("job_gpu_errors", "Errors of GPUs that agents have told.", "job_id")
JOB_QUARANTINES = JOB.counter(
    "job_quarantines", "Times that the job was put aside, as the coordinator failed at it.", "job_id"
)


RANK = Section("Each rank", "Only with `--metrics-ranks`: four series for each rank.")

_RANK_LABELS = ("job_id", "pipeline", "stage", "tensor")
RANK_CONNECTED = RANK.gauge("rank_connected", "1 while an agent serves the rank.", *_RANK_LABELS)
RANK_ITERATION = RANK.gauge("rank_iteration", "The highest iteration that the rank reported.", *_RANK_LABELS)
RANK_ON_CLOCK = RANK.gauge(
    "rank_on_clock_ratio", "Share of computing time at the planned clock, under the plan.", *_RANK_LABELS
)
RANK_SET_LATENCY = RANK.gauge(
    "rank_set_latency_seconds", "Median time until a clock that is set is in force.", *_RANK_LABELS
)


AGENT = Section(
    "The agent", "What has `gpu_uuid` is told of the GPUs that were served since the agent started."
)

AGENT_CONNECTED = AGENT.gauge("agent_connected", "1 while the agent has a stream to the coordinator.")
AGENT_LEASE = AGENT.gauge("agent_lease_seconds", "How long plans outlive the coordinator's last word.")
AGENT_LEASE_LEFT = AGENT.gauge("agent_lease_left_seconds", "How much of that lease is left.")
AGENT_BATCHES_KEPT = AGENT.gauge("agent_telemetry_batches_kept", "Batches that are not acknowledged yet.")
AGENT_BATCHES = AGENT.counter("agent_telemetry_batches", "Batches of telemetry that the agent has made.")
AGENT_BATCHES_DROPPED = AGENT.counter(
    "agent_telemetry_batches_dropped", "Batches dropped: no room, or refused by the coordinator."
)
AGENT_TRAINERS_REFUSED = AGENT.counter(
    "agent_trainers_refused", "Trainers turned away, by the stable reason.", "reason"
)

AGENT_PART_FAILURES = AGENT.counter(
    "agent_part_failures",
    "Unforeseen failures of parts that the agent can do without; each is started again.",
    "part",
)

GPU_RANK = AGENT.gauge(
    "gpu_rank_info",
    "Always 1; the labels say which rank runs on the GPU.",
    "gpu_uuid",
    "job_id",
    "pipeline",
    "stage",
    "tensor",
)
GPU_CLOCK_WANTED = AGENT.gauge(
    "gpu_clock_wanted_hertz", "SM clock that the plan wants now; 0 is stock.", "gpu_uuid"
)
GPU_CLOCK_SET = AGENT.gauge(
    "gpu_clock_set_hertz",
    "SM clock that the driver was told last; 0 is stock, and it is left out after an error.",
    "gpu_uuid",
)
GPU_CLOCK_IN_FORCE = AGENT.gauge("gpu_clock_in_force_hertz", "SM clock as the driver reads it.", "gpu_uuid")
GPU_POWER = AGENT.gauge("gpu_power_watts", "Power as the driver reads it.", "gpu_uuid")
GPU_ENERGY = AGENT.counter(
    "gpu_energy_joules", "The GPU's energy counter: since its driver was loaded.", "gpu_uuid"
)
GPU_PLANNED = AGENT.gauge("gpu_planned", "1 while a plan, or a clock to measure, is in force.", "gpu_uuid")
GPU_SETS = AGENT.histogram(
    "gpu_clock_set_seconds", "What sets took until the clock was in force.", "gpu_uuid"
)
GPU_RESTORES = AGENT.counter(
    "gpu_restores", "Times that the GPU was brought back after an agent that died.", "gpu_uuid"
)
GPU_NOT_RESTORED = AGENT.gauge(
    "gpu_not_restored", "1 while the GPU can't be brought back to stock, and is tried again.", "gpu_uuid"
)
GPU_ERRORS = AGENT.counter(
    "gpu_errors", "Errors of the driver; one that repeats itself at once counts once.", "gpu_uuid", "reason"
)
GPU_MARKS_DROPPED = AGENT.counter(
    "gpu_marks_dropped", "Marks that the trainers on the GPU dropped rather than wait.", "gpu_uuid"
)


SECTIONS = (BOTH, SERVER, LEDGER, FEED, SIGNAL, JOB, RANK, AGENT)

ALL = tuple(metric for section in SECTIONS for metric in section)
