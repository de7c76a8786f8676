"""The common part of all benchmarks: result files, machine data, and the published data.

A benchmark is a module with a ``run`` that returns its tables; under ``if __name__ == "__main__":`` it calls
``main("<name>", run)``. Its figures go to ``benchmarks/results/<name>.json``; :mod:`benchmarks.report`
renders them into the README.
"""

import json
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from perseus.solver import Pipeline, one_forward_one_backward, read_profile_csv

RESULTS = Path(__file__).resolve().parent / "results"
DATA = Path(__file__).resolve().parents[2] / "shared" / "data"

_PACKAGES = ("numpy", "igraph", "highspy", "lowtime", "torch")

GPUS = {"a100-sxm": "A100 SXM", "a40": "A40"}
BLOCKING_POWER_W = {"a100-sxm": 83.64, "a40": 70.38}
"""Blocking power per GPU, as published."""

GPUS_PER_STAGE = 8

Cell = str | int | float | None
"""A cell of a table; None is rendered as a dash: not measured, or not published."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column's heading, unit included, and the format of its numbers, as in ``format(value, form)``."""

    name: str
    form: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Figures with a title, and a note on how to read them."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


def main(name: str, run: Callable[[], Sequence[Table]]) -> None:
    """Run a benchmark and write its result file; skip it, with the reason, if the data is absent."""
    if not DATA.exists():
        print(f"{name}: skipped, the published data is not at ../shared/data", file=sys.stderr)
        return
    started_s = time.perf_counter()
    tables = run()
    result = {
        "benchmark": name,
        "date": datetime.now(UTC).date().isoformat(),
        "duration_s": round(time.perf_counter() - started_s, 1),
        "machine": {"cpu": _cpu_model(), "cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {package: _version(package) for package in _PACKAGES},
        "tables": [asdict(table) for table in tables],
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for table in tables:
        print(f"\n{table.title}")
        for row in table.rows:
            print("  " + "  ".join(str(cell) for cell in row))
    print(f"\nwrote {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


def print_upright(tables: Sequence[Table]) -> None:
    """Print wide tables of few rows: a line per cell."""
    for table in tables:
        print(table.title)
        for row in table.rows:
            for column, cell in zip(table.columns, row, strict=True):
                shown = cell if cell is None or isinstance(cell, str) else format(cell, column.form)
                print(f"  {column.name:40} {'–' if shown is None else shown}")


def published_pipeline(gpu: str, microbatch_count: int) -> Pipeline:
    """GPT-3 175B as published: 8 stages of 8 GPUs, 1F1B; ``gpu`` is a key of ``GPUS``."""
    profiles = read_profile_csv(DATA / "profiles" / f"gpt3-175b-{gpu}.csv", GPUS_PER_STAGE)
    return Pipeline(
        one_forward_one_backward(8, microbatch_count), profiles, (GPUS_PER_STAGE * BLOCKING_POWER_W[gpu],) * 8
    )


class Stopwatch:
    """CPU seconds that a block of :func:`timed` took."""

    seconds: float = 0.0


@contextmanager
def timed() -> Iterator[Stopwatch]:
    """Time a block: ``with timed() as watch: ...``, then ``watch.seconds``.

    It is CPU time of this process: all timed code runs in one thread, and wall-clock time says little on a
    shared machine.
    """
    watch = Stopwatch()
    started_s = time.process_time()
    try:
        yield watch
    finally:
        watch.seconds = time.process_time() - started_s


def peak_memory_mb() -> float:
    """Return the peak memory of this process, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
