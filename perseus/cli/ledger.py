"""`perseus ledger`: energy that jobs have used and saved, for those who pay for it."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from perseus.cli.connection import Connection, connecting, fleet
from perseus.cli.listing import PAGE_SIZE, moment, pages
from perseus.cli.rows import Format, FormatOption, show_message, show_messages

if TYPE_CHECKING:
    import grpc

    from perseus.v1.ledger_service_pb2 import LedgerAccount, LedgerEntry, ListLedgerEntriesResponse
    from perseus.v1.ledger_service_pb2_grpc import LedgerServiceStub

_PLAIN = (
    "iteration_count",
    "unmeasured_iteration_count",
    "time_s",
    "energy_kwh",
    "stock_energy_kwh",
    "uncompared_energy_kwh",
    "profiling_energy_kwh",
    "straggler_energy_kwh",
)
_WHOLE = ("cost", "carbon_g")
_SAVED = {
    "saved_energy_kwh": ("saved_energy_se_kwh", "saved_energy_margin_kwh"),
    "saved_cost": ("saved_cost_se", "saved_cost_margin"),
    "saved_carbon_g": ("saved_carbon_se_g", "saved_carbon_margin_g"),
}


@connecting
def ledger(
    connection: Connection,
    since: Annotated[
        str | None,
        typer.Option(
            help="Only usage since this time (2026-11-01, in UTC), or within the last 2h, 7d. "
            "The ledger has hourly entries: a time is rounded down to its hour.",
            show_default=False,
        ),
    ] = None,
    until: Annotated[
        str | None, typer.Option(help="Only usage before this time, as above.", show_default=False)
    ] = None,
    job: Annotated[str, typer.Option(help="Only this job.", show_default=False)] = "",
    form: FormatOption = Format.TABLE,
) -> None:
    """Show energy, cost and carbon of all runs against their stock baselines, and the total."""
    from perseus.cli.ledger_tables import ledger_table
    from perseus.v1 import ledger_service_pb2, ledger_service_pb2_grpc

    request = ledger_service_pb2.ListLedgerEntriesRequest(job_id=job, page_size=PAGE_SIZE)
    if since is not None:
        request.start_time.FromDatetime(moment("--since", since))
    if until is not None:
        request.end_time.FromDatetime(moment("--until", until))

    def listed(channel: "grpc.Channel") -> "ListLedgerEntriesResponse":
        stub = ledger_service_pb2_grpc.LedgerServiceStub(channel)
        found = list(pages(stub.ListLedgerEntries, request))
        return ledger_service_pb2.ListLedgerEntriesResponse(
            entries=(entry for page in found for entry in page.entries), total=found[-1].total
        )

    with fleet(connection) as coordinators:
        answers = [listed(coordinators.channel)] if job else [*coordinators.ask(listed).values()]
        whole = merged(answers)
        if form is Format.CSV:
            total = ledger_service_pb2.LedgerEntry(account=whole.total)
            show_messages(form, [*whole.entries, total], total.DESCRIPTOR, lambda: "")
        else:
            show_message(form, whole, lambda: [ledger_table(whole.entries, whole.total)])


def merged(answers: "Sequence[ListLedgerEntriesResponse]") -> "ListLedgerEntriesResponse":
    """Return the ledgers of coordinators, which have different jobs, as one."""
    from perseus.v1 import ledger_service_pb2

    if len(answers) == 1:
        return answers[0]
    return ledger_service_pb2.ListLedgerEntriesResponse(
        # The order of deleted jobs of a name is kept: all are of one coordinator.
        entries=sorted(
            (entry for answer in answers for entry in answer.entries), key=lambda entry: entry.job_id
        ),
        total=_sum([answer.total for answer in answers]),
    )


def _sum(accounts: "Sequence[LedgerAccount]") -> "LedgerAccount":
    """Return the sum of accounts of different jobs, whose errors are independent."""
    from perseus.v1 import ledger_service_pb2

    total = ledger_service_pb2.LedgerAccount()

    def known(field: str) -> list[float]:
        return [getattr(each, field) for each in accounts if each.HasField(field)]  # type: ignore[arg-type]

    for field in _PLAIN:
        setattr(total, field, sum(getattr(each, field) for each in accounts))
    for field in _WHOLE:  # a part would look like the whole
        if len(known(field)) == len(accounts):
            setattr(total, field, sum(known(field)))
    for field, errors in _SAVED.items():
        if saved := known(field):
            setattr(total, field, sum(saved))
            for error in errors:
                if len(known(error)) == len(saved):
                    setattr(total, error, math.hypot(*known(error)))
    if extra := known("profiling_extra_energy_kwh"):
        total.profiling_extra_energy_kwh = sum(extra)
    at_stock_kwh = sum(
        100 * each.saved_energy_kwh / each.saved_percent for each in accounts if each.saved_percent
    )
    if at_stock_kwh:
        percent = 100 / at_stock_kwh
        total.saved_percent = percent * total.saved_energy_kwh
        if total.HasField("saved_energy_se_kwh"):
            total.saved_se_percent = percent * total.saved_energy_se_kwh
            total.saved_margin_percent = percent * total.saved_energy_margin_kwh
    if total.HasField("cost") and total.energy_kwh:
        total.price_per_kwh = total.cost / total.energy_kwh
    if total.HasField("carbon_g") and total.energy_kwh:
        total.intensity_g_per_kwh = total.carbon_g / total.energy_kwh
    return total


def ledger_entry(stub: "LedgerServiceStub", job_id: str, run_number: int) -> "LedgerEntry | None":
    """Return a run's ledger entry; None if there is none."""
    import grpc

    from perseus.v1 import ledger_service_pb2

    request = ledger_service_pb2.ListLedgerEntriesRequest(job_id=job_id, page_size=PAGE_SIZE)
    try:
        entries = [entry for page in pages(stub.ListLedgerEntries, request) for entry in page.entries]
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:  # an older coordinator
            return None
        raise
    own = (entry for entry in entries if entry.run_number == run_number and not entry.is_deleted)
    return next(own, None)
