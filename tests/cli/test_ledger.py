"""Tables and words of `perseus ledger`, and the sum over a fleet."""

import csv

from perseus.cli.ledger import merged
from perseus.cli.ledger_tables import account_lines, ledger_table
from perseus.v1.ledger_service_pb2 import LedgerAccount, LedgerEntry, ListLedgerEntriesResponse
from tests.cli.commands import lines
from tests.cli.prepared import PreparedCoordinator

PLANNED = LedgerAccount(
    energy_kwh=18.0,
    saved_energy_kwh=4.0,
    saved_energy_margin_kwh=0.208,
    saved_percent=18.18,
    saved_margin_percent=0.8,
    cost=4.5,
    saved_cost=1.0,
    saved_cost_margin=0.0519,
    carbon_g=7200.0,
    saved_carbon_g=1600.0,
    profiling_energy_kwh=3.5,
    profiling_extra_energy_kwh=0.167,
    price_per_kwh=0.254545,
    intensity_g_per_kwh=400.0,
)
AT_STOCK = LedgerAccount(
    energy_kwh=0.0004, uncompared_energy_kwh=0.0004, straggler_energy_kwh=0.25, unmeasured_iteration_count=2
)
ENTRIES = [
    LedgerEntry(job_id="gpt3", run_number=1, account=PLANNED),
    LedgerEntry(job_id="old", run_number=2, account=AT_STOCK, is_deleted=True),
]
ENTRIES[0].start_time.FromJsonString("2026-08-31T00:00:00Z")
ENTRIES[0].end_time.FromJsonString("2026-09-01T01:00:00Z")


def test_a_table_has_a_line_for_each_run_the_total_and_the_assumptions() -> None:
    *_, first, second, _, total, _, one, other, last = lines(ledger_table(ENTRIES, PLANNED))
    figures = "18.000 4.000 ± 0.208 +18.2 ± 0.8 4.500 1.000 ± 0.0519 7.200 1.600"
    assert first == f"gpt3 1 2026-08-31 00:00 – 2026-09-01 01:00 {figures}"
    assert second == "old (deleted) 2 1970-01-01 00:00 – 1970-01-01 00:00 0.0004"
    assert total == f"total {figures}"
    assert [one, other, last] == [
        "saved ± half its 95 % interval, against the stock baseline",
        "of it for profiling: 3.500 kWh, +0.167 kWh against stock",
        "assumed: 0.254545 per kWh, 400 g CO2 per kWh",
    ]


def test_words_show_unknown_values_and_small_figures() -> None:
    assert account_lines(PLANNED)[:3] == [
        "used 18.000 kWh; saved 4.000 ± 0.208 kWh, +18.2 ± 0.8 %",
        "cost 4.500, saved 1.000 ± 0.0519",
        "7.200 kg of CO2, saved 1.600 kg",
    ]
    assert account_lines(AT_STOCK) == [
        "used 0.0004 kWh; saving unknown",
        "saved ± half its 95 % interval, against the stock baseline",
        "0.0004 kWh could not be compared with a baseline",
        "0.250 kWh with a straggler: their saving is understated",
        "2 iterations were not measured on all GPUs",
        "assumed: no price and no carbon intensity (none is set)",
    ]


def test_csv_has_a_column_for_each_figure_and_ends_with_the_total(prepared: PreparedCoordinator) -> None:
    prepared.answers = {"ListLedgerEntries": ListLedgerEntriesResponse(entries=ENTRIES, total=PLANNED)}
    gpt3, old, total = csv.DictReader(prepared.perseus("ledger --format csv").stdout.splitlines())
    assert (gpt3["job_id"], gpt3["run_number"], gpt3["start_time"]) == ("gpt3", "1", "2026-08-31T00:00:00Z")
    assert (old["account.energy_kwh"], old["account.saved_energy_kwh"]) == ("0.0004", "")
    assert total["job_id"] == ""
    assert total["account.saved_energy_kwh"] == gpt3["account.saved_energy_kwh"] == "4.0"


def test_ledgers_of_a_fleet_are_added_up() -> None:
    one = LedgerAccount(
        iteration_count=1,
        energy_kwh=90.0,
        cost=9.0,
        carbon_g=5.0,
        saved_energy_kwh=10.0,
        saved_energy_se_kwh=3.0,
        saved_energy_margin_kwh=6.0,
        saved_percent=10.0,
        saved_cost=1.0,
        saved_cost_se=0.5,
    )
    other = LedgerAccount(
        iteration_count=2,
        energy_kwh=270.0,
        cost=9.0,
        saved_energy_kwh=30.0,
        saved_energy_se_kwh=4.0,
        saved_energy_margin_kwh=8.0,
        saved_percent=10.0,
        saved_cost=2.0,
    )
    answers = [
        ListLedgerEntriesResponse(entries=[LedgerEntry(job_id=job_id) for job_id in job_ids], total=total)
        for job_ids, total in (("ac", one), ("b", other))
    ]
    assert merged(answers[:1]) is answers[0]
    whole = merged(answers)
    assert [entry.job_id for entry in whole.entries] == ["a", "b", "c"]
    assert whole.total == LedgerAccount(
        iteration_count=3,
        energy_kwh=360.0,
        cost=18.0,  # nobody knows all carbon
        price_per_kwh=0.05,
        saved_energy_kwh=40.0,
        saved_energy_se_kwh=5.0,
        saved_energy_margin_kwh=10.0,
        saved_percent=10.0,
        saved_se_percent=1.25,
        saved_margin_percent=2.5,
        saved_cost=3.0,  # nor all its error
    )
