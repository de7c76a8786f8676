"""The common part of the demos' screens: live on a terminal, line by line elsewhere."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text


class Screen:
    """A panel that follows a scenario; a context manager.

    `descriptions`: of the scenario's steps; `source`: who measured what is shown.

    Attributes:
        step: the step that began last.
    """

    def __init__(
        self,
        console: Console,
        title: str,
        descriptions: Mapping[str, str],
        source: str = "measured by the agents, published by the coordinator",
    ) -> None:
        self.step = ""
        self._console = console
        self._title = title
        self._descriptions = descriptions
        self._source = source
        self._live = (
            Live(console=console, refresh_per_second=8, transient=True) if console.is_terminal else None
        )

    def __enter__(self) -> Self:
        self._context: AbstractContextManager[object] = self._live or nullcontext()
        self._context.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._context.__exit__(*exception)  # type: ignore[arg-type]

    @property
    def is_live(self) -> bool:
        """Whether there is a terminal."""
        return self._live is not None

    def begin(self, step: str) -> None:
        """Begin a step."""
        self.step = step
        if self._live is None:
            self._console.print(Text.assemble((step, "bold"), f": {self._descriptions[step]}"))

    def note(self, lines: Iterable[str]) -> None:
        """Print lines that stay."""
        for line in lines:
            self._console.print(line, highlight=False)

    def show(self, content: RenderableType) -> None:
        """Replace the content shown on a terminal."""
        assert self._live is not None
        self._live.update(
            Panel(
                content,
                title=Text(self._title, style="bold"),
                subtitle=self._source,
            )
        )

    def print_line(self, line: str) -> None:
        """Print a line if there is no terminal."""
        self._console.print(f"  {line}", highlight=False)


def two_columns(rows: Mapping[str, str]) -> RenderableType:
    """Return words or names with their explanations."""
    table = Table.grid(padding=(0, 2))
    for name, explanation in rows.items():
        table.add_row(Text(f"  {name}", style="bold", no_wrap=True), explanation)
    return table


def steps_table(
    steps: Sequence[str], descriptions: Mapping[str, str], current: str, done: Mapping[str, str]
) -> RenderableType:
    """Return a table of all steps of a scenario; `done`: the results of finished steps."""
    table = Table.grid(padding=(0, 2))
    for step in steps:
        if step in done:
            table.add_row(Text("✔", style="green"), step, done[step])
        elif step == current:
            heading = Text(step, style="bold"), Text(descriptions[step], style="dim")
            table.add_row(Text("●", style="yellow"), *heading)
        else:
            table.add_row(Text("○", style="dim"), Text(step, style="dim"), "")
    return table
