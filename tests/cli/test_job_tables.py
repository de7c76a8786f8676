"""Tables of `perseus jobs` for the coordinator's messages."""

import io
import re
import shlex
from itertools import pairwise

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console, RenderableType
from typer.testing import CliRunner

from perseus.cli.job_tables import (
    event_table,
    gap_text,
    job_facts,
    job_table,
    no_slowdown,
    plan_table,
    profiling_cost,
    progress_text,
    rank_table,
    report_table,
)
from perseus.cli.main import app
from perseus.cli.terminal import print_whole
from perseus.cli.top_tables import Snapshot, screen
from perseus.service.domain.stall import StallReason, StockReason, next_step
from perseus.v1 import event_pb2, job_pb2, job_service_pb2, rank_pb2

MIN = job_pb2.LeastSignal(extra_time=job_pb2.ExtraTime(percent=5, horizon_s=86_400))
SIGNAL_TARGET = job_pb2.SignalTarget(
    state=job_pb2.SIGNAL_TARGET_STATE_FOLLOWING,
    start_time=Timestamp(seconds=1_767_225_600),
    end_time=Timestamp(seconds=1_767_225_600 + 86_400),
    iteration_count=82_285.7,
    done_count=1200,
    iteration_time_s=1.1,
    value_per_kwh=412.6,
)
JOB = job_pb2.Job(
    job_id="gpt3",
    state=job_pb2.JOB_STATE_STOCK,
    state_reason="no frontier: expected [2] clocks, found [/1]",
    next_step="`perseus jobs resume gpt3` solves again",
    parallelism=job_pb2.Parallelism(pipeline_count=6, stage_count=2, tensor_count=1),
    rank_counts=job_pb2.RankCounts(connected_count=11, lost_count=1),
    policy=job_pb2.OperatingPolicy(max_average_power_w=900),
    baseline=job_pb2.Baseline(iteration_time_s=1.25, energy_j=4000),
    t_min_s=1.0,
    t_star_s=1.2,
    t_slow_s=1.5,
    straggler_count=1,
    stragglers=[job_pb2.Straggler(pipeline=3, iteration_time_s=1.1, is_detected=True)],
    planned_iteration_time_s=[1.1, 1.1, 1.1, 1.0, 1.1, 1.1],
)


def lines(shown: RenderableType) -> list[str]:
    """Return the lines without blanks and frames."""
    console = Console(width=200)
    with console.capture() as printed:
        console.print(shown)
    return [" ".join(line.replace("│", " ").split()) for line in printed.get().splitlines()]


def test_a_job_is_one_line() -> None:
    assert "gpt3 stock, 1 straggler 6 × 2 × 1 11/12 1.000 s" in lines(job_table([JOB]))


def test_only_known_facts_are_shown() -> None:
    facts = lines(job_facts(JOB))
    assert "state stock: no frontier: expected [2] clocks, found [/1]" in facts
    assert "next step `perseus jobs resume gpt3` solves again" in facts
    assert "ranks 11 connected, 1 lost" in facts
    assert "policy at most 900 W a pipeline" in facts
    assert "stock baseline 1.250 s, 4000 J" in facts
    assert "frontier T_min 1.000 s, T* 1.200 s, T_slow 1.500 s" in facts
    assert "stragglers pipeline 3, detected: 1.100 s" in facts
    assert not any(line.startswith(("finished", "clocks measured")) for line in facts)


def test_a_job_s_signal_and_progress_are_shown() -> None:
    job = job_pb2.Job(policy=job_pb2.OperatingPolicy(least_carbon=MIN), signal_target=SIGNAL_TARGET)
    facts = lines(job_facts(job))
    assert "policy least carbon within 5 % more time over 24 h" in facts
    done = "1200 of 82286 iterations since 2026-01-01 00:00:00 UTC, until 2026-01-02 00:00:00 UTC"
    assert f"signal iterations of 1.100 s, at 412.6 g per kWh; {done}" in facts
    job.signal_target.ClearField("iteration_time_s")
    assert f"signal no slowdown now, at 412.6 g per kWh; {done}" in lines(job_facts(job))
    job.signal_target.ClearField("value_per_kwh")
    for state, text in [
        (job_pb2.SIGNAL_TARGET_STATE_NO_SIGNAL, "the signal is unknown: no slowdown"),
        (job_pb2.SIGNAL_TARGET_STATE_LATE, "no slowdown: the work can't be done in time"),
        (job_pb2.SIGNAL_TARGET_STATE_DONE, "no slowdown: the work is done, or its deadline has passed"),
    ]:
        job.signal_target.state = state
        assert f"signal {text}; {done}" in lines(job_facts(job))
    until = job_pb2.LeastSignal(
        work_until=job_pb2.WorkUntil(iteration_count=500, end_time=SIGNAL_TARGET.end_time)
    )
    job.policy.least_cost.CopyFrom(until)
    expected = "policy least cost for 500 iterations until 2026-01-02 00:00:00 UTC"
    assert expected in lines(job_facts(job))


def test_no_slowdown_is_shown_with_its_basis() -> None:
    all_max = job_pb2.NoSlowdownTime(iteration_time_s=1.02, basis=job_pb2.NO_SLOWDOWN_BASIS_ALL_MAX)
    measured = job_pb2.NoSlowdownTime(iteration_time_s=1.01, basis=job_pb2.NO_SLOWDOWN_BASIS_BASELINE)
    job = job_pb2.Job(no_slowdown_time=measured)
    assert no_slowdown(job) == "up to 1.010 s: the stock baseline, shorter than predicted"
    job.CopyFrom(JOB)
    job.no_slowdown_time.CopyFrom(all_max)
    assert no_slowdown(job) == "up to 1.020 s: every computation at its highest clock"
    assert f"no slowdown {no_slowdown(job)}" in lines(job_facts(job))
    assert not any(line.startswith("no slowdown") for line in lines(job_facts(JOB)))


def test_plans_are_compared_with_stock_not_with_t_min() -> None:
    job = job_pb2.Job()
    job.CopyFrom(JOB)
    job.no_slowdown_time.iteration_time_s = 1.1
    found = lines(plan_table(job))
    assert "3 1.000 s -9.1 %" in found
    assert "0–2, 4–5 1.100 s +0.0 %" in found


def test_all_times_of_a_job_are_on_the_scale_of_its_measured_ones() -> None:
    job = job_pb2.Job()
    job.CopyFrom(JOB)
    job.no_slowdown_time.iteration_time_s = 1.0
    job.iteration_overhead_s = 0.25
    job.baseline.iteration_time_s = 1.25
    job.budget_target_iteration_time_s = 1.1
    job.signal_target.iteration_time_s = 1.15
    job.stragglers.add(pipeline=2, iteration_time_s=1.2)
    found = lines(job_facts(job))
    assert f"frontier T_min {job.t_min_s + 0.25:.3f} s, " in "\n".join(found)
    assert "no slowdown up to 1.250 s:" in found
    assert "power budget holds it back: iterations of 1.350 s" in found
    assert any("iterations of 1.400 s" in line for line in found)
    assert any("pipeline 2, reported: 1.450 s" in line for line in found)
    assert "0–2, 4–5 1.350 s +8.0 %" in lines(plan_table(job))


def test_the_cost_of_profiling_is_its_difference_from_stock_and_its_budget() -> None:
    cost = job_pb2.ProfilingCost(
        iteration_count=41, time_s=31.5, extra_time_s=4.7, energy_j=23_338, extra_energy_j=-2238
    )
    budget = job_pb2.ProfilingBudget(iteration_count=30_000, extra_time_s=360, extra_energy_j=5e6)
    assert profiling_cost(cost, budget) == (
        "41 iterations, 31.5 s, 23338 J; against stock +4.7 s, -2238 J; "
        "budget: 30000 iterations, +360 s, +5000000 J"
    )
    cost.extra_energy_j = 5.5
    assert "against stock +4.7 s, +5.500 J; budget: unlimited" in profiling_cost(
        cost, job_pb2.ProfilingBudget()
    )


def test_profiling_shows_its_progress_and_remaining_time() -> None:
    progress = job_pb2.ProfilingProgress(tried_clock_count=5, max_clock_count=12)
    assert progress_text(progress) == "5 of at most 12 clocks tried"
    progress.remaining_s = 40.4
    assert progress_text(progress) == "5 of at most 12 clocks tried, done within 40 s"
    progress.remaining_s = 125
    assert progress_text(progress).endswith("done within 2 min 05 s")
    job = job_pb2.Job(job_id="gpt3", state=job_pb2.JOB_STATE_PROFILING, profiling_progress=progress)
    assert "profiling 5 of at most 12 clocks tried, done within 2 min 05 s" in lines(job_facts(job))


def test_pipelines_of_the_same_plan_share_a_line() -> None:
    found = lines(plan_table(JOB))
    assert "3 1.000 s +0.0 %" in found
    assert "0–2, 4–5 1.100 s +10.0 %" in found


def test_a_rank_is_one_line_for_any_host_name() -> None:
    place = rank_pb2.RankCoordinates(pipeline=1, stage=0, tensor=2)
    rank = rank_pb2.Rank(
        coordinates=place, state=rank_pb2.RANK_STATE_LOST, hostname="[red]", iteration=-1, offered_version=7
    )
    assert "1/0/2 lost stock → 7 [red]" in lines(rank_table([rank]))


def test_nothing_is_cut_at_80_columns() -> None:
    rank = rank_pb2.Rank(
        coordinates=rank_pb2.RankCoordinates(pipeline=127, stage=15, tensor=7),
        state=rank_pb2.RANK_STATE_DISCONNECTED,
        hostname="gpu-node-0123.cluster-with-a-long-name.example",
        gpu_model="NVIDIA H100 80GB HBM3",
        gpu_uuid="GPU-12345678-1234-1234-1234-123456789abc",
        iteration=1_234_567,
        offered_version=13,
        in_force_version=12,
        capped_clock_mhz=1200,
    )
    job = job_pb2.Job(
        job_id="a-job-with-quite-a-long-name",
        state=job_pb2.JOB_STATE_FINISHED,
        figures=job_pb2.JobFigures(power_w=0.0, saving=job_pb2.Saving(energy_percent=12.5)),
    )
    for table in (rank_table([rank]), job_table([job]), screen(Snapshot([job], (), [rank]), 9)):
        console = Console(file=io.StringIO(), width=80)
        console.print(table)
        assert isinstance(console.file, io.StringIO)
        assert "…" not in console.file.getvalue()
    found = lines(job_table([job]))
    assert "a-job-with-quite-a-long-name finished 0 × 0 × 0 0/0 0.00 kW +12.5 %" in found


def test_the_limits_of_a_gpu_are_shown_with_its_rank() -> None:
    rank = rank_pb2.Rank(
        state=rank_pb2.RANK_STATE_CONNECTED,
        power_limit_w=300.0,
        workload_power_profiles=[0, 7],
        clock_event_reasons=0x44,
        capped_clock_mhz=1200,
        foreign_clock=rank_pb2.ForeignClock(clock_mhz=705),
    )
    (shown,) = [line for line in lines(rank_table([rank])) if "300 W" in line]
    assert (
        "300 W; workload power profiles 0, 7; held by power cap, heat (hardware); reaches 1200 MHz; "
        "held at 705 MHz by another client, wanted stock" in shown
    )


def test_a_finished_job_shows_what_it_saved() -> None:
    saving = job_pb2.Saving(slowdown_percent=1.3, energy_percent=9.3, energy_margin_percent=1.4)
    job = job_pb2.Job(state=job_pb2.JOB_STATE_FINISHED, figures=job_pb2.JobFigures(saving=saving))
    assert "saved +9.3 ± 1.4 % energy against stock; slowdown +1.3 %" in lines(job_facts(job))
    assert not any(line.startswith("saved") for line in lines(job_facts(job_pb2.Job())))


def test_a_report_fits_80_columns_without_cut_figures() -> None:
    period = job_pb2.ReportPeriod(
        number=12,
        state=job_pb2.JOB_STATE_PROFILING,
        plan_versions=[29],
        first_iteration=10_083,
        last_iteration=10_095,
        iteration_count=13,
        iteration_time_s=1.011,
        iteration_time_margin_s=0.107,
        energy_j=1324.0,
        energy_margin_j=35.0,
        saving=job_pb2.Saving(
            slowdown_percent=34.2,
            slowdown_margin_percent=14.3,
            energy_percent=19.6,
            energy_margin_percent=2.2,
        ),
    )
    console = Console(width=80, file=io.StringIO(), force_terminal=True)
    print_whole(report_table([period]), to=console)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert all(len(line) <= 80 for line in re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()), shown
    assert "…" not in shown
    for figure in ("10083", "10095", "1.011", "0.107", "1324", "+34.2", "14.3", "+19.6"):
        assert figure in shown


def test_set_latency_is_shown_with_the_job_and_below_the_report() -> None:
    job = job_pb2.Job(set_latency_s=0.0201, latency_cost_percent=0.618)
    assert "set latency 20 ms" in lines(job_facts(job))
    job.t_min_s = 1.0
    cost = "set latency 20 ms; costs 0.62 % energy at T_min against clocks that change at once"
    assert cost in lines(job_facts(job))
    periods = [
        job_pb2.ReportPeriod(number=number, latency_cost_percent=percent)
        for number, percent in enumerate((0.0, 0.618, -0.1))
    ]
    assert (
        "predicted extra energy from the time to set clocks: +0.62 % in period 1; -0.10 % in period 2"
    ) in " ".join(lines(report_table(periods)))


def test_a_period_shows_its_errors_only_where_they_are_known() -> None:
    known = job_pb2.ReportPeriod(
        number=4,
        state=job_pb2.JOB_STATE_PLANNED,
        has_straggler=True,
        plan_versions=[8, 9, 8],
        first_iteration=40,
        last_iteration=47,
        iteration_count=8,
        iteration_time_s=1.0249,
        iteration_time_se_s=0.001,
        iteration_time_margin_s=0.002,
        energy_j=780.4,
        energy_se_j=1.3,
        energy_margin_j=3.0,
        saving=job_pb2.Saving(
            energy_percent=21.96,
            energy_se_percent=0.1,
            energy_margin_percent=0.31,
            slowdown_percent=-0.04,
            slowdown_se_percent=0.1,
            slowdown_margin_percent=0.2,
        ),
    )
    known.start_time.FromJsonString("2031-05-06T23:59:58Z")
    known.end_time.FromJsonString("2031-05-07T00:00:07Z")
    single = job_pb2.ReportPeriod(
        number=5,
        state=job_pb2.JOB_STATE_PLANNED,
        plan_versions=[9],
        first_iteration=48,
        last_iteration=48,
        iteration_count=1,
        iteration_time_s=1.0,
        start_time=known.end_time,
        end_time=known.end_time,
        saving=job_pb2.Saving(slowdown_percent=2.0),
    )
    found = lines(report_table([known, single]))
    assert (
        "4 planned with straggler 8, 9 40 – 47 8 05-06 23:59:58 – 05-07 00:00:07 1.025 ± 0.002 780 ± 3 "
        "+0.0 ± 0.2 +22.0 ± 0.3" in found
    )
    assert "5 planned 9 48 1 05-07 00:00:07 – 00:00:07 1.000 0 +2.0" in found


def test_gaps_between_iterations_are_one_line() -> None:
    period = job_pb2.ReportPeriod(
        number=3,
        plan_versions=[1],
        gap_time_s=0.6321,
        gap_energy_j=55.4,
        gap_slowed_time_s=0.0042,
    )
    line = (
        "between iterations, in period 3: 0.632 s and 55.40 J each on average, "
        "of which clocks cost 4.2 ms at most"
    )
    assert line in " ".join(lines(report_table([job_pb2.ReportPeriod(), period])))
    assert not any("between" in each for each in lines(report_table([period, job_pb2.ReportPeriod()])))


def test_irregular_iterations_are_listed_below_the_table() -> None:
    periods = [
        job_pb2.ReportPeriod(number=number, irregular_count=count, irregular_time_s=1.5)
        for number, count in enumerate((0, 7, 2))
    ]
    assert (
        "irregular iterations, not counted above: 7 in period 1, 1.500 s on average; 2 in period 2, "
        "1.500 s on average"
    ) in " ".join(lines(report_table(periods)))


def test_an_event_is_one_line_even_of_an_unknown_type() -> None:
    solved = event_pb2.JobEvent(sequence=7, type=event_pb2.JOB_EVENT_TYPE_SOLVED, message="from [1] to [/2]")
    solved.create_time.FromSeconds(1_767_225_600)
    newer = event_pb2.JobEvent(sequence=8, type=99, message="new")  # type: ignore[arg-type]
    shown = lines(event_table([solved, newer]))
    assert "7 2026-01-01 00:00:00 solved from [1] to [/2]" in shown
    assert "8 1970-01-01 00:00:00 99 new" in shown
    unexplained = event_pb2.JOB_EVENT_TYPE_MEASUREMENTS_UNEXPLAINED
    found = event_pb2.JobEvent(sequence=9, type=unexplained, message="0.2 s remain")
    assert "9 1970-01-01 00:00:00 measurements_unexplained 0.2 s remain" in lines(event_table([found]))


def test_a_gap_is_described_in_plain_words() -> None:
    gap = job_service_pb2.WatchGap
    deleted = gap_text(gap(first_missed_sequence=3, last_missed_sequence=9))
    assert deleted == "events 3 to 9 are no longer stored"
    assert gap_text(gap(missed_iteration_count=12)) == "12 iterations were dropped: this reader was too slow"


@pytest.mark.parametrize("reason", [*StallReason, *StockReason, None])
def test_the_commands_of_every_next_step_exist(reason: StallReason | StockReason | None) -> None:
    commands = [shlex.split(part) for part in next_step(reason, "gpt3").split("`")[1::2]]
    assert commands
    for program, *arguments in commands:
        assert program == "perseus"
        assert CliRunner().invoke(app, [*arguments, "--help"]).exit_code == 0, arguments
        for option, value in pairwise(arguments):
            if option == "--type":
                assert event_pb2.JobEventType.Value(f"JOB_EVENT_TYPE_{value.upper()}")
