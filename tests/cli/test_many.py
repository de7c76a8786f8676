"""Many profiles and scenarios by one command: in processes, and on a Dask cluster that breaks meanwhile."""

import csv
import json
import subprocess
import time
from pathlib import Path

import pytest

from perseus.cli.executor import Executor
from tests.cli.commands import perseus, text
from tests.cli.processes import COMMAND, call
from tests.cli.test_simulate import scenario
from tests.cli.test_solve import rows, written
from tests.service.solving.dask_processes import dask_processes

__all__ = ["scenario"]

slow = pytest.mark.slow("worker processes start")

SWEEP = """
seeds = [1, 2]
forecasts = ["regression", "perfect"]
[[budgets]]
name = "none"
[[budgets]]
name = "cut"
budgets = [{ budget_id = "cut", percent = 98, begin_h = 0.5, end_h = 1 }]
[[policies]]
name = "cheap"
policy = { signal = "price", extra_time_percent = 20, horizon_h = 2 }
"""


@pytest.fixture
def profiles(tmp_path: Path) -> list[Path]:
    return [written(tmp_path / f"stages-{count}.csv", rows(count)) for count in range(1, 5)]


@slow
def test_many_profiles_give_the_frontiers_of_one_each(profiles: list[Path], tmp_path: Path) -> None:
    options = ("--microbatches", 4, "--blocking-power-w", 50, "--points", 20)
    shown = perseus("solve", tmp_path / "*.csv", *options, "--output", tmp_path / "all", "--format", "csv")
    assert shown.exit_code == 0, shown.output
    found = list(csv.DictReader(shown.stdout.splitlines()))
    assert [row["profile"] for row in found] == [str(path) for path in profiles]
    for path, row in zip(profiles, found, strict=True):
        alone = perseus("solve", path, *options, "--output", tmp_path / "one.json", "--format", "json")
        points = {each["point"]: each for each in json.loads(alone.stdout)}
        assert (tmp_path / "all" / f"{path.stem}.json").read_bytes() == (tmp_path / "one.json").read_bytes()
        assert float(row["t_star_s"]) == points["T*"]["iteration_time_s"]
        assert float(row["t_min_saving_percent"]) == points["T_min"]["saving_percent"]
    table = text(perseus("solve", *profiles, *options))
    assert "frontiers of 4 pipelines" in table


@slow
def test_a_problem_that_fails_does_not_stop_the_others(profiles: list[Path], tmp_path: Path) -> None:
    result = perseus(
        "solve", *profiles, "--microbatches", 64, "--output", tmp_path / "all", "--limit-s", 0.001
    )
    assert result.exit_code == 1
    assert text(result).count("took longer than 0.001 s") == 4


def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_here(_self: object, _what: str, pieces: object, on_done: object, _limit_s: float) -> None:
        for number, piece in enumerate(pieces):  # type: ignore[arg-type, var-annotated]
            on_done(number, piece())  # type: ignore[operator]

    monkeypatch.setattr(Executor, "run", run_here)


def test_a_sweep_has_a_row_for_each_run(scenario: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_this_process(monkeypatch)
    sweep = scenario.with_name("sweep.toml")
    sweep.write_text(SWEEP)
    result = perseus("simulate", scenario, "--sweep", sweep, "--format", "json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [(row["budgets"], row["forecast"], row["policy"], row["seed"]) for row in found] == [
        (budgets, forecast, "cheap", seed)
        for budgets in ("none", "cut")
        for forecast in ("regression", "perfect")
        for seed in (1, 2)
    ]
    assert [(row["budget_count"], row["kept_budget_count"]) for row in found] == 4 * [(0, 0)] + 4 * [(1, 1)]
    assert found[0]["energy_j"] != found[1]["energy_j"], "the seed counts"
    assert all(row["cost"] < row["stock_cost"] for row in found)


def test_a_sweep_has_a_table_and_a_picture(scenario: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_this_process(monkeypatch)
    sweep, picture = scenario.with_name("sweep.toml"), scenario.with_name("sweep.svg")
    sweep.write_text("seeds = [1, 2]\n")
    result = perseus("simulate", scenario, "--sweep", sweep, "--plot", picture)
    assert result.exit_code == 0, result.output
    assert "scenario: 2 runs" in text(result)
    assert "as in the scenario" in text(result)
    assert "<!-- cost (% of stock) -->" in picture.read_text()


@pytest.mark.timeout(600)
@pytest.mark.slow("a Dask cluster's processes start, and a command runs there and here")
@pytest.mark.parametrize("victim", ["worker", "scheduler"])
def test_commands_are_complete_though_the_cluster_breaks(
    profiles: list[Path], scenario: Path, tmp_path: Path, victim: str
) -> None:
    for number in range(12):
        (tmp_path / f"copy-{number}.csv").write_text(profiles[-1].read_text().replace("0.2", f"0.2{number}"))
    sweep = tmp_path / "sweep.toml"
    sweep.write_text(SWEEP)
    commands: list[list[object]] = [
        ["solve", "copy-*.csv", "--microbatches", 6, "--points", 40, "--output"],
        ["simulate", scenario, "--sweep", sweep, "--format", "csv"],
    ]
    here = [call(*commands[0], "here", cwd=tmp_path), call(*commands[1], cwd=tmp_path)]
    assert [done.exit_code for done in here] == [0, 0], here
    with dask_processes(tmp_path) as dask:
        there = ["--dask", dask.address, "--dask-insecure"]
        killed = dask.scheduler if victim == "scheduler" else dask.workers[1]
        command = [*COMMAND, *map(str, [*commands[0], "there", *there])]
        with subprocess.Popen(
            command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE
        ) as solving:
            while solving.poll() is None and len(list(tmp_path.glob("there/*"))) < 4:
                time.sleep(0.01)
            killed.kill()
            error = solving.communicate()[1].decode()
        assert solving.returncode == 0, error
        assert error.count("the Dask cluster is not there: own processes solve") == (victim == "scheduler")
        simulated = call(*commands[1], *there, cwd=tmp_path)
        if victim == "worker":
            assert (simulated.exit_code, simulated.stdout) == (0, here[1].stdout)
        else:
            assert simulated.exit_code == 1
            assert "its scheduler can't be reached" in simulated.error
    for path in (tmp_path / "here").iterdir():
        assert (tmp_path / "there" / path.name).read_bytes() == path.read_bytes()
