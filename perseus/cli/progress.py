"""How far a command is, on standard error, and only on a terminal: a bar, or a sign of life."""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from perseus.cli.terminal import error_console

_SHOW_AFTER_S = 0.5
"""Nothing is shown of what takes less."""

_MIN_SHARE = 0.005
"""By how much a share must have changed, so that it is shown."""


class Report(Protocol):
    """Tells how far it is: a share from 0 to 1, and the words beside it if they change."""

    def __call__(self, share: float, description: str | None = None) -> None:
        """It is that far."""


def has_terminal() -> bool:
    """Whether standard error is a terminal; not merely said to be one, so that it is coloured."""
    return sys.stderr.isatty()


@contextmanager
def working(description: str, *, is_measured: bool = False) -> Iterator[Report]:
    """Show for as long as the block takes that something goes on; how far it is, if that is reported.

    `is_measured`: the share is reported.
    """
    with _DelayedProgress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        *([BarColumn(), TextColumn("{task.percentage:>3.0f} %")] if is_measured else []),
        TimeElapsedColumn(),
        console=error_console,
        transient=True,
        disable=not has_terminal(),
    ) as progress:
        task = progress.add_task(description, total=1.0 if is_measured else None)
        shown = 0.0

        def report(share: float, description: str | None = None) -> None:
            nonlocal shown
            # To show it takes about as long as a small maximum flow: not for what nobody would see.
            if description is not None or abs(share - shown) >= _MIN_SHARE or share >= 1:
                shown = share
                progress.update(task, completed=share, description=description)

        yield report


class _DelayedProgress(Progress):
    """Shows itself only once it is worth it."""

    _begun_s: float | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        """See `Progress.get_renderables`."""
        now_s = time.monotonic()
        self._begun_s = self._begun_s or now_s
        if now_s >= self._begun_s + _SHOW_AFTER_S:
            yield from super().get_renderables()
