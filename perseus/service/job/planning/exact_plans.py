"""Plans made for exactly the target iteration times. Part of the state machine.

A frontier's points are available at once but lie a step apart. For each target iteration time, a worker makes
the plan for exactly that time, which takes about as long as a few sweeps; when it is done, it replaces the
point if it saves enough. It is kept, so the same target, or a slightly longer one, gets it at once.

Where computations vary, plans are made for the iterations that were seen (`Variation`): a point of the
frontier is too slow for its time then. Until the plan for a time is made, the one for the next shorter time
serves; or, for a much longer time, as by a straggler or a power budget, a point that is as much faster than
that as the plan is on mean times. After a restart it is not known how computations vary, but such plans may
be in force: they stay until it is.

One plan is made at a time. A plan that is no longer wanted is dropped.
"""

from collections import OrderedDict
from collections.abc import Iterable

from perseus.service.domain.commands import DropSolve, Refine
from perseus.service.job.command_buffer import CommandBuffer
from perseus.solver import Frontier, Plan, Refinement, Variation

KEPT_PLANS = 16
"""Plans that a job remembers."""

_SAME_SHARE = 0.01
"""By how much a held plan may exceed a time: stock is measured again and again."""

MIN_GAIN = 0.0002
"""Share of an iteration's energy that a plan has to save to replace another."""


class ExactPlans:
    """The plans of one frontier for target iteration times.

    Attributes:
        refining: the plan that is being made, if any.
        variation: how computations vary; None if they don't, as far as known.
        tolerance: the share by which plans may exceed their times then.
    """

    def __init__(self, buffer: CommandBuffer) -> None:
        self.refining: Refinement | None = None
        self.variation: Variation | None = None
        self.tolerance = 0.0
        self._refining_s = 0.0
        self._buffer = buffer
        # Keyed by target iteration time, most recently wanted last; None if the plan can't be made or does
        # not save enough.
        self._plans: OrderedDict[float, Plan | None] = OrderedDict()
        # Plans for computations that vary, of an earlier frontier.
        self._held: list[Plan] = []

    def forget(self) -> None:
        """Forget all plans, and how computations vary: the frontier was replaced or dropped."""
        self._plans.clear()
        self.variation = None
        self._held.clear()
        self.drop()

    def remember(self, plan: Plan) -> None:
        """Take an earlier plan, replayed on the frontier's pipeline, so that it may stay if it is as good."""
        self._keep(plan.iteration_time_s, plan)

    def hold(self, plan: Plan) -> None:
        """Take an earlier plan for computations that vary, with the time that it took then.

        It stays until there is another one, or they are known not to vary.
        """
        self._held.append(plan)

    def vary(self, variation: Variation | None) -> bool:
        """Take how computations vary, None if they don't; return whether other plans are needed."""
        is_news = variation is not None or bool(self._held)
        if variation is None:
            self._held.clear()
        else:
            if self.variation is not None:  # as it was known before
                self._held = [plan for plan in self._plans.values() if plan is not None]
            self._plans.clear()
            self.drop()
        self.variation = variation
        return is_news

    def drop(self) -> None:
        """Drop the plan being made: it is no longer needed, or something else has to be solved."""
        if self.refining is not None:
            self.refining = None
            self._buffer.do(DropSolve())

    def plan_within(self, frontier: Frontier, iteration_time_s: float) -> Plan:
        """Return at once the best known plan that takes no longer than `iteration_time_s`."""
        point = frontier.plan_within(iteration_time_s)
        kept = [(time_s, plan) for time_s, plan in self._plans.items() if plan is not None]
        if self.variation is not None or self._held:
            held = [(plan.iteration_time_s / (1 + _SAME_SHARE), plan) for plan in self._held]
            made = [
                each
                for each in (kept if self.variation is not None and kept else held)
                if each[0] <= iteration_time_s
            ]
            if not made:
                return point
            made_s, plan = max(made, key=lambda each: each[0])
            point = frontier.plan_within(max(frontier.t_min_s, iteration_time_s * _own_time_s(plan) / made_s))
            return point if point.iteration_time_s > plan.iteration_time_s else plan
        within = [plan for _, plan in kept if plan.iteration_time_s <= iteration_time_s]
        best = min(within, key=lambda plan: plan.effective_energy_j, default=point)
        return best if _pays(best, point, iteration_time_s) else point

    def want(self, frontier: Frontier, iteration_times_s: Iterable[float]) -> None:
        """Have the plans for these iteration times made, the first one first."""
        wanted_s = [min(time_s, frontier.t_slow_s) for time_s in iteration_times_s]
        for time_s in wanted_s:
            if time_s in self._plans:
                self._plans.move_to_end(time_s)
        missing_s = [time_s for time_s in wanted_s if self._is_missing(frontier, time_s)]
        if self.refining is not None and self._refining_s not in missing_s:
            self.drop()
        if self.refining is None and missing_s and (self.variation is not None or not self._held):
            self._refining_s = missing_s[0]
            self.refining = frontier.refinement(self._refining_s, self.variation, self.tolerance)
            self._buffer.do(Refine(self.refining))

    def take(self, frontier: Frontier, refinement: Refinement, plan: Plan | None) -> bool:
        """Take a finished plan, or None if it could not be made; return whether it was awaited."""
        if refinement is not self.refining:
            return False
        self.refining = None
        time_s = self._refining_s
        if plan is not None and self.variation is None:
            plan = plan if _pays(plan, self.plan_within(frontier, time_s), time_s) else None
        self._keep(time_s, plan)
        return True

    def _keep(self, time_s: float, plan: Plan | None) -> None:
        self._plans[time_s] = plan
        while len(self._plans) > KEPT_PLANS:
            self._plans.popitem(last=False)

    def _is_missing(self, frontier: Frontier, time_s: float) -> bool:
        is_exact = self.variation is None and frontier.is_exact(time_s)
        return time_s not in self._plans and not is_exact


def _own_time_s(plan: Plan) -> float:
    """Return a plan's iteration time on mean times."""
    return max(stage[-1].start_s + stage[-1].duration_s for stage in plan.stages if stage)


def _pays(plan: Plan, other: Plan, iteration_time_s: float) -> bool:
    """Tell whether a plan saves enough over another one, both with waiting until `iteration_time_s`."""
    gain_j = other.effective_energy_j - plan.effective_energy_j
    return gain_j > MIN_GAIN * other.energy_until_j(iteration_time_s)
