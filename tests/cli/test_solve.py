"""`perseus solve` and `perseus plan`, as users call them."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from perseus.cli.main import app
from perseus.schedule_name import ScheduleName
from perseus.solver import named_schedule
from tests.published_data import PUBLISHED_DATA

CHUNKED = {
    ScheduleName.INTERLEAVED_ONE_FORWARD_ONE_BACKWARD,
    ScheduleName.ZERO_BUBBLE_V,
    ScheduleName.DUAL_PIPE_V,
}
MORE_INSTRUCTIONS = {"forward": ["recomputation"], "backward": ["backward-input", "backward-weight"]}
HEADER = "stage,instruction,frequency,time,energy\n"
A100 = PUBLISHED_DATA / "profiles" / "gpt3-175b-a100-sxm.csv"
needs_a100 = pytest.mark.skipif(not A100.exists(), reason=f"published profile not found at {A100}")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def text(result: Result) -> str:
    """Return the whole output, without the line breaks of a narrow terminal."""
    return " ".join(result.output.split())


def rows(stage_count: int = 2) -> list[str]:
    """Return a profile whose last stage is heavier; every stage can save energy by slowing down."""
    lines = []
    for stage in range(stage_count):
        weight = 1.0 + 0.5 * (stage == stage_count - 1)
        for clock_mhz, time_factor, energy_factor in ((1000, 1.0, 1.0), (800, 1.2, 0.8), (600, 1.6, 0.75)):
            lines.append(
                f"{stage},forward,{clock_mhz},{0.1 * weight * time_factor},{30 * weight * energy_factor}"
            )
            lines.append(
                f"{stage},backward,{clock_mhz},{0.2 * weight * time_factor},{60 * weight * energy_factor}"
            )
    return lines


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.csv"
    path.write_text(HEADER + "\n".join(rows()) + "\n")
    return path


@pytest.fixture
def frontier(tmp_path: Path, profile: Path) -> Path:
    path = tmp_path / "frontier.json"
    result = run("solve", profile, "--microbatches", 4, "--blocking-power-w", 50, "--output", path)
    assert result.exit_code == 0, result.output
    return path


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_moves_of_layers_are_shown_beside_the_frontier(profile: Path, tmp_path: Path) -> None:
    flags = ("--microbatches", 4, "--blocking-power-w", 50, "--rebalance", "--layers", "4,6")
    result = run("solve", profile, *flags, "--plot", tmp_path / "frontier.svg", "--format", "json")
    assert result.exit_code == 0, result.output
    found = {row["point"]: row for row in json.loads(result.output)}
    row, present = found["layers 1 → 0"], found["T_min"]
    assert (present["layers"], row["layers"], row["is_advised"]) == ([4, 6], [5, 5], True)
    assert row["t_min_s"] < present["t_min_s"] == present["iteration_time_s"]
    assert row["iteration_time_s"] <= present["iteration_time_s"]
    assert row["saving_percent"] > row["clocks_alone_saving_percent"] == present["saving_percent"]
    assert "layers 5,5" in (tmp_path / "frontier.svg").read_text()


def test_the_table_of_moved_layers_states_what_it_assumes(profile: Path) -> None:
    result = run("solve", profile, "--microbatches", 4, "--rebalance", "--layers", "4")
    assert result.exit_code == 0
    assert "layers are equal" in text(result)
    assert "33.3 % of the last" in text(result)
    assert "Memory is not considered" in text(result)


def test_blocking_power_by_clock_is_counted_in_the_frontier_and_its_plans(
    tmp_path: Path, profile: Path, frontier: Path
) -> None:
    path = tmp_path / "by-clock.json"
    flags = ("--microbatches", 4, "--blocking-power-w", "1000=50,600=40")
    assert run("solve", profile, *flags, "--output", path).exit_code == 0
    found, constant = load(path), load(frontier)
    assert found["problem"]["blockingPowers"] == [{"clockMhz": [600, 1000], "powerW": [40.0, 50.0]}] * 2
    assert found["baseline"] == constant["baseline"], "all waits are at the highest clock"
    assert found["points"][0]["energyJ"] < constant["points"][0]["energyJ"]
    plan = tmp_path / "plan.json"
    assert run("plan", path, "--no-slowdown", "--output", plan).exit_code == 0
    assert load(plan)["energyJ"] == pytest.approx(found["points"][0]["energyJ"], rel=1e-3)


def test_frontier_file_holds_baseline_and_points_from_t_min_to_t_slow(frontier: Path) -> None:
    found = load(frontier)
    times_s = [point["iterationTimeS"] for point in found["points"]]
    assert times_s == sorted(times_s)
    assert times_s[0] <= found["tMinS"] == pytest.approx(found["baseline"]["iterationTimeS"])
    assert times_s[-1] == pytest.approx(found["tSlowS"])
    assert times_s[found["tStarIndex"]] <= found["tStarS"]
    assert found["points"][0]["energyJ"] < found["baseline"]["energyJ"]
    assert all(point["boundEnergyJ"] <= point["energyJ"] * (1 + 1e-9) for point in found["points"])


def test_frontier_file_prints_zero_values(frontier: Path) -> None:
    profiles = load(frontier)["problem"]["profiles"]
    assert profiles[0]["stage"] == 0
    assert profiles[0]["measurements"][0]["timeSeS"] == 0


def test_table_shows_the_marked_points(profile: Path) -> None:
    result = run("solve", profile, "--microbatches", 4)
    assert result.exit_code == 0
    assert all(name in result.output for name in ("all-max", "T_min", "T*", "T_slow"))


def test_without_standard_errors_nothing_is_promised_and_that_is_said(profile: Path, tmp_path: Path) -> None:
    flags, path, plan = (
        ("--microbatches", 2, "--points", 3),
        tmp_path / "frontier.json",
        tmp_path / "plan.json",
    )
    shown = text(run("solve", profile, *flags, "--output", path))
    assert "Plans have no margin and promise nothing. No standard errors are known of all times:" in shown
    assert "--assume-error-percent assumes some" in shown
    assert "have a margin" not in shown
    rows = json.loads(run("solve", profile, *flags, "--format", "json").stdout)
    assert {row["confidence_percent"] for row in rows} == {None}
    assert load(path)["confidence"] == 0
    assert "It has no margin and promises nothing" in text(
        run("plan", path, "--no-slowdown", "--output", plan)
    )
    planned = json.loads(run("plan", path, "--no-slowdown", "--format", "json").stdout)
    assert {row["confidence_percent"] for row in planned} == {None}
    assert load(plan)["confidence"] == 0


def test_an_error_can_be_assumed_where_none_is_known(profile: Path, tmp_path: Path) -> None:
    flags = ("--microbatches", 2, "--points", 3, "--assume-error-percent", 1)
    path, plan = tmp_path / "frontier.json", tmp_path / "plan.json"
    shown = text(run("solve", profile, *flags, "--output", path))
    assert "plans keep their times in 95 of 100 cases" in shown
    assert "promise nothing" not in shown
    rows = json.loads(run("solve", profile, *flags, "--format", "json").stdout)
    assert {row["confidence_percent"] for row in rows} == {95}
    assert load(path)["confidence"] == 0.95
    assert 0.5 < load(path)["marginTimePercent"] < 2
    assert "It keeps its time in 95 of 100 cases" in text(
        run("plan", path, "--no-slowdown", "--output", plan)
    )
    planned = json.loads(run("plan", path, "--no-slowdown", "--format", "json").stdout)
    assert {row["confidence_percent"] for row in planned} == {95}
    assert load(plan)["confidence"] == 0.95


def test_a_confidence_that_cannot_be_shown_is_lowered_and_that_is_said(profile: Path, tmp_path: Path) -> None:
    flags = ("--microbatches", 2, "--points", 3, "--assume-error-percent", 1, "--confidence-percent")
    path = tmp_path / "frontier.json"
    shown = text(run("solve", profile, *flags, 99.99, "--output", path))
    assert "warning: --confidence-percent: a margin can be shown to suffice in 99.98 of 100 cases" in shown
    assert "plans keep their times in 99.98 of 100 cases" in shown
    assert load(path)["confidence"] == pytest.approx(0.9998)
    assert "It keeps its time in 99.98 of 100 cases" in text(run("plan", path, "--no-slowdown"))
    assert "warning" not in text(run("solve", profile, *flags, 99.98))


def test_times_without_an_error_beside_others_are_counted(profile: Path) -> None:
    """A stated error is kept where another one is assumed."""
    header, first, *others = profile.read_text().splitlines()
    profile.write_text(
        "\n".join([f"{header},time_se", f"{first},0.002", *(f"{row}," for row in others)]) + "\n"
    )
    flags = ("--microbatches", 2, "--points", 3)
    shown = text(run("solve", profile, *flags))
    assert "plans keep their times in 95 of 100 cases" in shown
    assert "No standard errors are known of 11 of 12 times" in shown
    assert "No standard errors" not in text(run("solve", profile, *flags, "--assume-error-percent", 2))


@pytest.mark.parametrize("name", ScheduleName)
def test_every_schedule_is_offered_solved_and_planned(tmp_path: Path, name: ScheduleName) -> None:
    chunk_count = 2 if name in CHUNKED else 1
    path, frontier = tmp_path / "profile.csv", tmp_path / "frontier.json"
    lines = []
    for row in rows():
        stage, instruction, *others = row.split(",")
        for each in (instruction, *MORE_INSTRUCTIONS[instruction]):
            lines += [",".join([stage, each, *others, str(chunk)]) for chunk in range(chunk_count)]
    path.write_text(HEADER.strip() + ",chunk\n" + "\n".join(lines) + "\n")
    result = run("solve", path, "--microbatches", 4, "--points", 5, "--schedule", name, "--output", frontier)
    assert result.exit_code == 0, result.output
    planned = run("plan", frontier, "--no-slowdown", "--format", "json")
    assert planned.exit_code == 0, planned.output
    found = json.loads(planned.output)
    expected = {(c.stage, c.kind.value) for c in named_schedule(name, 2, 4, chunk_count).computations}
    assert {(row["stage"], row["kind"]) for row in found} == expected
    assert f"`{name}`" in (Path(__file__).parents[2] / "docs" / "frontiers.md").read_text()


def test_plot_is_an_image(profile: Path, tmp_path: Path) -> None:
    assert run("solve", profile, "--microbatches", 4, "--plot", tmp_path / "frontier.png").exit_code == 0
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")


def test_baselines_are_shown_beside_the_frontier(profile: Path, tmp_path: Path) -> None:
    flags = ("--microbatches", 4, "--blocking-power-w", 50, "--compare")
    result = run("solve", profile, *flags, "--plot", tmp_path / "frontier.svg", "--format", "json")
    assert result.exit_code == 0, result.output
    by_name = {row["point"]: row for row in json.loads(result.output)}
    for mark in ("T_min", "T*", "T_slow"):
        others = [by_name[f"{name} within {mark}"] for name in ("one clock", "a clock per stage", "EnvPipe")]
        for row in others:
            assert row["iteration_time_s"] <= by_name[mark]["iteration_time_s"]
            assert row["saving_percent"] <= by_name[mark]["saving_percent"] + 1e-9
        # Balancing forwards leaves no clock per stage that is as fast as T_min here, but one for all is.
        of_all, per_stage, _ = others
        assert per_stage["saving_percent"] >= of_all["saving_percent"]
    assert by_name["one clock within T_min"]["saving_percent"] == pytest.approx(0.0)
    drawn = (tmp_path / "frontier.svg").read_text()
    assert "<svg" in drawn


def test_the_table_says_what_its_rows_mean(profile: Path) -> None:
    alone = text(run("solve", profile, "--microbatches", 4))
    assert "saved: against all-max waiting until the same time" in alone
    assert "within:" not in alone
    compared = text(run("solve", profile, "--microbatches", 4, "--compare"))
    assert "within: the plan of least energy that takes no longer, waiting until then" in compared
    assert "per stage: balancing the stages' forwards (Zeus), or one for all if better" in compared


POWER = "MHz: expected energy / time to be 5 to 3,000 W a GPU"
UNITS = "are times in seconds, energies in joules per GPU?"


@pytest.mark.parametrize(
    ("time", "energy", "waiting_w", "expected"),
    [
        (1000, 1, 50, f"profile.csv: stage 0 backward at 600 {POWER}, found 0.141 W: {UNITS}"),
        (1, 1000, 50, f"profile.csv: stage 0 backward at 600 {POWER}, found 140,625 W: {UNITS}"),
        (
            1000,
            1000,
            50,
            "profile.csv: stage 1 backward at 600 MHz: expected a time of at most 10 s, found 480 s: "
            "are times in seconds?",
        ),
        (
            1,
            1,
            50_000,
            "--blocking-power-w: expected a waiting GPU to draw at most what a computing one does, 300 W, "
            "found 50,000 W: is it in watts per GPU?",
        ),
        (1, 1, 50, ""),
    ],
    ids=["ms", "mJ", "ms and mJ", "mW", "right"],
)
def test_a_wrong_unit_is_warned_of(
    tmp_path: Path, time: float, energy: float, waiting_w: float, expected: str
) -> None:
    path = tmp_path / "profile.csv"
    lines = [row.split(",") for row in rows()]
    path.write_text(
        HEADER
        + "\n".join(
            ",".join([*of, str(float(time_s) * time), str(float(energy_j) * energy)])
            for *of, time_s, energy_j in lines
        )
    )
    flags = ("--microbatches", 4, "--gpus-per-stage", 2, "--blocking-power-w", waiting_w)
    result = run("solve", path, *flags, "--format", "csv")
    assert result.exit_code == 0
    assert result.stdout.startswith("point,")
    assert result.stderr.count("warning:") == bool(expected)
    assert expected in " ".join(result.stderr.split())


def test_figures_of_kernels_are_in_their_units(tmp_path: Path) -> None:
    path = tmp_path / "kernels.csv"
    cells = [row.split(",") for row in rows()]
    path.write_text(HEADER + "\n".join(f"{a},{b},{c},{d}e-6,{e}e-6" for a, b, c, d, e in cells) + "\n")
    found = text(run("solve", path, "--microbatches", 4, "--blocking-power-w", 50))
    assert "T* │ 2.520 µs │ 760.5 µJ │" in found
    assert " 0.0 J" not in found


def test_measurements_of_almost_the_same_time_lower_the_bound_and_say_so(tmp_path: Path) -> None:
    path = tmp_path / "profile.csv"
    clocks = ((1000, "0.1", 100), (900, "0.100000000001", 50), (800, "0.2", 20))
    lines = [f"0,{kind},{mhz},{time},{j}" for kind in ("forward", "backward") for mhz, time, j in clocks]
    path.write_text(HEADER + "\n".join(lines) + "\n")
    found = text(run("solve", path, "--microbatches", 64, "--points", 3))
    assert "too steep to plan on: the bounds are lower by at most 1e+02 % for it." in found


def test_a_hull_tolerance_lowers_only_the_bound(profile: Path, tmp_path: Path) -> None:
    found = []
    for percent in (0, 40):
        path = tmp_path / f"{percent}.json"
        flags = ("--microbatches", 4, "--hull-tolerance-percent", percent, "--output", path)
        result = run("solve", profile, *flags)
        assert result.exit_code == 0
        # The output has the possible cost, and the actual one.
        os_error_text = " ".join(result.output.split())
        assert ("lower by at most 40 % of each computation's energy" in os_error_text) == bool(percent)
        assert ("the bounds are lower by at most" in os_error_text) == bool(percent)
        found.append(load(path))
    exact, coarse = found
    assert (coarse["tMinS"], coarse["tSlowS"]) == (exact["tMinS"], exact["tSlowS"])
    bounds_j = [max(point["boundEnergyJ"] for point in each["points"]) for each in found]
    assert 0.6 * bounds_j[0] <= bounds_j[1] <= bounds_j[0]


def test_plan_is_made_for_the_requested_time(frontier: Path, tmp_path: Path) -> None:
    t_min_s = load(frontier)["tMinS"]
    asked_s = t_min_s * 1.0731
    result = run("plan", frontier, "--iteration-time", asked_s, "--output", tmp_path / "plan.json")
    assert result.exit_code == 0, result.output
    plan = load(tmp_path / "plan.json")
    assert plan["iterationTimeS"] <= asked_s
    assert [len(stage["computations"]) for stage in plan["stages"]] == [8, 8]
    first, last = plan["stages"][0]["computations"][0], plan["stages"][1]["computations"][-1]
    assert ("FORWARD" in first["kind"], first["microbatch"]) == (True, 0)
    assert ("BACKWARD" in last["kind"], last["microbatch"]) == (True, 3)
    assert {computation["clockMhz"] for stage in plan["stages"] for computation in stage["computations"]} <= {
        1000,
        800,
        600,
    }


def test_plan_at_t_min_is_no_slower(frontier: Path, tmp_path: Path) -> None:
    t_min_s = load(frontier)["tMinS"]
    assert run("plan", frontier, "--iteration-time", t_min_s, "--output", tmp_path / "p.json").exit_code == 0
    plan = load(tmp_path / "p.json")
    assert plan["iterationTimeS"] == pytest.approx(t_min_s)
    assert plan["energyJ"] < load(frontier)["baseline"]["energyJ"]


def test_no_slowdown_is_measured_against_the_highest_clocks_not_against_t_min(tmp_path: Path) -> None:
    """Every forward is 5 % faster one clock below the highest."""
    path, output = tmp_path / "profile.csv", tmp_path / "frontier.json"
    faster = [
        f"{stage},{kind},900,{time_s},{energy_j}"
        for stage, weight in ((0, 1.0), (1, 1.5))
        for kind, time_s, energy_j in (
            ("forward", 0.095 * weight, 27 * weight),
            ("backward", 0.21 * weight, 54 * weight),
        )
    ]
    path.write_text(HEADER + "\n".join(rows() + faster) + "\n")
    assert run("solve", path, "--microbatches", 4, "--output", output).exit_code == 0
    stock_s = load(output)["baseline"]["iterationTimeS"]
    assert load(output)["tMinS"] < 0.99 * stock_s
    plans = []
    for name, flags in (("none", ["--no-slowdown"]), ("asked", ["--iteration-time", stock_s])):
        written = tmp_path / f"{name}.json"
        result = run("plan", output, *flags, "--output", written)
        assert result.exit_code == 0, result.output
        plans.append(load(written))
    assert plans[0] == plans[1]
    assert 0.99 * stock_s < plans[0]["iterationTimeS"] <= stock_s


@needs_a100
def test_published_profile_saves_at_least_15_6_percent_at_t_min(tmp_path: Path) -> None:
    output = tmp_path / "frontier.json"
    flags = ["--microbatches", 12, "--gpus-per-stage", 8, "--blocking-power-w", 83.64]
    assert run("solve", A100, *flags, "--output", output).exit_code == 0
    found = load(output)
    assert found["tMinS"] == pytest.approx(2.8365, abs=5e-5)
    assert found["tMinS"] == pytest.approx(found["baseline"]["iterationTimeS"])
    assert 1 - found["points"][0]["energyJ"] / found["baseline"]["energyJ"] >= 0.156
