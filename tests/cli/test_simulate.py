"""`perseus simulate`, as users call it."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from perseus.cli.simulate import tables
from perseus.simulation.build import build_fleet
from perseus.simulation.replay import replay
from perseus.simulation.scenario import read_scenario
from tests.cli.commands import perseus, rendered, text
from tests.cli.test_solve import rows, written

SCENARIO = """
start = 2022-01-01T00:00:00Z
duration_h = 2
[[jobs]]
job_id = "x"
profile = "profile.csv"
microbatches = 4
blocking_power_w = 50
tolerance_percent = 3
power_error_percent = 1
[[budgets]]
budget_id = "cut"
percent = 60
begin_h = 0.5
end_h = 1
[[signals]]
kind = "price"
file = "price.csv"
column = "eur"
"""


PRICES = "timestamp,eur\n2022-01-01,0.2\n2022-01-01T01:00,0.3\n"


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    written(tmp_path / "profile.csv", rows())
    (tmp_path / "price.csv").write_text(PRICES)
    path = tmp_path / "scenario.toml"
    path.write_text(SCENARIO)
    return path


def test_a_table_has_the_results_and_violated_limits(scenario: Path) -> None:
    result = perseus("simulate", scenario)
    assert result.exit_code == 0, result.output
    assert "2 hours of 1 jobs" in text(result)
    assert "NOT KEPT, pause x" in text(result)


def test_budgets_are_shown_as_perseus_power_shows_them(scenario: Path) -> None:
    feed = '[[feeds]]\nname = "default"\nramp_down_w_per_s = 5\n[[jobs]]'
    later = '[[budgets]]\nbudget_id = "never"\npercent = 80\nbegin_h = 1.5\ncancelled_h = 1.2\n'
    changed = scenario.read_text().replace("[[jobs]]", feed).replace("percent = 60", "percent = 90")
    scenario.write_text(changed + later)
    shown = text(perseus("simulate", scenario))
    budget = re.search(r"cut default (\d+), ramp 5 W/s 0.5 – 1 (\d+) in \d+ s kept", shown)
    assert budget is not None, shown
    assert int(budget[2]) <= int(budget[1])
    assert "never" not in shown


def test_power_above_a_power_cap_that_falls_is_shown(scenario: Path) -> None:
    long = {'"x"': '"a-job-with-a-long-name"', '"cut"': '"a-budget-with-a-long-name"'}
    for name, longer in long.items():
        scenario.write_text(scenario.read_text().replace(name, longer))
    fleet = build_fleet(read_scenario(scenario))
    done = replay(fleet)
    ((budget, status),) = done.outcomes
    caps: dict[str, Any] = {"limit_w": 1000.0, "power_cap_w": 1050.0, "is_above_power_cap": True}
    status = replace(status, in_transition=True, is_compliant=True, **caps)
    above = replace(done, statuses=[(fleet.begin_s + 3600, status)], outcomes=[(budget, status)])
    ((job_id, totals),) = done.totals.items()
    row: dict[str, Any] = {"job_id": job_id, **dict.fromkeys(asdict(totals), 1e6)}
    shown = rendered(tables(fleet, above, [row]), 80)
    assert re.search(r"1.00 h: default: \d+ W drawn, limit 1000 W, power cap 1050 W", " ".join(shown.split()))
    assert shown.split().count("ABOVE") == 2
    assert "…" not in shown


def test_a_picture_is_drawn_beside_every_job_in_json(scenario: Path, tmp_path: Path) -> None:
    result = perseus("simulate", scenario, "--plot", tmp_path / "fleet.svg", "--format", "json")
    (job,) = json.loads(result.stdout)
    assert (job["job_id"], job["carbon_g"]) == ("x", None)
    assert job["energy_j"] < job["stock_energy_j"]
    assert job["cost"] < job["stock_cost"]
    drawn = (tmp_path / "fleet.svg").read_text()
    assert drawn.startswith("<?xml")
    assert "<!-- feed default (kW) -->" in drawn


def test_a_wrong_unit_is_warned_of(scenario: Path) -> None:
    scenario.write_text(scenario.read_text().replace("blocking_power_w = 50", "blocking_power_w = 5000"))
    result = perseus("simulate", scenario)
    assert result.exit_code == 0, result.output
    assert "scenario.toml: job 'x': blocking_power_w: expected a waiting GPU to draw at most" in text(result)
