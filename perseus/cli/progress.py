"""A command's progress on standard error, if that is a terminal: a bar, or a sign of life."""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from perseus.cli.terminal import error_console

SHOW_AFTER_S = 0.5
"""Work that takes less time shows no progress."""

_MIN_SHARE = 0.005
"""The smallest change of a share that is shown."""


class Report(Protocol):
    """Reports progress: a share from 0 to 1, and a new description if it changes."""

    def __call__(self, share: float, description: str | None = None) -> None:
        """Report progress."""


def has_terminal() -> bool:
    """Whether standard error really is a terminal, and not merely forced to be coloured as one."""
    return sys.stderr.isatty()


@contextmanager
def working(description: str, *, is_measured: bool = False) -> Iterator[Report]:
    """Show activity while the block runs; also its progress, if it reports that.

    `is_measured`: the block reports its share.
    """
    with DelayedProgress(
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
            # An update takes about as long as a small maximum flow: skip those that nobody would see.
            if description is not None or abs(share - shown) >= _MIN_SHARE or share >= 1:
                shown = share
                progress.update(task, completed=share, description=description)

        yield report


class DelayedProgress(Progress):
    """Progress that appears only after a delay."""

    _begun_s: float | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield what is shown: nothing during the delay."""
        now_s = time.monotonic()
        self._begun_s = self._begun_s or now_s
        if now_s >= self._begun_s + SHOW_AFTER_S:
            yield from super().get_renderables()
