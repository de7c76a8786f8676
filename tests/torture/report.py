"""Figures in a page of results: the tables below its headings. The prose above them is written by people."""

import os
import platform
import time
from collections.abc import Iterable, Sequence
from pathlib import Path


def publish(
    page: Path | None, heading: str, columns: Sequence[str], rows: Iterable[Sequence[object]], note: str
) -> None:
    """Print a table and a note, and put them in place of those below a heading of a page."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in (columns, *rows)]
    lines.insert(1, "|---" * len(columns) + "|")
    table = "\n".join(lines)
    print(f"{heading}\n\n{table}\n\n{note}")
    if page is not None:
        before, _, below = page.read_text().partition(f"{heading}\n")
        prose, (_, is_last, after) = below.partition("\n| ")[0], below.partition("\n## ")
        section = f"{before}{heading}\n{prose}\n{table}\n\n{note}\n"
        page.write_text(section + (f"\n## {after}" if is_last else ""))


def last_run(took_s: float, seed: int | None = None) -> str:
    """Return a sentence on a run that ends now."""
    seeded = "" if seed is None else f", seed {seed}"
    today, python = time.strftime("%Y-%m-%d"), platform.python_version()
    return f"Last run: {today}, {took_s / 60:.0f} minutes, {os.cpu_count()} cores, Python {python}{seeded}."
