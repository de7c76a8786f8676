"""All metrics: every name, its meaning, and its labels. Pure.

Rules. Base units (seconds, joules, watts, hertz, bytes, ratios from 0 to 1), each in the name. Labels have
few values: a job's identifier, one of an enumeration, a GPU of the node. Series that grow with a job's ranks
are in `RANK`, and exist only where the operator asks for them. `job_id`, not `job`: that label is Prometheus'
own. Unknown values are left out, not reported as 0. Counters start with their process.

`docs/metrics.md` is made from this (`document`), and tests compare it with real scrapes.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field


class Kind(enum.Enum):
    """Prometheus' type of a metric."""

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
    """Metrics that belong together, with their text on the page; it makes its metrics."""

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

BUILD_INFO = BOTH.gauge("build_info", "Always 1; the label is the running version.", "version")
CERTIFICATE_EXPIRY = BOTH.gauge(
    "certificate_expiry_timestamp_seconds",
    "Unix time at which a certificate in use expires, by its file; for a file of CAs, the latest expiry.",
    "file",
)


SERVER = Section(
    "The coordinator",
    "A fixed number of series, and one for each reason of refusals so far. Of several coordinators each has "
    "what is of its slot, so that sums over all count nothing twice; what is of the whole database is the "
    "same at each: take the maximum of idle slots, the store's size and its standbys, and the minimum of the "
    "coordinators that stand by. One that stands by has the metrics of the fleet, its release and its "
    "certificates only.",
)

SERVING = SERVER.gauge(
    "coordinator_serving", "1 while health reports SERVING, 0 while the coordinator is late."
)
LEASE_EPOCH = SERVER.gauge(
    "lease_epoch",
    "By the slot of jobs that is served: rises when a coordinator takes it over; 0 on SQLite.",
    "slot",
)
STANDING_BY = SERVER.gauge(
    "coordinator_standing_by", "1 while the coordinator stands by, 0 while it serves a slot of jobs."
)
STANDBY_COORDINATORS = SERVER.gauge(
    "standby_coordinators", "Coordinators of the fleet that serve no slot of jobs; absent on SQLite."
)
IDLE_SLOTS = SERVER.gauge("idle_slots", "Slots of jobs that no coordinator of the fleet serves.")
LATE_RENEWALS = SERVER.counter(
    "late_lease_renewals", "Renewals of the coordinator's lease that failed, or took a sixth of it."
)
CLOCK_SKEW = SERVER.gauge(
    "clock_skew_seconds",
    "How far other wall clocks differ from the coordinator's, beyond what the transit explains: of agents' "
    "hosts (the largest) and of the database; absent where unknown.",
    "kind",
)
JOBS = SERVER.gauge("jobs", "Jobs by the state of their latest run.", "state")
UNREADABLE_JOBS = SERVER.gauge("unreadable_jobs", "Jobs whose latest run can't be read from the store.")
HIDDEN_JOBS = SERVER.gauge(
    "hidden_jobs", "Unfinished jobs without their own series, as there are too many; the newest have them."
)
JOB_FAULTS = SERVER.counter(
    "job_faults", "Faults of the coordinator that quarantined a job, by the part that failed.", "part"
)

LOOP_LAG = SERVER.gauge("loop_lag_seconds", "How late the event loop's last tick (one per second) was.")
LOOP_LATE = SERVER.counter("loop_late_seconds", "Total time by which the event loop's ticks were late.")
AGENT_STREAMS = SERVER.gauge("agent_streams", "Agents with a stream.")
WATCH_STREAMS = SERVER.gauge("watch_streams", "Watchers of jobs.")
BATCHES = SERVER.counter(
    "telemetry_batches",
    "Batches of telemetry: taken, repeated (sent again after they were taken) or refused.",
    "outcome",
)
BATCHES_THINNED = SERVER.counter(
    "telemetry_batches_thinned",
    "Batches without their rows of computations, or also without their sums (not taken at all), because "
    "agents sent more than the coordinator takes in time.",
    "part",
)
REFUSALS = SERVER.counter(
    "refusals", "Calls, streams and messages refused, by their stable reason (see errors.md).", "reason"
)
THROTTLED_STREAMS = SERVER.gauge(
    "throttled_streams", "Streams that wait until the coordinator has room for their messages."
)

STORE_LATE = SERVER.gauge("store_late_seconds", "How long the oldest work has waited to be stored.")
STORE_WAITING = SERVER.gauge("store_waiting", "Work that waits to be stored and carried out.")
STORE_COMMIT = SERVER.histogram("store_commit_seconds", "Duration of commits, from the request on.")
STORE_ENTRIES = SERVER.counter("store_entries", "Records written.")
STORE_STANDBYS = SERVER.gauge(
    "store_standbys",
    "Standbys of the PostgreSQL database, as of the last minute; commits wait for synchronous ones.",
    "kind",
)
STORE_SIZE = SERVER.gauge("store_size_bytes", "Size of the database, as of the last minute.")

SOLVER_QUEUE = SERVER.gauge("solver_queue", "Problems that wait for a solver process.", "pool")
SOLVER_BUSY = SERVER.gauge("solver_busy", "Problems that solver processes work on.", "pool")
SOLVES = SERVER.histogram("solver_seconds", "Duration of solves, from request to answer.", "pool")
SOLVER_FAILURES = SERVER.counter("solver_failures", "Solves that failed.", "pool")
SOLVER_CRASHES = SERVER.counter("solver_crashes", "Solver processes that died.", "pool")
SOLVER_DASK_THREADS = SERVER.gauge(
    "solver_dask_threads", "Threads of the Dask cluster that solves; 0 while own processes do."
)


LEDGER = Section(
    "The ledger",
    "All jobs together, at most a minute old; for single runs ask [the ledger](power.md#the-ledger). "
    "Cost and carbon are published where their rates are known. Pruned hours (`keep_ledger_days`) leave the "
    "totals at the coordinator's next start.",
)

LEDGER_ENERGY = LEDGER.gauge(
    "ledger_energy_joules", "Energy in the ledger, of all jobs, including ended and deleted ones."
)
LEDGER_SAVED_ENERGY = LEDGER.gauge(
    "ledger_saved_energy_joules", "Energy saved against stock baselines; negative if more was used."
)
LEDGER_COST = LEDGER.gauge("ledger_cost", "Cost of that energy, in the currency of the prices.")
LEDGER_SAVED_COST = LEDGER.gauge("ledger_saved_cost", "Cost of the saved energy.")
LEDGER_CARBON = LEDGER.gauge("ledger_carbon_grams", "Carbon dioxide of that energy.")
LEDGER_SAVED_CARBON = LEDGER.gauge("ledger_saved_carbon_grams", "Carbon dioxide of the saved energy.")


FEED = Section(
    "Each feed",
    "The feeds in the coordinator's settings, and `default`. Where jobs are spread over slots, this "
    "coordinator's [share](power.md#several-coordinators) of them: the sum over all is the feed's.",
)

FEED_LIMIT = FEED.gauge("feed_limit_watts", "The lowest limit in force, while there is one.", "feed")
FEED_POWER_CAP = FEED.gauge(
    "feed_power_cap_watts", "What may be drawn now: the cap follows the ramps to its limit.", "feed"
)
FEED_POWER = FEED.gauge(
    "feed_power_watts", "Power drawn: the mean over a minute or three iterations, if longer.", "feed"
)
FEED_MANAGED = FEED.gauge("feed_managed_watts", "Expected power of jobs under plans.", "feed")
FEED_UNMANAGED = FEED.gauge(
    "feed_unmanaged_watts", "Recent power of jobs without plans, and of GPUs without a rank.", "feed"
)
FEED_COMPLIANT = FEED.gauge(
    "feed_compliant", "1 while plans and measurements keep the limit, or can't be judged.", "feed"
)
FEED_ABOVE_CAP = FEED.gauge(
    "feed_above_power_cap", "1 while more than the power cap has been drawn for a whole window.", "feed"
)
FEED_TRANSITION = FEED.gauge("feed_in_transition", "1 while the power cap is on its way to a limit.", "feed")
FEED_HELD_JOBS = FEED.gauge("feed_held_jobs", "Jobs that a power budget slows down.", "feed")


SIGNAL = Section("Each signal", "The signals of carbon intensity and price in the coordinator's settings.")

SIGNAL_KNOWN = SIGNAL.gauge("signal_known", "1 while the signal's value is known, 0 otherwise.", "signal")
SIGNAL_FAILURES = SIGNAL.counter("signal_failures", "Failed attempts to read the signal's source.", "signal")


JOB = Section(
    "Each job",
    "Jobs that have not finished, at most the 1,000 newest: about 50 series for each, however many ranks it "
    "has. A job's counters restart with a new run.",
)

JOB_NEEDS_RESUME = JOB.gauge(
    "job_needs_resume",
    "1 for a job at stock that a person has to resume; not while it is tried again by itself.",
    "job_id",
)
JOB_STATE = JOB.gauge("job_state", "1 for the state that the job is in, 0 for the others.", "job_id", "state")
JOB_RUN = JOB.gauge("job_run_number", "Which run of the job it is, from 1.", "job_id")
JOB_RANKS = JOB.gauge("job_ranks", "Ranks by whether an agent serves them.", "job_id", "state")
JOB_STALLED = JOB.gauge("job_stalled", "1 while the job makes no progress, by reason.", "job_id", "reason")
JOB_ITERATIONS = JOB.counter(
    "job_iterations", "Iterations that all ranks have reported.", "job_id", "regular"
)
JOB_TIME = JOB.counter("job_seconds", "Time of these iterations and of the gaps between them.", "job_id")
JOB_ENERGY = JOB.counter("job_energy_joules", "Energy of these iterations and gaps, of all GPUs.", "job_id")
JOB_SAVED_ENERGY = JOB.gauge(
    "job_saved_energy_joules",
    "Energy of these iterations saved against the stock baseline; negative if more was used.",
    "job_id",
)
JOB_ITERATION_TIME = JOB.gauge("job_iteration_seconds", "Time of the latest iteration.", "job_id")
JOB_ITERATION_ENERGY = JOB.gauge("job_iteration_energy_joules", "Energy of the latest iteration.", "job_id")
JOB_POWER = JOB.gauge(
    "job_power_watts", "Power of all GPUs over the latest iteration; unknown once a rank is lost.", "job_id"
)
JOB_BASELINE_TIME = JOB.gauge("job_baseline_seconds", "Time of an iteration at stock.", "job_id")
JOB_BASELINE_ENERGY = JOB.gauge("job_baseline_energy_joules", "Energy of an iteration at stock.", "job_id")
JOB_MEASURED = JOB.gauge(
    "job_measured_seconds", "Mean iteration time since the present clocks came into force.", "job_id"
)
JOB_PREDICTED = JOB.gauge(
    "job_predicted_seconds", "Iteration time that the plans predict; known while planned.", "job_id"
)
JOB_SAVING = JOB.gauge(
    "job_saving_ratio",
    "Share of the stock baseline's energy saved, measured since the present plans came into force.",
    "job_id",
)
JOB_SAVING_ERROR = JOB.gauge("job_saving_error_ratio", "Standard error of that saving.", "job_id")
JOB_SLOWDOWN = JOB.gauge(
    "job_slowdown_ratio", "Slowdown of iterations against the stock baseline, measured likewise.", "job_id"
)
JOB_FRONTIER = JOB.gauge(
    "job_frontier_seconds",
    "Iteration times of the frontier as they would be measured: T_min, T* and T_slow.",
    "job_id",
    "point",
)
JOB_STRAGGLERS = JOB.gauge(
    "job_stragglers", "Pipelines known to be slow, by the source of that knowledge.", "job_id", "source"
)
JOB_STRAGGLER_TIME = JOB.gauge(
    "job_straggler_seconds", "Iteration time T' of the slowest of them, as it would be measured.", "job_id"
)
JOB_BUDGET_TARGET_TIME = JOB.gauge(
    "job_budget_target_seconds",
    "Iteration time to which a power budget slows the job's plans, while one does.",
    "job_id",
)
JOB_PROFILED = JOB.gauge("job_profiled_clocks", "Measured clocks of the stage with the fewest.", "job_id")
JOB_PROFILING_ITERATIONS = JOB.gauge(
    "job_profiling_iterations", "Iterations used for profiling in the whole run.", "job_id"
)
JOB_PROFILING_TIME = JOB.gauge("job_profiling_seconds", "Duration of these iterations.", "job_id")
JOB_PROFILING_EXTRA_TIME = JOB.gauge(
    "job_profiling_extra_seconds", "Time of these iterations beyond stock.", "job_id"
)
JOB_PROFILING_EXTRA_ENERGY = JOB.gauge(
    "job_profiling_extra_energy_joules",
    "Energy of these iterations beyond stock; negative if less.",
    "job_id",
)
JOB_PROFILING_BUDGET = JOB.gauge(
    "job_profiling_budget_used_ratio",
    "Used share of profiling's budget, of the part that is used most.",
    "job_id",
)
JOB_PROFILING_TRIED = JOB.gauge(
    "job_profiling_tried_clocks",
    "While profiling: clocks tried of the stage with the most, including abandoned ones.",
    "job_id",
)
JOB_PROFILING_MAX = JOB.gauge(
    "job_profiling_max_clocks", "While profiling: most clocks that are tried of a stage.", "job_id"
)
JOB_PROFILING_LEFT = JOB.gauge(
    "job_profiling_remaining_seconds",
    "While profiling: longest remaining time at the present rate.",
    "job_id",
)
JOB_PLAN_SWITCHES = JOB.counter("job_plan_switches", "How often pipelines were given other plans.", "job_id")
JOB_PREDICTION_VIOLATIONS = JOB.counter(
    "job_prediction_violations", "How often the guard found a plan's prediction violated.", "job_id"
)
JOB_DETECTED = JOB.counter("job_stragglers_detected", "How often a pipeline was found to be slow.", "job_id")
JOB_GPU_ERRORS = JOB.counter("job_gpu_errors", "GPU errors that agents have reported.", "job_id")
JOB_QUARANTINES = JOB.counter(
    "job_quarantines", "How often the job was quarantined after a fault of the coordinator.", "job_id"
)


RANK = Section("Each rank", "Only with `--metrics-ranks`: five series for each rank.")

_RANK_LABELS = ("job_id", "pipeline", "stage", "tensor")
RANK_CONNECTED = RANK.gauge("rank_connected", "1 while an agent serves the rank.", *_RANK_LABELS)
RANK_ITERATION = RANK.gauge("rank_iteration", "The highest iteration that the rank reported.", *_RANK_LABELS)
RANK_ON_CLOCK = RANK.gauge(
    "rank_on_clock_ratio", "Share of computing time at the planned clock under the plan.", *_RANK_LABELS
)
RANK_CLOCK_FOREIGN = RANK.gauge(
    "rank_clock_foreign_hertz",
    "SM clock at which another client of the driver holds the rank's GPU; 0 if none does.",
    *_RANK_LABELS,
)
RANK_SET_LATENCY = RANK.gauge(
    "rank_set_latency_seconds", "Median time from setting a clock until it is in force.", *_RANK_LABELS
)


AGENT = Section(
    "The agent", "Series with `gpu_uuid` cover the GPUs that were served since the agent started."
)

AGENT_CONNECTED = AGENT.gauge(
    "agent_connected",
    "1 while the agent has a stream to the coordinator; in a fleet, to that of each of its jobs.",
)
AGENT_LEASE = AGENT.gauge("agent_lease_seconds", "How long plans outlive the coordinator's last message.")
AGENT_LEASE_LEFT = AGENT.gauge("agent_lease_left_seconds", "Remaining time of that lease.")
AGENT_BATCHES_KEPT = AGENT.gauge("agent_telemetry_batches_kept", "Batches not acknowledged yet.")
AGENT_BATCHES = AGENT.counter("agent_telemetry_batches", "Batches of telemetry made by the agent.")
AGENT_BATCHES_DROPPED = AGENT.counter(
    "agent_telemetry_batches_dropped", "Batches dropped for lack of room, or refused by the coordinator."
)
AGENT_TRAINERS_REFUSED = AGENT.counter(
    "agent_trainers_refused", "Trainers refused, by the stable reason.", "reason"
)

AGENT_PART_FAILURES = AGENT.counter(
    "agent_part_failures",
    "Unexpected failures of optional parts of the agent; each is restarted.",
    "part",
)

GPU_RANK = AGENT.gauge(
    "gpu_rank_info",
    "Always 1; the labels name the rank that runs on the GPU.",
    "gpu_uuid",
    "job_id",
    "pipeline",
    "stage",
    "tensor",
)
GPU_CLOCK_WANTED = AGENT.gauge(
    "gpu_clock_wanted_hertz", "SM clock that the plan wants now; 0 means stock.", "gpu_uuid"
)
GPU_CLOCK_SET = AGENT.gauge(
    "gpu_clock_set_hertz",
    "SM clock last set through the driver; 0 means stock. Left out after an error.",
    "gpu_uuid",
)
GPU_CLOCK_IN_FORCE = AGENT.gauge("gpu_clock_in_force_hertz", "SM clock as read from the driver.", "gpu_uuid")
GPU_CLOCK_FOREIGN = AGENT.gauge(
    "gpu_clock_foreign_hertz",
    "SM clock at which another client of the driver holds the GPU; 0 if none does.",
    "gpu_uuid",
)
GPU_POWER = AGENT.gauge("gpu_power_watts", "Power as read from the driver.", "gpu_uuid")
GPU_ENERGY = AGENT.counter(
    "gpu_energy_joules", "The GPU's energy counter, since its driver was loaded.", "gpu_uuid"
)
GPU_PLANNED = AGENT.gauge("gpu_planned", "1 while a plan or a clock to measure is in force.", "gpu_uuid")
GPU_SETS = AGENT.histogram(
    "gpu_clock_set_seconds", "Time from setting a clock until it was in force.", "gpu_uuid"
)
GPU_RESTORES = AGENT.counter(
    "gpu_restores", "How often the GPU was restored to stock after an agent that died.", "gpu_uuid"
)
GPU_NOT_RESTORED = AGENT.gauge(
    "gpu_not_restored", "1 while the GPU can't be restored to stock; the agent keeps trying.", "gpu_uuid"
)
GPU_ERRORS = AGENT.counter(
    "gpu_errors", "Errors of the driver; immediate repetitions count once.", "gpu_uuid", "reason"
)
GPU_MARKS_DROPPED = AGENT.counter(
    "gpu_marks_dropped", "Marks that trainers on the GPU dropped rather than wait.", "gpu_uuid"
)


INSTANCE = Section("Each inference engine", "Those in the agent's configuration, from the agent.")

INSTANCE_CONTROLLED = INSTANCE.gauge(
    "instance_controlled",
    "1 while a clock is chosen for the inference engine, 0 while it is not.",
    "engine",
)
INSTANCE_CLOCK_WANTED = INSTANCE.gauge(
    "instance_clock_wanted_hertz", "SM clock that is chosen for the engine's GPUs; 0 means stock.", "engine"
)
INSTANCE_REQUESTS = INSTANCE.gauge(
    "instance_requests", "Requests of the engine that run or wait.", "engine", "state"
)
INSTANCE_POWER = INSTANCE.gauge("instance_power_watts", "Power of all the engine's GPUs.", "engine")
INSTANCE_ENERGY = INSTANCE.counter(
    "instance_energy_joules",
    "Energy of the engine's GPUs, without windows at stock; goes on over restarts of the agent.",
    "engine",
)
INSTANCE_TOKENS = INSTANCE.counter(
    "instance_generated_tokens", "Tokens generated with that energy; goes on likewise.", "engine"
)
INSTANCE_ATTAINMENT = INSTANCE.gauge(
    "instance_attainment_ratio", "Share of latencies within the objective's limit.", "engine", "objective"
)
INSTANCE_SAVING = INSTANCE.gauge(
    "instance_saving_ratio", "Share of stock's energy saved, measured against windows at stock.", "engine"
)
INSTANCE_SAVING_UNCERTAINTY = INSTANCE.gauge(
    "instance_saving_uncertainty_ratio", "Half the width of that saving's interval at 95 %.", "engine"
)


SECTIONS = (BOTH, SERVER, LEDGER, FEED, SIGNAL, JOB, RANK, AGENT, INSTANCE)

ALL = tuple(metric for section in SECTIONS for metric in section)
