"""`perseus ledger`: energy that jobs have used and saved, for those who pay for it."""

from typing import TYPE_CHECKING, Annotated

import typer

from perseus.cli.connection import Connection, connected, connecting
from perseus.cli.listing import PAGE_SIZE, moment, pages
from perseus.cli.rows import Format, FormatOption, show_message, show_messages

if TYPE_CHECKING:
    from perseus.v1.ledger_service_pb2 import LedgerEntry
    from perseus.v1.ledger_service_pb2_grpc import LedgerServiceStub


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
    with connected(connection) as channel:
        stub = ledger_service_pb2_grpc.LedgerServiceStub(channel)
        found = list(pages(stub.ListLedgerEntries, request))
    whole = ledger_service_pb2.ListLedgerEntriesResponse(
        entries=(entry for page in found for entry in page.entries), total=found[-1].total
    )
    if form is Format.CSV:
        total = ledger_service_pb2.LedgerEntry(account=whole.total)
        show_messages(form, [*whole.entries, total], total.DESCRIPTOR, lambda: "")
        return
    show_message(form, whole, lambda: [ledger_table(whole.entries, whole.total)])


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
