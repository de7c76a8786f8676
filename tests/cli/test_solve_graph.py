"""`perseus solve --graph`: the documented example, and the files."""

import json
import os
import re
from pathlib import Path

import pytest

from tests.cli.commands import perseus
from tests.cli.processes import call
from tests.cli.test_solve import load

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "graph" / "workflow.json"
SECTION = (ROOT / "docs" / "frontiers.md").read_text().partition("## Any graph of computations")[2]


def trimmed(output: str) -> list[str]:
    return [line.rstrip() for line in output.strip("\n").splitlines()]


@pytest.mark.slow("starts the documented commands, which solve")
def test_the_documented_commands_print_what_is_documented(tmp_path: Path) -> None:
    commands, documented = (re.search(rf"```{kind}\n(.*?)```", SECTION, re.DOTALL) for kind in ("sh", "text"))
    assert commands is not None
    assert documented is not None
    os.symlink(ROOT / "examples", tmp_path / "examples")
    for line in commands[1].splitlines():
        words = line.split()
        assert words[0] == "perseus"
        ended = call(*words[1:], cwd=tmp_path, environment={"COLUMNS": "110", "PYTHONPATH": str(ROOT)})
        assert ended.exit_code == 0, ended.stderr
        printed = ended.stdout.decode()
    assert trimmed(printed) == trimmed(documented[1])
    rows = {
        row["point"]: row
        for row in json.loads(perseus("solve", "--graph", EXAMPLE, "--format", "json").output)
    }
    later, now = rows["T*"], rows["no slowdown"]
    less_percent = 100 * (1 - later["energy_j"] / now["energy_j"])
    sentence = (
        f"one after {later['iteration_time_s']:.1f} s (T\\*) takes {less_percent:.0f} % less energy than this"
    )
    assert sentence in " ".join(SECTION.split())


def test_a_frontier_is_drawn_and_plans_are_written_with_the_nodes(tmp_path: Path) -> None:
    frontier, plan = tmp_path / "frontier.json", tmp_path / "plan.json"
    flags = ("--points", 10, "--output", frontier, "--plot", tmp_path / "frontier.svg")
    assert perseus("solve", "--graph", EXAMPLE, *flags).exit_code == 0
    assert (tmp_path / "frontier.svg").read_text().startswith("<?xml")
    names = [node["name"] for node in load(EXAMPLE)["nodes"]]
    assert [node["name"] for node in load(frontier)["graph"]["nodes"]] == names
    result = perseus("plan", frontier, "--iteration-time", 12, "--output", plan, "--format", "json")
    rows = json.loads(result.output)
    assert list(rows[0]) == ["node", "resource", "clock_mhz", "start_s", "duration_s", "slowdown_percent"]
    written = load(plan)
    assert written["iterationTimeS"] <= 12
    assert written["stages"] == []
    assert [
        (node["name"], node["clockMhz"], node["startS"], node["durationS"]) for node in written["nodes"]
    ] == [(row["node"], row["clock_mhz"], row["start_s"], row["duration_s"]) for row in rows]
