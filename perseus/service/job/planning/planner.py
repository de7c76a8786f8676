"""From profiles to plans: the frontier, and where on it each pipeline runs. Part of the state machine.

One problem is solved at a time. When a frontier is dropped (clocks are gone, or are back), the problem being
solved becomes obsolete: it is dropped, and a late answer is ignored.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from perseus.service.domain.commands import DropSolve, SlowPlan, Solve
from perseus.service.domain.inputs import SignalTargetSet
from perseus.service.domain.job_power import PowerCurveBasis
from perseus.service.domain.job_signal import JobSignal, SpeedCurveBasis
from perseus.service.domain.measured import JobIteration, Period
from perseus.service.domain.messages import NUMBERS, policy_to_proto, signal_target_to_proto
from perseus.service.domain.model import Clocks, NoSlowdown, PlannedClocks, Straggler
from perseus.service.domain.pairs import Pair, PairSums
from perseus.service.domain.records import Counters, JobRecord
from perseus.service.domain.signals import SignalTarget, SignalTargetState
from perseus.service.domain.specification import OperatingPolicy, Parallelism
from perseus.service.job.command_buffer import CommandBuffer
from perseus.service.job.iterations.baseline import Baseline
from perseus.service.job.iterations.variation_memory import MAX_ITERATIONS, MIN_ITERATIONS, VariationMemory
from perseus.service.job.planning.caps import CapWatch
from perseus.service.job.planning.exact_plans import ExactPlans
from perseus.service.job.planning.guard import Guard
from perseus.service.job.planning.offers import OfferBoard
from perseus.service.job.planning.operating_point import (
    budget_target_times_s,
    missed_policy,
    no_slowdown,
    overhead_s,
    own_time_s,
    planned_clocks,
    prediction_of_s,
    straggler_time_s,
    target_times_s,
)
from perseus.service.job.planning.plan_watch import PlanWatch, Verdict
from perseus.service.job.planning.set_latency import SetLatency
from perseus.service.job.profiling.profiler import Profiler
from perseus.service.job.profiling.stage_profiles import build_problem, is_power_known
from perseus.service.job.ranks.rank_table import RankTable
from perseus.service.job.ranks.usable_clocks import stages_at_stock
from perseus.service.job.rules import Rules
from perseus.service.job.stragglers.registry import StragglerRegistry
from perseus.solver import (
    Frontier,
    Kind,
    Plan,
    ProfileError,
    Refinement,
    Schedule,
    common_lag_s,
    highest,
    replay,
    with_lag,
)
from perseus.v1 import event_pb2

_DIGITS = 1e-6
"""Share by which a stored plan's times may be off."""

_VARIATION_SHARE = 1 / 3
"""Share of the guard's tolerance that plans use up where computations vary.

Some is needed: any clock below stock's delays those iterations in which its computation is critical.
"""

_NOT_IN_USE = "it slows nothing while no rank has reported its blocking power"


class Planner:
    """Solves for a job's frontier, and sets the plans on it as the desired clocks.

    Attributes:
        frontier: the solved frontier, until a newer one replaces it or it is dropped.
        is_solving: whether an answer is outstanding.
        is_in_vain: whether that answer is no longer of use.
        latency: the GPUs' set latency.
    """

    def __init__(
        self,
        record: JobRecord,
        counters: Counters,
        parallelism: Parallelism,
        schedule: Schedule,
        rules: Rules,
        ranks: RankTable,
        offers: OfferBoard,
        profiler: Profiler,
        baseline: Baseline,
        stragglers: StragglerRegistry,
        variations: VariationMemory,
        buffer: CommandBuffer,
    ) -> None:
        self.frontier: Frontier | None = None
        self.is_solving = False
        self.is_in_vain = False
        self.latency = SetLatency(record, len(ranks))
        self.watch = PlanWatch(record, parallelism, rules, profiler, buffer)
        self._record = record
        self._rules = rules
        self._guard = Guard(rules)
        self._counters = counters
        self._schedule = schedule
        self._ranks = ranks
        self._offers = offers
        self._profiler = profiler
        self._baseline = baseline
        self._stragglers = stragglers
        self._variations = variations
        self._buffer = buffer
        self._exact = ExactPlans(buffer)
        # From how many iterations the plans know how computations vary.
        self._variation_count = 0
        # The set latency that the offered plans were made with; None if they predate a restart.
        self._made_for_s: float | None = None
        # The slow plan that the next frontier has to explain.
        self._slow: SlowPlan | None = None
        # By version in use: the plan whose predicted durations iterations are judged by.
        self._expected: dict[int, Clocks] = {}

    def solve(self) -> None:
        """Request the frontier, unless an answer is outstanding.

        Raises:
            SolverError: the profiles do not make a solvable problem.
        """
        if not self.is_solving:
            clocks_mhz = self._ranks.usable_clocks_mhz()
            problem = build_problem(self._profiler.profiles, self._schedule, clocks_mhz)
            self._exact.drop()
            self.is_solving = True
            self.latency.adopt_changes()
            self._buffer.do(Solve(with_lag(problem, self._record.lag_s), self._slow, self.latency.planned_s))
            self._slow = None

    @property
    def is_outdated(self) -> bool:
        """Whether the frontier was made for another set latency, and no newer one is on its way."""
        frontier = self.frontier
        return (
            frontier is not None and not self.is_solving and frontier.set_latency_s != self.latency.planned_s
        )

    def end_solving(self) -> bool:
        """Record that an answer has arrived; return whether it is of use."""
        is_of_use = not self.is_in_vain
        self.is_solving = self.is_in_vain = False
        return is_of_use

    def take_frontier(self, frontier: Frontier) -> None:
        """Plan on a new frontier."""
        self.frontier = frontier
        self._exact.forget()
        self._variation_count = 0
        self._remember_plans(frontier)
        self.renew_variation()
        self._record.lag_s = common_lag_s(frontier.pipeline)
        self._record.overhead_s = self.overhead_s
        margin, varied = frontier.margin, self._exact.variation
        self._buffer.announce(
            event_pb2.JOB_EVENT_TYPE_SOLVED,
            f"frontier from T_min {frontier.t_min_s:.4g} s to T_slow {frontier.t_slow_s:.4g} s, "
            f"without an iteration's overhead of {self.overhead_s:.4g} s"
            + (f", for a set latency of {frontier.set_latency_s:.3f} s" if frontier.set_latency_s else "")
            + (
                f", with a margin of {margin.time_share:.2%} for noisy measurements"
                if margin
                else ", without a margin: no errors of measurements are known"
            )
            + (f"; plans allow for computations that vary by {varied.spread:.1%}" if varied else "")
            + (f"; {missed}" if (missed := self.missed_policy) else ""),
            event_pb2.Solved(
                t_min_s=frontier.t_min_s,
                t_star_s=frontier.t_star_s,
                t_slow_s=frontier.t_slow_s,
                baseline_energy_j=frontier.baseline.energy_j,
                t_min_energy_j=frontier.points[0].energy_j,
                point_count=len(frontier.points),
                transfer_lag_s=self._record.lag_s,
                confidence=margin.confidence if margin else 0.0,
                margin_time_percent=100 * margin.time_share if margin else 0.0,
                margin_energy_percent=100 * frontier.margin_energy_share,
                set_latency_s=frontier.set_latency_s,
                latency_cost_percent=frontier.points[0].latency_cost_percent,
            ),
        )

    def renew_variation(self) -> bool:
        """Learn how computations vary; return whether that asks for other plans.

        Once it is known, and again from twice as many iterations: a plan fits those that it was made for
        better than others.
        """
        count, before = self._variations.count, self._variation_count
        needed = max(MIN_ITERATIONS, min(MAX_ITERATIONS, 2 * before))
        if self.frontier is None or count < needed or count == before:
            return False
        variation = self._variations.variation()
        assert variation is not None
        self._variation_count = count
        return self._exact.vary(None if variation.is_negligible else variation)

    @property
    def why_too_noisy(self) -> str | None:
        """Which measurements are so uncertain that plans would be guesses; None if none is."""
        if self.frontier is None or self.frontier.margin is None:
            return None
        share, most = self.frontier.margin.time_share, self._rules.max_margin
        if share <= most:
            return None
        uncertain = {
            (m.time_se_s / m.time_s, profile.stage, kind.name.lower(), profile.clock_mhz)
            for profile in self._profiler.profiles
            for (_, kind), m in profile.measurements.items()
        }
        error, stage, kind_name, clock_mhz = max(uncertain)
        return (
            f"plans would need a margin of {share:.1%} for noisy measurements, more than {most:.0%}: "
            f"the time of a {kind_name} of stage {stage} at {clock_mhz} MHz is known to ± {error:.1%} only"
        )

    def _remember_plans(self, frontier: Frontier) -> None:
        """Add the plans in force to the known plans, so that a restart does not replace them needlessly.

        They keep their clocks only for the set latency that they were made with.
        """
        before_s, self._made_for_s = self._made_for_s, frontier.set_latency_s
        if before_s is not None and before_s != frontier.set_latency_s:
            return
        for clocks in {id(clocks): clocks for clocks in self._offers.plans}.values():
            if isinstance(clocks, PlannedClocks):
                with suppress(ProfileError):  # it has clocks that are no longer available
                    profiles = frontier.pipeline.profiles
                    clocks_mhz = {
                        c: mhz or highest(profiles[c.stage, c.chunk, c.kind]).clock_mhz
                        for c, mhz in clocks.plan.clocks_mhz.items()
                        if c.kind is not Kind.FIXED
                    }
                    plan = replay(frontier.pipeline, clocks_mhz)
                    mean_s = clocks.plan.iteration_time_s
                    if mean_s > plan.iteration_time_s * (1 + _DIGITS):
                        self._exact.hold(replace(plan, iteration_time_s=mean_s))
                    else:
                        self._exact.remember(plan)

    def drop_frontier(self, slow: SlowPlan | None = None) -> None:
        """Drop the frontier: its clocks have changed, or its predictions were violated.

        The problem being solved is dropped, too. The next frontier has to explain the slow plan, if one is
        given.
        """
        self.frontier = None
        self._exact.forget()
        self.stop_solving()
        self._slow = slow

    def stop_solving(self) -> None:
        """Drop the problem being solved, if there is one."""
        self._exact.drop()
        if self.is_solving and not self.is_in_vain:
            self.is_in_vain = True
            self._buffer.do(DropSolve())

    def announce_retry(self, cause: str, crash_count: int, delay_s: float) -> None:
        """Announce that solving takes longer because the solver's process died."""
        self._buffer.announce(
            event_pb2.JOB_EVENT_TYPE_SOLVE_RETRIED,
            f"solving restarts in {delay_s:.1f} s: {cause}",
            event_pb2.SolveRetried(cause=cause, crash_count=crash_count, delay_s=delay_s),
        )

    def announce_unexplained(self, found: event_pb2.MeasurementsUnexplained) -> None:
        """Announce that the model does not explain the measurements, and by how much it is off."""
        measured_s = found.median_time_s - found.baseline_time_s
        predicted_s = found.predicted_time_s - found.predicted_baseline_time_s
        self._buffer.announce(
            event_pb2.JOB_EVENT_TYPE_MEASUREMENTS_UNEXPLAINED,
            f"the plan's iterations take {measured_s:.6f} s more than stock's, of which the model explains "
            f"{predicted_s:.6f} s; no transfer time explains the remaining {found.residual_s:.6f} s",
            found,
        )

    @property
    def no_slowdown(self) -> NoSlowdown | None:
        """The iteration time that is not slower than stock; None without a frontier."""
        return no_slowdown(self.frontier, self._baseline.time_s) if self.frontier else None

    @property
    def overhead_s(self) -> float:
        """The part of a measured iteration that the frontier, or the latest one, leaves out; 0 before."""
        if self.frontier is None or not self._baseline.time_s:
            return self._record.overhead_s
        return overhead_s(self.frontier, self._baseline.time_s)

    @property
    def missed_policy(self) -> str:
        """How every plan misses the policy, in a sentence; empty if one meets it, or without a frontier."""
        return (
            missed_policy(self.frontier, self._record.policy, self._baseline.time_s) if self.frontier else ""
        )

    def straggler_times_s(self) -> dict[int, float]:
        """Return T' of each straggler; 0 without a frontier."""
        if self.frontier is None:
            return {straggler.pipeline: 0.0 for straggler in self._stragglers}
        _, planned_s = self._own_times_s(self.frontier)
        return {
            straggler.pipeline: straggler_time_s(straggler, self.frontier, self._baseline.time_s, planned_s)
            for straggler in self._stragglers
        }

    def set_policy(self, policy: OperatingPolicy) -> bool:
        """Take a policy; return whether it has changed. Without budget terms it keeps the previous ones."""
        if policy.budget_terms is None:
            policy = replace(policy, budget_terms=self._record.policy.budget_terms)
        is_news = policy != self._record.policy
        if is_news:
            if policy.max_slowdown_percent != self._record.policy.max_slowdown_percent:
                self._record.slowdown_share = 1.0
            if policy.signal != self._record.policy.signal:
                self._record.signal_target = None  # its counts belong to another rule
                self._counters.signal_count = 0
            self._record.policy = policy
            slows = policy != OperatingPolicy(budget_terms=policy.budget_terms)
            is_waiting = slows and self.frontier is not None and self._policy_in_use() is not policy
            waiting = _NOT_IN_USE if is_waiting else ""
            self._buffer.announce(
                event_pb2.JOB_EVENT_TYPE_POLICY_SET,
                "; ".join(filter(None, (f"policy: {policy}", waiting, self.missed_policy))),
                event_pb2.PolicySet(policy=policy_to_proto(policy)),
            )
        return is_news

    def set_budget_target(self, target_time_s: float | None, *, is_urgent: bool) -> bool:
        """Take a power budget's target iteration time, None without one; return whether it has changed."""
        before_s = self._record.budget_target_time_s
        if target_time_s == before_s:
            return False
        self._record.budget_target_time_s = target_time_s
        if target_time_s is None:
            message = "no power budget slows the job any more"
        else:
            change = "slower" if before_s is None or target_time_s > before_s else "faster"
            measured_s = target_time_s + self.overhead_s
            message = f"a power budget makes the job {change}: iterations of {measured_s:.4g} s"
        self._buffer.announce(
            event_pb2.JOB_EVENT_TYPE_BUDGET_TARGET_SET,
            message,
            event_pb2.BudgetTargetSet(
                iteration_time_s=target_time_s, before_iteration_time_s=before_s, is_urgent=is_urgent
            ),
        )
        return True

    def set_signal_target(self, order: SignalTargetSet) -> bool:
        """Take the target that a signal asks for; return whether the iteration time has changed.

        Of this and a budget's target, the slower counts (`retarget`).
        """
        if order.rule != self._record.policy.signal:
            return False
        before = self._signal_target
        before_s = None if before is None else before.target_time_s
        is_same_window = before is not None and before.window == order.window
        self._record.signal_target = SignalTarget(
            order.window,
            order.state,
            order.target_time_s,
            order.value,
            before.done_count if before is not None and is_same_window else 0,
        )
        self._counters.signal_count = 0
        if before is None or (before_s, before.state) != (order.target_time_s, order.state):
            self._buffer.announce(
                event_pb2.JOB_EVENT_TYPE_SIGNAL_TARGET_SET,
                _signal_target_text(self._record.signal_target, order.rule.kind.value, self.overhead_s),
                event_pb2.SignalTargetSet(
                    kind=NUMBERS[order.rule.kind],
                    signal_target=signal_target_to_proto(self._record.signal_target),
                    before_iteration_time_s=before_s,
                ),
            )
        return before_s != order.target_time_s

    def count_done(self, iteration_count: int) -> None:
        """Count iterations of the job, as work of the signal's window."""
        if self._record.signal_target is not None:
            self._counters.signal_count += iteration_count

    def job_signal(self, *, is_planned: bool) -> JobSignal | None:
        """Return the inputs for load shifting by a signal; None if the policy follows none."""
        rule = self._record.policy.signal
        if rule is None:
            return None
        basis = None
        if is_planned and self.frontier is not None and self._policy_in_use() is self._record.policy:
            baseline_s = self._baseline.time_s
            full_s = no_slowdown(self.frontier, baseline_s).time_s
            basis = SpeedCurveBasis(self.frontier, full_s, overhead_s(self.frontier, baseline_s))
        return JobSignal(rule, self._signal_target, basis)

    @property
    def _signal_target(self) -> SignalTarget | None:
        """The target that a signal asks for, with the progress until now."""
        target = self._record.signal_target
        return None if target is None else target.after(self._counters.signal_count)

    @property
    def _signal_target_s(self) -> float | None:
        return None if self._record.signal_target is None else self._record.signal_target.target_time_s

    def curve_basis(self) -> PowerCurveBasis | None:
        """Return the basis of the job's power and speed curve; None without a frontier."""
        if self.frontier is None:
            return None
        baseline_s = self._baseline.time_s
        own_s, planned_s = self._own_times_s(self.frontier)
        slowdowns = {
            pipeline: slow_s / planned_s
            for pipeline, slow_s in self.straggler_times_s().items()
            if slow_s > planned_s
        }
        return PowerCurveBasis(self.frontier, own_s, slowdowns, overhead_s(self.frontier, baseline_s))

    def _own_times_s(self, frontier: Frontier) -> tuple[float, float]:
        """Return the iteration time that the policy allows a pipeline, and that of the plan for it."""
        own_s = own_time_s(
            frontier,
            self._policy_in_use(),
            self._baseline.time_s,
            self._signal_target_s,
            self._record.slowdown_share,
        )
        return own_s, self._exact.plan_within(frontier, own_s).iteration_time_s

    def announce_straggler(self, straggler: Straggler) -> None:
        """Announce a reported straggler, and its T' on the frontier."""
        details = event_pb2.StragglerReported(
            pipeline=straggler.pipeline, target_time_s=self.straggler_times_s()[straggler.pipeline]
        )
        if straggler.iteration_time_s is not None:
            details.iteration_time_s = straggler.iteration_time_s
        elif straggler.slowdown_factor is not None:
            details.slowdown_factor = straggler.slowdown_factor
        self._buffer.announce(
            event_pb2.JOB_EVENT_TYPE_STRAGGLER_REPORTED,
            f"pipeline {straggler.pipeline} is slow: {straggler}",
            details,
        )

    def retarget(self, *, is_urgent: bool = False) -> None:
        """Give every pipeline the plan for its target time; pipelines with the same plan share its version.

        `is_urgent`: offer the plans as urgent.
        """
        if self.frontier is None:
            return
        targets_s = target_times_s(
            self.frontier,
            self._policy_in_use(),
            self._baseline.time_s,
            self.straggler_times_s(),
            len(self._offers),
            self._signal_target_s,
            self._record.slowdown_share,
        )
        if self._record.budget_target_time_s is not None and (basis := self.curve_basis()) is not None:
            targets_s = budget_target_times_s(
                self.frontier, targets_s, self._record.budget_target_time_s, basis.slowdowns
            )
        at_stock = stages_at_stock(self._ranks.usable_clocks_mhz())
        for target_s in sorted(set(targets_s)):
            same = [pipeline for pipeline, own_s in enumerate(targets_s) if own_s == target_s]
            plan = self._exact.plan_within(self.frontier, target_s)
            clocks = planned_clocks(plan, self.frontier, target_s, at_stock)
            self._offers.set_desired(same, clocks, is_urgent=is_urgent)
        # A deadline is kept, and a signal's target: they are times, not comparisons with stock.
        policy = self._policy_in_use()
        is_exact = policy.deadline is not None or policy.signal is not None
        self._exact.tolerance = 0.0 if is_exact else _VARIATION_SHARE * self._rules.guard_tolerance
        if not self.is_solving:
            self._exact.want(self.frontier, dict.fromkeys(sorted(targets_s, reverse=True)))

    def take_plan(self, refinement: Refinement, plan: Plan) -> bool:
        """Take the plan for exactly one iteration time; return whether it was awaited."""
        return self.frontier is not None and self._exact.take(self.frontier, refinement, plan)

    def do_without_plan(self, refinement: Refinement, cause: str) -> bool:
        """Keep the frontier's point because the exact plan failed; return whether it was awaited."""
        is_awaited = self.frontier is not None and self._exact.take(self.frontier, refinement, None)
        if is_awaited:
            self._buffer.announce(
                event_pb2.JOB_EVENT_TYPE_SOLVE_FAILED,
                f"no plan for exactly {refinement.deadline_s:.6f} s, the nearest one stays: {cause}",
                event_pb2.SolveFailed(cause=cause),
            )
        return is_awaited

    def _policy_in_use(self) -> OperatingPolicy:
        """Return the policy; but one without a slowdown if the blocking power is only assumed.

        The assumption errs on the low side: T* would come out too late, and a slowdown would cost energy.
        """
        if self._record.policy.max_average_power_w is None and not is_power_known(self._profiler.profiles):
            return OperatingPolicy()
        return self._record.policy

    def update_expectations(self, changed: Iterable[int]) -> None:
        """Pass the planned duration of each computation of these pipelines to the straggler detection."""
        for pipeline in changed:
            offer = self._offers[pipeline]
            version, clocks = offer.version, offer.clocks
            if self.frontier and isinstance(clocks, PlannedClocks) and self._expected.get(version) != clocks:
                planned_s = {
                    each.computation: each.duration_s for stage in clocks.plan.stages for each in stage
                }
                self._stragglers.expect(version, {**self.frontier.pipeline.fixed_times_s, **planned_s})
                self._expected[version] = clocks
        in_use = self._offers.versions_in_use
        self._expected = {version: some for version, some in self._expected.items() if version in in_use}

    def judge(self, iteration: JobIteration, caps: CapWatch, pair: Pair | None, pairs: PairSums) -> Verdict:
        """Judge an iteration under the plans in force, unless a new frontier is on its way.

        `pair`: the block at stock beside them that it completes, if it does; `pairs`: the sums with that.
        """
        is_in_force = iteration.versions == self._offers.versions and not self._offers.is_beside_plans
        if self.frontier is None or self.is_solving or not is_in_force:
            return Verdict()
        clocks = [offer.clocks for offer in self._offers if isinstance(offer.clocks, PlannedClocks)]
        planned_s = max(some.plan.iteration_time_s for some in clocks)
        predicted_s = prediction_of_s(planned_s, self.frontier, self._baseline.time_s)
        proof, is_late = None, False
        if pair is not None:
            is_late = pair.planned_time_s > predicted_s * (1 + self._rules.guard_tolerance)
            promised = self._promised_ratio(self.frontier, predicted_s)
            proof = self._guard.judge(pair, pairs, promised, iteration.versions)
            self.watch.note_pairs(pairs, promised)
        return self.watch.judge(
            iteration,
            clocks,
            self.frontier,
            predicted_s,
            proof,
            is_late,
            self._stragglers.pipelines,
            self._stragglers.suspects,
            partial(caps.explain, clocks, self._ranks.usable_clocks_mhz(), self._stragglers.pipelines),
        )

    def why_undecided(self, period: Period) -> str | None:
        """Say that noise hides for too long whether the plans of a period keep their promise, if it does."""
        planned_s = self.predicted_time_s()
        if self.frontier is None or planned_s is None:
            return None
        promised = self._promised_ratio(self.frontier, planned_s)
        margin = self._guard.undecided_margin(period, promised)
        if margin is None:
            return None
        return (
            f"iterations vary too much: after an hour under plans they take {period.time_pairs.ratio:.3f} ± "
            f"{margin:.3f} × stock's beside them, and {promised:.3f} × is promised"
        )

    def _promised_ratio(self, frontier: Frontier, predicted_s: float) -> float:
        """Return by which factor iterations may be slower than stock: the prediction where it is wanted."""
        policy = self._policy_in_use()
        if policy.deadline is None and policy.max_average_power_w is None and policy.signal is None:
            return 1 + policy.max_slowdown_percent / 100
        return max(1.0, predicted_s / (no_slowdown(frontier, self._baseline.time_s).time_s + self.overhead_s))

    def predicted_time_s(self) -> float | None:
        """Return the iteration time that the offered plans predict; None without plans."""
        _, planned_s = self._offers.planned_range_s
        if self.frontier is None or not planned_s:
            return None
        return prediction_of_s(planned_s, self.frontier, self._baseline.time_s)

    def validate(self) -> None:
        """Check the invariants."""
        assert self.is_solving or not self.is_in_vain
        assert self._exact.refining is None or (self.frontier is not None and not self.is_solving)


def _signal_target_text(signal_target: SignalTarget, signal: str, overhead_s: float) -> str:
    value = "" if signal_target.value is None else f" ({signal_target.value:g} per kWh)"
    work = f"{signal_target.done_count} of {signal_target.window.iteration_count:.0f} iterations are done"
    match signal_target.state:
        case SignalTargetState.FOLLOWING if signal_target.target_time_s is not None:
            time = f"iterations of {signal_target.target_time_s + overhead_s:.4g} s"
            return f"the {signal} signal{value} asks for {time}; {work}"
        case SignalTargetState.FOLLOWING:
            return f"the {signal} signal{value} asks for no slowdown now; {work}"
        case SignalTargetState.NO_SIGNAL:
            return f"the {signal} signal is unknown: no slowdown; {work}"
        case SignalTargetState.LATE:
            return f"the work can't be done in time: no slowdown; {work}"
        case SignalTargetState.DONE:
            return f"the {signal} policy's work is done, or its time is over: no slowdown; {work}"
