"""What the fleet is told, and what it says: the inputs and commands of its state machine."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from perseus.service.domain.power import Budget, FeedStatus
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
    `ceiling_mhz`: that it is under, from before the fleet knew of it; None without one.
    """

    demand: JobDemand
    iteration_time_s: float
    max_clock_mhz: int | None = None


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
        changing: jobs that drew this, in part at least, under other plans than they are told to have now: it
            counts for the feeds, and says nothing of what the plans draw.
        outdated: those of them that have their new plans by now. What these are expected to draw counts,
            until an iteration under them is measured.
        doubtful_counts: by feed, GPUs of which agents say what can't be, or contradict each other.
    """

    duration_s: float
    jobs_w: Mapping[str, Mapping[str, float]]
    others_w: Mapping[str, float]
    changing: Collection[str] = ()
    outdated: Collection[str] = ()
    conflicting_counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Input = BudgetSet | BudgetCancelled | JobChanged | JobLeft | PowerMeasured | Tick


@dataclass(frozen=True, slots=True)
class SetTargetTime:
    """A job is to take this iteration time from now on; None: as its own policy says.

    `is_urgent`: at once, also inside a running computation.
    """

    job_id: str
    iteration_time_s: float | None
    is_urgent: bool


Command = SetTargetTime | FeedStatus
