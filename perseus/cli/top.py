"""`perseus top`: jobs and GPUs, live in the terminal."""

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from perseus.cli.connection import Connection, connected, connecting
from perseus.cli.listing import PAGE_SIZE, TIMEOUT_S, pages
from perseus.cli.terminal import console, print_whole

if TYPE_CHECKING:
    import grpc
    from rich.live import Live

    from perseus.cli.top_tables import Snapshot

_ROWS_BESIDE = 8
"""Terminal lines for everything that is neither a job nor a rank."""

_ROWS_UNSEEN = 1_000_000


@connecting
def top(
    connection: Connection,
    job: Annotated[
        str | None, typer.Option(help="Also show the GPUs of this job.", show_default=False)
    ] = None,
    interval_s: Annotated[float, typer.Option(min=0.5, max=3600, help="Seconds between updates.")] = 2.0,
) -> None:
    """Show jobs by power draw, and feeds that have a limit, until you press Ctrl-C.

    If the output is not a terminal, show them once.
    """
    from rich.live import Live

    from perseus.cli.top_tables import screen

    with connected(connection, is_quiet=True) as channel:
        snapshot = _fetch(channel, job)
        if not sys.stdout.isatty():
            print_whole(screen(snapshot, _ROWS_UNSEEN))
            return
        with Live(console=console, screen=True, auto_refresh=False) as live:
            _show_until_interrupted(live, channel, job, interval_s, snapshot)


def _show_until_interrupted(
    live: "Live", channel: "grpc.Channel", job: str | None, interval_s: float, snapshot: "Snapshot"
) -> None:
    import grpc

    from perseus.cli.top_tables import screen

    trouble, received_s = "", time.monotonic()
    while True:
        rows = max(1, console.height - _ROWS_BESIDE)
        live.update(screen(snapshot, rows if job is None else max(1, rows // 2), trouble), refresh=True)
        time.sleep(interval_s)
        try:
            snapshot, trouble, received_s = _fetch(channel, job), "", time.monotonic()
        except grpc.RpcError as error:
            # It may come back: keep its last answer on the screen, with the current error.
            since_s = time.monotonic() - received_s
            trouble = f"no answer for {since_s:.0f} s: {error.details() or error.code().name}"


def _fetch(channel: "grpc.Channel", job: str | None) -> "Snapshot":
    from perseus.cli.top_tables import Snapshot
    from perseus.v1 import job_service_pb2, power_service_pb2
    from perseus.v1.job_service_pb2_grpc import JobServiceStub
    from perseus.v1.power_service_pb2_grpc import PowerServiceStub

    jobs = JobServiceStub(channel)
    listed = pages(jobs.ListJobs, job_service_pb2.ListJobsRequest(page_size=PAGE_SIZE))
    feeds = PowerServiceStub(channel).ListFeeds(power_service_pb2.ListFeedsRequest(), timeout=TIMEOUT_S)
    found = [each for page in listed for each in page.jobs]
    if job is None:
        return Snapshot(found, feeds.feeds)
    asked = pages(jobs.ListRanks, job_service_pb2.ListRanksRequest(job_id=job, page_size=PAGE_SIZE))
    return Snapshot(found, feeds.feeds, [rank for page in asked for rank in page.ranks])
