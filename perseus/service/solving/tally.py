"""What became of the problems of a lane, counted."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from perseus.metrics.distribution import Distribution

_BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)


class LaneTally:
    """Counts since the lane was made.

    Attributes:
        solved: what problems with an answer took, from asking to the answer.
        failure_count: those that came to nothing; whoever no longer wanted one has not failed.
        crash_count: processes that died.
    """

    def __init__(self) -> None:
        self.solved = Distribution(_BOUNDS_S)
        self.failure_count = 0
        self.crash_count = 0

    @contextmanager
    def problem(self, now_s: Callable[[], float]) -> Iterator[None]:
        """For the length of a block: one problem; `now_s` is any clock that never goes back."""
        begun_s = now_s()
        try:
            yield
        except Exception:
            self.failure_count += 1
            raise
        self.solved.add(now_s() - begun_s)
