"""Follows a trainer's marks through its iterations, and returns the clock commands for them. Pure.

`clocks.keeper` decides on clocks from the marks. Computations are recognised by identity; an iteration that
deviates from the registered order runs at stock to its end. After `MAX_IRREGULAR` of these in a row,
iterations run at stock from their begin on, until one is regular again. Long gaps between iterations, and a
trainer that is silent for long, also run at stock. Marks may be lost, even an iteration's first: that only
loses samples. Times of marks are limited so that they never lie in the future and never go back.

Finished iterations go to the recorder. The methods return the clocks to be set.
"""

from collections.abc import Sequence

from perseus.agent.clocks.keeper import ClockKeeper, Commands
from perseus.agent.link.packets import ComputationMark, IterationMark, WaitMark
from perseus.agent.rank.order import Order
from perseus.agent.rank.plans import Plans
from perseus.agent.rank.recorder import Iteration, Recorder, Run

MAX_IRREGULAR = 2
"""After this many iterations in a row that deviate from the order, the next ones begin at stock."""


class IterationTracker:
    """One rank's iterations and computations as they run, under its `plans`.

    Attributes:
        begun_iteration: the latest iteration that has begun, -1 before the first.
        marked_at_s: the time of the latest mark.
        keeper: decides about clocks.
    """

    def __init__(self, plans: Plans, recorder: Recorder) -> None:
        self._plans = plans
        self._recorder = recorder
        self.keeper = ClockKeeper()
        self.begun_iteration = -1
        self.marked_at_s = 0.0
        self._iteration: Iteration | None = None
        self._irregular_count = 0

    @property
    def has_iteration(self) -> bool:
        """Whether an iteration is running."""
        return self._iteration is not None

    @property
    def needed_s(self) -> float:
        """The earliest time of which data is needed to measure the current iteration."""
        if self._iteration is not None and self._iteration.needed_s is not None:
            return self._iteration.needed_s
        return self.marked_at_s

    # --- Plans and limits -----------------------------------------------------------------------------------

    def follow_plan(self) -> None:
        """Switch to the plan that is now in force, or to none."""
        plans = self._plans
        is_hold = plans.in_force is not None and plans.in_force.is_hold
        begins_alone = plans.order is not None and plans.order.begins_alone
        self.keeper.follow(plans.clocks_mhz, keeps_gaps=is_hold and begins_alone)
        self._recorder.follow(plans.id_in_force.version, plans.clocks_mhz)

    def follow_order(self) -> None:
        """Switch to the newly registered order, without a plan in force."""
        self._irregular_count = 0
        self.follow_plan()

    def forbid(self) -> None:
        """Set no more clocks. None was ever set, so there is nothing to reset."""
        self.keeper = ClockKeeper()

    def fall_back(self) -> Commands:
        """Go to the fallback clock until the next marks."""
        return self.keeper.fall_back() if self._plans.forbidden is None else []

    def change_immediately(self, now_s: float) -> Commands:
        """Switch clocks at once, which makes the current iteration's measurements useless."""
        if self._iteration is not None:
            self._iteration.has_clock_change = True
        self.follow_plan()
        return self.keeper.go_on(now_s) if self._plans.forbidden is None else []

    def follow_max_clock(self, now_s: float) -> Commands:
        """Apply a new maximum clock, or none, where nothing is planned."""
        return self.keeper.change_fallback(self._plans.fallback_mhz, now_s)

    def fall_back_if_silent(self, now_s: float) -> Commands:
        """Go to the fallback if a plan is in force and the trainer has been silent for long."""
        if self._plans.in_force is not None and self.keeper.is_silent(self.marked_at_s, now_s):
            return self.fall_back()
        return []

    def deviate(self) -> Commands:
        """Note a deviation of the current iteration: stock until the next one begins."""
        if self._iteration is None:
            return []
        self._iteration.has_deviated = True
        return self.fall_back()

    def abandon_iteration(self) -> None:
        """Forget the current iteration, which will not end."""
        self._iteration = None

    # --- Iterations -----------------------------------------------------------------------------------------

    def begin_iteration(self, mark: IterationMark, now_s: float) -> Commands:
        """Begin an iteration under the plan that is in force now."""
        begin_s = self._mark_s(mark.time_ns, now_s)
        return self._begin_iteration(mark.iteration, begin_s, now_s, mark.relative_work_permille / 1000)

    def _begin_iteration(
        self, number: int, begin_s: float | None, now_s: float, relative_work: float = 0.0
    ) -> Commands:
        """Begin an iteration at its first mark; `begin_s` is None if that is not its begin mark."""
        if number <= self.begun_iteration:
            return []
        self.begun_iteration = number
        # This drops a previous iteration whose end mark was lost.
        self._iteration = self._recorder.iteration(number, begin_s, relative_work)
        if self._irregular_count >= MAX_IRREGULAR:
            self._iteration.is_at_stock = True
            return self.fall_back()
        if self._plans.order is not None and self._plans.forbidden is None:
            return self.keeper.begin_iteration(now_s)
        return []

    def end_iteration(self, mark: IterationMark, now_s: float) -> Commands:
        """End an iteration."""
        end_s = self._mark_s(mark.time_ns, now_s)
        commands = self._begin_iteration(mark.iteration, None, now_s)
        iteration, order = self._iteration, self._plans.order
        if iteration is None or iteration.number != mark.iteration:
            return commands
        self._iteration = None
        iteration.work = mark.work
        if order is None:
            return commands
        is_to_order = not iteration.has_deviated and iteration.position == len(order) - 1
        self._irregular_count = 0 if is_to_order else self._irregular_count + 1
        if self._plans.forbidden is None and not iteration.is_at_stock:
            following_mhz = self._plans.following_mhz(mark.iteration)
            commands += self.keeper.end_iteration(end_s, now_s, following_mhz)
        # Iterations of zero length (marks with equal times) don't count.
        if iteration.begin_s is not None and end_s > iteration.begin_s:
            self._recorder.finish(iteration, end_s)
        return commands

    # --- Computations ---------------------------------------------------------------------------------------

    def begin_computation(self, mark: ComputationMark, now_s: float) -> Commands:
        """Begin a computation."""
        begin_s = self._mark_s(mark.time_ns, now_s)
        commands = self._begin_iteration(mark.iteration, None, now_s)
        if (under_way := self._under_way(mark.iteration)) is None:
            return commands
        iteration, order = under_way
        # The ordinal distinguishes a lost mark from a deviation.
        position = order.position(mark.computation)
        if position is None or position != mark.ordinal or position <= iteration.position:
            return commands + self.deviate()
        iteration.position = position
        iteration.runs.append(Run(mark.computation, position, begin_s))
        if self._plans.forbidden is None and not iteration.is_at_stock:
            following_mhz = self._plans.following_mhz(iteration.number)
            commands += self.keeper.begin(position, begin_s, now_s, following_mhz)
        return commands

    def end_computation(self, mark: ComputationMark, now_s: float) -> Commands:
        """End a computation."""
        end_s = self._mark_s(mark.time_ns, now_s)
        commands = self._begin_iteration(mark.iteration, None, now_s)
        if (under_way := self._under_way(mark.iteration)) is None:
            return commands
        iteration, order = under_way
        position = order.position(mark.computation)
        if position is None or position < iteration.position:
            return commands  # a later computation was already seen
        iteration.position = position
        if iteration.runs and iteration.runs[-1].computation == mark.computation:
            iteration.runs[-1].end(end_s)
        if self._plans.forbidden is None and not iteration.is_at_stock:
            following_mhz = self._plans.following_mhz(iteration.number)
            commands += self.keeper.end(position, end_s, now_s, following_mhz)
        return commands

    def wait(self, mark: WaitMark, now_s: float) -> Commands:
        """Begin or end the current computation's wait for others."""
        time_s = self._mark_s(mark.time_ns, now_s)
        commands = self._begin_iteration(mark.iteration, None, now_s)
        under_way = self._under_way(mark.iteration)
        if under_way is not None and under_way[0].runs:
            under_way[0].runs[-1].wait(mark.edge, time_s)
        return commands

    def _under_way(self, number: int) -> tuple[Iteration, Order] | None:
        """Return the current iteration and its order, if it has this number and follows the order."""
        iteration, order = self._iteration, self._plans.order
        if iteration is None or iteration.number != number or iteration.has_deviated or order is None:
            return None
        return iteration, order

    def _mark_s(self, time_ns: int, now_s: float) -> float:
        self.marked_at_s = min(max(time_ns / 1e9, self.marked_at_s), now_s)
        return self.marked_at_s

    def validate(self, supported_clocks_mhz: Sequence[int]) -> None:
        """Check the invariants; AssertionError otherwise. Called by tests after every event."""
        self.keeper.validate(supported_clocks_mhz)
        assert self.keeper.fallback_mhz == self._plans.fallback_mhz
        assert self._plans.forbidden is None or self.keeper.wanted_mhz is None
        if self._iteration is None:
            return
        assert self._iteration.number == self.begun_iteration
        if not self._iteration.has_deviated:
            computations = [run.computation for run in self._iteration.runs]
            order = self._plans.order.computations if self._plans.order is not None else ()
            positions = [order.index(computation) for computation in computations]
            assert positions == sorted(set(positions))
