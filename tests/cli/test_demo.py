"""`perseus demo`: where it can't even begin, and what it says around its scenario."""

import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest

from perseus.demo import example, grid_scenario, serving_scenario, straggler_scenario
from perseus.demo.grid_scenario import FREE, OVER, GridOutcome
from perseus.demo.lateness import Lateness
from perseus.demo.observation import ObservationError
from perseus.demo.power_log import PowerLog, Sample
from perseus.demo.straggler_scenario import STOCK, Outcome
from perseus.demo.summary import Iteration, Measurements
from perseus.v1 import frontier_pb2, job_service_pb2
from tests.cli.commands import perseus
from tests.demo.test_example import trained
from tests.demo.test_serving_scenario import outcome as served


def test_a_script_that_does_not_attach_is_bad_input(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('training')\n")
    output = tmp_path / "out"
    result = perseus("demo --script", script, "--output", output)
    assert result.exit_code == 2
    assert f"{script}: expected `from … import …`" in result.output
    assert not any(output.iterdir())


def play(patch: pytest.MonkeyPatch, module: ModuleType, outcome: object) -> None:
    """Let a scenario be over at once, with an outcome or an error."""

    async def scenario(*_: object, **__: object) -> object:
        print("it runs")
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    patch.setattr(module, SCENARIOS[module], scenario)


SCENARIOS = {
    straggler_scenario: "run_scenario",
    grid_scenario: "run_grid_scenario",
    serving_scenario: "run_serving_scenario",
    example: "show",
}


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    """All scenarios are over at once."""
    measurements = Measurements(pipeline_count=1)
    measurements.add(Iteration(0, 1, 0, 0.8, 1500.0))
    measurements.close_phase(STOCK, [1])
    timeline = job_service_pb2.GetTimelineResponse()
    samples = [Sample(float(second), {"a": 1000.0}, {}) for second in range(1, 81)]
    steps = [FREE, grid_scenario.CUT, grid_scenario.DEEPER, OVER]
    phases = [(step, 20.0 * number, 20.0 * (number + 1)) for number, step in enumerate(steps)]
    straggler = Outcome(measurements, frontier_pb2.Frontier(), timeline, timeline)
    play(monkeypatch, straggler_scenario, straggler)
    play(monkeypatch, grid_scenario, GridOutcome(PowerLog(samples), phases))
    play(monkeypatch, serving_scenario, served(own_w=150.0, ttft_s=0.1))


TITLES = {
    "straggler": "Mean of an iteration",
    "grid": "Power from the GPUs' counters",
    "serving": "Measured by clients and energy counters",
}


@pytest.mark.parametrize("scenario", TITLES)
def test_without_matplotlib_it_says_so_first_and_has_its_table(
    played: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scenario: str
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = perseus(f"demo --scenario {scenario} --output", tmp_path)
    assert result.exit_code == 0, result.output
    warning, *rest = result.output.splitlines()
    assert "no pictures without matplotlib: pip install 'perseus-energy[plot]'" in warning
    text = "\n".join(rest)
    assert text.index("it runs") < text.index(TITLES[scenario]) < text.index("Next:")
    assert ".png" not in text
    assert f"{tmp_path}/summary.json" in text


@pytest.mark.parametrize("scenario", TITLES)
def test_the_table_comes_before_the_pictures(
    played: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scenario: str
) -> None:
    full = Mock(side_effect=OSError(28, "No space left on device", "x.png"))
    monkeypatch.setattr(straggler_scenario, "draw", full)
    monkeypatch.setattr(grid_scenario, "draw", full)
    monkeypatch.setattr(serving_scenario, "draw_serving", full)
    result = perseus(f"demo --scenario {scenario} --output", tmp_path)
    assert result.exit_code == 1
    assert TITLES[scenario] in result.output
    assert "error: x.png: No space left on device" in result.output


BUSY = "this machine was too busy"
AGAIN = f"warning: {BUSY}. Run it again"
SLOW = (served(own_w=150.0, ttft_s=0.6), "ttft: expected 99 % in time, found 0.00 %")
UNPLANNED = (
    ExceptionGroup("tasks", [ObservationError("expected a plan in force")]),
    "expected a plan in force",
)
FULL = (OSError("No space left on device"), "No space left on device")


@pytest.mark.parametrize(
    ("outcome", "busy", "code", "begin"),
    [
        (SLOW, "", 1, "error: "),
        (SLOW, BUSY, 75, AGAIN),
        (UNPLANNED, "", 1, "error: "),
        (UNPLANNED, BUSY, 75, AGAIN),
        (FULL, BUSY, 1, "error: "),
        ((served(own_w=150.0, ttft_s=0.1), ""), BUSY, 0, ""),
    ],
)
def test_only_what_is_not_as_expected_may_be_explained_by_a_busy_machine(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    outcome: tuple[object, str],
    busy: str,
    code: int,
    begin: str,
) -> None:
    play(monkeypatch, serving_scenario, outcome[0])
    monkeypatch.setattr(Lateness, "explain", lambda _: busy)
    result = perseus("demo --scenario serving --output", tmp_path)
    assert result.exit_code == code, result.output
    last = " ".join(result.stderr.splitlines()[-1:])
    assert last.startswith(begin)
    assert outcome[1] in last
    assert bool(last) is (code != 0)
    assert ("too busy" in result.output) is (code == 75)


def test_a_script_is_judged_after_its_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    play(monkeypatch, example, trained(1.322, 103.2, "planned → solving: predictions violated"))
    (script := tmp_path / "train.py").touch()
    result = perseus("demo --script", script, "--output", tmp_path / "out")
    assert result.exit_code == 1, result.output
    assert result.output.index("+32.2 %") < result.output.index("error: plan: expected it to stay in force")


def test_words_are_explained_first_and_it_ends_with_what_is_next(
    played: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(straggler_scenario, "draw", lambda *_: None)
    result = perseus("demo --output", tmp_path)
    assert result.exit_code == 0, result.output
    before, _, after = result.output.partition("it runs")
    assert "stock      the clocks that GPUs have without Perseus" in before
    _, _, last = after.partition("Next:")
    assert f"{tmp_path}/timeline.png" in last
    assert "perseus demo --scenario grid" in last
