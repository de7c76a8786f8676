"""Findings on a real GPU: one table for the terminal, and the same for `benchmarks/results/gpus.md`."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from rich.table import Table


class Verdict(Enum):
    """What became of a check."""

    PASSED = "passed"
    FAILED = "FAILED"
    REPORTED = ""
    """There is nothing to be expected."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, what was expected and what was found."""

    name: str
    found: str
    expected: str = ""
    verdict: Verdict = Verdict.REPORTED


def judged(name: str, found: str, expected: str, is_good: bool) -> Finding:
    """A finding that has passed or failed."""
    return Finding(name, found, expected, Verdict.PASSED if is_good else Verdict.FAILED)


@dataclass(frozen=True, slots=True)
class Report:
    """All findings on one GPU."""

    model: str
    driver: str
    versions: str
    date: str
    findings: tuple[Finding, ...]

    @property
    def has_passed(self) -> bool:
        """Whether nothing has failed."""
        return not any(finding.verdict is Verdict.FAILED for finding in self.findings)

    @property
    def title(self) -> str:
        """The GPU, and what it was looked at with."""
        return f"{self.model}, driver {self.driver}"

    def table(self) -> Table:
        """For the terminal."""
        table = Table(title=f"{self.title}; {self.versions}")
        for column in ("check", "found", "expected", ""):
            table.add_column(column, overflow="fold")
        colours = {Verdict.PASSED: "green", Verdict.FAILED: "bold red"}
        for each in self.findings:
            style = colours.get(each.verdict)
            table.add_row(each.name, each.found, each.expected, each.verdict.value, style=style)
        return table

    def markdown(self) -> str:
        """A section of the page."""
        rows = []
        for each in self.findings:
            cells = (each.name, each.found, each.expected, each.verdict.value)
            rows.append(f"| {' | '.join(map(_cell, cells))} |")
        return "\n".join(
            [
                f"### {self.title}",
                "",
                f"{self.date}, {self.versions}, by `make test-gpu`.",
                "",
                "| check | found | expected | |",
                "|---|---|---|---|",
                *rows,
                "",
            ]
        )


def append(page: Path, report: Report) -> None:
    """Put a report at the end of a page, whole or not at all."""
    text = page.read_text().rstrip("\n")
    draft = page.with_name(f".{page.name}.draft")
    draft.write_text(f"{text}\n\n{report.markdown()}")
    draft.replace(page)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
