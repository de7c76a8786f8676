"""What one principal may take of the coordinator: how much at once, how large, how often.

All agents of a cluster may come with one token, so limits on a principal are wide: above any cluster known.
What a single stream may say is limited by itself. Whatever is beyond a limit is refused, with when to come
again where time helps; what comes too often is not refused but waits, and flow control lets its sender wait.
"""

from dataclasses import dataclass

from perseus.service.domain.bounds import check_size
from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.specification import JobSpec

ROWS_LIKE_A_MESSAGE = 1024
"""So many rows of telemetry count as one message more."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of each principal, if nothing else is said.

    Attributes:
        streams: agents and watchers at once.
        messages_per_s: what all its agents may say, on average.
        stream_messages_per_s: what one agent may say, on average.
        jobs: that it has registered and that have not ended.
        ranks, computations: of all these jobs, as they state them: a rank takes some 1.4 KB of memory, a
            computation some 0.4 KB.
        solves: problems and plans asked for by a client at once, waiting or being made; and as many listings
            of the ledger.
        solve_computations: of one such problem.
        batch_rows: computations in one batch of telemetry.
        message_bytes: of one message, unpacked.
        budgets: power budgets that it has set and that have not ended.
    """

    streams: int = 16_384
    messages_per_s: float = 20_000.0
    stream_messages_per_s: float = 1_000.0
    jobs: int = 1_024
    ranks: int = 524_288
    computations: int = 1_048_576
    solves: int = 8
    solve_computations: int = 8_192
    batch_rows: int = 100_000
    message_bytes: int = 4_194_304
    budgets: int = 256

    def check_job(self, spec: JobSpec) -> None:
        """Refuse a job that is beyond the limits by itself: waiting helps nothing.

        Raises:
            InvalidFieldError: names the field.
        """
        spec.parallelism.check()
        if spec.rank_count > self.ranks:
            expected = f"at most {self.ranks} ranks, the limit for one principal"
            raise InvalidFieldError(field="parallelism", expected=expected, found=spec.rank_count)
        if spec.computation_count > self.computations:
            expected = f"at most {self.computations} computations, the limit for one principal"
            raise InvalidFieldError(field="schedule", expected=expected, found=spec.computation_count)

    def check_rows(self, row_count: int) -> None:
        """Refuse a batch of telemetry with too many computations.

        Raises:
            InvalidFieldError: names the field.
        """
        check_size("computations.iteration", row_count, self.batch_rows)


class Bucket:
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
