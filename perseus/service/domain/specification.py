"""A job's specification, and the checks that it must pass to be registered."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from perseus.job_id import is_job_id
from perseus.schedule_name import ScheduleName
from perseus.service.domain.bounds import (
    MAX_COUNT,
    MAX_PIPELINE_POWER_W,
    MAX_TOTAL_TIME_S,
    MIN_DURATION_S,
    MIN_POWER_W,
    check_ascii,
    check_range,
    check_text,
)
from perseus.service.domain.errors import (
    InvalidFieldError,
    InvalidJobIdError,
    PipelineOutOfRangeError,
    RankOutOfRangeError,
)
from perseus.service.domain.signals import SignalRule
from perseus.solver import MAX_LAYER_COUNT, Computation, Path, Schedule, max_computations, named_schedule

_LABEL = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")

MAX_PIPELINE_COUNT = 4096
MAX_STAGE_COUNT = 256
MAX_TENSOR_COUNT = 256
MAX_RANK_COUNT = 65_536
MAX_MICROBATCH_COUNT = 4096
MAX_CHUNK_COUNT = 256
MAX_COMPUTATION_COUNT = 65_536
MAX_FINGERPRINT_LENGTH = 64
MAX_WORK_FINGERPRINT_LENGTH = 128
MAX_REQUEST_ID_LENGTH = 64
MAX_LABEL_COUNT = 16
"""Limits above any known job, so that a typo can't exhaust the coordinator's time and memory.

The largest published pipeline is of 64 stages and 512 microbatches: 65,536 computations (Narayanan et al., SC
'21, Table 1). Registering that many takes less than half a second of a thread, solving them hours."""

MIN_WEIGHT, MAX_WEIGHT = 1e-6, 1e6
"""Bounds on the weight of a job's lost speed."""


def check_job_id(job_id: str) -> str:
    """Return a job's identifier after checking it.

    Raises:
        InvalidJobIdError: it is invalid.
    """
    if not is_job_id(job_id):
        raise InvalidJobIdError(job_id=job_id)
    return job_id


@dataclass(frozen=True, slots=True, order=True)
class Coordinates:
    """The place of one rank in its job; each counts from 0."""

    pipeline: int
    stage: int
    tensor: int

    def __str__(self) -> str:
        return f"pipeline {self.pipeline}, stage {self.stage}, tensor {self.tensor}"


@dataclass(frozen=True, slots=True)
class Parallelism:
    """How a job's ranks are laid out."""

    pipeline_count: int
    stage_count: int
    tensor_count: int

    def all_coordinates(self) -> Iterator[Coordinates]:
        """Return every rank, ordered by pipeline, stage and tensor."""
        return (
            Coordinates(pipeline, stage, tensor)
            for pipeline in range(self.pipeline_count)
            for stage in range(self.stage_count)
            for tensor in range(self.tensor_count)
        )

    def check(self) -> None:
        """Refuse counts below 1 or beyond the limits.

        Raises:
            InvalidFieldError: names the count.
        """
        for name, limit in (
            ("pipeline_count", MAX_PIPELINE_COUNT),
            ("stage_count", MAX_STAGE_COUNT),
            ("tensor_count", MAX_TENSOR_COUNT),
        ):
            check_range(f"parallelism.{name}", getattr(self, name), 1, limit)
        ranks = self.pipeline_count * self.stage_count * self.tensor_count
        if ranks > MAX_RANK_COUNT:
            expected = f"at most {MAX_RANK_COUNT} ranks"
            raise InvalidFieldError(field="parallelism", expected=expected, found=ranks)


@dataclass(frozen=True, slots=True)
class NamedSchedule:
    """A schedule that follows from its name and its counts (`perseus.solver.named_schedule`)."""

    name: ScheduleName
    microbatch_count: int
    chunk_count: int = 0

    def max_computations(self, stage_count: int) -> int:
        """Return how many computations it has at most."""
        return max_computations(
            self.name, stage_count, max(1, self.microbatch_count), max(1, self.chunk_count)
        )


@dataclass(frozen=True, slots=True)
class ExplicitSchedule:
    """A schedule given as each stage's order, stage 0 first; without paths, chunk by chunk."""

    orders: tuple[tuple[Computation, ...], ...]
    paths: tuple[Path, ...] = ()


ScheduleSpec = NamedSchedule | ExplicitSchedule


def build_schedule(spec: ScheduleSpec, stage_count: int) -> Schedule:
    """Expand the schedule.

    Raises:
        InvalidFieldError: a count is out of range.
        ScheduleError: the orders are inconsistent, or deadlock.
    """
    if isinstance(spec, NamedSchedule):
        check_range("schedule.named.microbatch_count", spec.microbatch_count, 1, MAX_MICROBATCH_COUNT)
        check_range("schedule.named.chunk_count", spec.chunk_count, 0, MAX_CHUNK_COUNT)
        _check_size("schedule.named.microbatch_count", spec.max_computations(stage_count))
        return named_schedule(spec.name, stage_count, spec.microbatch_count, spec.chunk_count)
    if len(spec.orders) != stage_count:
        raise InvalidFieldError(
            field="schedule.explicit.stages",
            expected=f"one order for each of {stage_count} stages",
            found=len(spec.orders),
        )
    _check_size("schedule.explicit.stages", sum(len(order) for order in spec.orders))
    _check_numbering(spec.orders)
    step_count = sum(len(path) for path in spec.paths)
    if step_count > MAX_COMPUTATION_COUNT:
        raise InvalidFieldError(
            field="schedule.explicit.paths",
            expected=f"at most {MAX_COMPUTATION_COUNT} steps",
            found=step_count,
        )
    return Schedule(spec.orders, spec.paths)


def _check_size(field: str, computation_count: int) -> None:
    if computation_count > MAX_COMPUTATION_COUNT:
        expected = f"at most {MAX_COMPUTATION_COUNT} computations"
        raise InvalidFieldError(field=field, expected=expected, found=computation_count)


def _check_numbering(orders: Sequence[Sequence[Computation]]) -> None:
    """Refuse microbatch and chunk numbers with large gaps: tables are as wide as the highest number."""
    microbatch = max((each.microbatch for order in orders for each in order), default=0)
    chunk = max((each.chunk for order in orders for each in order), default=0)
    check_range("schedule.explicit.stages.computations.microbatch", microbatch, 0, MAX_MICROBATCH_COUNT - 1)
    check_range("schedule.explicit.stages.computations.chunk", chunk, 0, MAX_CHUNK_COUNT - 1)
    place_count = len(orders) * (1 + chunk) * (1 + microbatch)
    if place_count > MAX_COMPUTATION_COUNT:
        raise InvalidFieldError(
            field="schedule.explicit.stages",
            expected=f"at most {MAX_COMPUTATION_COUNT} stages × chunks × microbatches, without large gaps",
            found=place_count,
        )


@dataclass(frozen=True, slots=True)
class Deadline:
    """A number of whole iterations within a time."""

    iteration_count: int
    time_s: float


@dataclass(frozen=True, slots=True)
class BudgetTerms:
    """What a power budget may do to a job.

    Attributes:
        tolerance_percent: the largest share of the job's own speed that it may take.
        weight: the cost of the job's lost speed, relative to other jobs.
    """

    tolerance_percent: float = 100.0
    weight: float = 1.0

    def __str__(self) -> str:
        return f"a budget may take {self.tolerance_percent:g} % of its speed, of weight {self.weight:g}"

    def check(self) -> None:
        """Refuse impossible figures.

        Raises:
            InvalidFieldError: names the figure.
        """
        check_range("policy.budget_terms.tolerance_percent", self.tolerance_percent, 0, 100)
        check_range("policy.budget_terms.weight", self.weight, MIN_WEIGHT, MAX_WEIGHT)


@dataclass(frozen=True, slots=True)
class OperatingPolicy:
    """Where on the frontier a job runs without a straggler: one rule of four.

    Attributes:
        max_slowdown_percent: how much slower than stock; 0 is no slowdown.
        deadline: run as slowly as it allows.
        max_average_power_w: run as fast as this cap on a pipeline's average power allows.
        signal: run slower while energy is dirty or expensive, faster while it is not.
        budget_terms: what a power budget may do to the job; None if unspecified.
    """

    max_slowdown_percent: float = 0.0
    deadline: Deadline | None = None
    max_average_power_w: float | None = None
    budget_terms: BudgetTerms | None = None
    signal: SignalRule | None = None

    def __str__(self) -> str:
        return self._rule() if self.budget_terms is None else f"{self._rule()}; {self.budget_terms}"

    def _rule(self) -> str:
        if self.deadline is not None:
            return f"{self.deadline.iteration_count} iterations within {self.deadline.time_s:g} s"
        if self.max_average_power_w is not None:
            return f"at most {self.max_average_power_w:g} W a pipeline"
        if self.signal is not None:
            return str(self.signal)
        return f"at most {self.max_slowdown_percent:g} % slower than stock"

    def check(self) -> None:
        """Refuse impossible figures.

        Raises:
            InvalidFieldError: names the figure.
        """
        if self.deadline is not None:
            check_range("policy.deadline.iteration_count", self.deadline.iteration_count, 1, MAX_COUNT)
            check_range("policy.deadline.time_s", self.deadline.time_s, MIN_DURATION_S, MAX_TOTAL_TIME_S)
        if self.max_average_power_w is not None:
            power_w = self.max_average_power_w
            check_range("policy.max_average_power_w", power_w, MIN_POWER_W, MAX_PIPELINE_POWER_W)
        check_range("policy.max_slowdown_percent", self.max_slowdown_percent, 0, 100)
        if self.signal is not None:
            self.signal.check()
        if self.budget_terms is not None:
            self.budget_terms.check()


@dataclass(frozen=True, slots=True)
class Registration:
    """The origin of a job: the request, and the specification that its ranks belong to.

    Attributes:
        spec_fingerprint: of that specification; "" if the ranks don't give one.
        owner: the run's owner, from the kernel of the agent's node; "" if no agent registered it.
        principal: who registered it; "" if unknown.
        labels: the user's labels by key.
    """

    request_id: str
    spec_fingerprint: str = ""
    owner: str = ""
    principal: str = ""
    labels: tuple[tuple[str, str], ...] = ()

    def check(self) -> None:
        """Refuse invalid texts.

        Raises:
            InvalidFieldError: names the text.
        """
        check_request_id(self.request_id)
        check_ascii("spec_fingerprint", self.spec_fingerprint, 0, MAX_FINGERPRINT_LENGTH)
        check_text("owner", self.owner)
        if len(self.labels) > MAX_LABEL_COUNT:
            raise InvalidFieldError(
                field="labels", expected=f"at most {MAX_LABEL_COUNT}", found=len(self.labels)
            )
        if len({key for key, _ in self.labels}) != len(self.labels):
            found = [key for key, _ in self.labels]
            raise InvalidFieldError(field="labels", expected="each key once", found=found)
        for key, value in self.labels:
            if not _LABEL.fullmatch(key):
                expected = "keys of 1 to 63 of a-z, 0-9, -, _ and ., beginning with a letter or digit"
                raise InvalidFieldError(field="labels", expected=expected, found=repr(key[:64]))
            check_text(f"labels[{key}]", value)


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job as it was registered.

    `stage_work`: a fingerprint of each stage's work, stage 0 first, "" where unknown; empty if none is known.
    `stage_layers`: the number of layers of each stage's chunks, likewise; they don't make a different job.
    """

    job_id: str
    parallelism: Parallelism
    schedule: ScheduleSpec
    policy: OperatingPolicy = field(default_factory=OperatingPolicy)
    stage_work: tuple[str, ...] = ()
    stage_layers: tuple[tuple[int, ...], ...] = ()

    @property
    def rank_count(self) -> int:
        """The number of ranks that it declares."""
        counts = self.parallelism
        return counts.pipeline_count * counts.stage_count * counts.tensor_count

    @property
    def computation_count(self) -> int:
        """An upper bound on the computations of all its stages together."""
        if isinstance(self.schedule, NamedSchedule):
            return self.schedule.max_computations(self.parallelism.stage_count)
        return sum(len(order) for order in self.schedule.orders)

    @property
    def size(self) -> int:
        """Its ranks plus its computations; the cost of checks and of the state machine grows with this."""
        return self.rank_count + self.computation_count

    def difference(self, other: "JobSpec") -> str | None:
        """Return the name of the first part in which another specification differs; None if none does."""
        parts = ("parallelism", "schedule", "policy", "stage_work")
        return next((name for name in parts if getattr(self, name) != getattr(other, name)), None)

    def check(self) -> Schedule:
        """Check everything and return the expanded schedule.

        Raises:
            InvalidJobIdError, InvalidFieldError: a value is invalid.
            ScheduleError: the orders are inconsistent, or deadlock.
        """
        check_job_id(self.job_id)
        self.parallelism.check()
        self.policy.check()
        stage_count = self.parallelism.stage_count
        for of_stages in (self.stage_work, self.stage_layers):
            if of_stages and len(of_stages) != stage_count:
                raise InvalidFieldError(
                    field="stage_work",
                    expected=f"none, or one for each of {stage_count} stages",
                    found=len(of_stages),
                )
        for stage, fingerprint in enumerate(self.stage_work):
            name = f"stage_work[{stage}].fingerprint"
            check_ascii(name, fingerprint, 0, MAX_WORK_FINGERPRINT_LENGTH)
        schedule = build_schedule(self.schedule, self.parallelism.stage_count)
        for stage, layers in enumerate(self.stage_layers):
            name = f"stage_work[{stage}].layer_counts"
            chunks = [chunk for path in schedule.paths for of_stage, chunk in path if of_stage == stage]
            chunk_count = 1 + max(chunks, default=-1)
            if len(layers) not in (0, chunk_count):
                expected = f"none, or one for each of {chunk_count} chunks"
                raise InvalidFieldError(field=name, expected=expected, found=len(layers))
            for count in layers:
                check_range(name, count, 1, MAX_LAYER_COUNT)
        return schedule

    def check_rank(self, rank: Coordinates) -> None:
        """Refuse coordinates that the parallelism does not have.

        Raises:
            RankOutOfRangeError: quotes both.
        """
        counts = self.parallelism
        if not (
            0 <= rank.pipeline < counts.pipeline_count
            and 0 <= rank.stage < counts.stage_count
            and 0 <= rank.tensor < counts.tensor_count
        ):
            raise RankOutOfRangeError(
                job_id=self.job_id,
                pipeline_count=counts.pipeline_count,
                stage_count=counts.stage_count,
                tensor_count=counts.tensor_count,
                pipeline=rank.pipeline,
                stage=rank.stage,
                tensor=rank.tensor,
            )

    def check_pipeline(self, pipeline: int) -> None:
        """Refuse a pipeline that the parallelism does not have.

        Raises:
            PipelineOutOfRangeError: quotes both.
        """
        if not 0 <= pipeline < self.parallelism.pipeline_count:
            raise PipelineOutOfRangeError(
                job_id=self.job_id, last_pipeline=self.parallelism.pipeline_count - 1, pipeline=pipeline
            )


def check_request_id(request_id: str) -> None:
    """Refuse an invalid request identifier.

    Raises:
        InvalidFieldError: it is empty, too long or not of printable ASCII characters.
    """
    check_ascii("request_id", request_id, 1, MAX_REQUEST_ID_LENGTH)
