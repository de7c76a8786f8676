"""The table of cases in docs/frameworks.md, from the tests' measurements, one file per case.

    python -m tests.frameworks.case_table docs/frameworks.md

puts it between its markers. If $FRAMEWORKS_RESULTS names a folder, as in `make test-frameworks`, each test
writes its case there once all its checks have passed: only passed cases are published.
"""

import json
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RESULTS_VARIABLE = "FRAMEWORKS_RESULTS"
RESULTS = Path(__file__).parent / "results"
STOCK = "stock"

_BEGIN, _END = "<!-- cases: begin -->", "<!-- cases: end -->"
_SECTION = re.compile(f"{_BEGIN}.*?{_END}", re.DOTALL)


class PageError(Exception):
    """A page without a place for the table."""


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One line. Times and energies are per iteration of the whole job: seconds, joules of all its GPUs.

    Attributes:
        position: position in the table.
        base: its reference: stock, or another one in words.
        iteration_count: number of iterations behind the medians with Perseus.
        packages: packages whose versions are listed.
        note: additional information.
        budget_percent: slowdown against its base that its policy permits.
        energy_errors_percent: by how much predicted energies exceed measured ones, at stock and under the
            plan, over iterations and the gaps between them.
    """

    name: str
    position: int
    title: str
    ranks: str
    base_time_s: float
    time_s: float
    base_energy_j: float
    energy_j: float
    iteration_count: int
    losses_are_equal: bool
    base: str = STOCK
    packages: tuple[str, ...] = ("torch",)
    note: str = ""
    budget_percent: float = 0.0
    energy_errors_percent: tuple[float, float] | None = None

    def keep(self) -> None:
        """Write it to the folder of results, if there is one."""
        if (folder := os.environ.get(RESULTS_VARIABLE)) is None:
            return
        reported = {
            **asdict(self),
            "versions": {name: found for name in self.packages if (found := _version(name))},
            "core_count": os.cpu_count(),
        }
        path = Path(folder) / f"{self.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(reported, indent=2) + "\n")


def _version(package: str) -> str | None:
    try:
        return version(package).partition("+")[0]  # without the build's target
    except PackageNotFoundError:
        return None


def table(results: Path) -> str:
    """Return the table of all cases in a folder, in Markdown."""
    cases = [json.loads(path.read_text()) for path in results.glob("*.json")]
    cases.sort(key=lambda case: (case["position"], case["name"]))
    lines = [
        "| case | ranks | iteration | with Perseus | energy | prediction | losses | versions |",
        "|---|---|---:|---:|---:|---:|---|---|",
        *(_line(case) for case in cases),
    ]
    cores = sorted({case["core_count"] for case in cases})
    return "\n".join(
        [*lines, "", f"Measured on {_listed(map(str, cores))} cores, by the emulated GPUs' counters."]
    )


def _line(case: dict[str, object]) -> str:
    base_s, time_s = float(str(case["base_time_s"])), float(str(case["time_s"]))
    base_j, energy_j = float(str(case["base_energy_j"])), float(str(case["energy_j"]))
    versions = case["versions"]
    assert isinstance(versions, dict)
    base = "" if case["base"] == STOCK else f" {case['base']}"
    errors_percent = case.get("energy_errors_percent")
    assert errors_percent is None or isinstance(errors_percent, list)
    cells = [
        f"{case['title']}{': ' if case['note'] else ''}{case['note']}",
        str(case["ranks"]),
        f"{base_s:.3f} s{base}",
        f"{time_s:.3f} s ({100 * (time_s / base_s - 1):+.1f} %)",
        f"{100 * (energy_j / base_j - 1):+.1f} %",
        "–" if errors_percent is None else ", ".join(f"{error:+.1f} %" for error in errors_percent),
        "equal" if case["losses_are_equal"] else "DIFFER",
        ", ".join(f"{name} {number}" for name, number in versions.items()),
    ]
    return f"| {' | '.join(cells)} |"


def _listed(words: Iterable[str]) -> str:
    return " or ".join(words)


def filled(text: str, results: Path) -> str:
    """Return a page's text with the table filled in. PageError unless its place is there exactly once."""
    if len(_SECTION.findall(text)) != 1:
        raise PageError(
            f"expected {_BEGIN} and {_END} once, found {text.count(_BEGIN)} and {text.count(_END)}"
        )
    return _SECTION.sub(lambda _: f"{_BEGIN}\n{table(results)}\n{_END}", text)


def main(arguments: list[str]) -> int:
    """Fill the named page."""
    (page,) = map(Path, arguments)
    page.write_text(filled(page.read_text(), RESULTS))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
