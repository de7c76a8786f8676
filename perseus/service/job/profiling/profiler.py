"""Profiling in vivo: rounds of held clocks, and when they are enough. Part of the state machine.

In a round every stage holds one clock, its own (`clock_choice`), on all pipelines. It ends when all stages
are measured, or when it lasted so long that what is missing will not come (a stage that computes in step with
its energy counter, say): that clock is given up. Pipelines that were slow in a round do not count in it.
A stage that stays at stock is measured at stock, which counts as its highest clock. One of which nothing is
left to measure goes on with a clock that it has.

Profiling ends when the plan's energy can no longer change by more than the accuracy asked for, or when the
budget is used up. Two clocks of each stage are the least; without them there is nothing to plan.

A profile of the same GPUs and job shape may be there from before. It is taken over if it agrees with what the
first rounds measured.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from perseus.service.domain.measured import JobIteration, StageProfile
from perseus.service.domain.model import STOCK_MHZ, EventType, HoldClocks
from perseus.service.domain.specification import Coordinates, Parallelism
from perseus.service.domain.telemetry import EnergyEstimate
from perseus.service.job.journal import Journal
from perseus.service.job.profiling.clock_choice import ClockChoice, choose_clocks
from perseus.service.job.profiling.stage_profiles import agree, is_measured, is_power_known, merge
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
        iterations: measured at each clock.
        accuracy: by what share the plan's energy may still change.
        most_clocks: rounds at most.
        budget_iterations, budget_s, budget_j: what all rounds may take together; the energy is what they
            cost more than the same iterations at stock.
    """

    iterations: int = 3
    accuracy: float = 0.003
    most_clocks: int = 12
    budget_iterations: float = math.inf
    budget_s: float = math.inf
    budget_j: float = math.inf


@dataclass(frozen=True, slots=True)
class ProfileEnd:
    """No further round; why. `is_enough`: there is something to plan on."""

    is_enough: bool
    why: str


class Profiler:
    """What is measured of a job, and what is to be measured next.

    Attributes:
        profiles: what is measured so far.
        offered: a profile of the same GPUs and job shape from before.
    """

    def __init__(
        self, parallelism: Parallelism, schedule: Schedule, rules: ProfilingRules, journal: Journal
    ) -> None:
        self.profiles: tuple[StageProfile, ...] = ()
        self.offered: tuple[StageProfile, ...] = ()
        self._parallelism = parallelism
        self._schedule = schedule
        self._rules = rules
        self._journal = journal
        self._estimates: dict[Coordinates, EnergyEstimate] = {}
        self._disturbed: set[int] = set()
        self._held_count = 0
        self._barred: set[tuple[int, int]] = set()
        self._round_count = 0
        self._iteration_count = 0
        self._extra_j = 0.0
        self._begun_s: float | None = None

    @property
    def clock_count(self) -> int:
        """Clocks measured at the stage that has the most."""
        stages = [profile.stage for profile in self.profiles]
        return max((stages.count(stage) for stage in set(stages)), default=0)

    def take_estimate(self, rank: Coordinates, estimate: EnergyEstimate) -> None:
        """Take what a rank's counter says of the clock that it holds."""
        self._estimates[rank] = estimate

    def take_iteration(
        self, iteration: JobIteration, disturbed: Iterable[int], baseline_energy_j: float
    ) -> None:
        """Take an iteration of the round, and the pipelines that were slow in it."""
        self._held_count += 1
        self._iteration_count += 1
        self._disturbed.update(disturbed)
        if baseline_energy_j:
            self._extra_j += math.fsum(iteration.pipeline_energy_j) - baseline_energy_j

    def next_round(
        self, held: HoldClocks | None, clocks_mhz: UsableClocks, now_s: float
    ) -> HoldClocks | ProfileEnd:
        """Return the clocks to hold: the same until the round has ended; or that no more are needed.

        `held` is None where no round is to go on.
        """
        if self._begun_s is None:
            self._begun_s = now_s
        if held is not None and not self._end_round(held, clocks_mhz):
            return held
        self._adopt_offered()
        choice = choose_clocks(self.profiles, self._schedule, clocks_mhz, self._barred)
        why = self._why_to_end(choice, now_s)
        if why is None:
            at_stock = stages_at_stock(clocks_mhz)
            self._start_round(at_stock)
            self._round_count += 1
            return HoldClocks(
                tuple(
                    STOCK_MHZ if stage in at_stock else clock_mhz
                    for stage, clock_mhz in enumerate(choice.clocks_mhz)
                )
            )
        if not is_power_known(self.profiles):
            why += "; no rank has told what it draws while it waits: that is assumed"
        return ProfileEnd(not math.isinf(choice.doubt), why)

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

    def _why_to_end(self, choice: ClockChoice, now_s: float) -> str | None:
        clocks = f"{self.clock_count} clocks are measured"
        if 0 in choice.clocks_mhz:
            return f"stage {choice.clocks_mhz.index(0)} has no clock that can be measured"
        measured = self._measured_places()
        if all(place in measured for place in enumerate(choice.clocks_mhz)):
            return f"{clocks}, all there are"
        if choice.doubt <= self._rules.accuracy:
            return f"{clocks}: the plan's energy can change by {100 * choice.doubt:.2f} %"
        if math.isinf(choice.doubt):
            return None  # Less than two clocks is nothing: the budget counts from then on.
        doubt = f"the plan's energy may still change by {100 * choice.doubt:.2f} %"
        if max(self._round_count, self.clock_count) >= self._rules.most_clocks:
            return f"{clocks}, as many as may be; {doubt}"
        assert self._begun_s is not None
        for used, budget, unit in (
            (self._iteration_count, self._rules.budget_iterations, "iterations"),
            (now_s - self._begun_s, self._rules.budget_s, "s"),
            (self._extra_j, self._rules.budget_j, "J more than at stock"),
        ):
            if used >= budget:
                return f"{clocks}, and the budget of {budget:g} {unit} is used up; {doubt}"
        return None

    def _end_round(self, held: HoldClocks, clocks_mhz: UsableClocks) -> bool:
        """Keep what was measured, if the round has ended."""
        pipelines = self._counting_pipelines()
        known = self._measured_places()
        # The stages that are measured in this round, and the clocks that they count as.
        counted_mhz = {
            stage: clock_mhz
            for stage, held_mhz in enumerate(held.clocks_mhz)
            for clock_mhz in [held_mhz or clocks_mhz[stage][0]]
            if (stage, clock_mhz) not in known
        }
        missing = [
            stage for stage in counted_mhz if not self._is_measured(stage, held.clocks_mhz[stage], pipelines)
        ]
        has_lasted = self._held_count >= HOLD_LIMIT * self._rules.iterations
        if missing and not has_lasted:
            return False
        for stage, clock_mhz in counted_mhz.items():
            if stage in missing:
                self._give_up(stage, clock_mhz)
            else:
                held_mhz = held.clocks_mhz[stage]
                found = merge(stage, clock_mhz, self._estimates, self._parallelism, pipelines, held_mhz)
                self.replace([found])
        if len(missing) < len(counted_mhz):
            self._announce_round(held, pipelines)
        return True

    def _measured_places(self) -> set[tuple[int, int]]:
        return {(profile.stage, profile.clock_mhz) for profile in self.profiles}

    def _counting_pipelines(self) -> Sequence[int]:
        """Pipelines that were not slow; all of them if all were, as then there is nothing better to go by."""
        everybody = range(self._parallelism.pipeline_count)
        return [pipeline for pipeline in everybody if pipeline not in self._disturbed] or everybody

    def _is_measured(self, stage: int, clock_mhz: int, pipelines: Sequence[int]) -> bool:
        order = self._schedule.orders[stage]
        return all(
            (estimate := self._estimates.get(Coordinates(pipeline, stage, tensor))) is not None
            and is_measured(estimate, order, clock_mhz, self._rules.iterations)
            for pipeline in pipelines
            for tensor in range(self._parallelism.tensor_count)
        )

    def _give_up(self, stage: int, clock_mhz: int) -> None:
        self._barred.add((stage, clock_mhz))
        self._journal.announce(
            EventType.CLOCK_GIVEN_UP,
            f"stage {stage} could not be measured at {clock_mhz} MHz in {self._held_count} iterations",
            stage=stage,
            clock_mhz=clock_mhz,
            iteration_count=self._held_count,
            disturbed_pipelines=sorted(self._disturbed),
        )

    def _announce_round(self, held: HoldClocks, pipelines: Sequence[int]) -> None:
        powers_w = {
            f"blocking_power_w.{profile.stage}": profile.blocking_power_w
            for profile in self.profiles
            if profile.clock_mhz == held.clocks_mhz[profile.stage] and profile.blocking_power_w is not None
        }
        self._journal.announce(
            EventType.CLOCK_PROFILED,
            f"{held} is measured on {len(pipelines)} pipelines",
            clocks_mhz=list(held.clocks_mhz),
            iteration_count=self._held_count,
            **powers_w,
        )

    def _adopt_offered(self) -> None:
        if not self.offered or self.clock_count < LEAST_CLOCKS:
            return
        offered, self.offered = self.offered, ()
        if agree(self.profiles, offered, _SAME_TIME_SHARE, _SAME_ENERGY_SHARE):
            known = self._measured_places()
            self.replace(p for p in offered if (p.stage, p.clock_mhz) not in known)
            self._journal.announce(
                EventType.PROFILE_ADOPTED,
                f"a profile from before agrees with what is measured: {self.clock_count} clocks",
                clock_count=self.clock_count,
            )
