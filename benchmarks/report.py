"""Render the result files into ``benchmarks/README.md``, each between its own pair of markers.

Run ``python -m benchmarks.report``. The prose around the markers is written by hand and does not change.
"""

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS

README = Path(__file__).resolve().parent / "README.md"

_SECTION = re.compile(r"(<!-- results: (?P<name>\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def render(text: str, results: Path) -> str:
    """Return the README's text with every marked section filled from its result file, if there is one."""

    def fill(section: re.Match[str]) -> str:
        path = results / f"{section['name']}.json"
        if not path.exists():
            return section[0]
        return section[1] + _render_result(json.loads(path.read_text(encoding="utf-8"))) + section[3]

    return _SECTION.sub(fill, text)


def _render_result(result: dict[str, Any]) -> str:
    machine = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version)
    parts = [_render_table(table) for table in result["tables"]]
    parts.append(
        f"<sub>`python -m benchmarks.{result['benchmark']}`, {result['date']}, {result['duration_s']:.0f} s "
        f"on {machine['cores']} cores ({machine['cpu']}), Python {machine['python']}, {versions}.</sub>\n"
    )
    return "\n" + "\n".join(parts) + "\n"


def _render_table(table: dict[str, Any]) -> str:
    columns = table["columns"]
    lines = [
        f"**{table['title']}**\n",
        "| " + " | ".join(column["name"] for column in columns) + " |",
        "|" + "|".join("---:" if column["form"] else "---" for column in columns) + "|",
    ]
    for row in table["rows"]:
        cells = (_render_cell(cell, column["form"]) for cell, column in zip(row, columns, strict=True))
        lines.append("| " + " | ".join(cells) + " |")
    if table["note"]:
        lines.append(f"\n{table['note']}")
    return "\n".join(lines) + "\n"


def _render_cell(cell: str | float | None, form: str) -> str:
    if cell is None:
        return "–"
    return cell if isinstance(cell, str) else format(cell, form)


if __name__ == "__main__":
    README.write_text(render(README.read_text(encoding="utf-8"), RESULTS), encoding="utf-8")
