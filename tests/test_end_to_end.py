"""The whole loop with real processes, sockets, streams and a real database: the demo's story, shorter."""

import json
from pathlib import Path

import pytest

from perseus.demo.observation import Observer
from perseus.demo.story import ANSWERED, PLAN, PROFILING, RECOVERED, STOCK, STRAGGLER, Plot, tell
from tests.workloads import SMALL


class Notes:
    """A display that only takes note of the steps."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.observer: Observer | None = None

    def begin(self, step: str) -> None:
        self.steps.append(step)

    def refresh(self, observer: Observer) -> None:
        self.observer = observer


@pytest.mark.timeout(240)
async def test_a_job_is_profiled_planned_and_replanned_around_a_straggler(tmp_path: Path) -> None:
    notes = Notes()
    plot = Plot(straggler=1, slowdown=1.3, watched_iterations=8)
    measurements = await tell(SMALL, plot, tmp_path, notes)

    assert notes.steps == [STOCK, PROFILING, PLAN, STRAGGLER, ANSWERED, RECOVERED]
    phases = {phase.name: phase for phase in measurements.phases}
    # On a shared machine time is noisy; the demo itself judges more strictly.
    assert phases[PLAN].slowdown_percent < 5
    assert phases[PLAN].saving_percent > 3
    assert phases[STRAGGLER].iteration_count <= 4, "found without a word, and answered"
    assert phases[STRAGGLER].slowdown_percent > 15
    assert phases[ANSWERED].iteration_time_s < 1.3 * phases[PLAN].iteration_time_s * 1.05
    assert phases[ANSWERED].saving_percent > 0
    assert phases[RECOVERED].saving_percent > 3

    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [phase["name"] for phase in summary["phases"]] == notes.steps
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
