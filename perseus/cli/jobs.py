"""`perseus jobs`: look at the jobs of a running coordinator, and tell it what only the operator knows."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from perseus.cli.terminal import BAD_INPUT, FAILURE, console, fail

if TYPE_CHECKING:
    from perseus.v1.clock_statistics_pb2 import ClockStatistics
    from perseus.v1.job_pb2 import Job
    from perseus.v1.job_service_pb2_grpc import JobServiceStub

_TIMEOUT_S = 10.0

app = typer.Typer(help="Look at jobs, and steer them.", no_args_is_help=True)

Coordinator = Annotated[
    str, typer.Option(envvar="PERSEUS_COORDINATOR", help="The coordinator's HOST:PORT.", show_envvar=True)
]
JobId = Annotated[str, typer.Argument(help="The job's identifier.", show_default=False)]
RunNumber = Annotated[int, typer.Option("--run", min=0, help="A run of the job; 0 for the latest.")]
_DEFAULT_COORDINATOR = "127.0.0.1:50051"


@app.command("list")
def list_jobs(coordinator: Coordinator = _DEFAULT_COORDINATOR) -> None:
    """List all jobs."""
    from perseus.v1 import job_service_pb2

    table = Table()
    for column in ("job", "state", "pipelines × stages × tensor", "ranks connected", "T_min", "stragglers"):
        table.add_column(column)
    with _jobs(coordinator) as jobs:
        token = ""
        while True:
            page = jobs.ListJobs(job_service_pb2.ListJobsRequest(page_token=token), timeout=_TIMEOUT_S)
            for job in page.jobs:
                table.add_row(*_summary(job))
            token = page.next_page_token
            if not token:
                break
    console.print(table)


@app.command()
def runs(job_id: JobId, coordinator: Coordinator = _DEFAULT_COORDINATOR) -> None:
    """List all runs of a job, the latest first."""
    from perseus.v1 import job_service_pb2

    table = Table()
    for column in ("run", "state", "registered", "pipelines × stages × tensor"):
        table.add_column(column)
    with _jobs(coordinator) as jobs:
        token = ""
        while True:
            request = job_service_pb2.ListRunsRequest(job_id=job_id, page_token=token)
            page = jobs.ListRuns(request, timeout=_TIMEOUT_S)
            for run in page.runs:
                _, state, layout, *_ = _summary(run)
                at = run.create_time.ToDatetime().strftime("%Y-%m-%d %H:%M:%S UTC")
                table.add_row(str(run.run_number), state, at, layout)
            token = page.next_page_token
            if not token:
                break
    console.print(table)


@app.command()
def show(job_id: JobId, run_number: RunNumber = 0, coordinator: Coordinator = _DEFAULT_COORDINATOR) -> None:
    """Show a job and its ranks."""
    from perseus.v1 import job_service_pb2

    with _jobs(coordinator) as jobs:
        request = job_service_pb2.GetJobRequest(job_id=job_id, run_number=run_number)
        _show(jobs.GetJob(request, timeout=_TIMEOUT_S).job)


@app.command()
def watch(job_id: JobId, run_number: RunNumber = 0, coordinator: Coordinator = _DEFAULT_COORDINATOR) -> None:
    """Print a job's events and iterations as they come, until it has ended or you press Ctrl-C."""
    from perseus.v1 import job_service_pb2

    with _jobs(coordinator) as jobs:
        try:
            request = job_service_pb2.WatchJobRequest(job_id=job_id, run_number=run_number)
            for update in jobs.WatchJob(request):
                if update.HasField("event"):
                    at = update.event.create_time.ToDatetime().strftime("%H:%M:%S")
                    console.print(f"{at}  {update.event.message}", highlight=False, markup=False)
                elif update.HasField("iteration"):
                    found = update.iteration
                    console.print(
                        f"          pipeline {found.pipeline} iteration {found.iteration}: "
                        f"{found.iteration_time_s:.3f} s, {found.energy_j:.0f} J, plan {found.plan_version}",
                        highlight=False,
                        style="dim",
                    )
        except KeyboardInterrupt:
            raise typer.Exit from None


@app.command()
def straggler(
    job_id: JobId,
    pipeline: Annotated[int, typer.Argument(min=0, help="The slow pipeline, from 0.", show_default=False)],
    factor: Annotated[
        float | None, typer.Option(help="Its iteration time as a factor of T_min.", show_default=False)
    ] = None,
    iteration_time_s: Annotated[
        float | None, typer.Option(help="Its iteration time as measured, seconds.", show_default=False)
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="It is no longer slow.")] = False,
    coordinator: Coordinator = _DEFAULT_COORDINATOR,
) -> None:
    """Report that a pipeline is slow, or that it no longer is."""
    from perseus.v1 import job_service_pb2

    if [factor is not None, iteration_time_s is not None, clear].count(True) != 1:
        fail("expected one of --factor, --iteration-time-s and --clear")
    with _jobs(coordinator) as jobs:
        if clear:
            cleared = job_service_pb2.ClearStragglerRequest(job_id=job_id, pipeline=pipeline)
            _show(jobs.ClearStraggler(cleared, timeout=_TIMEOUT_S).job)
        else:
            report = job_service_pb2.ReportStragglerRequest(job_id=job_id, pipeline=pipeline)
            if factor is not None:
                report.slowdown_factor = factor
            elif iteration_time_s is not None:
                report.iteration_time_s = iteration_time_s
            _show(jobs.ReportStraggler(report, timeout=_TIMEOUT_S).job)


@app.command()
def report(job_id: JobId, run_number: RunNumber = 0, coordinator: Coordinator = _DEFAULT_COORDINATOR) -> None:
    """Show what was measured: time and energy, period by period, against the stock baseline."""
    from perseus.v1 import job_pb2, job_service_pb2

    with _jobs(coordinator) as jobs:
        request = job_service_pb2.GetReportRequest(job_id=job_id, run_number=run_number)
        periods = jobs.GetReport(request, timeout=_TIMEOUT_S).periods
    stock = None
    table = Table(caption="mean ± standard error; against the latest stock baseline before")
    table.add_column("state")
    for column in ("first iteration", "iterations", "iteration time", "energy", "slowdown", "saving"):
        table.add_column(column, justify="right")
    for period in periods:
        state = _state_name(period.state) + (" with straggler" if period.has_straggler else "")
        compared = ["", ""]
        if period.state == job_pb2.JOB_STATE_BASELINE:
            stock = period
        elif stock is not None:
            compared = [
                f"{100 * (period.iteration_time_s / stock.iteration_time_s - 1):+.1f} %",
                f"{100 * (1 - period.energy_j / stock.energy_j):+.1f} %",
            ]
        table.add_row(
            state,
            str(period.first_iteration),
            str(period.iteration_count),
            f"{period.iteration_time_s:.3f} ± {period.iteration_time_se_s:.3f} s",
            f"{period.energy_j:.0f} ± {period.energy_se_j:.0f} J",
            *compared,
        )
    console.print(table)


@app.command()
def rebaseline(job_id: JobId, coordinator: Coordinator = _DEFAULT_COORDINATOR) -> None:
    """Measure the stock baseline again: a few iterations at stock, then the plans return."""
    from perseus.v1 import job_service_pb2

    with _jobs(coordinator) as jobs:
        request = job_service_pb2.MeasureBaselineRequest(job_id=job_id, request_id=uuid.uuid4().hex)
        _show(jobs.MeasureBaseline(request, timeout=_TIMEOUT_S).job)


@app.command()
def policy(
    job_id: JobId,
    no_slowdown: Annotated[bool, typer.Option("--no-slowdown", help="Never slower than T_min.")] = False,
    max_slowdown_percent: Annotated[
        float | None, typer.Option(help="Slower than T_min by at most this.", show_default=False)
    ] = None,
    deadline_s: Annotated[
        float | None, typer.Option(help="Time for the remaining iterations, seconds.", show_default=False)
    ] = None,
    iterations: Annotated[
        int | None, typer.Option(help="The remaining iterations, with a deadline.", show_default=False)
    ] = None,
    max_average_power_w: Annotated[
        float | None, typer.Option(help="Cap on a pipeline's average power, watts.", show_default=False)
    ] = None,
    coordinator: Coordinator = _DEFAULT_COORDINATOR,
) -> None:
    """Set where on the frontier a job runs while no straggler holds it up."""
    from perseus.v1 import job_pb2, job_service_pb2

    rules = (no_slowdown or None, max_slowdown_percent, deadline_s, max_average_power_w)
    if len(rules) - rules.count(None) != 1:
        fail("expected one of --no-slowdown, --max-slowdown-percent, --deadline-s and --max-average-power-w")
    if (deadline_s is None) != (iterations is None):
        fail("expected --deadline-s and --iterations together")
    wanted = job_pb2.OperatingPolicy()
    if max_slowdown_percent is not None:
        wanted.max_slowdown_percent = max_slowdown_percent
    elif max_average_power_w is not None:
        wanted.max_average_power_w = max_average_power_w
    elif deadline_s is not None and iterations is not None:
        wanted.deadline.iteration_count = iterations
        wanted.deadline.time_s = deadline_s
    else:
        wanted.no_slowdown.SetInParent()
    with _jobs(coordinator) as jobs:
        request = job_service_pb2.SetPolicyRequest(job_id=job_id, policy=wanted)
        _show(jobs.SetPolicy(request, timeout=_TIMEOUT_S).job)


@app.command()
def finish(job_id: JobId, coordinator: Coordinator = _DEFAULT_COORDINATOR) -> None:
    """End a job: all of its GPUs go back to stock."""
    from perseus.v1 import job_service_pb2

    with _jobs(coordinator) as jobs:
        _show(jobs.FinishJob(job_service_pb2.FinishJobRequest(job_id=job_id), timeout=_TIMEOUT_S).job)


@app.command()
def resume(job_id: JobId, coordinator: Coordinator = _DEFAULT_COORDINATOR) -> None:
    """Let a job that was put back to stock go on: the baseline is measured, then it is planned again."""
    from perseus.v1 import job_service_pb2

    with _jobs(coordinator) as jobs:
        _show(jobs.ResumeJob(job_service_pb2.ResumeJobRequest(job_id=job_id), timeout=_TIMEOUT_S).job)


@app.command()
def delete(job_id: JobId, coordinator: Coordinator = _DEFAULT_COORDINATOR) -> None:
    """Forget a finished job, with all its runs, events and reports."""
    from perseus.v1 import job_service_pb2

    with _jobs(coordinator) as jobs:
        jobs.DeleteJob(job_service_pb2.DeleteJobRequest(job_id=job_id), timeout=_TIMEOUT_S)


@contextmanager
def _jobs(address: str) -> Iterator["JobServiceStub"]:
    """The coordinator's job service; its refusals become one line and an exit code."""
    import grpc

    from perseus.v1 import job_service_pb2_grpc

    their_fault = {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
    }
    with grpc.insecure_channel(address) as channel:
        try:
            yield job_service_pb2_grpc.JobServiceStub(channel)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                fail(f"no coordinator at {address}: {error.details()}", FAILURE)
            fail(error.details() or error.code().name, BAD_INPUT if error.code() in their_fault else FAILURE)


def _state_name(state: int) -> str:
    from perseus.v1 import job_pb2

    return job_pb2.JobState.Name(state).removeprefix("JOB_STATE_").lower()  # type: ignore[arg-type]


def _summary(job: "Job") -> list[str]:
    from perseus.v1 import rank_pb2

    layout = job.spec.parallelism
    connected = sum(rank.state == rank_pb2.RANK_STATE_CONNECTED for rank in job.ranks)
    return [
        job.spec.job_id,
        _state_name(job.state),
        f"{layout.pipeline_count} × {layout.stage_count} × {layout.tensor_count}",
        f"{connected} of {len(job.ranks)}",
        f"{job.t_min_s:.3f} s" if job.t_min_s else "",
        ", ".join(f"pipeline {s.pipeline} ({s.iteration_time_s:.3f} s)" for s in job.stragglers),
    ]


def _on_clock(clocks: "ClockStatistics") -> str:
    """How well a rank's clocks follow its plan, in a table's cell."""
    if not clocks.computation_time_s:
        return ""
    share = clocks.on_clock_time_s / clocks.computation_time_s
    figures = f"{share:.0%}, {clocks.late_raise_count} of {clocks.computation_count} late"
    if clocks.HasField("prediction_error_s"):
        figures += (
            f"; latency {1e3 * clocks.set_latency_s:.0f} ms, ends ± {1e3 * clocks.prediction_error_s:.1f} ms"
        )
    return figures


def _show(job: "Job") -> None:
    from perseus.v1 import rank_pb2

    titles = ("job", "state", "pipelines × stages × tensor", "ranks connected", "T_min", "stragglers")
    for title, value in zip(titles, _summary(job), strict=True):
        console.print(f"[dim]{title:>28}[/]  {value}", highlight=False)
    table = Table()
    for column in (
        "pipeline",
        "stage",
        "tensor",
        "state",
        "host",
        "GPU",
        "iteration",
        "offered",
        "in force",
        "on clock",
    ):
        table.add_column(column)
    for rank in job.ranks:
        place = rank.coordinates
        table.add_row(
            str(place.pipeline),
            str(place.stage),
            str(place.tensor),
            rank_pb2.RankState.Name(rank.state).removeprefix("RANK_STATE_").lower(),
            rank.hostname,
            f"{rank.gpu_model} {rank.gpu_uuid}",
            str(rank.iteration) if rank.iteration >= 0 else "",
            str(rank.offered_version or "stock"),
            str(rank.in_force_version or "stock"),
            _on_clock(rank.clocks),
        )
    console.print(table)
