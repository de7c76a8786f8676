"""What one principal may take of the coordinator: how much at once, how large, how often.

All agents of a cluster may come with one token, so limits on a principal are wide: above any cluster known.
What a single stream may say is limited by itself. Whatever is beyond a limit is refused, with when to come
again where time helps; what comes too often is not refused but waits, and flow control lets its sender wait.
"""

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from perseus.service.domain.errors import InvalidFieldError

if TYPE_CHECKING:  # settings are read where no solver is installed
    from perseus.service.domain.specification import JobSpec

MAX_SETTING = 2**53
"""What a double, a column and a field of the wire hold alike."""

ROWS_LIKE_A_MESSAGE = 1024
"""So many rows of telemetry count as one message more."""


class Limits(BaseModel):
    """Of each principal, as the operator sets them.

    Of the jobs' ranks and computations as they state them, a rank takes some 1.4 KB of memory, a computation
    some 0.4 KB.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    limit_streams: int = Field(
        default=16_384,
        ge=1,
        le=MAX_SETTING,
        description="Agents and watchers of one principal at once, at most.",
    )
    limit_messages_per_s: float = Field(
        default=20_000.0, ge=1, description="Messages a second that all agents of one principal may send."
    )
    limit_stream_messages_per_s: float = Field(
        default=1_000.0, ge=1, description="Messages a second that one agent may send."
    )
    limit_jobs: int = Field(
        default=1_024,
        ge=1,
        le=MAX_SETTING,
        description="Jobs that one principal has registered and that live, at most.",
    )
    limit_ranks: int = Field(
        default=524_288, ge=1, le=MAX_SETTING, description="Ranks of these jobs, at most."
    )
    limit_computations: int = Field(
        default=1_048_576,
        ge=1,
        le=MAX_SETTING,
        description="Computations of the schedules of these jobs, at most.",
    )
    limit_solves: int = Field(
        default=8,
        ge=1,
        le=MAX_SETTING,
        description="Solves and plans that one principal may wait for at once, and listings of the "
        "ledger likewise.",
    )
    limit_solve_computations: int = Field(
        default=8_192, ge=1, le=65_536, description="Computations of a problem that a client has solved."
    )
    limit_batch_rows: int = Field(
        default=100_000, ge=1, le=1_000_000, description="Computations in one batch of telemetry, at most."
    )
    limit_message_bytes: int = Field(
        default=4_194_304, ge=65_536, le=2**30, description="Bytes of one message, unpacked, at most."
    )
    limit_budgets: int = Field(
        default=256,
        ge=1,
        le=MAX_SETTING,
        description="Power budgets of one principal that have not ended, at most.",
    )

    def check_job(self, spec: "JobSpec") -> None:
        """Refuse a job that is beyond the limits by itself: waiting helps nothing.

        Raises:
            InvalidFieldError: names the field.
        """
        spec.parallelism.check()
        if spec.rank_count > self.limit_ranks:
            expected = f"at most {self.limit_ranks} ranks, the limit for one principal"
            raise InvalidFieldError(field="parallelism", expected=expected, found=spec.rank_count)
        if spec.computation_count > self.limit_computations:
            expected = f"at most {self.limit_computations} computations, the limit for one principal"
            raise InvalidFieldError(field="schedule", expected=expected, found=spec.computation_count)

    def check_rows(self, row_count: int) -> None:
        """Refuse a batch of telemetry with too many computations.

        Raises:
            InvalidFieldError: names the field.
        """
        from perseus.service.domain.bounds import check_size

        check_size("computations.iteration", row_count, self.limit_batch_rows)


class TokenBucket:
    """Lets so many messages a second through, and after a silence a second's worth at once. Pure.

    Nothing is ever turned away: what comes too early is told how long to wait, in the order in which it came,
    and whoever comes next waits the longer. (A leaky bucket as a virtual schedule: the generic cell rate
    algorithm, ITU-T I.371, with room for waiting.) The times are of any clock that never goes back, seconds.
    """

    __slots__ = ("_burst_s", "_next_s", "_s_per_message")

    def __init__(self, messages_per_s: float, burst_s: float = 1.0) -> None:
        self._s_per_message = 1.0 / messages_per_s
        self._burst_s = burst_s
        # When the next message is due, if all were spread evenly.
        self._next_s = float("-inf")

    def take(self, now_s: float, message_count: int = 1) -> float:
        """Note messages; return how long they are to wait, 0 if not at all."""
        due_s = self._next_s
        if due_s < now_s:
            due_s = now_s
        self._next_s = due_s = due_s + message_count * self._s_per_message
        wait_s = due_s - now_s - self._burst_s
        return wait_s if wait_s > 0.0 else 0.0
