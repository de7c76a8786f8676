"""Frameworks in versions other than the environment's own, beside it, and the table of all tested ones.

`-m tests.frameworks.versions FOLDER… -- MODULE ARGUMENT…` runs a module with the packages in these folders of
the environment in place of the installed ones.
"""

import runpy
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import pytest

from perseus.agent.probe import tested_versions
from perseus.agent.probe.tested_versions import FRAMEWORKS, Run, version_key

NEWEST_TORCH = "torch-2.15.0"
"""The folder with the newest torch, and the torchtitan that needs it."""
NEWEST_MEGATRON = "megatron-core-0.19.2"
OTHER_MEGATRONS = (
    *(f"megatron-core-{version}" for version in ("0.12.3", "0.13.1", "0.14.0", "0.15.3")),
    NEWEST_MEGATRON,
)
"""Folders with versions other than the installed one."""

ROOT = Path(__file__).parents[2]
MODULE = Path(tested_versions.__file__)
PAGE = ROOT / "docs" / "frameworks.md"
_IN_MODULE = ("# Written by `make framework-versions`.\n", "# End of the generated part.\n")
_IN_PAGE = ("<!-- Written by `make framework-versions`. -->\n", "<!-- End of what is written. -->\n")


def beside(*folders: str) -> list[str]:
    """Return Python's arguments before a module and its arguments; nothing without folders."""
    return ["-m", "tests.frameworks.versions", *folders, "--"] if folders else ["-m"]


def skip_unless_there(*folders: str) -> None:
    """Skip the test if a folder is not installed beside the environment."""
    for folder in folders:
        if not Path(sys.prefix, folder).exists():
            pytest.skip(f"{folder} is not installed beside; `make test-frameworks` has it")


def table(runs: Sequence[Run]) -> str:
    """Return the table of docs/frameworks.md: a row for every hook and version of torch."""
    lines = ["| hook | with | on torch |", "|---|---|---|"]
    for (hook, torch), some in groupby(in_order(runs), key=lambda run: (run[0], run[2])):
        versions = ", ".join(version for _, version, _ in some)
        framework = (
            "its own pipelining and data parallelism" if hook == "torch" else f"{FRAMEWORKS[hook]} {versions}"
        )
        module = "torch" if hook == "accelerate" else hook
        lines.append(f"| `perseus.agent.{module}` | {framework} | {torch} |")
    return "".join(f"{line}\n" for line in lines)


def in_order(runs: Sequence[Run]) -> list[Run]:
    """Sort by hook, by torch's version, by the framework's."""
    return sorted(runs, key=lambda run: (run[0], version_key(run[2]), version_key(run[1])))


def literal(runs: Sequence[Run]) -> str:
    """Return the table of `tested_versions`."""
    rows = "".join(f'    ("{hook}", "{version}", "{torch}"),\n' for hook, version, torch in in_order(runs))
    return f"RUNS: Sequence[Run] = (\n{rows})\n"


def written(file: Path) -> str:
    """Return the text between the marks of the module or the page."""
    _, _, rest = file.read_text().partition(_marks(file)[0])
    return rest.partition(_marks(file)[1])[0]


def write(runs: Sequence[Run]) -> None:
    """Write the table into the module and the page."""
    for file, text in ((MODULE, literal(runs)), (PAGE, table(runs))):
        first, last = _marks(file)
        file.write_text(file.read_text().replace(f"{first}{written(file)}{last}", f"{first}{text}{last}"))


def _marks(file: Path) -> tuple[str, str]:
    return _IN_MODULE if file == MODULE else _IN_PAGE


if __name__ == "__main__":
    end = sys.argv.index("--")
    sys.path[:0] = [str(Path(sys.prefix, folder)) for folder in sys.argv[1:end]]
    sys.argv[:] = sys.argv[end + 1 :]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
