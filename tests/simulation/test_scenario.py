"""Scenarios from TOML and JSON, and one clear line for each error."""

import json
from pathlib import Path

import pytest

from perseus.service.domain.signals import SignalKind
from perseus.simulation.scenario import ScenarioError, read_scenario

JOB = '[[jobs]]\njob_id = "x"\nprofile = "x.csv"\nmicrobatches = 4\n'
HEAD = "start = 2022-01-01T00:00:00Z\nduration_h = 2\n"


def write(tmp_path: Path, text: str, name: str = "scenario.toml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    signal = '[[signals]]\nkind = "carbon"\nfile = "../c.csv"\ncolumn = "g"\n'
    scenario = read_scenario(write(tmp_path, HEAD + JOB + signal))
    assert scenario.jobs[0].profile == tmp_path / "x.csv"
    assert scenario.signals[0].file == tmp_path / "../c.csv"
    assert scenario.signals[0].kind is SignalKind.CARBON


def test_json_and_toml_are_equivalent(tmp_path: Path) -> None:
    content = {
        "start": "2022-01-01T00:00:00Z",
        "duration_h": 2,
        "jobs": [{"job_id": "x", "profile": "x.csv", "microbatches": 4}],
    }
    path = write(tmp_path, json.dumps(content), "scenario.json")
    assert read_scenario(path) == read_scenario(write(tmp_path, HEAD + JOB))


BUDGET = '[[budgets]]\nbudget_id = "b"\nbegin_h = 1\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("start =", "expected TOML in UTF-8, found"),
        (HEAD, ", jobs: Field required"),
        (HEAD + JOB + "weigth = 2\n", ", jobs.0.weigth: Extra inputs are not permitted, found 2"),
        (HEAD + JOB + "weight = 0\n", ", jobs.0.weight: Input should be greater than or equal to"),
        (HEAD + JOB.replace('"x"', '"GPT 3"'), ", jobs.0.job_id: expected 1 to 63 of a–z, A–Z"),
        (HEAD + JOB + JOB, "expected each job_id once, found 'x' twice"),
        (HEAD + JOB + BUDGET, ", budgets.0: expected one of limit_w and percent"),
        (
            HEAD + JOB + BUDGET + "percent = 75\nend_h = 1\n",
            ", budgets.0: expected an end_h after begin_h, 1",
        ),
        (
            HEAD + JOB + BUDGET + 'limit_w = 5\nfeed = "other"\n',
            "budget 'b': expected a feed with a job on it, found 'other'",
        ),
        (
            HEAD + JOB + 'policy = { signal = "price", extra_time_percent = 2, horizon_h = 24 }\n',
            "job 'x': expected a signal 'price', found none",
        ),
        (
            HEAD + JOB + "stragglers = [{ pipeline = 1, factor = 1.1 }]\n",
            "job 'x': expected a straggler among pipelines 0 to 0, found 1",
        ),
        (
            HEAD + JOB + '[[signals]]\nkind = "price"\nfile = "p.csv"\ncolumn = "p"\nunit = "lbs/MWh"\n',
            ", signals.0: expected a unit of kind price, one of per kWh, per MWh, found 'lbs/MWh'",
        ),
    ],
)
def test_the_error_names_the_place(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ScenarioError) as caught:
        read_scenario(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)
