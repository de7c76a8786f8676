"""`perseus jobs`: inspect the jobs of a running coordinator, and enter what only the operator knows."""

import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perseus.cli.connection import Connection, connected, connecting, fleet
from perseus.cli.ledger import ledger_entry
from perseus.cli.listing import (
    PAGE_SIZE,
    TIMEOUT_S,
    LabelsOption,
    duration_s,
    label_filter,
    later,
    moment,
    pages,
)
from perseus.cli.rows import Format, FormatOption, print_json, row_of, show_message, show_messages
from perseus.cli.terminal import YesOption, confirm, error_console, fail, print_whole

if TYPE_CHECKING:
    import grpc

    from perseus.v1.event_pb2 import JobEvent
    from perseus.v1.job_pb2 import Job
    from perseus.v1.job_service_pb2_grpc import JobServiceStub

# Bounds of the contract's integers.
MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1

_REBALANCING_TIMEOUT_S = 600.0
_ADVICE_TIMEOUT_S = 2.0

_SHOWN_EVENT_COUNT = 5
_WATCHED_EVENT_COUNT = 10
"""How many earlier events a watch begins with."""

# A policy that follows a signal gets its time from extra time and horizon, or from iterations and until.
_TIMES = (((True, True), (False, False)), ((False, False), (True, True)))


class WatchFormat(StrEnum):
    """The formats of a watch."""

    TEXT = "text"
    JSON = "json"


app = typer.Typer(no_args_is_help=True)

JobId = Annotated[str, typer.Argument(help="The job's identifier.", show_default=False)]
RunNumber = Annotated[
    int, typer.Option("--run", min=0, max=MAX_INT32, help="A run of the job; 0 for the latest.")
]


@app.command("list")
@connecting
def list_jobs(
    connection: Connection,
    state: Annotated[
        list[str] | None,
        typer.Option(help="Only jobs in this state; repeatable.", show_default=False),
    ] = None,
    label: LabelsOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """List all jobs."""
    from perseus.cli.job_tables import job_table
    from perseus.v1 import job_pb2, job_service_pb2

    request = job_service_pb2.ListJobsRequest(
        states=_numbers("--state", job_pb2.JobState, "JOB_STATE_", state or ()),
        labels=label_filter(label),
        page_size=PAGE_SIZE,
    )
    with fleet(connection) as coordinators:
        listed = coordinators.jobs(request)
        show_messages(form, listed, job_pb2.Job.DESCRIPTOR, lambda: job_table(listed))


@app.command()
@connecting
def runs(connection: Connection, job_id: JobId, form: FormatOption = Format.TABLE) -> None:
    """List all runs of a job, the latest first."""
    from perseus.cli.job_tables import run_table
    from perseus.v1 import job_pb2, job_service_pb2

    request = job_service_pb2.ListRunsRequest(job_id=job_id, page_size=PAGE_SIZE)
    with _jobs(connection) as jobs:
        listed = [run for page in pages(jobs.ListRuns, request) for run in page.runs]
    show_messages(form, listed, job_pb2.Job.DESCRIPTOR, lambda: run_table(listed))


@app.command()
@connecting
def show(
    connection: Connection, job_id: JobId, run_number: RunNumber = 0, form: FormatOption = Format.TABLE
) -> None:
    """Show a job: its state and the reason, its stragglers, its plans, its latest events."""
    from perseus.v1 import job_service_pb2, job_service_pb2_grpc

    with connected(connection) as channel:
        jobs = job_service_pb2_grpc.JobServiceStub(channel)
        request = job_service_pb2.GetJobRequest(job_id=job_id, run_number=run_number)
        job = jobs.GetJob(request, timeout=TIMEOUT_S).job
        if form is not Format.TABLE:
            _show(job, form)
            return
        asked = job_service_pb2.ListJobEventsRequest(
            job_id=job_id, run_number=job.run_number, page_size=_SHOWN_EVENT_COUNT, latest_first=True
        )
        latest = jobs.ListJobEvents(asked, timeout=TIMEOUT_S).events[::-1]
        _show(job, form, "" if run_number else _advice(channel, job), latest)


@app.command()
@connecting
def rebalancing(
    connection: Connection,
    job_id: JobId,
    layers: Annotated[
        str | None,
        typer.Option(
            metavar="LAYERS",
            help="Layers of each stage, as 7,8,8,7, or one number for all; of each chunk, in the model's "
            "order, if stages have several. By default those that were registered.",
            show_default=False,
        ),
    ] = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Show what moving layers between a job's stages would bring beside clocks. It changes nothing."""
    from perseus.cli.rebalancing import parse_layers, partitions_table
    from perseus.v1 import frontier_service_pb2, frontier_service_pb2_grpc

    counts = [] if layers is None else parse_layers(layers)
    for count in counts:
        if not 1 <= count <= MAX_INT32:
            fail(f"--layers: expected at least one layer everywhere, found {count}")
    with connected(connection) as channel:
        request = frontier_service_pb2.GetRebalancingRequest(job_id=job_id, layer_counts=counts)
        frontiers = frontier_service_pb2_grpc.FrontierServiceStub(channel)
        found = frontiers.GetRebalancing(request, timeout=_REBALANCING_TIMEOUT_S).rebalancing
    show_message(form, found, lambda: (partitions_table(found),))


@app.command()
@connecting
def ranks(
    connection: Connection,
    job_id: JobId,
    state: Annotated[
        list[str] | None,
        typer.Option(help="Only ranks in this state; repeatable.", show_default=False),
    ] = None,
    pipeline: Annotated[
        int | None,
        typer.Option(min=0, max=MAX_INT32, help="Only ranks of this pipeline.", show_default=False),
    ] = None,
    stage: Annotated[
        int | None, typer.Option(min=0, max=MAX_INT32, help="Only ranks of this stage.", show_default=False)
    ] = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """List a job's ranks: the agents that serve them, their iterations, the plans in force."""
    from perseus.cli.job_tables import rank_table
    from perseus.v1 import job_service_pb2, rank_pb2

    request = job_service_pb2.ListRanksRequest(
        job_id=job_id,
        states=_numbers("--state", rank_pb2.RankState, "RANK_STATE_", state or ()),
        pipeline=pipeline,
        stage=stage,
        page_size=PAGE_SIZE,
    )
    with _jobs(connection) as jobs:
        listed = [rank for page in pages(jobs.ListRanks, request) for rank in page.ranks]
    show_messages(form, listed, rank_pb2.Rank.DESCRIPTOR, lambda: rank_table(listed))


@app.command()
@connecting
def watch(
    connection: Connection,
    job_id: JobId,
    run_number: RunNumber = 0,
    form: Annotated[
        WatchFormat,
        typer.Option("--format", help="Lines for people; or json: an object a line."),
    ] = WatchFormat.TEXT,
) -> None:
    """Print a job's latest events, then new ones and iterations, until it ends or you press Ctrl-C.

    During profiling, also show its progress and when it will be done.
    """
    from perseus.cli.watching import Watching
    from perseus.v1 import job_pb2, job_service_pb2

    asked = job_service_pb2.GetJobRequest(job_id=job_id, run_number=run_number, view=job_pb2.JOB_VIEW_SUMMARY)
    with _jobs(connection) as jobs, Watching(as_json=form is WatchFormat.JSON) as watching:
        job = jobs.GetJob(asked, timeout=TIMEOUT_S).job
        request = job_service_pb2.WatchJobRequest(
            job_id=job_id,
            run_number=job.run_number,
            after_sequence=max(0, job.last_event_sequence - _WATCHED_EVENT_COUNT),
        )
        for update in jobs.WatchJob(request):
            watching.show(update)
            # Where another coordinator takes over, it goes on from here.
            if update.HasField("event"):
                request.after_sequence = update.event.sequence


@app.command()
@connecting
def events(
    connection: Connection,
    job_id: JobId,
    types: Annotated[
        list[str] | None,
        typer.Option(
            "--type",
            help="Only events of this type, such as plan_refused; repeatable.",
            show_default=False,
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            help="Only events since this time (2026-01-31T12:00, in UTC), or within the last 90s, 15m, 2h.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=MAX_INT32, help="Maximum number of events.")] = 100,
    first: Annotated[
        bool, typer.Option("--first", help="The earliest of these events instead of the latest.")
    ] = False,
    run_number: RunNumber = 0,
    form: FormatOption = Format.TABLE,
) -> None:
    """List the latest events of a job, in order of time."""
    from perseus.cli.job_tables import event_table
    from perseus.v1 import event_pb2, job_service_pb2

    request = job_service_pb2.ListJobEventsRequest(
        job_id=job_id,
        run_number=run_number,
        types=_numbers("--type", event_pb2.JobEventType, "JOB_EVENT_TYPE_", types or ()),
        page_size=min(limit + 1, PAGE_SIZE),
        latest_first=not first,
    )
    if since is not None:
        request.start_time.FromDatetime(moment("--since", since))
    with _jobs(connection) as jobs:
        listed = (event for page in pages(jobs.ListJobEvents, request) for event in page.events)
        found = list(islice(listed, limit + 1))
    shown = found[:limit] if first else found[:limit][::-1]
    show_messages(form, shown, event_pb2.JobEvent.DESCRIPTOR, lambda: event_table(shown))
    if len(found) > limit:
        which, others = ("first", "later") if first else ("latest", "earlier")
        error_console.print(
            f"these are the {which} {limit}; there are {others} ones", style="dim", highlight=False
        )


@app.command()
@connecting
def straggler(
    connection: Connection,
    job_id: JobId,
    pipeline: Annotated[
        int, typer.Argument(min=0, max=MAX_INT32, help="The slow pipeline, from 0.", show_default=False)
    ],
    factor: Annotated[
        float | None, typer.Option(help="Iteration time as a multiple of T_min.", show_default=False)
    ] = None,
    iteration_time_s: Annotated[
        float | None, typer.Option(help="Measured iteration time, seconds.", show_default=False)
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="The pipeline is no longer slow.")] = False,
    form: FormatOption = Format.TABLE,
) -> None:
    """Report that a pipeline is slow, or that it no longer is."""
    from perseus.v1 import job_service_pb2

    if [factor is not None, iteration_time_s is not None, clear].count(True) != 1:
        fail("expected one of --factor, --iteration-time-s and --clear")
    with _jobs(connection) as jobs:
        if clear:
            cleared = job_service_pb2.ClearStragglerRequest(job_id=job_id, pipeline=pipeline)
            _show(jobs.ClearStraggler(cleared, timeout=TIMEOUT_S).job, form)
        else:
            report = job_service_pb2.ReportStragglerRequest(job_id=job_id, pipeline=pipeline)
            if factor is not None:
                report.slowdown_factor = factor
            elif iteration_time_s is not None:
                report.iteration_time_s = iteration_time_s
            _show(jobs.ReportStraggler(report, timeout=TIMEOUT_S).job, form)


@app.command()
@connecting
def report(
    connection: Connection, job_id: JobId, run_number: RunNumber = 0, form: FormatOption = Format.TABLE
) -> None:
    """Show measured time and energy, period by period, against the stock baseline.

        Then show the energy that the whole run has used and saved, profiling and gaps included, as in
    `perseus ledger`.
    """
    from rich.text import Text

    from perseus.cli.job_tables import no_slowdown, profiling_cost, report_table, signal_target_text
    from perseus.cli.ledger_tables import account_lines
    from perseus.v1 import job_pb2, job_service_pb2, job_service_pb2_grpc, ledger_service_pb2_grpc

    with connected(connection) as channel:
        jobs = job_service_pb2_grpc.JobServiceStub(channel)
        wanted = job_service_pb2.GetJobRequest(
            job_id=job_id, run_number=run_number, view=job_pb2.JOB_VIEW_SUMMARY
        )
        job = jobs.GetJob(wanted, timeout=TIMEOUT_S).job
        number = job.run_number
        request = job_service_pb2.GetReportRequest(job_id=job_id, run_number=number, page_size=PAGE_SIZE)
        found = list(pages(jobs.GetReport, request))
        entry = ledger_entry(ledger_service_pb2_grpc.LedgerServiceStub(channel), job_id, number)
    last, periods = found[-1], [period for page in found for period in page.periods]
    if form is Format.CSV:
        show_messages(form, periods, job_pb2.ReportPeriod.DESCRIPTOR, lambda: "")
        return
    whole = job_service_pb2.GetReportResponse(
        periods=periods, profiling_cost=last.profiling_cost, profiling_budget=last.profiling_budget
    )
    facts = [f"profiling took {profiling_cost(last.profiling_cost, last.profiling_budget)}"]
    if last.HasField("no_slowdown_time"):
        whole.no_slowdown_time.CopyFrom(last.no_slowdown_time)
    if job.HasField("no_slowdown_time"):
        facts.append(f"no slowdown: {no_slowdown(job)}")
    if job.HasField("signal_target"):
        facts.append(f"signal: {signal_target_text(job)}")
    if form is Format.JSON:
        print_json({**row_of(whole), "ledger": row_of(entry.account) if entry is not None else None})
        return
    if entry is not None:
        facts += ["ledger of the run:", *(f"  {line}" for line in account_lines(entry.account))]
    print_whole(report_table(periods), *map(Text, facts))


@app.command()
@connecting
def rebaseline(connection: Connection, job_id: JobId, form: FormatOption = Format.TABLE) -> None:
    """Measure the stock baseline again: a few iterations at stock, then back to the plans."""
    from perseus.v1 import job_service_pb2

    with _jobs(connection) as jobs:
        request = job_service_pb2.MeasureBaselineRequest(job_id=job_id, request_id=uuid.uuid4().hex)
        _show(jobs.MeasureBaseline(request, timeout=TIMEOUT_S).job, form)


@app.command()
@connecting
def policy(
    connection: Connection,
    job_id: JobId,
    no_slowdown: Annotated[bool, typer.Option("--no-slowdown", help="Never slower than stock.")] = False,
    max_slowdown_percent: Annotated[
        float | None, typer.Option(help="Slower than stock by at most this percentage.", show_default=False)
    ] = None,
    deadline_s: Annotated[
        float | None, typer.Option(help="Time for the remaining iterations, seconds.", show_default=False)
    ] = None,
    iterations: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_INT64,
            help="The remaining iterations, with --deadline-s or --until.",
            show_default=False,
        ),
    ] = None,
    max_average_power_w: Annotated[
        float | None, typer.Option(help="Cap on a pipeline's average power, watts.", show_default=False)
    ] = None,
    carbon: Annotated[bool, typer.Option("--carbon", help="Least carbon in the given time.")] = False,
    cost: Annotated[bool, typer.Option("--cost", help="Least cost in the given time.")] = False,
    extra_time_percent: Annotated[
        float | None,
        typer.Option(help="Extra time over full speed, with --horizon.", show_default=False),
    ] = None,
    horizon: Annotated[
        str | None, typer.Option(help="Period for the extra time: 24h, 7d.", show_default=False)
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(
            help="End, with --iterations: 2026-01-31T12:00 (UTC), or 3h, 2d from now.",
            show_default=False,
        ),
    ] = None,
    tolerance_percent: Annotated[
        float | None,
        typer.Option(help="Largest share of its speed that a power budget may take.", show_default=False),
    ] = None,
    weight: Annotated[
        float | None,
        typer.Option(help="Cost of its lost speed, relative to other jobs.", show_default=False),
    ] = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Set where on the frontier a job runs without stragglers, and how far a power budget may slow it.

    Without --tolerance-percent and --weight, the terms for budgets stay as they are.
    """
    from perseus.v1 import job_pb2, job_service_pb2

    by_signal = carbon or cost
    rules = (
        no_slowdown or None,
        max_slowdown_percent,
        deadline_s,
        max_average_power_w,
        carbon or None,
        cost or None,
    )
    if len(rules) - rules.count(None) != 1:
        fail(
            "expected one of --no-slowdown, --max-slowdown-percent, --deadline-s, --max-average-power-w, "
            "--carbon and --cost"
        )
    if not by_signal and (deadline_s is None) != (iterations is None):
        fail("expected --deadline-s and --iterations together")
    within = (extra_time_percent is not None, horizon is not None)
    by_work = (iterations is not None, until is not None)
    if by_signal and (within, by_work) not in _TIMES:
        fail(
            "expected --extra-time-percent and --horizon, or --iterations and --until, with --carbon or "
            "--cost"
        )
    if not by_signal and (any(within) or until is not None):
        fail("expected --extra-time-percent, --horizon and --until with --carbon or --cost only")
    if (tolerance_percent is None) != (weight is None):
        fail("expected --tolerance-percent and --weight together")
    wanted = job_pb2.OperatingPolicy()
    if max_slowdown_percent is not None:
        wanted.max_slowdown_percent = max_slowdown_percent
    elif max_average_power_w is not None:
        wanted.max_average_power_w = max_average_power_w
    elif by_signal:
        least = wanted.least_carbon if carbon else wanted.least_cost
        if extra_time_percent is not None and horizon is not None:
            least.extra_time.percent = extra_time_percent
            least.extra_time.horizon_s = duration_s("--horizon", horizon)
        elif until is not None and iterations is not None:
            least.work_until.iteration_count = iterations
            least.work_until.end_time.FromDatetime(later("--until", until))
    elif deadline_s is not None and iterations is not None:
        wanted.deadline.iteration_count = iterations
        wanted.deadline.time_s = deadline_s
    else:
        wanted.no_slowdown.SetInParent()
    if tolerance_percent is not None and weight is not None:
        wanted.budget_terms.tolerance_percent = tolerance_percent
        wanted.budget_terms.weight = weight
    with _jobs(connection) as jobs:
        request = job_service_pb2.SetPolicyRequest(job_id=job_id, policy=wanted)
        _show(jobs.SetPolicy(request, timeout=TIMEOUT_S).job, form)


@app.command()
@connecting
def finish(
    connection: Connection, job_id: JobId, yes: YesOption = False, form: FormatOption = Format.TABLE
) -> None:
    """End a job: all of its GPUs go back to stock. Ask first if ranks are connected."""
    from perseus.v1 import job_pb2, job_service_pb2

    with _jobs(connection) as jobs:
        if not yes:
            asked = job_service_pb2.GetJobRequest(job_id=job_id, view=job_pb2.JOB_VIEW_SUMMARY)
            job = jobs.GetJob(asked, timeout=TIMEOUT_S).job
            count = job.rank_counts.connected_count
            if count and job.state != job_pb2.JOB_STATE_FINISHED:
                ranks = f"{count} connected {'rank' if count == 1 else 'ranks'}"
                confirm(f"{ranks} of job {job_id} would train on at stock", "End it?")
        _show(jobs.FinishJob(job_service_pb2.FinishJobRequest(job_id=job_id), timeout=TIMEOUT_S).job, form)


@app.command()
@connecting
def resume(connection: Connection, job_id: JobId, form: FormatOption = Format.TABLE) -> None:
    """Resume a job that is back at stock: its baseline is measured, then it is planned again."""
    from perseus.v1 import job_service_pb2

    with _jobs(connection) as jobs:
        _show(jobs.ResumeJob(job_service_pb2.ResumeJobRequest(job_id=job_id), timeout=TIMEOUT_S).job, form)


@app.command()
@connecting
def delete(connection: Connection, job_id: JobId) -> None:
    """Delete a finished job with all its runs, events and reports."""
    from perseus.v1 import job_service_pb2

    with _jobs(connection) as jobs:
        jobs.DeleteJob(job_service_pb2.DeleteJobRequest(job_id=job_id), timeout=TIMEOUT_S)


@contextmanager
def _jobs(connection: Connection) -> Iterator["JobServiceStub"]:
    """Connect to the coordinator's job service; turn its refusals into one line and an exit code."""
    from perseus.v1 import job_service_pb2_grpc

    with connected(connection) as channel:
        yield job_service_pb2_grpc.JobServiceStub(channel)


def _numbers(flag: str, enum: Any, prefix: str, names: Iterable[str]) -> list[Any]:
    """Return the numbers of a contract enum for names as people write them."""
    known = {name.removeprefix(prefix).lower(): number for name, number in enum.items() if number}
    for name in names:
        if name not in known:
            fail(f"{flag}: expected one of {', '.join(known)}, found {name!r}")
    return [known[name] for name in names]


def _show(job: "Job", form: Format, advice: str = "", events: "Sequence[JobEvent]" = ()) -> None:
    from perseus.cli.job_tables import event_table, job_facts, plan_table

    show_message(
        form,
        job,
        lambda: (
            job_facts(job, advice),
            *([plan_table(job)] if job.planned_iteration_time_s else []),
            *([event_table(events)] if events else []),
        ),
    )


def _advice(channel: "grpc.Channel", job: "Job") -> str:
    """Return what moving layers would bring a job, in a line; empty if that is unknown."""
    import grpc

    from perseus.cli.rebalancing import advice_text
    from perseus.v1.frontier_service_pb2 import GetRebalancingRequest
    from perseus.v1.frontier_service_pb2_grpc import FrontierServiceStub

    if not job.t_min_s or not any(work.layer_counts for work in job.spec.stage_work):
        return ""
    try:
        asked = GetRebalancingRequest(job_id=job.job_id)
        answer = FrontierServiceStub(channel).GetRebalancing(asked, timeout=_ADVICE_TIMEOUT_S)
    except grpc.RpcError as error:
        return "being computed" if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED else ""
    return advice_text(answer.rebalancing)
