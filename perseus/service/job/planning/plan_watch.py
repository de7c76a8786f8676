"""Holds what plans in force lead to against what was promised, and planned. Part of the state machine.

The guard says that a promise is broken, the watch for drift that computations take other times than the plans
were made with. In both cases the profile is what may be wrong, and is corrected by what was measured. Where
the computations take the time planned and the iteration does not, transfers between stages may be why.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from perseus.service.domain.commands import SlowPlan
from perseus.service.domain.measured import JobIteration
from perseus.service.domain.messages import NUMBERS
from perseus.service.domain.model import PlannedClocks
from perseus.service.domain.records import JobRecord
from perseus.service.domain.specification import Coordinates, Parallelism
from perseus.service.domain.telemetry import EnergyEstimate
from perseus.service.job.command_buffer import CommandBuffer
from perseus.service.job.planning.caps import Cap
from perseus.service.job.planning.drift import Drift, DriftWatch
from perseus.service.job.planning.guard import Guard, PredictionViolation, predicted_time_s
from perseus.service.job.planning.irregular import IrregularWatch
from perseus.service.job.profiling.profiler import Profiler
from perseus.service.job.profiling.stage_profiles import corrected
from perseus.service.job.rules import Rules
from perseus.solver import Frontier
from perseus.v1 import event_pb2

MAX_PREDICTION_VIOLATIONS = 2
"""After so many broken promises the job stays at stock."""

FORGIVING_ITERATIONS = 1000
"""Iterations that kept their promise and make up for a broken one: twice a year is not twice in a row."""

MAX_SUSPECTED = 20
"""Iterations in a row that somebody of whom nothing is proven explains: it takes 15 to find whom there is."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong with the plans in force; nothing by default.

    Attributes:
        withdraw: why they have to go, if they have to.
        solve_again: there may be better ones: the profile was corrected, or transfers are to be planned for.
        slow: the plan that transfers between stages may have made slower than promised.
        is_irregular: iterations are not as registered; the plans are good again when they are.
        caps: clocks that GPUs do not reach, which is why iterations are slower than planned.
    """

    withdraw: str | None = None
    solve_again: bool = False
    slow: SlowPlan | None = None
    is_irregular: bool = False
    caps: tuple[Cap, ...] = ()


class PlanWatch:
    """Follows the iterations of a job that runs under plans."""

    def __init__(
        self,
        record: JobRecord,
        parallelism: Parallelism,
        rules: Rules,
        profiler: Profiler,
        buffer: CommandBuffer,
    ) -> None:
        self._record = record
        self._guard = Guard(rules)
        self._irregular = IrregularWatch(rules)
        self._drift = DriftWatch(parallelism)
        self._profiler = profiler
        self._buffer = buffer
        self._kept_count = 0
        self._suspected_count = 0

    def restart(self) -> None:
        """What is under way counts for nothing."""
        self._suspected_count = 0
        self._guard.restart()
        self._irregular.restart()
        self._drift.restart()

    def forgive(self) -> None:
        """Promises that were broken so far count for nothing."""
        self._record.prediction_violation_count = self._kept_count = 0

    def take_stock(self, iteration: JobIteration) -> None:
        """Take an iteration that ran at stock."""
        self._irregular.take_stock(iteration)

    def learn(self, iteration: JobIteration) -> None:
        """Take any iteration of the job, whatever it ran under: how much iterations jump."""
        self._guard.learn(iteration)

    def take_estimate(self, rank: Coordinates, estimate: EnergyEstimate) -> None:
        """Take what a rank measured under the plan that it has now."""
        self._drift.take_estimate(rank, estimate)

    def judge(
        self,
        iteration: JobIteration,
        clocks: Sequence[PlannedClocks],
        frontier: Frontier,
        baseline_time_s: float,
        stragglers: Collection[int],
        suspects: Collection[int],
        baseline_gap_time_s: float | None = None,
        explain_caps: Callable[[], tuple[Cap, ...]] = tuple,
    ) -> Verdict:
        """Judge an iteration under these clocks. A straggler explains what is slow, and so do caps.

        So does, for a while, who may turn out to be a straggler: it can take more iterations to say who is
        slow than that something is.
        """
        self._suspected_count = self._suspected_count + 1 if suspects else 0
        if stragglers and (caps := explain_caps()):
            return Verdict(caps=caps)
        if not stragglers and not 0 < self._suspected_count <= MAX_SUSPECTED:
            predicted_s = predicted_time_s(clocks, frontier, baseline_time_s)
            violation = self._guard.judge(iteration, predicted_s, baseline_time_s, baseline_gap_time_s)
            if violation is not None and (caps := explain_caps()):
                return Verdict(caps=caps)
            if violation is not None:
                self._buffer.announce(
                    event_pb2.JOB_EVENT_TYPE_PREDICTION_VIOLATED,
                    f"iterations take {violation.median_time_s:.6f} s, not "
                    f"{violation.predicted_time_s:.6f} s "
                    f"and at most {violation.tolerance:.1%} more, where they jump by {violation.noise:.1%}",
                    event_pb2.PredictionViolated(
                        predicted_time_s=violation.predicted_time_s,
                        median_time_s=violation.median_time_s,
                        baseline_time_s=violation.baseline_time_s,
                        iteration_times_s=violation.iteration_times_s,
                        last_iteration=violation.last_iteration,
                        plan_versions=_single_where_same(iteration.versions),
                    ),
                )
                return self._handle_violation(violation, clocks, frontier)
            slow_s = self._irregular.judge(iteration, predicted_s)
            if slow_s is not None:
                return Verdict(
                    f"iterations are not as registered, and take {slow_s:.6f} s: stock until they are",
                    is_irregular=True,
                )
            self._check_prediction(iteration)
        if self._drift.is_due(iteration.versions) and self._correct_profile(frontier, stragglers):
            return Verdict(solve_again=True)
        return Verdict()

    def _check_prediction(self, iteration: JobIteration) -> None:
        self._kept_count += iteration.is_regular
        if self._kept_count >= FORGIVING_ITERATIONS:
            self._kept_count = 0
            self._record.prediction_violation_count = max(0, self._record.prediction_violation_count - 1)

    def _handle_violation(
        self, violation: PredictionViolation, clocks: Sequence[PlannedClocks], frontier: Frontier
    ) -> Verdict:
        self._record.prediction_violation_count += 1
        violation_count = self._record.prediction_violation_count
        self._kept_count = 0
        is_corrected = self._correct_profile(frontier, ())
        if violation_count > MAX_PREDICTION_VIOLATIONS:
            return Verdict(f"plans broke their promise {violation_count} times")
        if is_corrected:
            return Verdict("the plans broke their promise, and the profile was corrected", solve_again=True)
        slowest = max((some.plan for some in clocks), key=lambda plan: plan.iteration_time_s)
        return Verdict(
            "the plans broke their promise, and the profile agrees: do transfers between stages explain it?",
            solve_again=True,
            slow=SlowPlan(slowest, violation.median_time_s, violation.baseline_time_s),
        )

    def _correct_profile(self, frontier: Frontier, ignored: Collection[int]) -> bool:
        """Correct the profile by what was measured under the plans, if they disagree."""
        measured = {(profile.stage, profile.clock_mhz) for profile in self._profiler.profiles}
        drift = self._drift.check(frontier.pipeline, measured, ignored)
        if drift is None:
            return False
        self._announce(drift)
        self._profiler.replace(corrected(self._profiler.profiles, drift.times_s))
        return True

    def _announce(self, drift: Drift) -> None:
        stage, clock_mhz, (chunk, kind) = drift.worst
        self._buffer.announce(
            event_pb2.JOB_EVENT_TYPE_PROFILE_CORRECTED,
            f"stage {stage} takes {drift.worst_ratio:.3f} × the time planned at {clock_mhz} MHz",
            event_pb2.ProfileCorrected(
                stage=stage,
                clock_mhz=clock_mhz,
                chunk=chunk,
                kind=NUMBERS[kind],
                ratio=drift.worst_ratio,
                corrected_count=len(drift.times_s),
            ),
        )


def _single_where_same(versions: tuple[int, ...] | None) -> tuple[int, ...]:
    assert versions is not None
    return versions[:1] if len(set(versions)) == 1 else versions
