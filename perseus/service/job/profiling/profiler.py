"""Profiling in vivo: rounds of held clocks, and the decision when to stop. Part of the state machine.

In a round (`round`) every stage holds one clock of its own (`clock_choice`) on all pipelines. The round ends
when all stages are measured accurately enough for their noise (`sample_allocation`), or when it has lasted so
long that the missing measurements will not come (a stage that computes in step with its energy counter, say):
without even the energy of all its computations together, that clock is given up. A stage that stays at stock
is measured at stock, which counts as its highest clock. A stage with nothing left to measure holds a clock
that it has already measured.

Profiling ends when the plan's energy can no longer change by more than the required accuracy, or when the
budget is used up (`budget_tracker`), within a round or after it. Each stage needs at least two clocks;
without them there is nothing to plan.

An earlier profile of the same work on the same GPUs may be known, stage by stage. It is adopted if it agrees
with the stage's measurements in the stock baseline (as the highest clock) or in the first rounds.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from perseus.service.domain.measured import JobIteration, KnownProfile, StageProfile
from perseus.service.domain.messages import NUMBERS, coordinates_to_proto, cost_to_proto
from perseus.service.domain.model import STOCK_MHZ, HoldClocks, StockIteration
from perseus.service.domain.profiling import (
    ClockGivenUpReason,
    GivenUpClock,
    ProfilingCost,
    ProfilingLimit,
    ProfilingProgress,
)
from perseus.service.domain.records import Counters, ForgetProfile, JobRecord
from perseus.service.domain.specification import Coordinates, Parallelism
from perseus.service.domain.telemetry import EnergyEstimate
from perseus.service.job.command_buffer import CommandBuffer
from perseus.service.job.profiling.budget_tracker import BudgetTracker
from perseus.service.job.profiling.clock_choice import ClockChoice, choose_clocks
from perseus.service.job.profiling.progress_estimate import ProgressEstimate
from perseus.service.job.profiling.round import Round
from perseus.service.job.profiling.sample_allocation import MAX_HOLD_FACTOR, SampleAllocation
from perseus.service.job.profiling.stage_profiles import agree, is_power_known
from perseus.service.job.ranks.usable_clocks import MIN_CLOCKS, UsableClocks, stages_at_stock
from perseus.service.job.rules import Rules
from perseus.solver import Schedule
from perseus.v1 import event_pb2

HOLD_LIMIT = 8
"""Multiple of the configured iterations for which a clock may be held before it is given up."""

_MARGIN_ERRORS = 3.0
"""Standard errors that a margin for noisy measurements covers, and some more."""

_SAME_TIME_SHARE = 0.02
_SAME_ENERGY_SHARE = 0.1
"""By how much an earlier profile may differ from the current measurements."""


@dataclass(frozen=True, slots=True)
class ProfileEnd:
    """The decision that there is no further round.

    Attributes:
        is_enough: whether there is enough to plan on.
        limit: the part of the budget that is used up, if that is the reason.
        why: the reason, as part of a sentence.
    """

    is_enough: bool
    limit: ProfilingLimit | None
    why: str


class Profiler:
    """Collects a job's measurements, and chooses the next ones.

    Attributes:
        profiles: the measurements so far.
        known: earlier profiles of the stages' work, not yet compared with measurements.
        budget_tracker: the cost of profiling since it began or was renewed.
        whole_round_count: rounds that measured all their stages, since the last restart.
    """

    def __init__(
        self,
        record: JobRecord,
        counters: Counters,
        parallelism: Parallelism,
        schedule: Schedule,
        rules: Rules,
        buffer: CommandBuffer,
    ) -> None:
        self._record = record
        self.profiles: tuple[StageProfile, ...] = ()
        self.known: tuple[KnownProfile, ...] = ()
        self._parallelism = parallelism
        self._schedule = schedule
        self._rules = rules
        self._budget = rules.profiling_budget
        self._allocation = SampleAllocation(
            rules.profile_iterations, rules.profile_accuracy, rules.max_margin / _MARGIN_ERRORS
        )
        # A round's share of the extra time is that of one clock out of the maximum number.
        self._round = Round(
            parallelism, schedule, self._allocation, self._budget.extra_time_s / rules.profile_clocks
        )
        self._buffer = buffer
        self.budget_tracker = BudgetTracker(record, counters, self._budget)
        self.whole_round_count = 0
        self._progress = ProgressEstimate(self._budget)
        # The clock, stage and rank that the round waited for when the budget ended it.
        self._unmeasured: GivenUpClock | None = None

    @property
    def clock_count(self) -> int:
        """Number of measured clocks at the stage with the most."""
        return _max_at_a_stage(profile.stage for profile in self.profiles)

    @property
    def min_clock_count(self) -> int:
        """Number of measured clocks at the stage with the fewest."""
        counts = Counter(profile.stage for profile in self.profiles)
        return min(counts[stage] for stage in range(self._parallelism.stage_count))

    @property
    def cost(self) -> ProfilingCost:
        """The cost of profiling since it began or was renewed."""
        return self.budget_tracker.cost

    @property
    def progress(self) -> ProfilingProgress:
        """The progress, while profiling."""
        return self._progress.progress(self.cost)

    def renew(self) -> None:
        """Start again with a full budget, retrying clocks that were given up; measurements are kept."""
        self.budget_tracker.renew()
        self._progress.restart()
        self._record.given_up_clocks = ()

    def forget(self) -> None:
        """Discard all measurements."""
        self.profiles = self.known = ()
        self._allocation.restart()
        self._round.forget()
        self.renew()
        self._buffer.store(ForgetProfile())

    def take_estimate(self, rank: Coordinates, estimate: EnergyEstimate) -> None:
        """Take a rank's estimate for the clock that it holds."""
        self._round.take_estimate(rank, estimate)

    def take_iteration(
        self,
        iteration: JobIteration,
        is_of_round: bool,
        disturbed: Iterable[int],
        baseline: StockIteration,
    ) -> None:
        """Take an iteration of profiling, and the pipelines that were slow in it.

        `is_of_round`: whether it ran under the round's clocks.
        """
        extra_s = self.budget_tracker.take_iteration(iteration, baseline)
        if is_of_round:
            self._round.take_iteration(iteration.iteration_time_s, extra_s, disturbed)

    def unmeasured_ranks(self, held: HoldClocks, clocks_mhz: UsableClocks) -> list[Coordinates]:
        """Return the ranks from which a round awaits estimates, in order.

        Ranks whose noise prolongs the round are not among them: their estimates are usable, only more are
        wanted.
        """
        counted_mhz = self._counted_mhz(held, clocks_mhz)
        unmeasured = self._round.unmeasured(held, counted_mhz, self._allocation.min_iterations)
        return sorted(rank for ranks in unmeasured.values() for rank, _ in ranks)

    def next_round(self, held: HoldClocks | None, clocks_mhz: UsableClocks) -> HoldClocks | ProfileEnd:
        """Return the clocks to hold, unchanged until the round has ended; or the end of profiling.

        `held` is None if there is no round to continue.
        """
        limit = self.budget_tracker.limit
        if held is not None and not self._end_round(held, clocks_mhz, is_last=limit is not None):
            return held
        if held is None:
            self._adopt_at_stock(clocks_mhz)
        self._adopt_known()
        barred = {(clock.stage, clock.clock_mhz) for clock in self._record.given_up_clocks}
        choice = choose_clocks(self.profiles, self._schedule, clocks_mhz, barred)
        end = self._find_end(choice, limit)
        if end is None:
            at_stock = stages_at_stock(clocks_mhz)
            self._round.begin(at_stock)
            self._unmeasured = None
            max_count = min(self._rules.profile_clocks, max(map(len, clocks_mhz)))
            self._progress.begin_round(self.cost, self._tried_count(), max_count)
            return HoldClocks(
                tuple(
                    STOCK_MHZ if stage in at_stock else clock_mhz
                    for stage, clock_mhz in enumerate(choice.clocks_mhz)
                )
            )
        if end.is_enough and not is_power_known(self.profiles):
            assumed = "no rank has reported its blocking power, so it is assumed"
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
                self._buffer.store(profile)
        self.profiles = tuple(by_place[place] for place in sorted(by_place))

    def _find_end(self, choice: ClockChoice, limit: ProfilingLimit | None) -> ProfileEnd | None:
        clocks = f"{self.clock_count} clocks are measured"
        is_enough = not math.isinf(choice.uncertainty)
        uncertainty = f"the plan's energy may still change by {100 * choice.uncertainty:.2f} %"
        if not is_enough:
            uncertainty = "; ".join(["which is not enough", *map(str, self._find_obstacle())])
        if 0 in choice.clocks_mhz:
            stage = choice.clocks_mhz.index(0)
            why = f"stage {stage} has no measurable clock, {uncertainty}"
        elif self._measured_places().issuperset(enumerate(choice.clocks_mhz)):
            why = f"{clocks}, all there are" + ("" if is_enough else f", {uncertainty}")
        elif choice.uncertainty <= self._rules.profile_accuracy:
            why = f"{clocks}: the plan's energy can change by {100 * choice.uncertainty:.2f} %"
        elif self._tried_count() >= self._rules.profile_clocks:
            why = f"{clocks}, the most allowed; {uncertainty}"
        elif limit is not None:
            budget = f"{self._budget.limit_of(limit):g} {limit.value}"
            return ProfileEnd(
                is_enough, limit, f"{clocks}, and the budget of {budget} is used up; {uncertainty}"
            )
        else:
            return None
        return ProfileEnd(is_enough, None, why)

    def _tried_count(self) -> int:
        """Return the number of clocks tried at the stage with the most."""
        tried = [profile.stage for profile in self.profiles] + [
            clock.stage for clock in self._record.given_up_clocks
        ]
        return _max_at_a_stage(tried)

    def _find_obstacle(self) -> list[GivenUpClock]:
        """Return the clock that the budget cut off, or the first stage's failed one, if there is one."""
        if self._unmeasured is not None:
            return [self._unmeasured]
        counts = Counter(profile.stage for profile in self.profiles)
        failed = [clock for clock in self._record.given_up_clocks if counts[clock.stage] < MIN_CLOCKS]
        return sorted(failed, key=lambda clock: clock.stage)[:1]

    def _end_round(self, held: HoldClocks, clocks_mhz: UsableClocks, *, is_last: bool) -> bool:
        """Keep the measurements if the round has ended; the last round ends with whatever it has."""
        round_ = self._round
        held_count = round_.effective_count(round_.held_count)
        has_lasted = held_count >= HOLD_LIMIT * self._rules.profile_iterations
        if not has_lasted and not is_last:
            counted = partial(self._counted_mhz, held, clocks_mhz)
            if round_.is_waiting(held, counted, self.profiles) or self._awaits_power(held_count):
                return False
        counted_mhz = self._counted_mhz(held, clocks_mhz)
        missing = round_.unmeasured(
            held,
            counted_mhz,
            min(round_.wanted_count, self._rules.profile_iterations),
            accepts_sums=True,
        )
        if not missing and counted_mhz:
            self._allocation.take_round(*round_.judge(held, counted_mhz, self.profiles))
        for stage, clock_mhz in counted_mhz.items():
            if stage in missing:
                self._miss(stage, clock_mhz, missing[stage], is_given_up=has_lasted)
            else:
                self.replace([round_.found(stage, clock_mhz, held)])
        self.whole_round_count += not missing
        self._progress.end_round(self.cost)
        if len(missing) < len(counted_mhz):
            self._announce_round(held)
        return True

    def _awaits_power(self, held_count: float) -> bool:
        """Tell whether the first round goes on only because no rank knows its blocking power yet.

        Its clocks cost the least time, and without that power no policy may slow the job. A job whose ranks
        never wait is held there as long as a noisy one.
        """
        limit = MAX_HOLD_FACTOR * self._rules.profile_iterations
        return not self.profiles and not self._round.knows_power and held_count < limit

    def _counted_mhz(self, held: HoldClocks, clocks_mhz: UsableClocks) -> dict[int, int]:
        """Return the stages that a round measures, and the clocks that they count as."""
        known = self._measured_places()
        return {
            stage: clock_mhz
            for stage, held_mhz in enumerate(held.clocks_mhz)
            for clock_mhz in [held_mhz or clocks_mhz[stage][0]]
            if (stage, clock_mhz) not in known
        }

    def _measured_places(self) -> set[tuple[int, int]]:
        return {(profile.stage, profile.clock_mhz) for profile in self.profiles}

    def _miss(
        self,
        stage: int,
        clock_mhz: int,
        unmeasured: Sequence[tuple[Coordinates, ClockGivenUpReason]],
        *,
        is_given_up: bool,
    ) -> None:
        """Record that a round ended without a stage, because it lasted too long or was the last one."""
        reason = next(some for some in ClockGivenUpReason if some in {why for _, why in unmeasured})
        rank: Coordinates | None = next(rank for rank, why in unmeasured if why is reason)
        if self._round.is_all_disturbed:
            reason, rank = ClockGivenUpReason.DISTURBED, None
        clock = GivenUpClock(stage, clock_mhz, reason, rank)
        if not is_given_up:
            self._unmeasured = self._unmeasured or clock
            return
        self._record.given_up_clocks += (clock,)
        self._buffer.announce(
            event_pb2.JOB_EVENT_TYPE_CLOCK_GIVEN_UP,
            f"{clock}, in {self._round.held_count} iterations",
            event_pb2.ClockGivenUp(
                stage=stage,
                clock_mhz=clock_mhz,
                iteration_count=self._round.held_count,
                disturbed_pipelines=sorted(self._round.disturbed),
                reason=NUMBERS[reason],
                rank=None if rank is None else coordinates_to_proto(rank),
            ),
        )

    def _announce_round(self, held: HoldClocks) -> None:
        powers = (
            event_pb2.StagePower(stage=profile.stage, power_w=profile.blocking_power_w)
            for profile in self.profiles
            if profile.clock_mhz == held.clocks_mhz[profile.stage] and profile.blocking_power_w is not None
        )
        self._buffer.announce(
            event_pb2.JOB_EVENT_TYPE_CLOCK_PROFILED,
            f"{held} is measured on {len(self._round.pipelines)} pipelines",
            event_pb2.ClockProfiled(
                clocks_mhz=held.clocks_mhz, iteration_count=self._round.held_count, blocking_powers=powers
            ),
        )

    def _announce_end(self, end: ProfileEnd) -> None:
        self._buffer.announce(
            event_pb2.JOB_EVENT_TYPE_PROFILING_ENDED,
            f"profiling has ended after {self.cost.iteration_count} iterations, "
            f"{self.cost.extra_time_s:.1f} s more than at stock: {end.why}",
            event_pb2.ProfilingEnded(
                is_enough=end.is_enough,
                limit=None if end.limit is None else NUMBERS[end.limit],
                cost=cost_to_proto(self.cost),
            ),
        )

    def _adopt_at_stock(self, clocks_mhz: UsableClocks) -> None:
        """Compare earlier profiles with the baseline, and adopt those that agree."""
        agreeing: list[KnownProfile] = []
        others: list[KnownProfile] = []
        for known in self.known:
            at_stock = self._round.found_at_stock(
                known.stage, clocks_mhz[known.stage][0], self._rules.profile_iterations
            )
            is_same = at_stock is not None and agree(
                [at_stock], known.profiles, _SAME_TIME_SHARE, _SAME_ENERGY_SHARE
            )
            (agreeing if is_same else others).append(known)
        self.known = tuple(others)
        self._adopt(agreeing)

    def _adopt_known(self) -> None:
        """Compare earlier profiles with the first clocks, and adopt those that agree."""
        if not self.known or self.clock_count < MIN_CLOCKS:
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
            self._buffer.announce(
                event_pb2.JOB_EVENT_TYPE_PROFILE_ADOPTED,
                f"the profile of run {run_number} of job {job_id} agrees with the measurements of stages "
                f"{', '.join(map(str, stages))}: {self.min_clock_count} clocks",
                event_pb2.ProfileAdopted(
                    stages=stages,
                    clock_count=self.min_clock_count,
                    source_job_id=job_id,
                    source_run_number=run_number,
                ),
            )


def _max_at_a_stage(stages: Iterable[int]) -> int:
    return max(Counter(stages).values(), default=0)
