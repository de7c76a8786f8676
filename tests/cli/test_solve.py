"""`perseus solve` and `perseus plan`, as users call them."""

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from perseus.schedule_name import ScheduleName
from perseus.solver import named_schedule
from perseus.v1 import frontier_pb2
from tests.cli.commands import perseus, text

CHUNKED = {
    ScheduleName.INTERLEAVED_ONE_FORWARD_ONE_BACKWARD,
    ScheduleName.ZERO_BUBBLE_V,
    ScheduleName.DUAL_PIPE_V,
}
MORE_INSTRUCTIONS = {"forward": ["recomputation"], "backward": ["backward-input", "backward-weight"]}
HEADER = "stage,instruction,frequency,time,energy\n"
PAGE = Path(__file__).parents[2] / "docs" / "frontiers.md"


def rows(stage_count: int = 2, *, time: float = 1.0, energy: float = 1.0) -> list[str]:
    """Return a profile whose last stage is heavier; every stage can save energy by slowing down.

    `time`, `energy`: factors of all times and energies.
    """
    lines = []
    for stage in range(stage_count):
        weight = 1.0 + 0.5 * (stage == stage_count - 1)
        for clock_mhz, slower, cheaper in ((1000, 1.0, 1.0), (800, 1.2, 0.8), (600, 1.6, 0.75)):
            for kind, time_s, energy_j in (("forward", 0.1, 30.0), ("backward", 0.2, 60.0)):
                time_s, energy_j = time_s * weight * slower * time, energy_j * weight * cheaper * energy
                lines.append(f"{stage},{kind},{clock_mhz},{time_s},{energy_j}")
    return lines


def written(path: Path, lines: list[str], header: str = HEADER) -> Path:
    """Write a profile of these rows."""
    path.write_text("\n".join([header.strip(), *lines]) + "\n")
    return path


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("profile") / "profile.csv", rows())


@pytest.fixture(scope="module")
def frontier(profile: Path) -> Path:
    path = profile.with_name("frontier.json")
    done = perseus("solve --microbatches 4 --blocking-power-w 50", profile, "--output", path)
    assert done.exit_code == 0, done.output
    return path


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def by_point(profile: Path, flags: str, *more: object) -> dict[str, Any]:
    """Return the rows of a frontier, for scripts."""
    done = perseus(f"solve --microbatches 4 --format json {flags}", *more, profile)
    assert done.exit_code == 0, done.output
    return {row["point"]: row for row in json.loads(done.output)}


def test_moves_of_layers_are_shown_beside_the_frontier(profile: Path, tmp_path: Path) -> None:
    picture = tmp_path / "frontier.svg"
    found = by_point(profile, "--blocking-power-w 50 --rebalance --layers 4,6 --plot", picture)
    row, present = found["layers 1 → 0"], found["T_min"]
    assert (present["layers"], row["layers"], row["is_advised"]) == ([4, 6], [5, 5], True)
    assert row["t_min_s"] < present["t_min_s"] == present["iteration_time_s"]
    assert row["iteration_time_s"] <= present["iteration_time_s"]
    assert row["saving_percent"] > row["clocks_alone_saving_percent"] == present["saving_percent"]
    assert "layers 5,5" in picture.read_text()


def test_blocking_power_by_clock_is_counted_in_the_frontier_and_its_plans(
    tmp_path: Path, profile: Path, frontier: Path
) -> None:
    path, plan = tmp_path / "by-clock.json", tmp_path / "plan.json"
    solved = perseus("solve --microbatches 4 --blocking-power-w 1000=50,600=40", profile, "--output", path)
    assert solved.exit_code == 0
    found, constant = load(path), load(frontier)
    assert found["problem"]["blockingPowers"] == [{"clockMhz": [600, 1000], "powerW": [40.0, 50.0]}] * 2
    assert found["baseline"] == constant["baseline"], "all waits are at the highest clock"
    assert found["points"][0]["energyJ"] < constant["points"][0]["energyJ"]
    assert perseus("plan --no-slowdown", path, "--output", plan).exit_code == 0
    assert load(plan)["energyJ"] == pytest.approx(found["points"][0]["energyJ"], rel=1e-3)
    json_format.Parse(plan.read_text(), frontier_pb2.Plan())


def test_a_frontiers_file_has_its_points_and_nothing_but_the_contract(frontier: Path) -> None:
    found = load(frontier)
    times_s = [point["iterationTimeS"] for point in found["points"]]
    assert times_s[0] <= found["tMinS"] == pytest.approx(found["baseline"]["iterationTimeS"])
    assert times_s[-1] == pytest.approx(found["tSlowS"])
    assert times_s[found["tStarIndex"]] <= found["tStarS"]
    assert found["problem"]["profiles"][0]["measurements"][0]["timeSeS"] == 0
    json_format.Parse(frontier.read_text(), frontier_pb2.Frontier())


NOTHING_PROMISED = "Plans have no margin and promise nothing. No standard errors are known of all times:"
LOWERED = "warning: --confidence-percent: a margin can be shown to suffice in 99.98 of 100 cases"


@pytest.mark.parametrize(
    ("flags", "of_frontier", "of_plan", "percent"),
    [
        ("", NOTHING_PROMISED, "It has no margin and promises nothing", None),
        (
            "--assume-error-percent 1",
            "plans keep their times in 95 of 100 cases",
            "It keeps its time in 95 of 100 cases",
            95,
        ),
        ("--assume-error-percent 1 --confidence-percent 99.99", LOWERED, "in 99.98 of 100 cases", 99.98),
    ],
    ids=["no errors", "assumed errors", "more than can be shown"],
)
def test_a_plan_promises_what_the_errors_of_times_allow(
    profile: Path, tmp_path: Path, flags: str, of_frontier: str, of_plan: str, percent: float | None
) -> None:
    path, plan = tmp_path / "frontier.json", tmp_path / "plan.json"
    shown = text(perseus(f"solve --microbatches 2 --points 3 {flags}", profile, "--output", path))
    assert of_frontier in shown
    assert ("promise nothing" in shown) is (percent is None)
    assert of_plan in text(perseus("plan --no-slowdown", path, "--output", plan))
    solved = perseus(f"solve --microbatches 2 --points 3 --format json {flags}", profile)
    planned = perseus("plan --no-slowdown --format json", path)
    for done in (solved, planned):
        confidences_percent = [row["confidence_percent"] for row in json.loads(done.stdout)]
        assert confidences_percent == pytest.approx(len(confidences_percent) * [percent], abs=1e-4)
    for file in (path, plan):
        assert load(file)["confidence"] == pytest.approx((percent or 0) / 100)
    assert (0.5 < load(path)["marginTimePercent"] < 3) is (percent is not None)


def test_times_without_an_error_beside_others_are_counted(tmp_path: Path) -> None:
    """A stated error is kept where another one is assumed."""
    first, *others = rows()
    lines = [f"{first},0.002", *(f"{row}," for row in others)]
    path = written(tmp_path / "profile.csv", lines, f"{HEADER.strip()},time_se")
    shown = text(perseus("solve --microbatches 2 --points 3", path))
    assert "plans keep their times in 95 of 100 cases" in shown
    assert "No standard errors are known of 11 of 12 times" in shown
    assumed = perseus("solve --microbatches 2 --points 3 --assume-error-percent 2", path)
    assert "No standard errors" not in text(assumed)


@pytest.mark.parametrize("name", ScheduleName)
def test_every_schedule_is_offered_solved_and_planned(tmp_path: Path, name: ScheduleName) -> None:
    chunk_count = 2 if name in CHUNKED else 1
    lines = []
    for row in rows():
        stage, instruction, *others = row.split(",")
        for each in (instruction, *MORE_INSTRUCTIONS[instruction]):
            lines += [",".join([stage, each, *others, str(chunk)]) for chunk in range(chunk_count)]
    path = written(tmp_path / "profile.csv", lines, f"{HEADER.strip()},chunk")
    frontier = tmp_path / "frontier.json"
    solved = perseus(f"solve --microbatches 4 --points 5 --schedule {name}", path, "--output", frontier)
    assert solved.exit_code == 0, solved.output
    planned = perseus("plan --no-slowdown --format json", frontier)
    assert planned.exit_code == 0, planned.output
    expected = {(c.stage, c.kind.value) for c in named_schedule(name, 2, 4, chunk_count).computations}
    assert {(row["stage"], row["kind"]) for row in json.loads(planned.output)} == expected
    assert f"`{name}`" in PAGE.read_text()


def test_baselines_are_shown_beside_the_frontier(profile: Path, tmp_path: Path) -> None:
    picture = tmp_path / "frontier.png"
    found = by_point(profile, "--blocking-power-w 50 --compare --plot", picture)
    for mark in ("T_min", "T*", "T_slow"):
        others = [found[f"{name} within {mark}"] for name in ("one clock", "a clock per stage", "EnvPipe")]
        for row in others:
            assert row["iteration_time_s"] <= found[mark]["iteration_time_s"]
            assert row["saving_percent"] <= found[mark]["saving_percent"] + 1e-9
        # Balancing forwards leaves no clock per stage that is as fast as T_min here, but one for all is.
        of_all, per_stage, _ = others
        assert per_stage["saving_percent"] >= of_all["saving_percent"]
    assert found["one clock within T_min"]["saving_percent"] == pytest.approx(0.0)
    assert picture.read_bytes().startswith(b"\x89PNG")


SAVED = "saved: against all-max waiting until the same time"
WITHIN = "within: the plan of least energy that takes no longer, waiting until then"
PER_STAGE = "per stage: balancing the stages' forwards (Zeus), or one for all if better"


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ("", ("all-max", "T_min", "T*", "T_slow", SAVED)),
        ("--compare", (SAVED, WITHIN, PER_STAGE)),
        (
            "--rebalance --layers 4",
            ("layers are equal", "33.3 % of the last", "Memory is not considered", SAVED),
        ),
        (
            "--hull-tolerance-percent 40",
            ("lower by at most 40 % of each computation's energy", "the bounds are lower by at most"),
        ),
    ],
)
def test_the_table_says_what_its_rows_mean(profile: Path, flags: str, shown: tuple[str, ...]) -> None:
    table = text(perseus(f"solve --microbatches 4 {flags}", profile))
    assert [each for each in shown if each not in table] == []
    assert ("within:" in table, "lower by at most" in table) == ("--comp" in flags, "--hull" in flags)


POWER = "MHz: expected energy / time to be 5 to 3,000 W a GPU"
UNITS = "are times in seconds, energies in joules per GPU?"
WAITING = "--blocking-power-w: expected a waiting GPU to draw at most what a computing one does, 300 W"


@pytest.mark.parametrize(
    ("time", "energy", "waiting_w", "expected"),
    [
        (1000, 1, 50, f"profile.csv: stage 0 backward at 600 {POWER}, found 0.141 W: {UNITS}"),
        (1, 1000, 50, f"profile.csv: stage 0 backward at 600 {POWER}, found 140,625 W: {UNITS}"),
        (1000, 1000, 50, "600 MHz: expected a time of at most 10 s, found 480 s: are times in seconds?"),
        (1, 1, 50_000, f"{WAITING}, found 50,000 W: is it in watts per GPU?"),
        (1, 1, 50, ""),
    ],
    ids=["ms", "mJ", "ms and mJ", "mW", "right"],
)
def test_a_wrong_unit_is_warned_of(
    tmp_path: Path, time: float, energy: float, waiting_w: float, expected: str
) -> None:
    path = written(tmp_path / "profile.csv", rows(time=time, energy=energy))
    flags = f"--microbatches 4 --gpus-per-stage 2 --blocking-power-w {waiting_w} --format csv"
    done = perseus(f"solve {flags}", path)
    assert (done.exit_code, done.stdout[:6]) == (0, "point,")
    assert done.stderr.count("warning:") == bool(expected)
    assert expected in " ".join(done.stderr.split())


def test_figures_of_kernels_are_in_their_units(tmp_path: Path) -> None:
    path = written(tmp_path / "kernels.csv", rows(time=1e-6, energy=1e-6))
    found = text(perseus("solve --microbatches 4 --blocking-power-w 50", path))
    assert "T* │ 2.520 µs │ 760.5 µJ │" in found
    assert " 0.0 J" not in found


def test_measurements_of_almost_the_same_time_lower_the_bound_and_say_so(tmp_path: Path) -> None:
    clocks = ((1000, "0.1", 100), (900, "0.100000000001", 50), (800, "0.2", 20))
    lines = [f"0,{kind},{mhz},{time},{j}" for kind in ("forward", "backward") for mhz, time, j in clocks]
    found = text(perseus("solve --microbatches 64 --points 3", written(tmp_path / "profile.csv", lines)))
    assert "too steep to plan on: the bounds are lower by at most 1e+02 % for it." in found


def test_no_slowdown_is_measured_against_the_highest_clocks_not_against_t_min(tmp_path: Path) -> None:
    """Every forward is 5 % faster one clock below the highest."""
    faster = [
        f"{stage},{kind},900,{time_s * weight},{energy_j * weight}"
        for stage, weight in ((0, 1.0), (1, 1.5))
        for kind, time_s, energy_j in (("forward", 0.095, 27), ("backward", 0.21, 54))
    ]
    path, output = written(tmp_path / "profile.csv", rows() + faster), tmp_path / "frontier.json"
    assert perseus("solve --microbatches 4", path, "--output", output).exit_code == 0
    stock_s = load(output)["baseline"]["iterationTimeS"]
    assert load(output)["tMinS"] < 0.99 * stock_s
    plans = []
    for flags in ("--no-slowdown", f"--iteration-time {stock_s}"):
        assert perseus(f"plan {flags}", output, "--output", tmp_path / "plan.json").exit_code == 0
        plans.append(load(tmp_path / "plan.json"))
    assert plans[0] == plans[1]
    assert 0.99 * stock_s < plans[0]["iterationTimeS"] <= stock_s
