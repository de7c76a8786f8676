"""`perseus top`: jobs and GPUs, live in the terminal."""

import sys
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from perseus.cli.connection import Connection, connecting, fleet
from perseus.cli.escaping_channel import failure_of
from perseus.cli.fleet import merged_jobs
from perseus.cli.listing import PAGE_SIZE, TIMEOUT_S, LabelsOption, label_filter, pages
from perseus.cli.rows import print_json, row_of
from perseus.cli.terminal import print_whole, screen_console

if TYPE_CHECKING:
    import grpc
    from rich.console import RenderableType
    from rich.live import Live

    from perseus.cli.fleet import Fleet
    from perseus.cli.top_tables import Snapshot
    from perseus.v1.job_service_pb2 import ListJobsRequest, ListJobsResponse
    from perseus.v1.power_service_pb2 import FeedState

_ROWS_UNSEEN = 1_000_000


class TopFormat(StrEnum):
    """The formats of `top`."""

    TABLE = "table"
    JSON = "json"


@connecting
def top(
    connection: Connection,
    job: Annotated[
        str | None, typer.Option(help="Also show the GPUs of this job.", show_default=False)
    ] = None,
    label: LabelsOption = None,
    interval_s: Annotated[float, typer.Option(min=0.5, max=3600, help="Seconds between updates.")] = 2.0,
    form: Annotated[
        TopFormat, typer.Option("--format", help="A table; or json: one object, once, for scripts.")
    ] = TopFormat.TABLE,
) -> None:
    """Show jobs by power draw, and feeds that have a limit, until you press Ctrl-C.

    If the output is not a terminal, show them once.
    """
    from rich.live import Live

    from perseus.cli.top_tables import screen
    from perseus.v1.job_service_pb2 import ListJobsRequest

    wanted = ListJobsRequest(page_size=PAGE_SIZE, labels=label_filter(label))
    with fleet(connection, is_quiet=True) as coordinators:
        snapshot = _fetch(coordinators, wanted, job)
        if form is TopFormat.JSON:
            print_json(
                {
                    "jobs": [row_of(each) for each in snapshot.running],
                    "feeds": [row_of(each) for each in snapshot.feeds],
                    "ranks": [row_of(each) for each in snapshot.ranks],
                }
            )
            return
        if not sys.stdout.isatty():
            print_whole(screen(snapshot, _ROWS_UNSEEN))
            return
        with Live(console=screen_console, screen=True, auto_refresh=False) as live:
            show_until_interrupted(live, lambda: _fetch(coordinators, wanted, job), interval_s, snapshot)


def show_until_interrupted(
    live: "Live", fetch: Callable[[], "Snapshot"], interval_s: float, snapshot: "Snapshot"
) -> None:
    """Keep the screen up to date; through failures it has the last answer, and their reason."""
    import grpc

    trouble, received_s = "", time.monotonic()
    while True:
        live.update(_fitting(snapshot, "; ".join(filter(None, (trouble, snapshot.missing)))), refresh=True)
        time.sleep(interval_s)
        try:
            snapshot, trouble, received_s = fetch(), "", time.monotonic()
        except grpc.RpcError as error:
            # It may come back: keep its last answer on the screen, with the current error.
            since_s = time.monotonic() - received_s
            failure = failure_of(error)
            reason = (failure and failure.takeover) or error.details() or error.code().name
            trouble = f"no answer for {since_s:.0f} s: {reason}"


def _fitting(snapshot: "Snapshot", trouble: str) -> "RenderableType":
    """Return the screen with as many rows as the terminal has lines for: rows wrap on a narrow one."""
    from perseus.cli.top_tables import screen

    rows = screen_console.height
    while True:
        shown = screen(snapshot, rows, trouble)
        if rows == 1 or len(screen_console.render_lines(shown, pad=False)) <= screen_console.height:
            return shown
        rows = max(1, rows * 3 // 4)


def _fetch(coordinators: "Fleet", wanted: "ListJobsRequest", job: str | None) -> "Snapshot":
    from perseus.cli.top_tables import Snapshot
    from perseus.v1 import job_service_pb2, power_service_pb2
    from perseus.v1.job_service_pb2_grpc import JobServiceStub
    from perseus.v1.power_service_pb2_grpc import PowerServiceStub

    def asked_of(channel: "grpc.Channel") -> "tuple[Sequence[ListJobsResponse], Sequence[FeedState]]":
        feeds = PowerServiceStub(channel).ListFeeds(power_service_pb2.ListFeedsRequest(), timeout=TIMEOUT_S)
        return list(pages(JobServiceStub(channel).ListJobs, wanted)), feeds.feeds

    answers = coordinators.ask(asked_of)
    found = merged_jobs(of_one for of_one, _ in answers.values())
    # Those of slot 0 are whole, others' are parts.
    feeds = answers[0][1] if 0 in answers else ()
    missing = "; ".join(coordinators.missing)
    if job is None:
        return Snapshot(found, feeds, missing=missing)
    stub = JobServiceStub(coordinators.channel)
    asked = pages(stub.ListRanks, job_service_pb2.ListRanksRequest(job_id=job, page_size=PAGE_SIZE))
    return Snapshot(found, feeds, [rank for page in asked for rank in page.ranks], job, missing)
