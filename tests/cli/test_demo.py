"""`perseus demo`: where it can't even begin, and what it says around its scenario."""

import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from perseus.cli.main import app
from perseus.demo import example, grid_scenario, serving_scenario, straggler_scenario
from perseus.demo.example import ScriptOutcome
from perseus.demo.grid_scenario import FREE, OVER, GridOutcome
from perseus.demo.lateness import Lateness
from perseus.demo.observation import ObservationError
from perseus.demo.power_log import PowerLog, Sample
from perseus.demo.serving_scenario import ServingOutcome
from perseus.demo.straggler_scenario import STOCK, Outcome
from perseus.demo.summary import Iteration, Measurements
from perseus.v1 import frontier_pb2, job_service_pb2
from tests.demo.test_example import trained
from tests.demo.test_serving_scenario import outcome as served


def test_a_script_that_does_not_attach_is_bad_input(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('training')\n")
    output = tmp_path / "out"
    result = CliRunner().invoke(app, ["demo", "--script", str(script), "--output", str(output)])
    assert result.exit_code == 2
    assert f"{script}: expected `from … import …`" in result.output
    assert not any(output.iterdir())


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

    async def straggler(*_: object, **__: object) -> Outcome:
        print("it runs")
        return Outcome(measurements, frontier_pb2.Frontier(), timeline, timeline)

    async def grid(*_: object, **__: object) -> GridOutcome:
        print("it runs")
        return GridOutcome(PowerLog(samples), phases)

    monkeypatch.setattr(straggler_scenario, "run_scenario", straggler)

    async def inference(*_: object, **__: object) -> ServingOutcome:
        print("it runs")
        return served(own_w=150.0, ttft_s=0.1)

    monkeypatch.setattr(grid_scenario, "run_grid_scenario", grid)
    monkeypatch.setattr(serving_scenario, "run_serving_scenario", inference)


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
    result = CliRunner().invoke(app, ["demo", "--scenario", scenario, "--output", str(tmp_path)])
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
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "x.png")

    monkeypatch.setattr(straggler_scenario, "draw", full)
    monkeypatch.setattr(grid_scenario, "draw", full)
    monkeypatch.setattr(serving_scenario, "draw_serving", full)
    result = CliRunner().invoke(app, ["demo", "--scenario", scenario, "--output", str(tmp_path)])
    assert result.exit_code == 1
    assert TITLES[scenario] in result.output
    assert "error: x.png: No space left on device" in result.output


@pytest.mark.parametrize(
    ("busy", "code", "begin"),
    [
        ("", 1, "error: "),
        ("this machine was too busy", 75, "warning: this machine was too busy. Run it again"),
    ],
)
@pytest.mark.parametrize("scenario", ["serving", "no plan"])
def test_what_is_not_as_expected_is_no_error_of_a_busy_machine(
    played: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    scenario: str,
    busy: str,
    code: int,
    begin: str,
) -> None:
    async def missed(*_: object, **__: object) -> ServingOutcome:
        if scenario == "no plan":
            raise ExceptionGroup("of tasks", [ObservationError("expected a plan in force")])
        return served(own_w=150.0, ttft_s=0.6)

    monkeypatch.setattr(serving_scenario, "run_serving_scenario", missed)
    monkeypatch.setattr(Lateness, "explain", lambda _: busy)
    result = CliRunner().invoke(app, ["demo", "--scenario", "serving", "--output", str(tmp_path)])
    assert result.exit_code == code, result.output
    last = result.output.splitlines()[-1]
    assert last.startswith(begin)
    wanted = (
        "expected a plan in force" if scenario == "no plan" else "ttft: expected 99 % in time, found 0.00 %"
    )
    assert wanted in last


def test_figures_as_expected_are_worth_no_word_of_a_busy_machine(
    played: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Lateness, "explain", lambda _: "this machine was too busy")
    result = CliRunner().invoke(app, ["demo", "--scenario", "serving", "--output", str(tmp_path)])
    assert result.exit_code == 0
    assert "too busy" not in result.output


def test_a_fault_of_the_machine_is_an_error_also_if_it_is_busy(
    played: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def full(*_: object, **__: object) -> ServingOutcome:
        raise OSError("No space left on device")

    monkeypatch.setattr(serving_scenario, "run_serving_scenario", full)
    monkeypatch.setattr(Lateness, "explain", lambda _: "this machine was too busy")
    result = CliRunner().invoke(app, ["demo", "--scenario", "serving", "--output", str(tmp_path)])
    assert (result.exit_code, result.output.splitlines()[-1]) == (1, "error: No space left on device")


def test_a_script_is_judged_after_its_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def slow(*_: object, **__: object) -> ScriptOutcome:
        return trained(1.322, 103.2, "planned → solving: predictions violated")

    monkeypatch.setattr(example, "show", slow)
    (script := tmp_path / "train.py").touch()
    result = CliRunner().invoke(app, ["demo", "--script", str(script), "--output", str(tmp_path / "out")])
    assert result.exit_code == 1, result.output
    assert result.output.index("+32.2 %") < result.output.index("error: plan: expected it to stay in force")


def test_words_are_explained_first_and_it_ends_with_what_is_next(
    played: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(straggler_scenario, "draw", lambda *_: None)
    result = CliRunner().invoke(app, ["demo", "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    before, _, after = result.output.partition("it runs")
    assert "stock      the clocks that GPUs have without Perseus" in before
    _, _, last = after.partition("Next:")
    assert f"{tmp_path}/timeline.png" in last
    assert "perseus demo --scenario grid" in last
