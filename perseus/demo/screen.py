"""What the demos' screens share: live where there is a terminal, line by line where there is none."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text


class Screen:
    """A panel that follows a story; a context manager. `descriptions`: of the story's steps.

    Attributes:
        step: the one that has begun last.
    """

    def __init__(self, console: Console, title: str, descriptions: Mapping[str, str]) -> None:
        self.step = ""
        self._console = console
        self._title = title
        self._descriptions = descriptions
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
        """A step has begun."""
        self.step = step
        if self._live is None:
            self._console.print(Text.assemble((step, "bold"), f": {self._descriptions[step]}"))

    def show(self, content: RenderableType) -> None:
        """Show something in a terminal, in the place of what was shown before."""
        assert self._live is not None
        self._live.update(
            Panel(
                content,
                title=Text(self._title, style="bold"),
                subtitle="measured by the agents, told by the coordinator",
            )
        )

    def print_line(self, line: str) -> None:
        """Say something where there is no terminal."""
        self._console.print(f"  {line}", highlight=False)


def steps_table(
    steps: Sequence[str], descriptions: Mapping[str, str], current: str, done: Mapping[str, str]
) -> RenderableType:
    """Return all steps of a story; `done`: what those came to that are over."""
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
