"""The states of a job and the transitions between them.

    WAITING ──all connected──► BASELINE ──measured──► PROFILING ──swept──► SOLVING ──solved──► PLANNED
       ▲   stock                 stock                  clock by clock       stock              plans
       │
       └──── a rank is lost ◄── any of these; measurements are kept, and the way back skips them

    STOCK      something failed: stock on every rank until the job ends, or begins again at the baseline: on
               request, or by itself after a disturbance
    FINISHED   all ranks are done, or the job was ended: stock on every remaining rank

The picture leaves out some transitions back: to PROFILING when clocks are available that were not measured,
to SOLVING when the plans are no longer valid, to BASELINE when a new baseline is requested.
"""

from collections.abc import Mapping

from perseus.service.domain.model import JobState

TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    JobState.WAITING: frozenset(
        {
            JobState.BASELINE,
            JobState.PROFILING,
            JobState.SOLVING,
            JobState.PLANNED,
            JobState.STOCK,
            JobState.FINISHED,
        }
    ),
    JobState.BASELINE: frozenset(
        {
            JobState.WAITING,
            JobState.PROFILING,
            JobState.SOLVING,
            JobState.PLANNED,
            JobState.STOCK,
            JobState.FINISHED,
        }
    ),
    JobState.PROFILING: frozenset(
        {
            JobState.WAITING,
            JobState.BASELINE,
            JobState.PROFILING,
            JobState.SOLVING,
            JobState.STOCK,
            JobState.FINISHED,
        }
    ),
    JobState.SOLVING: frozenset(
        {
            JobState.WAITING,
            JobState.BASELINE,
            JobState.PROFILING,
            JobState.PLANNED,
            JobState.STOCK,
            JobState.FINISHED,
        }
    ),
    JobState.PLANNED: frozenset(
        {
            JobState.WAITING,
            JobState.BASELINE,
            JobState.PROFILING,
            JobState.SOLVING,
            JobState.STOCK,
            JobState.FINISHED,
        }
    ),
    JobState.STOCK: frozenset({JobState.WAITING, JobState.BASELINE, JobState.FINISHED}),
    JobState.FINISHED: frozenset(),
}
"""The states that a job can enter from each state."""

NEEDS_ALL_RANKS = frozenset({JobState.BASELINE, JobState.PROFILING, JobState.SOLVING, JobState.PLANNED})
"""The states that a job leaves when one of its ranks is lost."""


class TransitionError(RuntimeError):
    """The state machine attempted a forbidden transition: a bug."""

    def __init__(self, before: JobState, after: JobState) -> None:
        expected = ", ".join(sorted(state.name for state in TRANSITIONS[before])) or "no other state"
        super().__init__(f"from {before.name}: expected {expected}, found {after.name}")


def check_transition(before: JobState, after: JobState) -> None:
    """Check that a job may go from one state to the other.

    Raises:
        TransitionError: the transition is forbidden.
    """
    if after not in TRANSITIONS[before]:
        raise TransitionError(before, after)
