"""Findings on a real GPU: a section of `benchmarks/results/gpus.md`, also for the terminal."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path


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

    def markdown(self) -> str:
        """A section of the page."""
        rows = []
        for each in self.findings:
            cells = (each.name, each.found, each.expected, each.verdict.value)
            rows.append(f"| {' | '.join(map(_cell, cells))} |")
        return "\n".join(
            [
                f"### {self.model}, driver {self.driver}",
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
