"""`perseus solve` and `perseus plan` with settings beyond a clock, from profile to plan."""

import csv
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.cli.frontier_file import frontier_text, plan_text, problem_from_text
from perseus.solver import Kind, MeasuredSetting, Measurement, Pipeline, plan_at, solve
from tests.cli.commands import perseus, text
from tests.cli.test_solve import HEADER, load, rows, written
from tests.solver.pipelines import remeasured, small_pipeline

EXAMPLE = Path(__file__).parents[2] / "examples" / "settings" / "profile.csv"
FLAGS = ("--microbatches", 8, "--gpus-per-stage", 8, "--blocking-power-w", 85)
# Result of `perseus solve` on the example's rows without a power limit: the same profile with only clocks.
UNLIMITED = "400"


@pytest.fixture(scope="module")
def frontier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("settings") / "frontier.json"
    result = perseus("solve", EXAMPLE, *FLAGS, "--output", path)
    assert result.exit_code == 0, result.output
    assert "Settings are of frequency and power_limit_w, 12 a computation." in text(result)
    return path


def example_rows() -> list[dict[str, str]]:
    with EXAMPLE.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_power_limit_saves_more_than_clocks_alone(frontier: Path, tmp_path: Path) -> None:
    """This also checks the statements of docs/frontiers.md on the example."""
    lines = [
        ",".join(row[column] for column in ("stage", "instruction", "frequency", "time", "energy"))
        for row in example_rows()
        if row["power_limit_w"] == UNLIMITED
    ]
    clocks = written(tmp_path / "clocks.csv", lines)
    assert perseus("solve", clocks, *FLAGS, "--output", tmp_path / "clocks.json").exit_code == 0
    with_limit, with_clocks = load(frontier), load(tmp_path / "clocks.json")
    assert with_limit["baseline"] == with_clocks["baseline"]
    assert with_limit["tMinS"] == with_clocks["tMinS"]
    savings = [
        1 - each["points"][0]["energyJ"] / each["baseline"]["energyJ"] for each in (with_limit, with_clocks)
    ]
    assert savings == [pytest.approx(0.162, abs=5e-4), pytest.approx(0.141, abs=5e-4)]


def blocks_of_the_page(language: str) -> list[str]:
    page = EXAMPLE.parents[2] / "docs" / "frontiers.md"
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def test_the_page_matches_the_output(frontier: Path, tmp_path: Path) -> None:
    (shown_rows,) = (block for block in blocks_of_the_page("text") if block.startswith("stage,"))
    assert set(shown_rows.splitlines()) <= set(EXAMPLE.read_text().splitlines())
    assert perseus("plan", frontier, "--no-slowdown", "--output", tmp_path / "plan.json").exit_code == 0
    (shown,) = map(json.loads, blocks_of_the_page("json"))
    computations = load(tmp_path / "plan.json")["stages"][0]["computations"]
    assert any(shown.items() <= computation.items() for computation in computations)


def test_the_pages_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = (block for block in blocks_of_the_page("python") if "MeasuredSetting" in block)
    exec(code, {})
    assert "Setting(clock_mhz=1410, further=(('power_limit_w', 300.0),))" in capsys.readouterr().out


def test_a_plan_at_a_points_time_is_that_points(frontier: Path, tmp_path: Path) -> None:
    found = load(frontier)
    point, baseline = found["points"][20], found["baseline"]
    flags = ("--iteration-time", point["iterationTimeS"], "--output", tmp_path / "plan.json")
    shown = text(perseus("plan", frontier, *flags))
    plan = load(tmp_path / "plan.json")
    planned = (plan["iterationTimeS"], plan["energyJ"])
    assert planned == pytest.approx((point["iterationTimeS"], point["energyJ"]), rel=1e-12)
    waiting_w = sum(found["problem"]["blockingPowerW"])
    waiting_j = baseline["energyJ"] + waiting_w * (plan["iterationTimeS"] - baseline["iterationTimeS"])
    assert f"and {plan['energyJ']:.1f} J, {100 * (1 - plan['energyJ'] / waiting_j):.2f} % saved" in shown


def test_tables_and_rows_for_scripts_have_the_used_values(frontier: Path) -> None:
    first, *_, last = json.loads(perseus("plan --no-slowdown --format json", frontier).stdout)
    assert (first["stage"], first["kind"], first["power_limit_w"]) == (0, "backward", [200.0, 400.0])
    assert (last["stage"], last["power_limit_w"]) == (3, [400.0])
    header, line, *_ = perseus("plan --no-slowdown --format csv", frontier).stdout.splitlines()
    assert header.endswith(",highest_clock_mhz,power_limit_w")
    assert line.endswith(",200.0 400.0")
    table = text(perseus("plan --no-slowdown", frontier))
    assert "power_limit_w" in table
    assert "200, 400" in table


def test_one_setting_for_all_is_a_baseline_and_the_note_on_settings_is_no_data(tmp_path: Path) -> None:
    flags = (*FLAGS, "--compare", "--plot", tmp_path / "f.svg", "--format", "json")
    result = perseus("solve", EXAMPLE, *flags)
    assert result.exit_code == 0, result.output
    names = [row["point"] for row in json.loads(result.stdout)]
    assert names[0] == "all-max"
    assert {"one setting within T*", "a setting per stage within T*", "EnvPipe within T*"} <= set(names)
    assert "Settings are of frequency and power_limit_w" in " ".join(result.stderr.split())


def test_computations_may_have_no_setting_in_common(tmp_path: Path) -> None:
    lines = [f"{row},kernel-{number}" for number, row in enumerate(rows())]
    path = written(tmp_path / "profile.csv", lines, f"{HEADER.strip()},kernel")
    result = perseus("solve --microbatches 4 --compare --format json", path)
    assert result.exit_code == 0, result.output
    names = {row["point"] for row in json.loads(result.stdout)}
    assert "EnvPipe within T*" in names
    assert not any("setting" in name for name in names)


@pytest.mark.parametrize(
    ("stage", "settings", "expected"),
    [
        (0, 5, "expected an object of names and values, found 5"),
        (0, {}, "expected a setting beside the clock, found none"),
        (0, {"power_limit_w": "400 W"}, "expected a finite number of watts"),
        (0, {"power_limit_w": True}, "expected a finite number of watts"),
        (0, {"power_limit_w": 10**400}, "expected a finite number of watts"),
        (0, {"clock_mhz": 1.0}, "expected another name"),
        (0, None, "expected an object of power_limit_w, found none"),
        (1, {"kernel": "a"}, 'expected an object of power_limit_w, found {"kernel":'),
    ],
)
def test_a_frontier_with_wrong_settings_is_named(
    frontier: Path, tmp_path: Path, stage: int, settings: object, expected: str
) -> None:
    document = load(frontier)
    measurement = document["problem"]["profiles"][stage]["measurements"][0]
    del measurement["furtherSettings"]
    if settings is not None:
        measurement["furtherSettings"] = settings
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps(document))
    result = perseus("plan --no-slowdown", broken)
    assert result.exit_code == 2
    where = f"broken.json: problem.profiles[{stage}].measurements[0].furtherSettings: "
    assert where in text(result)
    assert expected in text(result)


def test_floats_may_come_back_as_integers(frontier: Path, tmp_path: Path) -> None:
    path = tmp_path / "frontier.json"
    path.write_text(frontier.read_text().replace('"power_limit_w": 400.0', '"power_limit_w": 400'))
    assert problem_from_text(path.read_text(), 10_000) == problem_from_text(frontier.read_text(), 10_000)


TEXTS = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=12)


@given(st.floats(0.0, 1e6), TEXTS, st.booleans(), st.floats(0.0, 1.0))
def test_settings_survive_in_the_files_of_a_frontier_and_its_plans(
    limit_w: float, kernel: str, has_one_clock: bool, share: float
) -> None:
    def with_settings(m: Measurement) -> MeasuredSetting:
        further = (("power_limit_w", limit_w), ("kernel, größte", f'{kernel} "{m.clock_mhz}"'.strip()))
        clock_mhz = 1000 if has_one_clock else m.clock_mhz
        return MeasuredSetting(clock_mhz, m.time_s, m.energy_j, further=further)

    pipeline = remeasured(small_pipeline(), with_settings)
    frontier = solve(pipeline, point_count=3)
    read, _, _ = problem_from_text(frontier_text(frontier), 100)
    assert isinstance(read, Pipeline)
    assert read.profiles == pipeline.profiles
    plan = plan_at(read, (1 - share) * frontier.t_min_s + share * frontier.t_slow_s)
    for stage, of_stage in enumerate(json.loads(plan_text(plan))["stages"]):
        for each in of_stage["computations"]:
            kind = Kind[each["kind"].removeprefix("COMPUTATION_KIND_")]
            (measured,) = (
                m
                for m in pipeline.profiles[stage, 0, kind]
                if isinstance(m, MeasuredSetting)
                if (m.clock_mhz, dict(m.further)) == (each["clockMhz"], each["furtherSettings"])
            )
            assert each["durationS"] == pytest.approx(measured.time_s)
