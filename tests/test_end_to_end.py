"""The whole loop with real processes, sockets, streams and a real database: a shorter demo scenario."""

import json
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
    Outcome,
    Script,
    draw,
    run_scenario,
)
from perseus.demo.summary import Phase
from tests.small_jobs import planned_soon
from tests.workloads import SMALL

STORY = [STOCK, PROFILING, PLAN, STRAGGLER, ANSWERED, RECOVERED]


class Notes:
    """A display that only records the steps."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.lines: list[str] = []
        self.observer: Observer | None = None

    def begin(self, step: str) -> None:
        self.steps.append(step)

    def refresh(self, observer: Observer) -> None:
        self.observer = observer

    def note(self, lines: list[str]) -> None:
        self.lines = lines


async def reported(folder: Path) -> tuple[Notes, Outcome, dict[str, Phase]]:
    """Run the scenario; return what was displayed, the outcome, and each step's figures."""
    notes = Notes()
    plot = Script(straggler=1, slowdown=1.3, watched_iterations=5)
    with planned_soon():
        outcome = await run_scenario(SMALL, plot, folder, notes)
    return notes, outcome, {phase.name: phase for phase in outcome.measurements.phases}


@pytest.mark.slow("real processes train, are profiled and planned, and answer a straggler")
@pytest.mark.smoke
@pytest.mark.timeout(240)
async def test_a_job_is_profiled_planned_and_replanned_around_a_straggler(tmp_path: Path) -> None:
    """The test below checks saving and speed, on an otherwise idle machine."""
    notes, outcome, _ = await reported(tmp_path)

    assert notes.steps == STORY
    assert "https://127.0.0.1:" in notes.lines[0]
    written = json.loads((tmp_path / "summary.json").read_text())
    assert [phase["name"] for phase in written["phases"]] == STORY
    draw(outcome, tmp_path)
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow("real processes train, are profiled and planned, and answer a straggler")
@pytest.mark.serial
@pytest.mark.timeout(240)
async def test_a_plan_saves_at_the_same_speed_and_more_around_a_straggler(tmp_path: Path) -> None:
    _, _, phases = await reported(tmp_path)

    assert phases[PLAN].slowdown_percent < 5
    assert phases[PLAN].saving_percent > 3
    assert phases[STRAGGLER].iteration_count <= 4, "detected without a report, and answered"
    assert phases[STRAGGLER].slowdown_percent > 15
    assert phases[ANSWERED].iteration_time_s < 1.3 * phases[PLAN].iteration_time_s * 1.05
    assert phases[ANSWERED].saving_percent > 0
    assert phases[RECOVERED].saving_percent > 3
