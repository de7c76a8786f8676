"""The inputs and commands of the fleet's state machine."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from perseus.service.domain.power import Budget, FeedStatus
from perseus.service.fleet.power.demand import JobDemand


@dataclass(frozen=True, slots=True)
class BudgetSet:
    """A budget was set, in place of any with its identifier."""

    budget: Budget


@dataclass(frozen=True, slots=True)
class BudgetCancelled:
    """A budget was cancelled."""

    budget_id: str


@dataclass(frozen=True, slots=True)
class JobChanged:
    """A job has appeared, or its demand has changed: a frontier, a straggler, a policy.

    `iteration_time_s`: of a present iteration; averages cover at least three of them. `max_clock_mhz`: the
    job's maximum clock from before the fleet knew of it; None without one.
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
    """The mean power of the last seconds, by energy counters: of each job on each feed.

    Attributes:
        duration_s: the time until now that the means cover.
        jobs_w: by job and feed.
        others_w: by feed, of GPUs that are in no job.
        changing: jobs that ran, at least in part, under plans other than their present ones: the power counts
            for the feeds, but does not measure the plans.
        outdated: those of them that have their new plans by now. Their expected power counts until an
            iteration under the new plans is measured.
        conflicting_counts: by feed, GPUs with conflicting readings.
    """

    duration_s: float
    jobs_w: Mapping[str, Mapping[str, float]]
    others_w: Mapping[str, float]
    changing: Collection[str] = ()
    outdated: Collection[str] = ()
    conflicting_counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FeedShared:
    """The feed is shared with coordinators of other slots.

    Attributes:
        feed: its name.
        share: the part of its limits and ramps that is ours; None while it is not divided: then nothing is
            limited here.
        elsewhere_w, elsewhere_max_w: the expected power of all others now, and without any limit.
    """

    feed: str
    share: float | None
    elsewhere_w: float
    elsewhere_max_w: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Input = BudgetSet | BudgetCancelled | JobChanged | JobLeft | PowerMeasured | FeedShared | Tick


@dataclass(frozen=True, slots=True)
class SetTargetTime:
    """Set a job's target iteration time; None lets its own policy apply.

    `is_urgent`: at once, even within a running computation.
    """

    job_id: str
    iteration_time_s: float | None
    is_urgent: bool


Command = SetTargetTime | FeedStatus
