"""`perseus power`: budgets for the power that jobs draw, and the state of feeds."""

import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from perseus.cli.connection import Connection, connecting, escaping
from perseus.cli.fleet import Fleet
from perseus.cli.jobs import WatchFormat
from perseus.cli.listing import PAGE_SIZE, TIMEOUT_S, later, pages
from perseus.cli.rows import Format, FormatOption, print_json, row_of, show_message, show_messages
from perseus.cli.terminal import YesOption, confirm, console, error_console, fail
from perseus.printable import printable

if TYPE_CHECKING:
    from perseus.v1.power_service_pb2 import Budget
    from perseus.v1.power_service_pb2_grpc import PowerServiceStub

app = typer.Typer(no_args_is_help=True)

BudgetId = Annotated[str, typer.Argument(help="The budget's identifier.", show_default=False)]
Feed = Annotated[str, typer.Option(help="Only this feed.", show_default=False)]


@app.command("set")
@connecting
def set_budget(
    connection: Connection,
    budget_id: BudgetId,
    limit_w: Annotated[float | None, typer.Option(help="The limit, watts.", show_default=False)] = None,
    percent: Annotated[
        float | None,
        typer.Option(help="The limit, percent of the feed's reference.", show_default=False),
    ] = None,
    feed: Annotated[str, typer.Option(help="The feed.")] = "default",
    start: Annotated[
        str | None,
        typer.Option(
            help="Start: 2026-11-01T18:00 (UTC), or a delay (30s, 15m, 2h); default now.",
            show_default=False,
        ),
    ] = None,
    end: Annotated[
        str | None,
        typer.Option(help="End, as above; by default when it is cancelled.", show_default=False),
    ] = None,
    ramp_w_per_s: Annotated[
        float | None,
        typer.Option(help="Ramp of the power cap, if slower than the feed's.", show_default=False),
    ] = None,
    correlation_id: Annotated[str, typer.Option(help="Your own name for it.", show_default=False)] = "",
    yes: YesOption = False,
    form: FormatOption = Format.TABLE,
) -> None:
    """Set a budget, or replace the one with the same identifier."""
    from perseus.v1 import power_service_pb2

    if (limit_w is None) == (percent is None):
        fail("expected one of --limit-w and --percent")
    request = power_service_pb2.SetBudgetRequest(
        budget_id=budget_id,
        request_id=uuid.uuid4().hex,
        feed=feed,
        ramp_w_per_s=ramp_w_per_s,
        correlation_id=correlation_id,
    )
    if limit_w is not None:
        request.limit_w = limit_w
    elif percent is not None:
        request.percent = percent
    if start is not None:
        request.start_time.FromDatetime(later("--start", start))
    if end is not None:
        request.end_time.FromDatetime(later("--end", end))
    if not yes and 0 in (limit_w, percent):
        until = "until it is cancelled" if end is None else f"until {end}"
        confirm(f"0 W slows every job on feed {feed!r} as far as its owner allows, {until}", "Set it?")
    with _power(connection) as power:
        answer = power.SetBudget(request, timeout=TIMEOUT_S)
    if answer.HasField("replaced"):
        from perseus.cli.power_tables import budget_text

        error_console.print(f"replaced: {printable(budget_text(answer.replaced))}", highlight=False)
    _show(answer.budget, form)


@app.command("list")
@connecting
def list_budgets(connection: Connection, feed: Feed = "", form: FormatOption = Format.TABLE) -> None:
    """List all budgets, including ended and cancelled ones."""
    from perseus.cli.power_tables import budget_table
    from perseus.v1 import power_service_pb2

    request = power_service_pb2.ListBudgetsRequest(feed=feed, page_size=PAGE_SIZE)
    with _power(connection) as power:
        found = [budget for page in pages(power.ListBudgets, request) for budget in page.budgets]
    show_messages(form, found, power_service_pb2.Budget.DESCRIPTOR, lambda: budget_table(found))


@app.command()
@connecting
def cancel(connection: Connection, budget_id: BudgetId, form: FormatOption = Format.TABLE) -> None:
    """End a budget at once."""
    from perseus.v1 import power_service_pb2

    request = power_service_pb2.CancelBudgetRequest(budget_id=budget_id)
    with _power(connection) as power:
        budget = power.CancelBudget(request, timeout=TIMEOUT_S).budget
    _show(budget, form)


@app.command()
@connecting
def feeds(connection: Connection, form: FormatOption = Format.TABLE) -> None:
    """Show every feed: its limit, its draw, and whether it keeps the limit."""
    from perseus.cli.power_tables import feed_table
    from perseus.v1 import power_service_pb2

    with _power(connection) as power:
        request = power_service_pb2.ListFeedsRequest()
        found = power.ListFeeds(request, timeout=TIMEOUT_S).feeds
    show_messages(form, found, power_service_pb2.FeedState.DESCRIPTOR, lambda: feed_table(found))


@app.command()
@connecting
def watch(
    connection: Connection,
    feed: Feed = "",
    form: Annotated[
        WatchFormat, typer.Option("--format", help="Lines for people; or json: an object a line.")
    ] = WatchFormat.TEXT,
) -> None:
    """Print the state of feeds whenever it changes, until you press Ctrl-C."""
    from perseus.cli.power_tables import feed_line
    from perseus.v1 import power_service_pb2

    with _power(connection) as power:
        for update in power.WatchFeeds(power_service_pb2.WatchFeedsRequest(feed=feed)):
            if form is WatchFormat.JSON:
                print_json(row_of(update.feed), is_line=True)
                sys.stdout.flush()
            else:
                console.print(feed_line(update.feed), highlight=False, markup=False)


@contextmanager
def _power(connection: Connection) -> Iterator["PowerServiceStub"]:
    """Connect to the power service of the coordinator that keeps the budgets, as `connected`."""
    from perseus.v1 import power_service_pb2_grpc

    with escaping(connection) as channel, Fleet(channel) as found:
        yield power_service_pb2_grpc.PowerServiceStub(found.keeper())


def _show(budget: "Budget", form: Format) -> None:
    from perseus.cli.power_tables import budget_table

    show_message(form, budget, lambda: [budget_table([budget])])
