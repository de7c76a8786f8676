"""Why a job makes no progress or is back at stock, and what to do about it, as plain values."""

import enum
from dataclasses import dataclass

from perseus.service.domain.specification import Coordinates


class StallReason(enum.Enum):
    """Why a job makes no progress."""

    RANK_MISSING = "rank missing"
    NO_ITERATIONS = "no iterations"
    IRREGULAR_ITERATIONS = "irregular iterations"
    OTHER_CLOCKS = "other clocks"
    REPEATED_ITERATIONS = "repeated iterations"
    NO_ENERGY_ESTIMATES = "no energy estimates"


class StockReason(enum.Enum):
    """Why a job is back at stock, until it is resumed or tried again."""

    NO_CLOCKS = "no clocks"
    NO_COMMON_CLOCK = "no common clock"
    PROFILED_TOO_LITTLE = "profiled too little"
    NO_FRONTIER = "no frontier"
    PREDICTIONS_VIOLATED = "predictions violated"
    UNEXPLAINED = "unexplained"
    NOISY = "noisy"
    UNDECIDED = "undecided"
    QUARANTINED = "quarantined"


NOISY = frozenset({StockReason.NOISY, StockReason.UNDECIDED})
"""The reasons that lie in how much times vary: what helps is known at once."""

RETRIED = frozenset({StockReason.PREDICTIONS_VIOLATED, StockReason.UNEXPLAINED}) | NOISY
"""The reasons that a passing disturbance may have: the job is tried again by itself."""

UNATTENDED_FALL_BACKS = 7
"""Up to so many in a row, tries are left to themselves: those after them have waited for more than a day."""

_RETRY_STEP = (
    "wait: it is tried again by itself; or end what else runs on its hosts, then `perseus jobs resume JOB`"
)

_NEXT_STEPS = {
    StallReason.RANK_MISSING: (
        "`perseus jobs ranks JOB --state expected --state lost --state finished` lists the missing "
        "ranks: read their trainers' logs, and run `perseus doctor --node` on their hosts; both say why "
        "training marks no iterations"
    ),
    StallReason.NO_ITERATIONS: (
        "read the trainers' logs on the hosts of `perseus jobs ranks JOB`: they hang, compile, load "
        "data, or mark no iterations; `perseus doctor --node` there names the cause of the latter, such as a "
        "model in eval()"
    ),
    StallReason.IRREGULAR_ITERATIONS: (
        "`perseus jobs report JOB` counts these iterations: train with the microbatches of the first "
        "iteration"
    ),
    StallReason.OTHER_CLOCKS: (
        "find what else sets clocks on the hosts of `perseus jobs ranks JOB`, with `perseus doctor "
        "--node` there"
    ),
    StallReason.REPEATED_ITERATIONS: (
        "end the rank's second training: `perseus jobs ranks JOB` has the rank's host"
    ),
    StallReason.NO_ENERGY_ESTIMATES: (
        "wait if iterations take far less than a second; otherwise run `perseus agent --self-test` on "
        "the hosts of `perseus jobs ranks JOB`"
    ),
    StockReason.NO_CLOCKS: (
        "`perseus jobs events JOB` says why GPUs refuse clocks; after the repair, `perseus jobs resume JOB`"
    ),
    StockReason.NO_COMMON_CLOCK: (
        "give each stage GPUs of one model (`perseus jobs ranks JOB`), then `perseus jobs resume JOB`"
    ),
    StockReason.PROFILED_TOO_LITTLE: (
        "`perseus jobs events JOB` says what prevents measurements; `perseus jobs resume JOB` "
        "continues with a new budget"
    ),
    StockReason.NO_FRONTIER: (
        "`perseus jobs resume JOB` solves again; if that fails, report the event of `perseus jobs "
        "events JOB --type solve_failed`"
    ),
    StockReason.PREDICTIONS_VIOLATED: (
        "tries have failed for a day: end what else runs on these GPUs and their hosts, then `perseus jobs "
        "resume JOB`; `perseus jobs events JOB --type prediction_violated` has the times"
    ),
    StockReason.UNEXPLAINED: (
        "tries have failed for a day: end what else runs on these GPUs and their hosts, then `perseus jobs "
        "resume JOB`; if nothing does, report the event of `perseus jobs events JOB --type "
        "measurements_unexplained`"
    ),
    StockReason.NOISY: (
        "if the work depends on the data, have the trainer state or count it (relative_work, count_work); if "
        "not, end what else runs on its hosts, or measure longer (profile_iterations); then `perseus jobs "
        "resume JOB`"
    ),
    StockReason.UNDECIDED: (
        "if the work depends on the data, have the trainer state or count it (relative_work, count_work); or "
        "allow a slowdown, `perseus jobs policy JOB --max-slowdown-percent 5`; then `perseus jobs resume JOB`"
    ),
    StockReason.QUARANTINED: (
        "`perseus jobs resume JOB` starts it again from its stored state; report the traceback in the "
        "coordinator's log"
    ),
    None: "`perseus jobs resume JOB` measures and plans again; `perseus jobs events JOB` says what led here",
}
"""Sentences with the commands to run, for people; None: at stock, of a reason that was not stored."""

MAX_CLOCK_STEP = "wait: `perseus power feeds` shows the limit that holds its clocks down"
"""The next step while a job waits until its maximum clock is lifted."""


def needs_person(reason: StallReason | StockReason | None, fall_back_count: int) -> bool:
    """Tell whether a person is asked to resume a job that is back at stock."""
    return reason not in RETRIED or fall_back_count > UNATTENDED_FALL_BACKS


def next_step(reason: StallReason | StockReason | None, job_id: str, fall_back_count: int = 0) -> str:
    """Return what to do next about a job that makes no progress or is back at stock.

    `fall_back_count`: that of its record.
    """
    is_known = needs_person(reason, fall_back_count) or reason in NOISY
    step = _NEXT_STEPS[reason] if is_known else _RETRY_STEP
    return step.replace("JOB", job_id)


_OF_ONE_AND_MANY = {
    StallReason.RANK_MISSING: ("is missing", "are missing"),
    StallReason.NO_ITERATIONS: ("reports no iterations", "report no iterations"),
    StallReason.IRREGULAR_ITERATIONS: (
        "runs iterations that differ from the registered order, or are not measured whole",
        "run iterations that differ from the registered order, or are not measured whole",
    ),
    StallReason.OTHER_CLOCKS: (
        "runs under other clocks than it was offered",
        "run under other clocks than they were offered",
    ),
    StallReason.REPEATED_ITERATIONS: (
        "repeats iteration numbers within one connection",
        "repeat iteration numbers within one connection",
    ),
    StallReason.NO_ENERGY_ESTIMATES: (
        "sends no energy estimates that can be used",
        "send no energy estimates that can be used",
    ),
}


@dataclass(frozen=True, slots=True)
class Stall:
    """A job makes no progress.

    Attributes:
        reason: why.
        rank: the first rank that the reason applies to; None if it applies to all.
        rank_count: how many ranks it applies to.
        since_time_s: since when, on the wall clock.
        iteration: the latest that a rank reported, -1 if none.
    """

    reason: StallReason
    rank: Coordinates | None
    rank_count: int
    since_time_s: float
    iteration: int

    def __str__(self) -> str:
        one, many = _OF_ONE_AND_MANY[self.reason]
        if self.rank is None:
            return f"all {self.rank_count} ranks {many}"
        if self.rank_count == 1:
            return f"{self.rank} {one}"
        return f"{self.rank_count} ranks {many}, the first is {self.rank}"
