"""What the fleet is told, and what it says: the inputs and commands of its state machine."""

from collections.abc import Mapping
from dataclasses import dataclass

from perseus.service.fleet.power.budgets import Budget
from perseus.service.fleet.power.demand import JobDemand


@dataclass(frozen=True, slots=True)
class BudgetSet:
    """There is a budget, or another one in the place of that with its identifier."""

    budget: Budget


@dataclass(frozen=True, slots=True)
class BudgetCancelled:
    """A budget counts no more."""

    budget_id: str


@dataclass(frozen=True, slots=True)
class JobChanged:
    """A job is there, or what it can offer has changed: a frontier, a straggler, a policy.

    `iteration_time_s`: how long one takes at present; three of them are the least that is averaged over.
    """

    demand: JobDemand
    iteration_time_s: float


@dataclass(frozen=True, slots=True)
class JobLeft:
    """A job has ended, or its agents are gone."""

    job_id: str


@dataclass(frozen=True, slots=True)
class PowerMeasured:
    """What was drawn in the last seconds, by the counters: of each job on each feed.

    Attributes:
        duration_s: the time until now over which it is the mean.
        jobs_w: by job and feed.
        others_w: by feed, of GPUs that are in no job.
    """

    duration_s: float
    jobs_w: Mapping[str, Mapping[str, float]]
    others_w: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Input = BudgetSet | BudgetCancelled | JobChanged | JobLeft | PowerMeasured | Tick


@dataclass(frozen=True, slots=True)
class SetPace:
    """A job is to take this iteration time from now on; None: as its own policy says.

    `is_urgent`: at once, also inside a running computation.
    """

    job_id: str
    iteration_time_s: float | None
    is_urgent: bool


@dataclass(frozen=True, slots=True)
class FeedStatus:
    """How a feed stands; said whenever anything but its powers changes.

    Attributes:
        feed: its name.
        limit_w: the lowest limit in force; None if there is none.
        in_transition: its ceiling is still on its way, or was a few seconds ago.
        is_compliant: the limit is kept by plans and as measured, or may not be judged yet.
        to_pause: jobs that would have to be paused for it to be kept.
        beyond_tolerance: jobs on it whose fastest plan is slower than their owners allow.
        measured_w: mean over the longer of a minute and three iterations.
        managed_w: the part of planned jobs.
        ceiling_w: what may be drawn now; None if there is no limit.
    """

    feed: str
    limit_w: float | None
    in_transition: bool
    is_compliant: bool
    to_pause: tuple[str, ...]
    beyond_tolerance: tuple[str, ...]
    measured_w: float
    managed_w: float
    ceiling_w: float | None


Command = SetPace | FeedStatus
