"""The whole loop with real processes, sockets, streams and a real database: a shorter demo scenario.

What plans save, and that they are no slower, is measured by the demo itself and by `make bench`.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from perseus.demo.observation import Observer
from perseus.demo.straggler_scenario import (
    ANSWERED,
    PLAN,
    PROFILING,
    RECOVERED,
    STOCK,
    STRAGGLER,
    Script,
    draw,
    run_scenario,
)
from tests.small_jobs import planned_soon
from tests.workloads import SMALL

STORY = [STOCK, PROFILING, PLAN, STRAGGLER, ANSWERED, RECOVERED]


class Notes:
    """A display that only records the steps."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.lines: list[str] = []

    def begin(self, step: str) -> None:
        self.steps.append(step)

    def refresh(self, observer: Observer) -> None:
        pass

    def note(self, lines: list[str]) -> None:
        self.lines = lines


@pytest.mark.slow("real processes train, are profiled and planned, and answer a straggler")
@pytest.mark.smoke
@pytest.mark.timeout(480)
async def test_a_job_is_profiled_planned_and_replanned_around_a_straggler(tmp_path: Path) -> None:
    notes = Notes()
    with planned_soon():
        workload = replace(SMALL, evaluation_s=0.2, evaluation_interval=8)
        outcome = await run_scenario(workload, Script(1, 1.3, watched_iterations=5), tmp_path, notes)
    assert notes.steps == STORY
    assert "https://127.0.0.1:" in notes.lines[0]
    written = json.loads((tmp_path / "summary.json").read_text())
    assert [phase["name"] for phase in written["phases"]] == STORY
    assert written["evaluations"]["later_count"] > 0
    draw(outcome, tmp_path)
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
