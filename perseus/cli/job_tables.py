"""Tables of `perseus jobs`, from the coordinator's messages."""

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from perseus.cli.amounts import joules, seconds
from perseus.printable import printable
from perseus.v1 import event_pb2, job_pb2, job_service_pb2, rank_pb2

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from google.protobuf.timestamp_pb2 import Timestamp

    from perseus.v1.clock_statistics_pb2 import ClockStatistics


_RANK = "rank: pipeline/stage/tensor; plan: in force → offered"


def job_table(jobs: Iterable[job_pb2.Job]) -> Table:
    """Return a table with one line for each job."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("job", overflow="fold")
    table.add_column("state")
    table.add_column("pipelines\n× stages\n× tensor", no_wrap=True)
    for column in ("ranks\nconnected", "T_min", "power", "energy\nsaved"):
        table.add_column(column, justify="right", no_wrap=True)
    for job in jobs:
        layout, figures = job.parallelism, job.figures
        rank_count = layout.pipeline_count * layout.stage_count * layout.tensor_count
        count = job.straggler_count
        table.add_row(
            Text(job.job_id),
            state_name(job.state) + (f", {count} straggler{'s' * (count != 1)}" if count else ""),
            _layout(layout),
            f"{job.rank_counts.connected_count}/{rank_count}",
            seconds(measured_scale_s(job, job.t_min_s)) if job.t_min_s else "",
            power_text(figures),
            saved_text(figures),
        )
    return table


def measured_scale_s(job: job_pb2.Job, time_s: float) -> float:
    """Return a time on the frontier's scale as an iteration of the job is measured."""
    return time_s + job.iteration_overhead_s


def power_text(figures: job_pb2.JobFigures) -> str:
    """Return a job's power; empty if it is unknown."""
    return f"{figures.power_w / 1000:.2f} kW" if figures.HasField("power_w") else ""


def saved_text(figures: job_pb2.JobFigures) -> str:
    """Return the energy that a job saves against stock; empty if it is unknown."""
    saving = figures.saving
    return f"{saving.energy_percent:+z.1f} %" if saving.HasField("energy_percent") else ""


def run_table(runs: Iterable[job_pb2.Job]) -> Table:
    """Return a table with one line for each run of a job."""
    table = Table()
    for column in ("run", "state", "pipelines × stages × tensor", "registered", "finished"):
        table.add_column(column)
    for run in runs:
        table.add_row(
            str(run.run_number),
            f"{state_name(run.state)}: {run.state_reason}",
            _layout(run.parallelism),
            _moment(run.create_time),
            _moment(run.finish_time) if run.HasField("finish_time") else "",
        )
    return table


def job_facts(job: job_pb2.Job, advice: str = "") -> Table:
    """Return the known facts of one job, one a line, without ranks and plans.

    `advice`: what moving layers would bring.
    """
    counts = job.rank_counts
    ranks = {
        "connected": counts.connected_count,
        "expected": counts.expected_count,
        "disconnected": counts.disconnected_count,
        "lost": counts.lost_count,
        "finished": counts.finished_count,
    }
    times = {"T_min": job.t_min_s, "T*": job.t_star_s, "T_slow": job.t_slow_s}
    frontier = ", ".join(f"{name} {seconds(measured_scale_s(job, time_s))}" for name, time_s in times.items())
    facts = {
        "job": job.job_id,
        "run": str(job.run_number),
        "state": f"{state_name(job.state)}: {job.state_reason}",
        "next step": job.next_step,
        "pipelines × stages × tensor": _layout(job.parallelism),
        "ranks": ", ".join(f"{count} {state}" for state, count in ranks.items() if count),
        "policy": _policy(job.policy),
        "signal": signal_target_text(job) if job.HasField("signal_target") else "",
        "power budget": f"holds it back: iterations of {budget_target_text(job)}"
        if job.HasField("budget_target_iteration_time_s")
        else "",
        "telemetry": f"{job.thinned_batch_count} batches thinned: agents sent more than the coordinator takes"
        if job.thinned_batch_count
        else "",
        "stock baseline": _baseline(job.baseline) if job.HasField("baseline") else "",
        "profiling": progress_text(job.profiling_progress) if job.HasField("profiling_progress") else "",
        "clocks measured": str(job.profiled_clock_count or ""),
        "profiling took": profiling_cost(job.profiling_cost, job.profiling_budget)
        if job.profiling_cost.iteration_count
        else "",
        "frontier": frontier if job.t_min_s else "",
        "saved": _saved(job.figures),
        "set latency": _latency(job),
        "moving layers": advice,
        "no slowdown": no_slowdown(job) if job.HasField("no_slowdown_time") else "",
        "labels": ", ".join(f"{label.key}={printable(label.value)}" for label in job.labels),
        "stragglers": "\n".join(
            f"pipeline {each.pipeline}, {'detected' if each.is_detected else 'reported'}"
            + (f": {seconds(measured_scale_s(job, each.iteration_time_s))}" if each.iteration_time_s else "")
            for each in job.stragglers
        ),
        "registered": _moment(job.create_time),
        "finished": _moment(job.finish_time) if job.HasField("finish_time") else "",
    }
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", justify="right", no_wrap=True)
    table.add_column()
    for name, value in facts.items():
        if value:
            table.add_row(name, Text(value))
    return table


def progress_text(progress: job_pb2.ProfilingProgress) -> str:
    """Return how far profiling is, and when it will be done."""
    clocks = f"{progress.tried_clock_count} of at most {progress.max_clock_count} clocks tried"
    if not progress.HasField("remaining_s"):
        return clocks
    minutes, seconds = divmod(round(progress.remaining_s), 60)
    return f"{clocks}, done within {f'{minutes} min {seconds:02} s' if minutes else f'{seconds} s'}"


def profiling_cost(cost: job_pb2.ProfilingCost, budget: job_pb2.ProfilingBudget) -> str:
    """Return the cost of profiling so far, and its budget."""
    limits = [
        *([f"{budget.iteration_count} iterations"] if budget.HasField("iteration_count") else []),
        *([f"{budget.time_s:g} s"] if budget.HasField("time_s") else []),
        *([f"{budget.extra_time_s:+g} s"] if budget.HasField("extra_time_s") else []),
        *([f"+{joules(budget.extra_energy_j)}"] if budget.HasField("extra_energy_j") else []),
    ]
    sign = "+" if cost.extra_energy_j > 0 else ""
    return (
        f"{cost.iteration_count} iterations, {cost.time_s:.1f} s, {joules(cost.energy_j)}; against stock "
        f"{cost.extra_time_s:+z.1f} s, {sign}{joules(cost.extra_energy_j)}; "
        f"budget: {', '.join(limits) or 'unlimited'}"
    )


def no_slowdown(job: job_pb2.Job) -> str:
    """Return the longest iteration time that is no slowdown against stock, and its basis."""
    limit = job.no_slowdown_time
    basis = {
        job_pb2.NO_SLOWDOWN_BASIS_ALL_MAX: "every computation at its highest clock",
        job_pb2.NO_SLOWDOWN_BASIS_BASELINE: "the stock baseline, shorter than predicted",
    }.get(limit.basis, "")
    return f"up to {seconds(measured_scale_s(job, limit.iteration_time_s))}: {basis}"


def budget_target_text(job: job_pb2.Job) -> str:
    """Return the iteration time to which a power budget slows a job down."""
    return seconds(measured_scale_s(job, job.budget_target_iteration_time_s))


def plan_table(job: job_pb2.Job) -> Table:
    """Return a table of the plans offered to a job's pipelines; pipelines with the same plan share a line."""
    table = Table()
    table.add_column("pipelines")
    for column in ("planned iteration", "slowdown"):
        table.add_column(column, justify="right")
    pipelines: dict[float, list[int]] = defaultdict(list)
    for pipeline, time_s in enumerate(job.planned_iteration_time_s):
        pipelines[time_s].append(pipeline)
    stock_s = measured_scale_s(job, job.no_slowdown_time.iteration_time_s or job.t_min_s)
    for planned_s in sorted(pipelines):
        time_s = measured_scale_s(job, planned_s)
        slowdown_percent = 100 * (time_s / stock_s - 1) if stock_s else 0.0
        table.add_row(_ranges(pipelines[planned_s]), seconds(time_s), f"{slowdown_percent:+z.1f} %")
    return table


def rank_table(ranks: Iterable[rank_pb2.Rank]) -> Table:
    """Return a table with one line for each rank; at 80 columns only its last column wraps."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", caption=_RANK, caption_justify="left")
    for column in ("rank", "state", "iteration", "plan"):
        table.add_column(column, no_wrap=True)
    table.add_column("host, GPU, clocks", overflow="fold")
    for rank in ranks:
        place, own = rank.coordinates, _on_clock(rank.clocks)
        gpu = f"{rank.gpu_model} {rank.gpu_uuid}".strip()
        about = (rank.hostname, gpu, own and f"on clock {own}", _limits(rank))
        offered, in_force = _version(rank.offered_version), _version(rank.in_force_version)
        table.add_row(
            f"{place.pipeline}/{place.stage}/{place.tensor}",
            rank_pb2.RankState.Name(rank.state).removeprefix("RANK_STATE_").lower(),
            str(rank.iteration) if rank.iteration >= 0 else "",
            in_force if offered == in_force else f"{in_force} → {offered}",
            Text("; ".join(filter(None, about))),
        )
    return table


def event_table(events: Iterable[event_pb2.JobEvent]) -> Table:
    """Return a table with one line for each event."""
    table = Table()
    table.add_column("no.", justify="right")
    for column in ("time (UTC)", "type", "what happened"):
        table.add_column(column)
    for event in events:
        at = f"{event.create_time.ToDatetime():%Y-%m-%d %H:%M:%S}"
        table.add_row(str(event.sequence), at, _event_type_name(event.type), Text(event.message))
    return table


def gap_text(gap: job_service_pb2.WatchGap) -> str:
    """Return a sentence on what a watch left out."""
    parts = []
    if gap.first_missed_sequence:
        parts.append(f"events {gap.first_missed_sequence} to {gap.last_missed_sequence} are no longer stored")
    if gap.missed_iteration_count:
        parts.append(f"{gap.missed_iteration_count} iterations were dropped: this reader was too slow")
    return "; ".join(parts)


def report_table(periods: Iterable[job_pb2.ReportPeriod]) -> Table:
    """Return a table with one line for each period; at 80 columns, its cells wrap."""
    table = Table(
        box=None,
        padding=(0, 1, 0, 0),
        header_style="dim",
        caption="mean ± half its 95 % interval; slowdown and saved energy against the latest stock baseline",
        caption_justify="left",
    )
    table.add_column("period")
    table.add_column("plan")
    for column in ("iteration", "count"):
        table.add_column(column, justify="right")
    table.add_column("from – to (UTC)")
    for column in ("time\nin s", "energy\nin J", "slowdown\nin %", "saved\nin %"):
        table.add_column(column, justify="right")
    gaps = ""
    irregular: list[str] = []
    latency: list[str] = []
    for period in periods:
        gaps = _gaps(period)
        if period.irregular_count:
            mean = f"{seconds(period.irregular_time_s)} on average"
            irregular.append(f"{period.irregular_count} in period {period.number}, {mean}")
        state = state_name(period.state) + (" with straggler" if period.has_straggler else "")
        first, last = period.first_iteration, period.last_iteration
        table.add_row(
            f"{period.number} {state}",
            ", ".join(map(_version, sorted(set(period.plan_versions)))),
            f"{first} – {last}" if last > first else str(first),
            str(period.iteration_count),
            _span(period.start_time, period.end_time),
            _figure(period.iteration_time_s, _known(period, "iteration_time_margin_s"), ".3f"),
            _figure(period.energy_j, _known(period, "energy_margin_j"), ".0f"),
            *_saving(period),
        )
        if period.latency_cost_percent:
            latency.append(f"{period.latency_cost_percent:+.2f} % in period {period.number}")
    if latency:
        what = "predicted extra energy from the time to set clocks"
        table.caption = f"{table.caption}\n{what}: {'; '.join(latency)}"
    if irregular:
        table.caption = f"{table.caption}\nirregular iterations, not counted above: {'; '.join(irregular)}"
    if gaps:
        table.caption = f"{table.caption}\n{gaps}"
    return table


def _gaps(period: job_pb2.ReportPeriod) -> str:
    """Return the gaps between iterations, which belong to no iteration."""
    if not period.gap_time_s:
        return ""
    text = f"between iterations, in period {period.number}: {seconds(period.gap_time_s)}"
    if period.gap_energy_j:
        text += f" and {joules(period.gap_energy_j)}"
    return f"{text} each on average, of which clocks cost {1e3 * period.gap_slowed_time_s:.1f} ms at most"


def _saved(figures: job_pb2.JobFigures) -> str:
    """Return what a job saves, or saved before it ended, against its stock baseline."""
    slowdown, saving = _saving(figures)
    return f"{saving} % energy against stock; slowdown {slowdown} %" if saving else ""


def _saving(period: job_pb2.ReportPeriod | job_pb2.JobFigures) -> tuple[str, str]:
    """Return slowdown and saving, as far as they are known."""
    if not period.HasField("saving"):
        return "", ""
    saving = period.saving
    slowdown_margin, energy_margin = (
        _known(saving, f"{name}_margin_percent") for name in ("slowdown", "energy")
    )
    return (
        _figure(saving.slowdown_percent, slowdown_margin, "+.1f"),
        _figure(saving.energy_percent, energy_margin, "+.1f") if saving.HasField("energy_percent") else "",
    )


def _known(message: "Message", field: str) -> float | None:
    return getattr(message, field) if message.HasField(field) else None


def _figure(mean: float, margin: float | None, form: str) -> str:
    """Format a mean with half its 95 % interval, if that is known; never "-0.0"."""
    sign = "+" if form.startswith("+") else "-"
    digits = form.removeprefix("+")
    shown = f"{mean:{sign}z{digits}}"
    return shown if margin is None else f"{shown} ± {margin:{digits}}"


def state_name(state: job_pb2.JobState.ValueType) -> str:
    """Return a job's state, for people."""
    return job_pb2.JobState.Name(state).removeprefix("JOB_STATE_").lower()


def _event_type_name(kind: event_pb2.JobEventType.ValueType) -> str:
    if kind not in event_pb2.JobEventType.values():
        return str(kind)  # a newer coordinator has more types
    return event_pb2.JobEventType.Name(kind).removeprefix("JOB_EVENT_TYPE_").lower()


def _layout(layout: job_pb2.Parallelism) -> str:
    return f"{layout.pipeline_count} × {layout.stage_count} × {layout.tensor_count}"


def _policy(policy: job_pb2.OperatingPolicy) -> str:
    match policy.WhichOneof("rule"):
        case "max_slowdown_percent":
            return f"at most {policy.max_slowdown_percent:g} % slower than stock"
        case "deadline":
            return f"{policy.deadline.iteration_count} iterations within {policy.deadline.time_s:g} s"
        case "max_average_power_w":
            return f"at most {policy.max_average_power_w:g} W a pipeline"
        case "least_carbon":
            return f"least carbon {_time_for(policy.least_carbon)}"
        case "least_cost":
            return f"least cost {_time_for(policy.least_cost)}"
    return "no slowdown"


def _time_for(least: job_pb2.LeastSignal) -> str:
    if least.HasField("work_until"):
        return f"for {least.work_until.iteration_count} iterations until {_moment(least.work_until.end_time)}"
    extra = least.extra_time
    return f"within {extra.percent:g} % more time over {extra.horizon_s / 3600:g} h"


def signal_target_text(job: job_pb2.Job) -> str:
    """Return how a job follows its signal, and how far it is."""
    signal_target = job.signal_target
    states = {
        job_pb2.SIGNAL_TARGET_STATE_NO_SIGNAL: "the signal is unknown: no slowdown",
        job_pb2.SIGNAL_TARGET_STATE_LATE: "no slowdown: the work can't be done in time",
        job_pb2.SIGNAL_TARGET_STATE_DONE: "no slowdown: the work is done, or its deadline has passed",
    }
    slow = f"iterations of {seconds(measured_scale_s(job, signal_target.iteration_time_s))}"
    text = states.get(
        signal_target.state, slow if signal_target.HasField("iteration_time_s") else "no slowdown now"
    )
    if signal_target.HasField("value_per_kwh"):
        unit = " g" if job.policy.WhichOneof("rule") == "least_carbon" else ""
        text += f", at {signal_target.value_per_kwh:.4g}{unit} per kWh"
    done = f"{signal_target.done_count} of {signal_target.iteration_count:.0f} iterations"
    return (
        f"{text}; {done} since {_moment(signal_target.start_time)}, until {_moment(signal_target.end_time)}"
    )


def _baseline(baseline: job_pb2.Baseline) -> str:
    energy = f", {joules(baseline.energy_j)}" if baseline.energy_j else ""
    return f"{seconds(baseline.iteration_time_s)}{energy}"


def _version(version: int) -> str:
    return str(version or "stock")


def _moment(time: "Timestamp") -> str:
    return f"{time.ToDatetime():%Y-%m-%d %H:%M:%S} UTC"


def _span(start: "Timestamp", end: "Timestamp") -> str:
    """Format a time span, with the day only once."""
    first, last = start.ToDatetime(), end.ToDatetime()
    end_format = "%H:%M:%S" if first.date() == last.date() else "%m-%d %H:%M:%S"
    return f"{first:%m-%d %H:%M:%S} – {last:{end_format}}"


def _ranges(numbers: list[int]) -> str:
    """Format ascending numbers, consecutive ones as a range."""
    breaks = [at for at, (one, other) in enumerate(pairwise(numbers), start=1) if other != one + 1]
    ranges = [numbers[first:end] for first, end in pairwise([0, *breaks, len(numbers)])]
    return ", ".join(f"{some[0]}–{some[-1]}" if len(some) > 1 else str(some[0]) for some in ranges)


def _latency(job: job_pb2.Job) -> str:
    """Return the set latency of clocks and its cost."""
    if not job.set_latency_s:
        return ""
    text = f"{1e3 * job.set_latency_s:.0f} ms"
    if job.t_min_s:
        text += f"; costs {job.latency_cost_percent:.2f} % energy at T_min against clocks that change at once"
    return text


_EVENT_REASONS = {
    0x4: "power cap",
    0x8: "slowdown",
    0x20: "heat",
    0x40: "heat (hardware)",
    0x80: "power brake",
}


def _limits(rank: rank_pb2.Rank) -> str:
    """Return the limits on a rank's GPU other than its clocks, for a table cell."""
    reasons = [name for bit, name in _EVENT_REASONS.items() if rank.clock_event_reasons & bit]
    parts = [
        *([f"{rank.power_limit_w:.0f} W"] if rank.power_limit_w else []),
        *(
            [f"workload power profiles {', '.join(map(str, rank.workload_power_profiles))}"]
            if rank.workload_power_profiles
            else []
        ),
        *([f"held by {', '.join(reasons)}"] if reasons else []),
        *([f"reaches {rank.capped_clock_mhz} MHz"] if rank.capped_clock_mhz else []),
        *([_foreign(rank.foreign_clock)] if rank.HasField("foreign_clock") else []),
    ]
    return "; ".join(parts)


def _foreign(clock: rank_pb2.ForeignClock) -> str:
    wanted = f"{clock.wanted_clock_mhz} MHz" if clock.wanted_clock_mhz else "stock"
    return f"held at {clock.clock_mhz} MHz by another client, wanted {wanted}"


def _on_clock(clocks: "ClockStatistics") -> str:
    """Return how well a rank's clocks follow its plan, for a table cell."""
    if not clocks.computation_time_s:
        return ""
    share = clocks.on_clock_time_s / clocks.computation_time_s
    figures = f"{share:.0%}, {clocks.late_raise_count} of {clocks.computation_count} late"
    if clocks.HasField("prediction_error_s"):
        figures += (
            f"; latency {1e3 * clocks.set_latency_s:.0f} ms, ends ± {1e3 * clocks.prediction_error_s:.1f} ms"
        )
    return figures
