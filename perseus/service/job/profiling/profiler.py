"""Profiling in vivo: rounds of held clocks, and when they are enough. Part of the state machine.

In a round every stage holds one clock, its own (`clock_choice`), on all pipelines. It ends when all stages
are measured, well enough for how noisy they are (`effort`), or when it lasted so long that what is missing
will not come (a stage that computes in step with its energy counter, say): that clock is given up. Pipelines
that were slow in a round do not count in it. A stage that stays at stock is measured at stock, which counts
as its highest clock. One of which nothing is left to measure goes on with a clock that it has.

Profiling ends when the plan's energy can no longer change by more than the accuracy asked for, or when the
budget is used up, within a round or after it. Whatever the ranks report, every iteration of the job counts
that did not run at stock as offered, and so does the time of those that were not reported. Two clocks of each
stage are the least; without them there is nothing to plan.

A round that is dear (it has taken its share of the extra time, that of one clock out of the most) is content
with the first iteration that is measured whole.

A profile of the same work on the same GPUs may be known from before, stage by stage. It is adopted where it
agrees with what the stock baseline, as the highest clock, or the first rounds measured of the stage.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from perseus.service.domain.evidence import (
    ClockGivenUp,
    ClockProfiled,
    ProfileAdopted,
    ProfilingEnded,
    StagePower,
)
from perseus.service.domain.measured import JobIteration, KnownProfile, StageProfile
from perseus.service.domain.model import STOCK_MHZ, EventType, HoldClocks, StockIteration
from perseus.service.domain.profiling import (
    ClockGivenUpReason,
    GivenUpClock,
    ProfilingBudget,
    ProfilingCost,
    ProfilingLimit,
    ProfilingProgress,
)
from perseus.service.domain.records import ForgetProfile
from perseus.service.domain.specification import Coordinates, Parallelism
from perseus.service.domain.telemetry import EnergyEstimate
from perseus.service.job.journal import Journal
from perseus.service.job.profiling.clock_choice import ClockChoice, choose_clocks
from perseus.service.job.profiling.effort import Effort, RoundError, round_error
from perseus.service.job.profiling.pace import Pace
from perseus.service.job.profiling.stage_profiles import agree, is_power_known, merge, why_not_measured
from perseus.service.job.ranks.usable_clocks import LEAST_CLOCKS, UsableClocks, stages_at_stock
from perseus.solver import Schedule

HOLD_LIMIT = 8
"""How many times the iterations asked for a clock may be held before it is given up."""

_SAME_TIME_SHARE = 0.02
_SAME_ENERGY_SHARE = 0.1
"""By how much a profile from before may differ from what is measured now."""


@dataclass(frozen=True, slots=True)
class ProfilingRules:
    """How much profiling may cost, and how good it has to be.

    Attributes:
        iterations: measured at a clock; at noisier ones than the others more, at clean ones fewer (`effort`).
        accuracy: by what share the plan's energy may still change.
        most_clocks: of a stage, those given up included.
        budget: what all rounds may take together.
    """

    iterations: int = 3
    accuracy: float = 0.003
    most_clocks: int = 12
    budget: ProfilingBudget = field(default_factory=ProfilingBudget)


@dataclass(frozen=True, slots=True)
class ProfileEnd:
    """No further round.

    Attributes:
        is_enough: whether there is something to plan on.
        limit: what is used up, if that is why.
        why: one sentence's part.
    """

    is_enough: bool
    limit: ProfilingLimit | None
    why: str


class Profiler:
    """What is measured of a job, and what is to be measured next.

    Attributes:
        profiles: what is measured so far.
        known: what is known of the stages' work from before, and not yet held against measurements.
        cost: what profiling has taken so far, since it was begun or renewed.
        whole_round_count: rounds in which every stage was measured that was to be, since the last restart.
        given_up: the clocks that could not be measured, in the order in which they were given up.
    """

    def __init__(
        self, parallelism: Parallelism, schedule: Schedule, rules: ProfilingRules, journal: Journal
    ) -> None:
        self.profiles: tuple[StageProfile, ...] = ()
        self.known: tuple[KnownProfile, ...] = ()
        self._parallelism = parallelism
        self._schedule = schedule
        # What a stage's estimate has to cover.
        self._needed = [frozenset((each.kind, each.chunk) for each in order) for order in schedule.orders]
        self._rules = rules
        self._effort = Effort(rules.iterations, rules.accuracy)
        # How many iterations every rank has to have measured before the round is looked at again.
        self._wanted_count = self._effort.least_iterations
        self._journal = journal
        self._estimates: dict[Coordinates, EnergyEstimate] = {}
        self._disturbed: set[int] = set()
        self._held_count = 0
        self._round_extra_s = 0.0
        # What counts already of the time since the latest iteration.
        self._silent_s = self._silent_extra_s = 0.0
        self.cost = ProfilingCost()
        # The cost for which it is known whether it has used up the budget, and what of it.
        self._judged_cost: ProfilingCost | None = None
        self._limit: ProfilingLimit | None = None
        self.whole_round_count = 0
        self._pace = Pace(rules.budget)
        self.given_up: tuple[GivenUpClock, ...] = ()
        # The stage and rank that the round was waiting for when the budget ended it.
        self._unmeasured: GivenUpClock | None = None
        # The ranks that a round measures, and how many of them, from the first on, were when they were looked
        # at: while the next one is not, none of the others needs a look.
        self._measured_ranks: list[Coordinates] = []
        self._measured_count = 0

    @property
    def clock_count(self) -> int:
        """Clocks measured at the stage that has the most."""
        return _most_at_a_stage(profile.stage for profile in self.profiles)

    @property
    def least_clock_count(self) -> int:
        """Clocks measured at the stage that has the fewest."""
        counts = Counter(profile.stage for profile in self.profiles)
        return min(counts[stage] for stage in range(self._parallelism.stage_count))

    @property
    def progress(self) -> ProfilingProgress:
        """How far it is, while it goes on."""
        return self._pace.progress(self.cost)

    def renew(self) -> None:
        """Begin with a whole budget, and with every clock that is not measured; what is measured is kept."""
        self.cost = ProfilingCost()
        self._pace.restart()
        self.given_up = ()
        self._silent_s = self._silent_extra_s = 0.0

    def forget(self) -> None:
        """What is measured is of no use any more."""
        self.profiles = self.known = ()
        self._effort.restart()
        self._estimates.clear()
        self.renew()
        self._journal.store(ForgetProfile())

    def take_estimate(self, rank: Coordinates, estimate: EnergyEstimate) -> None:
        """Take what a rank's counter says of the clock that it holds."""
        self._estimates[rank] = estimate

    def take_iteration(
        self,
        iteration: JobIteration,
        is_of_round: bool,
        disturbed: Iterable[int],
        baseline: StockIteration,
    ) -> None:
        """Take an iteration while profiling, and the pipelines that were slow in it.

        `is_of_round`: it ran under the clocks that are to be held.
        """
        extra_s = max(0.0, iteration.iteration_time_s - baseline.time_s)
        energy_j = math.fsum(iteration.pipeline_energy_j)
        self.cost = ProfilingCost(
            self.cost.iteration_count + 1,
            self.cost.time_s + iteration.iteration_time_s,
            self.cost.extra_time_s + extra_s,
            self.cost.energy_j + energy_j,
            self.cost.extra_energy_j + (energy_j - baseline.energy_j if baseline.energy_j else 0.0),
        )
        if is_of_round:
            self._held_count += 1
            self._round_extra_s += extra_s
            self._disturbed.update(disturbed)

    def take_silence(self, time_s: float, baseline_time_s: float) -> None:
        """Take note that for a time no iteration was reported, under clocks that were held until now."""
        self._take_unknown(time_s, max(0.0, time_s - baseline_time_s))

    def take_gap(self, iteration: JobIteration, time_s: float, baseline_time_s: float) -> None:
        """Take note of the iterations before this one that were not reported, `time_s` after the last."""
        unknown_s = max(0.0, time_s - iteration.iteration_time_s)
        extra_s = max(0.0, unknown_s - iteration.skipped_count * baseline_time_s)
        # Some of it may have been taken as silence.
        self._take_unknown(max(0.0, unknown_s - self._silent_s), max(0.0, extra_s - self._silent_extra_s))

    def _take_unknown(self, time_s: float, extra_s: float) -> None:
        self._silent_s += time_s
        self._silent_extra_s += extra_s
        self.cost = replace(
            self.cost, time_s=self.cost.time_s + time_s, extra_time_s=self.cost.extra_time_s + extra_s
        )

    def end_gap(self) -> None:
        """An iteration was reported."""
        self._silent_s = self._silent_extra_s = 0.0

    def unmeasured_ranks(self, held: HoldClocks, clocks_mhz: UsableClocks) -> list[Coordinates]:
        """Return the ranks of which a round waits for estimates, in order.

        Not those whose noise makes the round last: what they sent is enough, and more is wanted all the same.
        """
        pipelines, least_count = self._counting_pipelines(), self._effort.least_iterations
        return sorted(
            rank
            for stage in self._counted_mhz(held, clocks_mhz)
            for rank, _ in self._unmeasured_of(stage, held.clocks_mhz[stage], pipelines, least_count)
        )

    def next_round(self, held: HoldClocks | None, clocks_mhz: UsableClocks) -> HoldClocks | ProfileEnd:
        """Return the clocks to hold: the same until the round has ended; or that no more are needed.

        `held` is None where no round is to go on.
        """
        if self.cost is not self._judged_cost:
            self._judged_cost, self._limit = self.cost, self._rules.budget.used_up(self.cost)
        limit = self._limit
        if held is not None and not self._end_round(held, clocks_mhz, is_last=limit is not None):
            return held
        if held is None:
            self._adopt_at_stock(clocks_mhz)
        self._adopt_known()
        barred = {(clock.stage, clock.clock_mhz) for clock in self.given_up}
        choice = choose_clocks(self.profiles, self._schedule, clocks_mhz, barred)
        end = self._find_end(choice, limit)
        if end is None:
            at_stock = stages_at_stock(clocks_mhz)
            self._start_round(at_stock)
            most_count = min(self._rules.most_clocks, max(map(len, clocks_mhz)))
            self._pace.begin_round(self.cost, self._tried_count(), most_count)
            return HoldClocks(
                tuple(
                    STOCK_MHZ if stage in at_stock else clock_mhz
                    for stage, clock_mhz in enumerate(choice.clocks_mhz)
                )
            )
        if end.is_enough and not is_power_known(self.profiles):
            assumed = "no rank has told what it draws while it waits: that is assumed"
            end = replace(end, why=f"{end.why}; {assumed}")
        self._announce_end(end)
        return end

    def replace(self, profiles: Iterable[StageProfile]) -> None:
        """Take newer profiles in place of those of the same stage and clock."""
        by_place = {(profile.stage, profile.clock_mhz): profile for profile in self.profiles}
        for profile in profiles:
            place = profile.stage, profile.clock_mhz
            if by_place.get(place) != profile:
                by_place[place] = profile
                self._journal.store(profile)
        self.profiles = tuple(by_place[place] for place in sorted(by_place))

    def _start_round(self, at_stock: Collection[int]) -> None:
        """Forget what was estimated; but at stock it stays true, and newer estimates come more rarely."""
        self._estimates = {rank: some for rank, some in self._estimates.items() if rank.stage in at_stock}
        self._disturbed.clear()
        self._held_count = 0
        self._wanted_count = self._effort.least_iterations
        self._round_extra_s = 0.0
        self._unmeasured = None
        self._measured_ranks = []

    def _find_end(self, choice: ClockChoice, limit: ProfilingLimit | None) -> ProfileEnd | None:
        clocks = f"{self.clock_count} clocks are measured"
        is_enough = not math.isinf(choice.doubt)
        doubt = f"the plan's energy may still change by {100 * choice.doubt:.2f} %"
        if not is_enough:
            doubt = "; ".join(["which is not enough", *map(str, self._find_obstacle())])
        if 0 in choice.clocks_mhz:
            stage = choice.clocks_mhz.index(0)
            why = f"stage {stage} has no clock that can be measured, {doubt}"
        elif self._measured_places().issuperset(enumerate(choice.clocks_mhz)):
            why = f"{clocks}, all there are" + ("" if is_enough else f", {doubt}")
        elif choice.doubt <= self._rules.accuracy:
            why = f"{clocks}: the plan's energy can change by {100 * choice.doubt:.2f} %"
        elif self._tried_count() >= self._rules.most_clocks:
            why = f"{clocks}, as many as may be; {doubt}"
        elif limit is not None:
            budget = f"{self._rules.budget.limit_of(limit):g} {limit.value}"
            return ProfileEnd(is_enough, limit, f"{clocks}, and the budget of {budget} is used up; {doubt}")
        else:
            return None
        return ProfileEnd(is_enough, None, why)

    def _tried_count(self) -> int:
        """Return how many clocks were tried of the stage with the most."""
        tried = [profile.stage for profile in self.profiles] + [clock.stage for clock in self.given_up]
        return _most_at_a_stage(tried)

    def _find_obstacle(self) -> list[GivenUpClock]:
        """Return what the budget did not wait for, or the first stage's failure, if there is one."""
        if self._unmeasured is not None:
            return [self._unmeasured]
        counts = Counter(profile.stage for profile in self.profiles)
        failed = [clock for clock in self.given_up if counts[clock.stage] < LEAST_CLOCKS]
        return sorted(failed, key=lambda clock: clock.stage)[:1]

    def _end_round(self, held: HoldClocks, clocks_mhz: UsableClocks, *, is_last: bool) -> bool:
        """Keep what was measured, if the round has ended; the last one ends whatever it has."""
        has_lasted = self._held_count >= HOLD_LIMIT * self._rules.iterations
        if not has_lasted and not is_last and self._is_waiting(held, clocks_mhz):
            return False
        pipelines = self._counting_pipelines()
        counted_mhz = self._counted_mhz(held, clocks_mhz)
        least_count = min(self._wanted_count, self._rules.iterations)
        missing = {
            stage: unmeasured
            for stage in counted_mhz
            if (
                unmeasured := list(self._unmeasured_of(stage, held.clocks_mhz[stage], pipelines, least_count))
            )
        }
        if not missing and counted_mhz:
            self._effort.take_round(*self._judge_round(held, clocks_mhz))
        for stage, clock_mhz in counted_mhz.items():
            if stage in missing:
                self._miss(stage, clock_mhz, missing[stage], is_given_up=has_lasted)
            else:
                held_mhz = held.clocks_mhz[stage]
                found = merge(stage, clock_mhz, self._estimates, self._parallelism, pipelines, held_mhz)
                self.replace([found])
        self.whole_round_count += not missing
        self._pace.end_round(self.cost)
        if len(missing) < len(counted_mhz):
            self._announce_round(held, pipelines)
        return True

    def _is_waiting(self, held: HoldClocks, clocks_mhz: UsableClocks) -> bool:
        """Tell whether a rank that counts is not yet measured in a round, or all are not well enough."""
        while not self._is_any_awaited(held, clocks_mhz):
            if self._is_dear or self._effort.is_enough(*self._judge_round(held, clocks_mhz)):
                return False
            self._wanted_count += 1
            self._measured_count = 0
        return True

    def _judge_round(self, held: HoldClocks, clocks_mhz: UsableClocks) -> tuple[int, RoundError]:
        """Return how many iterations all that count have measured, and with what error."""
        pipelines, tensors = self._counting_pipelines(), range(self._parallelism.tensor_count)
        counted_mhz = self._counted_mhz(held, clocks_mhz)
        found = [
            merge(stage, clock_mhz, self._estimates, self._parallelism, pipelines, held.clocks_mhz[stage])
            for stage, clock_mhz in counted_mhz.items()
        ]
        ranks = (Coordinates(p, stage, t) for p in pipelines for stage in counted_mhz for t in tensors)
        iteration_count = min((self._estimates[rank].iteration_count for rank in ranks), default=0)
        return iteration_count, round_error(found, self.profiles, self._schedule)

    def _is_any_awaited(self, held: HoldClocks, clocks_mhz: UsableClocks) -> bool:
        """Tell whether a rank that counts has not yet measured as many iterations as wanted."""
        if not self._measured_ranks:
            stages, pipelines = self._counted_mhz(held, clocks_mhz), range(self._parallelism.pipeline_count)
            tensors = range(self._parallelism.tensor_count)
            self._measured_ranks = [Coordinates(p, s, t) for s in stages for p in pipelines for t in tensors]
            self._measured_count = 0
        ranks = self._measured_ranks
        while self._measured_count < len(ranks):
            if self._is_awaited(ranks[self._measured_count], held):
                return True
            self._measured_count += 1
        # All were measured at one time or another; a newer estimate may have undone that.
        undone = next((index for index, rank in enumerate(ranks) if self._is_awaited(rank, held)), None)
        if undone is not None:
            self._measured_count = undone
        return undone is not None

    def _is_awaited(self, rank: Coordinates, held: HoldClocks) -> bool:
        """Tell whether a rank counts and is not measured. If all pipelines were slow, all of them count."""
        is_left_out = (
            rank.pipeline in self._disturbed and len(self._disturbed) < self._parallelism.pipeline_count
        )
        if is_left_out:
            return False
        return self._why_not_measured(rank, held.clocks_mhz[rank.stage], self._wanted_count) is not None

    def _counted_mhz(self, held: HoldClocks, clocks_mhz: UsableClocks) -> dict[int, int]:
        """Return the stages that are measured in a round, and the clocks that they count as."""
        known = self._measured_places()
        return {
            stage: clock_mhz
            for stage, held_mhz in enumerate(held.clocks_mhz)
            for clock_mhz in [held_mhz or clocks_mhz[stage][0]]
            if (stage, clock_mhz) not in known
        }

    def _measured_places(self) -> set[tuple[int, int]]:
        return {(profile.stage, profile.clock_mhz) for profile in self.profiles}

    def _counting_pipelines(self) -> Sequence[int]:
        """Pipelines that were not slow; all of them if all were, as then there is nothing better to go by."""
        everybody = range(self._parallelism.pipeline_count)
        return [pipeline for pipeline in everybody if pipeline not in self._disturbed] or everybody

    def _unmeasured_of(
        self, stage: int, clock_mhz: int, pipelines: Sequence[int], iteration_count: int
    ) -> Iterator[tuple[Coordinates, ClockGivenUpReason]]:
        """Yield the ranks of a stage that are not measured, and why not."""
        for pipeline in pipelines:
            for tensor in range(self._parallelism.tensor_count):
                rank = Coordinates(pipeline, stage, tensor)
                if (why := self._why_not_measured(rank, clock_mhz, iteration_count)) is not None:
                    yield rank, why

    @property
    def _is_dear(self) -> bool:
        return self._round_extra_s >= self._rules.budget.extra_time_s / self._rules.most_clocks

    def _why_not_measured(
        self, rank: Coordinates, clock_mhz: int, iteration_count: int
    ) -> ClockGivenUpReason | None:
        count = 1 if self._is_dear else iteration_count
        return why_not_measured(self._estimates.get(rank), self._needed[rank.stage], clock_mhz, count)

    def _miss(
        self,
        stage: int,
        clock_mhz: int,
        unmeasured: Sequence[tuple[Coordinates, ClockGivenUpReason]],
        *,
        is_given_up: bool,
    ) -> None:
        """A round has ended without a stage, because it lasted so long or because it was the last."""
        reason = next(some for some in ClockGivenUpReason if some in {why for _, why in unmeasured})
        rank: Coordinates | None = next(rank for rank, why in unmeasured if why is reason)
        if len(self._disturbed) == self._parallelism.pipeline_count:
            reason, rank = ClockGivenUpReason.DISTURBED, None
        clock = GivenUpClock(stage, clock_mhz, reason, rank)
        if not is_given_up:
            self._unmeasured = self._unmeasured or clock
            return
        self.given_up += (clock,)
        self._journal.announce(
            EventType.CLOCK_GIVEN_UP,
            f"{clock}, in {self._held_count} iterations",
            ClockGivenUp(
                stage=stage,
                clock_mhz=clock_mhz,
                iteration_count=self._held_count,
                disturbed_pipelines=tuple(sorted(self._disturbed)),
                reason=reason,
                rank=rank,
            ),
        )

    def _announce_round(self, held: HoldClocks, pipelines: Sequence[int]) -> None:
        powers = (
            StagePower(profile.stage, profile.blocking_power_w)
            for profile in self.profiles
            if profile.clock_mhz == held.clocks_mhz[profile.stage] and profile.blocking_power_w is not None
        )
        self._journal.announce(
            EventType.CLOCK_PROFILED,
            f"{held} is measured on {len(pipelines)} pipelines",
            ClockProfiled(held.clocks_mhz, self._held_count, tuple(powers)),
        )

    def _announce_end(self, end: ProfileEnd) -> None:
        self._journal.announce(
            EventType.PROFILING_ENDED,
            f"profiling has ended after {self.cost.iteration_count} iterations, "
            f"{self.cost.extra_time_s:.1f} s more than at stock: {end.why}",
            ProfilingEnded(end.is_enough, end.limit, self.cost),
        )

    def _adopt_at_stock(self, clocks_mhz: UsableClocks) -> None:
        """Hold what is known from before against the baseline, and adopt it where it agrees."""
        shape = self._parallelism
        pipelines = range(shape.pipeline_count)
        agreeing: list[KnownProfile] = []
        others: list[KnownProfile] = []
        for known in self.known:
            stage = known.stage
            ranks = [Coordinates(p, stage, t) for p in pipelines for t in range(shape.tensor_count)]
            count = self._rules.iterations
            if any(self._why_not_measured(rank, STOCK_MHZ, count) is not None for rank in ranks):
                others.append(known)
                continue
            at_stock = merge(stage, clocks_mhz[stage][0], self._estimates, shape, pipelines, STOCK_MHZ)
            is_same = agree([at_stock], known.profiles, _SAME_TIME_SHARE, _SAME_ENERGY_SHARE)
            (agreeing if is_same else others).append(known)
        self.known = tuple(others)
        self._adopt(agreeing)

    def _adopt_known(self) -> None:
        """Hold what is known from before against the first clocks, and adopt it where it agrees."""
        if not self.known or self.clock_count < LEAST_CLOCKS:
            return
        known, self.known = self.known, ()
        agreeing = []
        for stage in known:
            own = [profile for profile in self.profiles if profile.stage == stage.stage]
            if agree(own, stage.profiles, _SAME_TIME_SHARE, _SAME_ENERGY_SHARE):
                agreeing.append(stage)
        self._adopt(agreeing)

    def _adopt(self, agreeing: Iterable[KnownProfile]) -> None:
        by_source: dict[tuple[str, int], list[int]] = {}
        measured = self._measured_places()
        for stage in agreeing:
            self.replace(p for p in stage.profiles if (p.stage, p.clock_mhz) not in measured)
            by_source.setdefault((stage.source_job_id, stage.source_run_number), []).append(stage.stage)
        for (job_id, run_number), stages in by_source.items():
            self._journal.announce(
                EventType.PROFILE_ADOPTED,
                f"what run {run_number} of job {job_id} measured agrees with what is measured of stages "
                f"{', '.join(map(str, stages))}: {self.least_clock_count} clocks",
                ProfileAdopted(tuple(stages), self.least_clock_count, job_id, run_number),
            )


def _most_at_a_stage(stages: Iterable[int]) -> int:
    return max(Counter(stages).values(), default=0)
