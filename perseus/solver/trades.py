"""A local search for trades: one computation a step or a few faster, so that others can be slower.

Where they together save more than it costs, the trade is made. The search looks at the whole iteration,
computation by computation, and ends where no such trade is left: the last polish of a plan that is wanted
exactly.
"""

from collections import deque
from collections.abc import Iterable

from perseus.solver.assignment import Assignment, Choice, Neighbourhood
from perseus.solver.graph import EventGraph

_STEPS = 3
"""By how many options a trade may make a computation faster."""


class Trades:
    """Trades over one event graph. A slower option is always a cheaper one (Pareto)."""

    def __init__(self, graph: EventGraph) -> None:
        self._neighbourhood = Neighbourhood(graph)

    def improve(self, choice: Choice, deadline_ps: int) -> Choice:
        """Return a choice that no trade makes cheaper, from one that keeps the deadline.

        After a trade, those next to whom it changed are looked at again.
        """
        assignment = Assignment(self._neighbourhood, choice, deadline_ps)
        waiting = deque(range(len(choice)))
        in_line = [True] * len(choice)
        while waiting:
            i = waiting.popleft()
            in_line[i] = False
            for changed in self._trade(assignment, i):
                neighbours = self._neighbourhood.before[changed] + self._neighbourhood.after[changed]
                for j in (changed, *(neighbour for neighbour, _ in neighbours)):
                    if not in_line[j]:
                        in_line[j] = True
                        waiting.append(j)
        return assignment.choice

    def _trade(self, assignment: Assignment, i: int) -> Iterable[int]:
        """Make ``i`` faster if others can save more than that costs; return whose options have changed."""
        energies_j, now = self._neighbourhood.energies_j[i], assignment.choice[i]
        for option in range(now - 1, max(-1, now - 1 - _STEPS), -1):
            mark = assignment.mark()
            assignment.choose(i, option)
            saved_j = assignment.spend_slack(assignment.rescheduled_since(mark) - {i})
            if saved_j > (energies_j[option] - energies_j[now]) * (1 + 1e-9):
                return assignment.rechosen_since(mark)
            assignment.undo_to(mark)
        return ()
