"""Compares iterations under plans with their prediction and their plan. Part of the state machine.

The guard reports plans that are slower than promised; the drift watch reports computations whose times differ
from those that the plans were made with. In both cases the profile may be wrong, and is corrected with the
new measurements. Where the computations take their planned time and the iteration does not, transfers between
stages may be why.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from perseus.service.domain.commands import SlowPlan
from perseus.service.domain.measured import MIN_PAIRS, JobIteration
from perseus.service.domain.messages import NUMBERS
from perseus.service.domain.model import PlannedClocks
from perseus.service.domain.pairs import PairSums
from perseus.service.domain.records import JobRecord
from perseus.service.domain.specification import Coordinates, Parallelism
from perseus.service.domain.telemetry import EnergyEstimate
from perseus.service.job.command_buffer import CommandBuffer
from perseus.service.job.planning.caps import Cap
from perseus.service.job.planning.drift import Drift, DriftWatch
from perseus.service.job.planning.guard import SlowdownProof
from perseus.service.job.planning.irregular import IrregularWatch
from perseus.service.job.profiling.profiler import Profiler
from perseus.service.job.profiling.stage_profiles import corrected
from perseus.service.job.rules import Rules
from perseus.solver import Frontier
from perseus.v1 import event_pb2

MAX_PREDICTION_VIOLATIONS = 2
"""After more violations than this, the job goes to stock without another plan."""

FORGIVING_ITERATIONS = 1000
"""Iterations within the prediction that cancel one violation: two in a year are not two in a row."""

MAX_SUSPECTED = 20
"""Consecutive iterations that an unproven suspect explains: finding a straggler can take 15."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong with the plans in force; nothing by default.

    Attributes:
        withdraw: why the plans have to be withdrawn; None if they stay.
        solve_again: whether solving again may give better plans: the profile was corrected, or transfers have
            to be planned for.
        slow: the plan that transfers between stages may have made slower than predicted.
        is_irregular: whether iterations are irregular; the plans are valid again once iterations are regular.
        caps: clocks that GPUs do not reach, which explains why iterations are slower than planned.
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
        self._irregular = IrregularWatch(rules)
        self._drift = DriftWatch(parallelism)
        self._profiler = profiler
        self._buffer = buffer
        self._tolerance = rules.guard_tolerance
        self._kept_count = 0
        self._suspected_count = 0
        self._is_doubtful = False

    def restart(self) -> None:
        """Discard the evidence gathered so far."""
        self._suspected_count = 0
        self._is_doubtful = False
        self._irregular.restart()
        self._drift.restart()

    def note_pairs(self, pairs: PairSums, promised: float) -> None:
        """Note whether it is doubtful that plans keep what is promised, by stock beside them."""
        margin = pairs.ratio_margin()
        is_kept = margin is None or pairs.ratio + margin <= promised * (1 + self._tolerance)
        self._is_doubtful = pairs.count >= MIN_PAIRS and not is_kept

    def forgive(self) -> None:
        """Forget violated promises."""
        self._record.prediction_violation_count = self._kept_count = 0
        self._record.slowdown_share = 1.0

    def take_stock(self, iteration: JobIteration) -> None:
        """Take an iteration that ran at stock."""
        self._irregular.take_stock(iteration)

    def take_estimate(self, rank: Coordinates, estimate: EnergyEstimate) -> None:
        """Take a rank's measurements under its current plan."""
        self._drift.take_estimate(rank, estimate)

    def judge(
        self,
        iteration: JobIteration,
        clocks: Sequence[PlannedClocks],
        frontier: Frontier,
        predicted_s: float,
        proof: SlowdownProof | None,
        is_late: bool,
        stragglers: Collection[int],
        suspects: Collection[int],
        explain_caps: Callable[[], tuple[Cap, ...]] = tuple,
    ) -> Verdict:
        """Judge an iteration under these clocks. Stragglers and capped clocks explain slow iterations.

        `proof`: that they are slower than promised. `is_late`: they are slower than predicted.

        For a while a suspected straggler does, too: naming the slow pipeline can take more iterations than
        noticing that something is slow.
        """
        self._suspected_count = self._suspected_count + 1 if suspects else 0
        if stragglers and (caps := explain_caps()):
            return Verdict(caps=caps)
        if not stragglers and not 0 < self._suspected_count <= MAX_SUSPECTED:
            if (proof is not None or is_late) and (caps := explain_caps()):
                return Verdict(caps=caps)
            if proof is not None:
                pair = proof.pair
                self._buffer.announce(
                    event_pb2.JOB_EVENT_TYPE_PREDICTION_VIOLATED,
                    f"iterations take {proof.ratio:.3f} × stock's beside them, surely more than "
                    f"{proof.surely:.3f} ×, and {proof.promised:.3f} × is promised: "
                    f"{pair.planned_time_s:.6f} s against {pair.stock_time_s:.6f} s in the latest of "
                    f"{proof.pair_count} blocks",
                    event_pb2.PredictionViolated(
                        predicted_time_s=proof.promised * pair.stock_time_s,
                        median_time_s=pair.planned_time_s,
                        baseline_time_s=pair.stock_time_s,
                        iteration_times_s=pair.before_s + pair.after_s,
                        last_iteration=pair.last_iteration,
                        plan_versions=_single_where_same(iteration.versions),
                    ),
                )
                return self._handle_violation(proof, clocks, frontier)
            slow_s = self._irregular.judge(iteration, predicted_s)
            if slow_s is not None:
                return Verdict(
                    f"iterations are irregular and take {slow_s:.6f} s: stock until they are regular again",
                    is_irregular=True,
                )
            self._check_prediction(iteration)
        if self._drift.is_due(iteration.versions) and self._correct_profile(frontier, stragglers):
            return Verdict(solve_again=True)
        return Verdict()

    def _check_prediction(self, iteration: JobIteration) -> None:
        self._kept_count += iteration.is_regular and not self._is_doubtful
        if self._kept_count >= FORGIVING_ITERATIONS:
            self._kept_count = self._record.fall_back_count = 0
            self._record.prediction_violation_count = max(0, self._record.prediction_violation_count - 1)

    def _handle_violation(
        self, proof: SlowdownProof, clocks: Sequence[PlannedClocks], frontier: Frontier
    ) -> Verdict:
        self._record.prediction_violation_count += 1
        violation_count = self._record.prediction_violation_count
        self._kept_count = 0
        is_corrected = self._correct_profile(frontier, ())
        if violation_count > MAX_PREDICTION_VIOLATIONS:
            return Verdict(f"predictions were violated {violation_count} times")
        if is_corrected:
            return Verdict("the prediction was violated, and the profile was corrected", solve_again=True)
        if (allowed := self._record.policy.max_slowdown_percent / 100) and proof.promised > 1:
            # What is too slow may be a share of the slowdown, or the same under all plans.
            share, excess = self._record.slowdown_share, proof.ratio - proof.promised
            less = min(share * allowed / (proof.ratio - 1), share - excess / allowed)
            self._record.slowdown_share = max(0.0, less)
            return Verdict("plans exceed the policy's slowdown: faster ones are tried", solve_again=True)
        slowest = max((some.plan for some in clocks), key=lambda plan: plan.iteration_time_s)
        return Verdict(
            "the prediction was violated, and the profile is right: do transfers between stages explain it?",
            solve_again=True,
            slow=SlowPlan(slowest, proof.pair.planned_time_s, proof.pair.stock_time_s),
        )

    def _correct_profile(self, frontier: Frontier, ignored: Collection[int]) -> bool:
        """Correct the profile with the measurements under the plans, if they disagree."""
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
            f"stage {stage} takes {drift.worst_ratio:.3f} × its planned time at {clock_mhz} MHz",
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
