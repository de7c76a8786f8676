"""Output of `perseus jobs watch`: a line for each update; during profiling, a bar below them.

The bar is on standard error if that is a terminal; otherwise each tried clock gets a line.
"""

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from perseus.cli.amounts import joules, seconds
from perseus.cli.job_tables import gap_text, progress_text
from perseus.cli.progress import has_terminal
from perseus.cli.rows import print_json, row_of
from perseus.cli.terminal import console, error_console
from perseus.v1 import job_pb2, job_service_pb2

_INDENT = " " * 10


class Watching:
    """Prints updates; a context manager."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._bar = Progress(
            TextColumn("profiling"),
            BarColumn(),
            TextColumn("{task.description}", markup=False),
            console=error_console,
            transient=True,
            disable=not has_terminal(),
        )
        self._task: TaskID | None = None
        self._printed_count = -1

    def __enter__(self) -> "Watching":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, update: job_service_pb2.WatchJobResponse) -> None:
        """Print one update."""
        if update.HasField("job"):
            self._show_progress(update.job)
        if self._as_json:
            print_json(row_of(update), is_line=True)
            sys.stdout.flush()
        elif update.HasField("event"):
            at = update.event.create_time.ToDatetime().strftime("%H:%M:%S")
            self._print(f"{at}  {update.event.message}")
        elif update.HasField("iteration"):
            found = update.iteration
            text = (
                f"{_INDENT}pipeline {found.pipeline} iteration {found.iteration}: "
                f"{seconds(found.iteration_time_s)}, {joules(found.energy_j)}, plan {found.plan_version}"
            )
            self._print(text, style="dim")
        elif update.HasField("caught_up"):
            self._print(f"{_INDENT}so far; new events follow", style="dim")
        elif update.HasField("gap"):
            self._print(f"{_INDENT}{gap_text(update.gap)}", style="yellow")

    def _show_progress(self, job: job_pb2.Job) -> None:
        if not job.HasField("profiling_progress"):
            if self._task is not None:
                self._bar.remove_task(self._task)
                self._task = None
            return
        progress = job.profiling_progress
        text = progress_text(progress)
        if not self._bar.disable:
            if self._task is None:
                self._task = self._bar.add_task(text)
            self._bar.update(
                self._task,
                total=progress.max_clock_count,
                completed=progress.tried_clock_count,
                description=text,
            )
        elif not self._as_json and progress.tried_clock_count != self._printed_count:
            self._print(f"{_INDENT}profiling: {text}", style="dim")
        self._printed_count = progress.tried_clock_count

    def _print(self, text: str, style: str = "") -> None:
        # If both are a terminal, lines have to go above the bar.
        has_bar = self._task is not None and sys.stdout.isatty()
        target: Console = self._bar.console if has_bar else console
        target.print(text, highlight=False, style=style)
