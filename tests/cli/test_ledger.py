"""`perseus ledger`, and the ledger in `perseus jobs report`, against a real coordinator process."""

import asyncio
import csv
import json
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner, Result

from perseus.cli.ledger_tables import account_lines
from perseus.cli.main import app
from perseus.demo.cluster import Cluster
from perseus.demo.workload import DEMO
from perseus.service.domain.ledger import EnergyHour, EnergySums, Rates, Reference
from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import JobDeleted, JobEntry, NewRun
from perseus.v1.ledger_service_pb2 import LedgerAccount
from tests.service.service_fakes import make_spec

HOUR = 496_704
"""2026-08-31T00:00Z."""

SUMS = EnergySums(
    iteration_count=1_000,
    time_s=3_600.0,
    stock_energy_j=3.6e6,
    compared_count=900,
    compared_energy_j=900 * 3.2e4,
    energy_m2=1e6 * 899,
    freedom_count=899,
    profiling_count=100,
    profiling_energy_j=100 * 4.2e4,
)
"""1 kWh at stock, 8 kWh under plans that would have been 10 kWh at stock."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment of an operator of a coordinator with a job, a deleted one, and one at stock."""
    run_dir = tmp_path_factory.mktemp("coordinator")
    baseline = Reference(0, 25, 4.0e4, 1e6 * 24)
    used = EnergyHour(HOUR, baseline, SUMS, Rates(0.25, 400.0))

    async def fill() -> None:
        store = await SqlStore.open(run_dir / "perseus.db")
        await store.write([NewRun(make_spec("old"), 1, 1.0), JobEntry("old", 1, used), JobDeleted("old", 0)])
        at_stock = EnergyHour(HOUR + 24, None, EnergySums(5, 0, 4.0, 1.8e6), Rates(0.5))
        await store.write(
            [
                *(NewRun(make_spec(job_id), 1, 1.0) for job_id in ("gpt3", "bare")),
                *(
                    JobEntry("gpt3", 1, EnergyHour(hour, baseline, SUMS, used.rates))
                    for hour in (HOUR, HOUR + 24)
                ),
                JobEntry("bare", 1, at_stock),
            ]
        )
        await store.close()

    asyncio.run(fill())
    with Cluster(DEMO, run_dir, run_dir / "logs") as cluster:
        address = cluster.start_coordinator()
        yield {**cluster.security.of_operator(), "PERSEUS_COORDINATOR": address}


def perseus(environment: dict[str, str], *arguments: str) -> Result:
    return CliRunner().invoke(
        app, list(arguments), env={"COLUMNS": "200", **environment}, catch_exceptions=False
    )


def test_a_table_has_a_line_for_each_run_the_total_and_the_assumptions(environment: dict[str, str]) -> None:
    done = perseus(environment, "ledger")
    assert done.exit_code == 0
    lines = [" ".join(line.replace("│", " ").split()) for line in done.stdout.splitlines()]
    # 2 kWh saved: the standard errors are 200 J of the baseline, times 900, and 1,000 J of the
    # iterations, times 30; half the 95 % interval is 2.06 errors.
    saved = "2.000 ± 0.104 +18.2 ± 0.8"
    hours = "2026-08-31 00:00 – 2026-09-01 01:00"
    assert f"gpt3 1 {hours} 18.000 4.000 ± 0.208 +18.2 ± 0.8 4.500" in " ".join(lines)
    assert any(line.startswith("old (deleted) 1 2026-08-31 00:00") and saved in line for line in lines)
    assert any(line.startswith("bare 1 2026-09-01 00:00") and line.endswith("0.500 0.250") for line in lines)
    assert any(line.startswith("total 27.500 6.000 ± ") for line in lines)
    text = " ".join(lines)
    assert "of it for profiling: 3.500 kWh, +0.167 kWh against stock" in text
    assert "0.500 kWh could not be compared with a baseline" in text
    assert "assumed: 0.254545 per kWh" in text


def test_json_has_the_entries_and_the_total(environment: dict[str, str]) -> None:
    found = json.loads(perseus(environment, "ledger", "--format", "json").stdout)
    assert [(entry["job_id"], entry["is_deleted"]) for entry in found["entries"]] == [
        ("bare", False),
        ("gpt3", False),
        ("old", True),
    ]
    bare, gpt3, _ = (entry["account"] for entry in found["entries"])
    assert (bare["saved_energy_kwh"], bare["saved_percent"]) == (None, None)
    assert bare["cost"] == pytest.approx(0.25)
    assert gpt3["saved_energy_kwh"] == pytest.approx(4.0)
    assert gpt3["saved_cost"] == pytest.approx(1.0)
    assert found["total"]["energy_kwh"] == pytest.approx(27.5)
    assert found["total"]["carbon_g"] is None


def test_csv_has_a_column_for_each_figure_and_ends_with_the_total(environment: dict[str, str]) -> None:
    done = perseus(environment, "ledger", "--format", "csv", "--job", "gpt3")
    gpt3, total = csv.DictReader(done.stdout.splitlines())
    assert (gpt3["job_id"], gpt3["run_number"], gpt3["start_time"]) == ("gpt3", "1", "2026-08-31T00:00:00Z")
    assert float(gpt3["account.energy_kwh"]) == pytest.approx(18.0)
    assert total["job_id"] == ""
    assert total["account.saved_energy_kwh"] == gpt3["account.saved_energy_kwh"]


@pytest.mark.parametrize(
    ("flags", "energy_kwh"),
    [
        (["--since", "2026-09-01"], 9.5),
        (["--since", "2026-09-01T00:59"], 9.5),
        (["--until", "2026-09-01"], 18.0),
        (["--since", "2026-08-31", "--until", "2026-09-01T01:00", "--job", "gpt3"], 18.0),
        (["--since", "2026-08-31T02:00+02:00", "--until", "2026-08-31T03:00+02:00"], 18.0),
    ],
)
def test_the_ledger_of_a_time_span_is_listed(
    environment: dict[str, str], flags: list[str], energy_kwh: float
) -> None:
    found = json.loads(perseus(environment, "ledger", "--format", "json", *flags).stdout)
    assert found["total"]["energy_kwh"] == pytest.approx(energy_kwh)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--since", "yesterday"], "--since: expected a time such as 2026-01-31T12:00"),
        (["--until", "soon"], "--until: expected a time such as 2026-01-31T12:00"),
        (["--since", "2026-09-01", "--until", "2026-08-31"], "end_time"),
        (["--job", "not a job"], "not a job"),
    ],
)
def test_an_invalid_query_gives_one_line(environment: dict[str, str], flags: list[str], message: str) -> None:
    done = perseus(environment, "ledger", *flags)
    assert done.exit_code == 2
    assert message in done.stderr


def test_a_report_ends_with_the_run_s_ledger(environment: dict[str, str]) -> None:
    shown = perseus(environment, "jobs", "report", "gpt3").stdout
    assert "used 18.000 kWh; saved 4.000 ± 0.208 kWh, +18.2 ± 0.8 %" in shown
    assert "cost 4.500, saved 1.000 ± 0.0519" in shown
    found = json.loads(perseus(environment, "jobs", "report", "gpt3", "--format", "json").stdout)
    assert found["ledger"]["energy_kwh"] == pytest.approx(18.0)
    assert "saving unknown" in perseus(environment, "jobs", "report", "bare").stdout


def test_words_show_unknown_values_and_small_figures() -> None:
    lines = account_lines(LedgerAccount(energy_kwh=0.0004, unmeasured_iteration_count=2))
    assert lines[0] == "used 0.0004 kWh; saving unknown"
    assert "2 iterations were not measured on all GPUs" in lines
    assert lines[-1] == "assumed: no price and no carbon intensity (none is set)"
