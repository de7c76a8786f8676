"""One run of a job: its specification, its record, and its parts. It makes no decisions.

State that must outlive the coordinator is in `record`, which the parts change in place, or in tables of their
own, whose rows are stored as they change. All other state is measured or requested anew after a restart.
"""

from copy import copy

from perseus.service.domain.records import Counters, JobRecord, Registrations, StoredJob
from perseus.service.domain.specification import JobSpec
from perseus.service.job.command_buffer import CommandBuffer
from perseus.service.job.iterations.baseline import Baseline
from perseus.service.job.iterations.counted_work import CountedWork
from perseus.service.job.iterations.energy_meter import EnergyMeter
from perseus.service.job.iterations.iteration_log import IterationLog
from perseus.service.job.iterations.timeline_memory import TimelineMemory
from perseus.service.job.iterations.variation_memory import VariationMemory
from perseus.service.job.planning.caps import CapWatch
from perseus.service.job.planning.max_clock import MaxClockEnforcer
from perseus.service.job.planning.offers import OfferBoard
from perseus.service.job.planning.planner import Planner
from perseus.service.job.planning.stock_blocks import StockBlocks
from perseus.service.job.profiling.profiler import Profiler
from perseus.service.job.progress import Progress
from perseus.service.job.ranks.rank_table import LIVE, RankTable
from perseus.service.job.rules import Rules
from perseus.service.job.stragglers.registry import StragglerRegistry


class Run:
    """The state of one run.

    Attributes:
        spec: the job as registered.
        run_number: the number of this run of the job, from 1.
        rules: the operator's settings.
        epoch: the epoch of the coordinator's state.
        create_time_s: when it was registered, on the wall clock.
        created_s: the same on the monotonic clock.
        now_s, wall_time_s: the time of the current input, on both clocks.
        registrations: who registered it.
        record: the state that must not be lost.
        counters: what iterations add to of it.
        schedule: its order of computations.
        buffer: the commands that the parts request.
        ranks: the ranks and the agents that serve them.
        offers: the clocks desired for its pipelines.
        max_clock_enforcer: the maximum clock without a plan.
        log: its iterations and the report.
        meter: its energy, for the ledger.
        timelines: the latest iteration of each pipeline.
        variations: how computations varied in the latest iterations.
        counted_work: what the work that hooks count means for its times.
        baseline: an iteration at stock.
        stock_blocks: blocks of iterations at stock beside plans.
        profiler: the measurements of its stages.
        stragglers: its slow pipelines.
        planner: the frontier and the plans on it.
        progress: whether the job makes progress.
        caps: the GPUs that are held below their clocks.
    """

    def __init__(
        self,
        spec: JobSpec,
        run_number: int,
        rules: Rules,
        epoch: str,
        create_time_s: float,
        created_s: float,
        record: JobRecord | None = None,
        counters: Counters | None = None,
    ) -> None:
        """Begin with no state except the record and the counters of a run that continues."""
        self.spec = spec
        self.run_number = run_number
        self.rules = rules
        self.epoch = epoch
        self.create_time_s, self.created_s = create_time_s, created_s
        self.now_s, self.wall_time_s = created_s, create_time_s
        self.registrations = Registrations(())
        self.record = record = JobRecord(spec.policy) if record is None else copy(record)
        self.counters = counters = Counters() if counters is None else copy(counters)
        self.schedule = spec.check()
        counts = spec.parallelism
        places = list(counts.all_coordinates())
        self.buffer = CommandBuffer(len(places), create_time_s)
        self.log = IterationLog(places)
        self.meter = EnergyMeter()
        self.timelines = TimelineMemory(counts)
        self.variations = VariationMemory(self.schedule, counts.pipeline_count)
        self.ranks = RankTable(spec, rules.lease_s, self.buffer, created_s)
        self.offers = OfferBoard(record, counts, self.ranks, self.buffer)
        self.max_clock_enforcer = MaxClockEnforcer(record, self.ranks, self.offers, self.buffer)
        self.counted_work = CountedWork(record, counts.stage_count)
        self.baseline = Baseline(record, rules.baseline_iterations)
        self.stock_blocks = StockBlocks(rules, f"{spec.job_id}/{run_number}")
        self.profiler = Profiler(record, counters, counts, self.schedule, rules, self.buffer)
        self.stragglers = StragglerRegistry(record, self.schedule, counts, self.buffer)
        self.planner = Planner(
            record,
            counters,
            counts,
            self.schedule,
            rules,
            self.ranks,
            self.offers,
            self.profiler,
            self.baseline,
            self.stragglers,
            self.variations,
            self.buffer,
        )
        self.progress = Progress(
            record,
            self.ranks,
            self.log,
            self.baseline,
            self.offers,
            self.profiler,
            rules.profile_iterations,
            self.buffer,
            created_s,
            create_time_s,
        )
        # A majority of the guard's iterations, which determines their median.
        self.caps = CapWatch(rules.guard_iterations // 2 + 1)

    def restore(self, stored: StoredJob, now_s: float, wall_time_s: float) -> None:
        """Take the tables of a stored run; its record and counters were already passed at creation."""
        self.now_s, self.wall_time_s = now_s, wall_time_s
        self.registrations = stored.registrations
        self.ranks.restore(stored.ranks, now_s)
        if any(rank.capped_clock_mhz for rank in stored.ranks):
            self.caps.hold(now_s)
        self.offers.restore(stored.offers, is_urgent=self.record.max_clock is not None)
        self.profiler.profiles = stored.profiles
        self.progress.restart(now_s)
        self.buffer.sequence, self.buffer.wall_time_s = stored.last_sequence, wall_time_s
        self.log.restore(stored.periods)
        self.meter.restore(stored.latest_hour)
        self.log.mark_straggler(-1, bool(self.stragglers))

    def begin(self, now_s: float, wall_time_s: float) -> None:
        """Begin to take an input at this time."""
        self.now_s, self.wall_time_s = now_s, wall_time_s
        self.buffer.begin(now_s, wall_time_s)

    @property
    def has_live_rank(self) -> bool:
        """Whether a rank is connected, or may come back within its lease."""
        return any(self.ranks.counts[state] for state in LIVE)

    def next_deadline_s(self) -> float | None:
        """Return when a Tick is due: when the next lease or the progress timeout runs out, if any."""
        deadlines_s = (self.ranks.next_deadline_s(), self.progress.next_deadline_s())
        return min((deadline_s for deadline_s in deadlines_s if deadline_s is not None), default=None)
