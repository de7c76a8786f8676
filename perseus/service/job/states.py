"""The states of a job, and the ways between them.

    WAITING ──all connected──► BASELINE ──measured──► PROFILING ──swept──► SOLVING ──solved──► PLANNED
       ▲   stock                 stock                  clock by clock       stock              plans
       │
       └──── a rank is lost ◄── any of these; what was measured is kept, and the way back skips it

    STOCK      something failed: stock on every rank until the job ends, or is told to resume at the baseline
    FINISHED   all ranks are done, or the job was ended: stock on every rank that is left

Ways that the picture leaves out lead back: to PROFILING where other clocks are to be had than were measured,
to SOLVING where the plans are of no use any more, to BASELINE where it is asked for again.
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
"""Where a job can go from each state."""

NEEDS_ALL_RANKS = frozenset({JobState.BASELINE, JobState.PROFILING, JobState.SOLVING, JobState.PLANNED})
"""The states that a job leaves when one of its ranks is lost."""


class TransitionError(RuntimeError):
    """A state machine went where it must not: a mistake of ours."""

    def __init__(self, before: JobState, after: JobState) -> None:
        expected = ", ".join(sorted(state.name for state in TRANSITIONS[before])) or "no other state"
        super().__init__(f"from {before.name}: expected {expected}, found {after.name}")


def check_transition(before: JobState, after: JobState) -> None:
    """Check that a job may go from one state to the other.

    Raises:
        TransitionError: it may not.
    """
    if after not in TRANSITIONS[before]:
        raise TransitionError(before, after)
