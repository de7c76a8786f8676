"""Tables of `perseus jobs` for the coordinator's messages."""

import shlex
from itertools import pairwise
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from perseus.cli.job_tables import (
    event_table,
    gap_text,
    job_facts,
    job_table,
    plan_table,
    rank_table,
    report_table,
    run_table,
)
from perseus.cli.top_tables import Snapshot, screen
from perseus.service.domain.stall import StallReason, StockReason, next_step
from perseus.v1 import event_pb2, job_pb2, job_service_pb2, rank_pb2
from tests.cli.commands import lines, perseus, rendered

NEW_YEAR_S = 1_767_225_600
SOON, LATER = Timestamp(seconds=NEW_YEAR_S), Timestamp(seconds=NEW_YEAR_S + 86_400)
JOB = job_pb2.Job(
    job_id="gpt3",
    run_number=2,
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
    create_time=SOON,
)


def changed(**fields: Any) -> job_pb2.Job:
    """Return that job with other fields."""
    job = job_pb2.Job()
    job.CopyFrom(JOB)
    job.MergeFrom(job_pb2.Job(**fields))
    return job


def test_a_job_is_one_line() -> None:
    assert lines(job_table([JOB]))[-1] == "gpt3 stock, 1 straggler 6 × 2 × 1 11/12 1.000 s"


def test_a_run_is_one_line() -> None:
    ended = job_pb2.Job(
        run_number=1, state=job_pb2.JOB_STATE_FINISHED, state_reason="done", finish_time=LATER
    )
    assert lines(run_table([JOB, ended]))[3:-1] == [
        "2 stock: no frontier: expected [2] clocks, found [/1] 6 × 2 × 1 2026-01-01 00:00:00 UTC",
        "1 finished: done 0 × 0 × 0 1970-01-01 00:00:00 UTC 2026-01-02 00:00:00 UTC",
    ]


def test_only_known_facts_of_a_job_are_shown() -> None:
    assert lines(job_facts(JOB)) == [
        "job gpt3",
        "run 2",
        "state stock: no frontier: expected [2] clocks, found [/1]",
        "next step `perseus jobs resume gpt3` solves again",
        "pipelines × stages × tensor 6 × 2 × 1",
        "ranks 11 connected, 1 lost",
        "policy at most 900 W a pipeline",
        "stock baseline 1.250 s, 4000 J",
        "frontier T_min 1.000 s, T* 1.200 s, T_slow 1.500 s",
        "stragglers pipeline 3, detected: 1.100 s",
        "registered 2026-01-01 00:00:00 UTC",
    ]


FOLLOWING = job_pb2.SIGNAL_TARGET_STATE_FOLLOWING
DONE = "1200 of 82286 iterations since 2026-01-01 00:00:00 UTC, until 2026-01-02 00:00:00 UTC"
WITHIN = job_pb2.LeastSignal(extra_time=job_pb2.ExtraTime(percent=5, horizon_s=86_400))
UNTIL = job_pb2.LeastSignal(work_until=job_pb2.WorkUntil(iteration_count=500, end_time=LATER))
SAVING = job_pb2.Saving(slowdown_percent=1.3, energy_percent=9.3, energy_margin_percent=1.4)


def by_signal(state: job_pb2.SignalTargetState.ValueType = FOLLOWING, **known: Any) -> dict[str, Any]:
    target = job_pb2.SignalTarget(
        state=state, start_time=SOON, end_time=LATER, iteration_count=82_285.7, **known
    )
    target.done_count = 1200
    return {"signal_target": target}


def policy(**rule: Any) -> dict[str, Any]:
    return {"policy": job_pb2.OperatingPolicy(**rule)}


def no_slowdown(basis: job_pb2.NoSlowdownBasis.ValueType) -> dict[str, Any]:
    return {"no_slowdown_time": job_pb2.NoSlowdownTime(iteration_time_s=1.02, basis=basis)}


UP_TO = "no slowdown up to 1.020 s"
PROGRESS = job_pb2.ProfilingProgress(tried_clock_count=5, max_clock_count=12, remaining_s=40.4)
COST = job_pb2.ProfilingCost(
    iteration_count=41, time_s=31.5, extra_time_s=4.7, energy_j=23_338, extra_energy_j=-2238
)
MORE = job_pb2.ProfilingCost(iteration_count=1, extra_energy_j=5.5)
BUDGET = job_pb2.ProfilingBudget(iteration_count=30_000, time_s=9, extra_time_s=360, extra_energy_j=5e6)
LATENCY = {"set_latency_s": 0.0201, "latency_cost_percent": 0.618}
UNKNOWN, LATE = job_pb2.SIGNAL_TARGET_STATE_NO_SIGNAL, job_pb2.SIGNAL_TARGET_STATE_LATE
FACTS: list[tuple[dict[str, Any], str]] = [
    (policy(max_slowdown_percent=2.5), "policy at most 2.5 % slower than stock"),
    (policy(deadline=job_pb2.Deadline(iteration_count=30, time_s=60)), "policy 30 iterations within 60 s"),
    (
        policy(least_carbon=WITHIN) | by_signal(value_per_kwh=412.6),
        "policy least carbon within 5 % more time over 24 h "
        f"signal no slowdown now, at 412.6 g per kWh; {DONE}",
    ),
    (policy(least_cost=UNTIL), "policy least cost for 500 iterations until 2026-01-02 00:00:00 UTC"),
    (by_signal(iteration_time_s=1.1), f"signal iterations of 1.100 s; {DONE}"),
    (by_signal(value_per_kwh=0.25), f"signal no slowdown now, at 0.25 per kWh; {DONE}"),
    (by_signal(UNKNOWN), f"signal the signal is unknown: no slowdown; {DONE}"),
    (by_signal(LATE), f"signal no slowdown: the work can't be done in time; {DONE}"),
    (
        by_signal(job_pb2.SIGNAL_TARGET_STATE_DONE),
        f"signal no slowdown: the work is done, or its deadline has passed; {DONE}",
    ),
    ({"profiling_progress": PROGRESS}, "profiling 5 of at most 12 clocks tried, done within 40 s"),
    ({"profiled_clock_count": 4}, "clocks measured 4"),
    (
        {"profiling_cost": COST},
        "profiling took 41 iterations, 31.5 s, 23338 J; against stock +4.7 s, -2238 J; budget: unlimited",
    ),
    (
        {"profiling_cost": MORE, "profiling_budget": BUDGET},
        "profiling took 1 iterations, 0.0 s, 0 J; against stock +0.0 s, +5.500 J; "
        "budget: 30000 iterations, 9 s, +360 s, +5000000 J",
    ),
    (LATENCY, "set latency 20 ms"),
    (
        LATENCY | {"t_min_s": 1.0, "t_star_s": 1.0, "t_slow_s": 1.0},
        "frontier T_min 1.000 s, T* 1.000 s, T_slow 1.000 s set latency 20 ms; costs 0.62 % energy at T_min "
        "against clocks that change at once",
    ),
    (
        {"figures": job_pb2.JobFigures(saving=SAVING)},
        "saved +9.3 ± 1.4 % energy against stock; slowdown +1.3 %",
    ),
    (no_slowdown(job_pb2.NO_SLOWDOWN_BASIS_ALL_MAX), f"{UP_TO}: every computation at its highest clock"),
    (no_slowdown(job_pb2.NO_SLOWDOWN_BASIS_BASELINE), f"{UP_TO}: the stock baseline, shorter than predicted"),
    ({"labels": [job_pb2.Label(key="a", value="\x1b")]}, r"labels a=\x1b"),
]
BARE = lines(job_facts(job_pb2.Job()))


@pytest.mark.parametrize(("fields", "shown"), FACTS, ids=[", ".join(fields) for fields, _ in FACTS])
def test_a_fact_is_shown_where_it_is_known(fields: dict[str, Any], shown: str) -> None:
    assert " ".join(line for line in lines(job_facts(job_pb2.Job(**fields))) if line not in BARE) == shown


def test_all_times_of_a_job_are_on_the_scale_of_its_measured_ones() -> None:
    job = changed(
        no_slowdown_time=job_pb2.NoSlowdownTime(iteration_time_s=1.0),
        iteration_overhead_s=0.25,
        budget_target_iteration_time_s=1.1,
        stragglers=[job_pb2.Straggler(pipeline=2, iteration_time_s=1.2)],
        **by_signal(iteration_time_s=1.15),
    )
    assert [line for line in lines(job_facts(job)) if line not in lines(job_facts(JOB))] == [
        f"signal iterations of 1.400 s; {DONE}",
        "power budget holds it back: iterations of 1.350 s",
        "frontier T_min 1.250 s, T* 1.450 s, T_slow 1.750 s",
        "no slowdown up to 1.250 s:",
        "stragglers pipeline 3, detected: 1.350 s",
        "pipeline 2, reported: 1.450 s",
    ]
    assert lines(plan_table(job))[3:-1] == ["3 1.250 s +0.0 %", "0–2, 4–5 1.350 s +8.0 %"]


def test_pipelines_of_the_same_plan_share_a_line_that_compares_it_with_stock() -> None:
    job = changed(no_slowdown_time=job_pb2.NoSlowdownTime(iteration_time_s=1.1))
    assert lines(plan_table(job))[3:-1] == ["3 1.000 s -9.1 %", "0–2, 4–5 1.100 s +0.0 %"]
    against_t_min = ["3 1.000 s +0.0 %", "0–2, 4–5 1.100 s +10.0 %"]
    assert lines(plan_table(JOB))[3:-1] == against_t_min, "where stock is unknown"


def rank_line(**fields: Any) -> str:
    """Return what is shown of a rank after its place."""
    line, *_ = lines(rank_table([rank_pb2.Rank(**fields)]))[1:]
    return line.removeprefix("0/0/0 ")


def test_a_rank_is_one_line_for_any_host_name() -> None:
    place = rank_pb2.RankCoordinates(pipeline=1, stage=0, tensor=2)
    line = rank_line(
        coordinates=place, state=rank_pb2.RANK_STATE_LOST, hostname="[red]", iteration=-1, offered_version=7
    )
    assert line == "1/0/2 lost stock → 7 [red]"


def test_the_limits_of_a_gpu_are_shown_with_its_rank() -> None:
    line = rank_line(
        state=rank_pb2.RANK_STATE_CONNECTED,
        power_limit_w=300.0,
        workload_power_profiles=[0, 7],
        clock_event_reasons=0x44,
        capped_clock_mhz=1200,
        foreign_clock=rank_pb2.ForeignClock(clock_mhz=705),
    )
    assert line == (
        "connected 0 stock 300 W; workload power profiles 0, 7; held by power cap, heat (hardware); "
        "reaches 1200 MHz; held at 705 MHz by another client, wanted stock"
    )


PERIOD = job_pb2.ReportPeriod(
    number=4,
    state=job_pb2.JOB_STATE_PLANNED,
    has_straggler=True,
    plan_versions=[8, 9, 8],
    first_iteration=10_083,
    last_iteration=10_090,
    iteration_count=8,
    iteration_time_s=1.0249,
    iteration_time_margin_s=0.002,
    energy_j=780.4,
    energy_margin_j=3.0,
    saving=job_pb2.Saving(
        energy_percent=21.96,
        energy_margin_percent=0.31,
        slowdown_percent=-0.04,
        slowdown_margin_percent=0.2,
    ),
)
PERIOD.start_time.FromJsonString("2031-05-06T23:59:58Z")
PERIOD.end_time.FromJsonString("2031-05-07T00:00:07Z")


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
        assert "…" not in rendered(table, 80)
    assert (
        lines(job_table([job]))[-1] == "a-job-with-quite-a-long-name finished 0 × 0 × 0 0/0 0.00 kW +12.5 %"
    )
    report = rendered(report_table([PERIOD]), 80)
    assert "…" not in report
    assert {"10083", "10090", "1.025", "0.002", "780", "+0.0", "0.2", "+22.0"} <= set(report.split())


def test_a_period_shows_its_errors_only_where_they_are_known() -> None:
    single = job_pb2.ReportPeriod(
        number=5,
        state=job_pb2.JOB_STATE_PLANNED,
        plan_versions=[9],
        first_iteration=48,
        last_iteration=48,
        iteration_count=1,
        iteration_time_s=1.0,
        start_time=PERIOD.end_time,
        end_time=PERIOD.end_time,
        saving=job_pb2.Saving(slowdown_percent=2.0),
    )
    assert lines(report_table([PERIOD, single]))[2:4] == [
        "4 planned with straggler 8, 9 10083 – 10090 8 05-06 23:59:58 – 05-07 00:00:07 1.025 ± 0.002 "
        "780 ± 3 +0.0 ± 0.2 +22.0 ± 0.3",
        "5 planned 9 48 1 05-07 00:00:07 – 00:00:07 1.000 0 +2.0",
    ]


@pytest.mark.parametrize(
    ("periods", "note"),
    [
        (
            [{"gap_time_s": 0.6321, "gap_energy_j": 55.4, "gap_slowed_time_s": 0.0042}],
            "between iterations, in period 0: 0.632 s and 55.40 J each on average, "
            "of which clocks cost 4.2 ms at most",
        ),
        (
            [{"irregular_count": 7, "irregular_time_s": 1.5}, {}, {"irregular_count": 2}],
            "irregular iterations, not counted above: 7 in period 0, 1.500 s on average; "
            "2 in period 2, 0.000 s on average",
        ),
        (
            [{"latency_cost_percent": 0.0}, {"latency_cost_percent": 0.618}, {"latency_cost_percent": -0.1}],
            "predicted extra energy from the time to set clocks: +0.62 % in period 1; -0.10 % in period 2",
        ),
        ([{"gap_time_s": 0.6321}, {}], ""),
    ],
    ids=["gaps", "irregular iterations", "set latency", "gaps of an earlier period"],
)
def test_what_is_not_in_the_rows_is_noted_below_them(periods: list[dict[str, Any]], note: str) -> None:
    shown = " ".join(
        lines(report_table(job_pb2.ReportPeriod(number=n, **each) for n, each in enumerate(periods)))
    )
    basis = "slowdown and saved energy against the latest stock baseline"
    assert shown.partition(basis)[2].strip() == note


def test_an_event_is_one_line_even_of_an_unknown_type() -> None:
    kinds = [event_pb2.JOB_EVENT_TYPE_SOLVED, event_pb2.JOB_EVENT_TYPE_MEASUREMENTS_UNEXPLAINED, 99]
    events = [
        event_pb2.JobEvent(sequence=number, type=kind, message="from [1] to [/2]", create_time=SOON)  # type: ignore[arg-type]
        for number, kind in enumerate(kinds)
    ]
    assert lines(event_table(events))[3:-1] == [
        "0 2026-01-01 00:00:00 solved from [1] to [/2]",
        "1 2026-01-01 00:00:00 measurements_unexplained from [1] to [/2]",
        "2 2026-01-01 00:00:00 99 from [1] to [/2]",
    ]


def test_a_gap_is_described_in_plain_words() -> None:
    gap = job_service_pb2.WatchGap(first_missed_sequence=3, last_missed_sequence=9, missed_iteration_count=12)
    assert gap_text(gap) == (
        "events 3 to 9 are no longer stored; 12 iterations were dropped: this reader was too slow"
    )


@pytest.mark.parametrize("reason", [*StallReason, *StockReason, None])
def test_the_commands_of_every_next_step_exist(reason: StallReason | StockReason | None) -> None:
    commands = [shlex.split(part) for part in next_step(reason, "gpt3").split("`")[1::2]]
    assert commands
    for program, *arguments in commands:
        assert program == "perseus"
        assert perseus("", *arguments, "--help").exit_code == 0, arguments
        for option, value in pairwise(arguments):
            if option == "--type":
                assert event_pb2.JobEventType.Value(f"JOB_EVENT_TYPE_{value.upper()}")
