import math
from dataclasses import asdict, replace
from typing import Any

import pytest

from perseus.agent.clocks.foreign import ForeignClock
from perseus.agent.link.computation import Computation, Kind, Rank
from perseus.agent.link.packets import Registration, Saving
from perseus.agent.rank.messages import (
    ClockStatistics,
    ComputationRow,
    Drain,
    EnergyEstimate,
    EnergySample,
    GpuLimits,
    HeartbeatAnswer,
    Hold,
    IterationRow,
    MaxClock,
    MessageRefused,
    PlanId,
    PlanOffer,
    PlanRefusal,
    PlanRefusalReason,
    RankAccepted,
    RankLeftReason,
    RankMaxClock,
    RankRefused,
    StageClocks,
    Stock,
    Telemetry,
    TelemetryAck,
    TelemetryRefused,
    Welcome,
    plan_answer,
)
from perseus.agent.stream import translate
from perseus.agent.stream.telemetry import Batch
from perseus.v1 import agent_service_pb2 as wire
from perseus.v1 import clock_statistics_pb2, computation_pb2, frontier_pb2, rank_pb2

RANK = Rank("job", 1, 2, 3)
COORDINATES = rank_pb2.RankCoordinates(pipeline=1, stage=2, tensor=3)
F0 = Computation(Kind.FORWARD, 0)
WIRE_F0 = computation_pb2.Computation(kind=computation_pb2.COMPUTATION_KIND_FORWARD)


def test_the_agents_enums_match_the_contract() -> None:
    for ours, prefix, theirs in (
        (Kind, "COMPUTATION_KIND", computation_pb2.ComputationKind),
        (RankLeftReason, "RANK_LEFT_REASON", rank_pb2.RankLeftReason),
        (PlanRefusalReason, "PLAN_REFUSAL_REASON", rank_pb2.PlanRefusalReason),
    ):
        numbers = {f"{prefix}_{member.name}": member.value for member in ours}
        assert {f"{prefix}_UNSPECIFIED": 0, **numbers} == dict(theirs.items())


def test_the_refusal_of_a_plan() -> None:
    refusal = PlanRefusal(PlanRefusalReason.CLOCK_NOT_SUPPORTED, "no such\nclock", (800, 7))
    assert plan_answer(RANK, PlanId("e", 3), refusal, 9) == wire.PlanAnswer(
        job_id="job",
        rank=COORDINATES,
        epoch="e",
        version=3,
        refusal_reason=rank_pb2.PLAN_REFUSAL_REASON_CLOCK_NOT_SUPPORTED,
        message="no such clock",
        iteration=9,
        refused_clocks_mhz=[800, 7],
    )


@pytest.mark.parametrize(
    ("iteration", "clock_mhz", "has_begins"),
    [
        (IterationRow(8, 3, 0.8, 240.0, True, 0), 900, True),
        (IterationRow(9, 3, 0.8, 240.0, True, 0), 900, False),
        (IterationRow(9, 3, 0.8, 240.0, True, 0), None, True),
        (IterationRow(9, 3, 60.0, 9000.0, True, 0), 900, True),
    ],
    ids=["every fourth", "under a plan", "at stock", "that takes a minute"],
)
def test_short_rows_leave_out_the_order_and_most_begins(
    iteration: IterationRow, clock_mhz: int | None, has_begins: bool
) -> None:
    rows = (
        ComputationRow(iteration.iteration, F0, 0.1, 0.05, clock_mhz),
        ComputationRow(iteration.iteration, Computation(Kind.BACKWARD, 0, 0), 0.2, 0.1, clock_mhz),
    )
    batch = Batch(5, Telemetry(RANK, (iteration,), rows, None, None), 0)
    short = translate.request(batch, has_short_rows=True).telemetry.computations
    assert short == wire.ComputationColumns(
        begin_s=[0.1, 0.2] if has_begins else [], duration_s=[0.05, 0.1], clock_mhz=[clock_mhz or 0] * 2
    )


def test_rows_of_an_irregular_iteration_are_not_short() -> None:
    rows = (ComputationRow(9, F0, 0.1, 0.05, None),)
    batch = Batch(5, Telemetry(RANK, (IterationRow(9, 3, 0.8, 240.0, False, 0),), rows, None, None), 0)
    whole = translate.request(batch).telemetry
    assert whole.computations.kind
    assert translate.request(batch, has_short_rows=True).telemetry == whole


def test_rows_become_columns() -> None:
    sample = EnergySample(Kind.FORWARD, 1, None, 4, 0.05, 0.001, 20.0, 0.5)
    estimate = EnergyEstimate(3, 2, (sample,), 100.0, 2.0, 12, 1, work=4096.0)
    statistics = ClockStatistics(3, 40, 64, 2, 1, 4.0, 3.5, 0.012, 0.001, 0.0004, 5)
    iterations = (
        IterationRow(7, 3, 0.8, 240.0, True, 0),
        IterationRow(8, 3, 0.9, 250.0, False, 0x40, 5.0, 600.0, 0.01, 1100, 1.25, True, 4096),
    )
    columns = {name: [asdict(row)[name] for row in iterations] for name in asdict(iterations[0])}
    telemetry = Telemetry(
        RANK,
        iterations,
        (
            ComputationRow(7, F0, 0.1, 0.05, 1410),
            ComputationRow(7, Computation(Kind.BACKWARD, 2, 1), 0.2, 0.1, None),
        ),
        estimate,
        statistics,
        GpuLimits(250.0, (3,)),
        ForeignClock(705, None),
    )
    batch = translate.request(Batch(5, telemetry, 2)).telemetry
    assert batch == wire.TelemetryBatch(
        sequence=5,
        job_id="job",
        rank=COORDINATES,
        dropped_batch_count=2,
        iterations=wire.IterationColumns(**columns),
        computations=wire.ComputationColumns(
            iteration=[7, 7],
            kind=[WIRE_F0.kind, computation_pb2.COMPUTATION_KIND_BACKWARD],
            microbatch=[0, 2],
            chunk=[0, 1],
            begin_s=[0.1, 0.2],
            duration_s=[0.05, 0.1],
            clock_mhz=[1410, 0],
        ),
        energy=wire.EnergyEstimate(**asdict(estimate)),
        clocks=clock_statistics_pb2.ClockStatistics(**asdict(statistics)),
        gpu_limits=wire.GpuLimits(power_limit_w=250.0, workload_power_profiles=[3]),
        foreign_clock=rank_pb2.ForeignClock(clock_mhz=705),
    )


def test_columns_of_what_no_iteration_has_stay_empty() -> None:
    row = IterationRow(7, 3, 0.8, 240.0, True, 0)
    for rows, relative_work, has_clock_change in (
        ((row,), [], []),
        ((replace(row, has_clock_change=True),), [], [True]),
        ((row, replace(row, relative_work=1.25)), [0.0, 1.25], []),
    ):
        batch = translate.request(Batch(6, Telemetry(RANK, rows, (), None, None), 0)).telemetry
        assert batch.iterations.relative_work == relative_work
        assert batch.iterations.work == []
        assert batch.iterations.has_clock_change == has_clock_change
        assert not batch.HasField("energy")


def of_rank(**fields: Any) -> dict[str, Any]:
    return {"job_id": "job", "rank": COORDINATES, **fields}


def heard(**messages: Any) -> wire.ConnectResponse:
    return wire.ConnectResponse(**messages)


def offer(**fields: Any) -> wire.ConnectResponse:
    offered = {"epoch": "e", "version": 3, "start_iteration": 8, "lease_s": 2.5, **fields}
    return heard(plan_offer=wire.PlanOffer(**of_rank(**offered)))


def stage_plan(**planned: Any) -> frontier_pb2.StagePlan:
    return frontier_pb2.StagePlan(computations=[frontier_pb2.PlannedComputation(**planned)])


ORDER = computation_pb2.StageOrder(computations=[WIRE_F0])
STOCK = {"stock": wire.StockClocks()}
LIMIT = wire.MaxClock(clock_mhz=900)
LASTING = wire.MaxClock(clock_mhz=900, outlasts_lease=True)
SAVING = wire.JobSaving(job_id="job", energy_percent=9.5, slowdown_percent=-0.5, energy_margin_percent=0.3)
REFUSED = {"reason": "R", "field": "f", "expected": "e", "found": "g"}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            heard(welcome=wire.Welcome(epoch="e", lease_s=3, acknowledged_sequence=4)),
            Welcome("e", 3.0, 4),
        ),
        (
            heard(welcome=wire.Welcome(epoch="e", lease_s=3, slot=2, slot_count=3)),
            Welcome("e", 3.0, 0, slot=2, slot_count=3),
        ),
        (heard(rank_accepted=wire.RankAccepted(**of_rank(order=ORDER))), RankAccepted(RANK, (F0,))),
        (
            heard(rank_accepted=wire.RankAccepted(**of_rank(order=ORDER, max_clock=LIMIT))),
            RankAccepted(RANK, (F0,), MaxClock(900)),
        ),
        (
            heard(rank_refused=wire.RankRefused(**of_rank(reason="R", message="m"))),
            RankRefused(RANK, "R", "m"),
        ),
        (
            heard(rank_refused=wire.RankRefused(**of_rank(reason="R", max_clock=LIMIT))),
            RankRefused(RANK, "R", "", MaxClock(900)),
        ),
        (
            heard(rank_refused=wire.RankRefused(**of_rank(reason="R", lease_left_s=2.5))),
            RankRefused(RANK, "R", "", lease_left_s=2.5),
        ),
        (
            heard(rank_max_clock=wire.RankMaxClock(**of_rank(max_clock=LASTING))),
            RankMaxClock(RANK, MaxClock(900, outlasts_lease=True)),
        ),
        (heard(rank_max_clock=wire.RankMaxClock(**of_rank())), RankMaxClock(RANK, None)),
        (heard(telemetry_ack=wire.TelemetryAck(sequence=9)), TelemetryAck(9)),
        (
            heard(telemetry_refused=wire.TelemetryRefused(sequence=9, **REFUSED)),
            TelemetryRefused(9, "R", "f", "e", "g"),
        ),
        (
            heard(message_refused=wire.MessageRefused(**of_rank(**REFUSED))),
            MessageRefused("R", "f", "e", "g", RANK),
        ),
        (heard(heartbeat=wire.Heartbeat()), HeartbeatAnswer()),
        (
            heard(heartbeat=wire.Heartbeat(power_interval_s=1.0, savings=[SAVING])),
            HeartbeatAnswer(1.0, {"job": Saving(9.5, -0.5, 0.3)}),
        ),
        (heard(drain=wire.Drain(reason="r")), Drain("r")),
        (offer(**STOCK), PlanOffer(RANK, PlanId("e", 3), 8, 2.5, Stock())),
        (offer(**STOCK, is_urgent=True), PlanOffer(RANK, PlanId("e", 3), 8, 2.5, Stock(), is_urgent=True)),
        (offer(hold=wire.HoldClock(clock_mhz=900)), PlanOffer(RANK, PlanId("e", 3), 8, 2.5, Hold(900))),
        (
            offer(stage_plan=stage_plan(kind=WIRE_F0.kind, clock_mhz=900)),
            PlanOffer(RANK, PlanId("e", 3), 8, 2.5, StageClocks((F0,), (900,))),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_messages_of_the_coordinator(message: wire.ConnectResponse, expected: object) -> None:
    assert translate.response(message) == expected


TWICE = computation_pb2.StageOrder(computations=[WIRE_F0, WIRE_F0])


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (heard(), "message: expected a message, found an empty one"),
        (offer(), "plan_offer.clocks: expected stock, hold or stage_plan, found none"),
        *(
            (
                offer(**STOCK, lease_s=lease_s),
                f"plan_offer.lease_s: expected 0.01 to 1000000.0, found {lease_s}",
            )
            for lease_s in (0.0, -1.0, 1e308, math.nan, math.inf)
        ),
        *(
            (
                heard(welcome=wire.Welcome(epoch="e", lease_s=lease_s)),
                f"welcome.lease_s: expected 0.01 to 1000000.0, found {lease_s}",
            )
            for lease_s in (1e308, 5e-324, math.nan)
        ),
        *(
            (
                heard(welcome=wire.Welcome(epoch="e", lease_s=3, slot=slot, slot_count=3)),
                f"welcome.slot: expected 0 to 2, found {slot}",
            )
            for slot in (-1, 3)
        ),
        *(
            (
                heard(rank_max_clock=wire.RankMaxClock(**of_rank(max_clock=wire.MaxClock(clock_mhz=mhz)))),
                f"rank_max_clock.max_clock.clock_mhz: expected 1 to 100000, found {mhz}",
            )
            for mhz in (0, -900, 100_001)
        ),
        (offer(**STOCK, version=0), "plan_offer.version: expected 1 to 9007199254740992, found 0"),
        (
            offer(stage_plan=stage_plan()),
            "plan_offer.stage_plan.computations[0].kind: expected 1 to 6, found 0",
        ),
        (
            heard(rank_accepted=wire.RankAccepted(**of_rank(order=TWICE))),
            "rank_accepted.order: expected at least one computation, each once, found 2, of which 1 differ",
        ),
    ],
)
def test_violations_of_the_contract_are_named(message: wire.ConnectResponse, problem: str) -> None:
    with pytest.raises(translate.MalformedMessageError) as caught:
        translate.response(message)
    assert str(caught.value) == problem
    has_rank = message.WhichOneof("message") not in (None, "welcome")
    assert caught.value.refused.rank == (RANK if has_rank else None)


def test_a_registration_that_is_no_job_spec_is_refused() -> None:
    request = translate.register_job_request(Registration({"jobId": "j"}, "r", "f"))
    assert (request.spec.job_id, request.request_id, request.spec_fingerprint) == ("j", "r", "f")
    assert translate.register_job_request(Registration({"jobId": "j"}, "r", "f"), "alice").owner == "alice"
    newer = translate.register_job_request(Registration({"jobId": "j", "ofALaterRelease": 3}, "r", "f"))
    assert newer == request
    labels = (("slurm-account", "physics"), ("slurm-job", "17"))
    request = translate.register_job_request(Registration({"jobId": "j"}, "r", "f"), "alice", labels)
    assert tuple((label.key, label.value) for label in request.labels) == labels
    with pytest.raises(ValueError, match=r"registration: expected a JobSpec as JSON: .*jobId"):
        translate.register_job_request(Registration({"jobId": 3}, "r", "f"))
    for spec in ({"\ud800": 1}, {"schedule": "\ud800"}, {"jobId": "\ud800"}):
        with pytest.raises(ValueError, match=r"registration: expected a JobSpec as JSON: .*surrogate"):
            translate.register_job_request(Registration(spec, "r", "f"))
