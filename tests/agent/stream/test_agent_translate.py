import math
from dataclasses import replace

import pytest

from perseus.agent.link.computation import Computation, Kind, Rank
from perseus.agent.link.packets import Registration, Saving
from perseus.agent.rank.messages import (
    ClockStatistics,
    ComputationRow,
    Drain,
    EnergyEstimate,
    EnergySample,
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
    rank_left,
)
from perseus.agent.stream import translate
from perseus.agent.stream.telemetry import Batch
from perseus.v1 import agent_service_pb2 as wire
from perseus.v1 import computation_pb2, frontier_pb2, rank_pb2

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


def test_a_sessions_message_goes_out_in_its_own_field() -> None:
    refusal = PlanRefusal(PlanRefusalReason.CLOCK_NOT_SUPPORTED, "no such\nclock", (800, 7))
    refused = plan_answer(RANK, PlanId("e", 3), refusal, 9)
    assert refused == wire.PlanAnswer(
        job_id="job",
        rank=COORDINATES,
        epoch="e",
        version=3,
        refusal_reason=rank_pb2.PLAN_REFUSAL_REASON_CLOCK_NOT_SUPPORTED,
        message="no such clock",
        iteration=9,
        refused_clocks_mhz=[800, 7],
    )
    accepted = plan_answer(RANK, PlanId("e", 3), None, 9)
    assert accepted == wire.PlanAnswer(
        job_id="job", rank=COORDINATES, epoch="e", version=3, accepted=True, iteration=9
    )
    left = rank_left(RANK, RankLeftReason.GPU_FAILED)
    assert left == wire.RankLeft(job_id="job", rank=COORDINATES, reason=rank_pb2.RANK_LEFT_REASON_GPU_FAILED)
    assert translate.request(refused) == wire.ConnectRequest(plan_answer=refused)
    assert translate.request(left) == wire.ConnectRequest(rank_left=left)
    for name, message in (
        ("rank_joined", wire.RankJoined(job_id="job")),
        ("plan_in_force", wire.PlanInForce(job_id="job")),
        ("gpu_error", wire.GpuError(job_id="job")),
        ("power_reading", wire.PowerReading(duration_s=1.0)),
    ):
        request = translate.request(message)
        assert request.WhichOneof("message") == name
        assert getattr(request, name) == message


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
    telemetry = Telemetry(
        RANK,
        (
            IterationRow(7, 3, 0.8, 240.0, True, 0),
            IterationRow(8, 3, 0.9, 250.0, False, 0x40, 5.0, 600.0, 0.01, relative_work=1.25),
        ),
        (
            ComputationRow(7, F0, 0.1, 0.05, 1410),
            ComputationRow(7, Computation(Kind.BACKWARD, 2, 1), 0.2, 0.1, None),
        ),
        EnergyEstimate(3, 2, (sample,), None, 0.0, 12, 1),
        ClockStatistics(3, 40, 64, 2, 1, 4.0, 3.5, 0.012, 0.001, None),
    )
    batch = translate.request(Batch(5, telemetry, 2)).telemetry
    assert (batch.sequence, batch.job_id, batch.rank, batch.dropped_batch_count) == (5, "job", COORDINATES, 2)
    assert list(batch.iterations.iteration) == [7, 8]
    assert list(batch.iterations.is_regular) == [True, False]
    assert list(batch.iterations.energy_j) == [240.0, 250.0]
    assert list(batch.iterations.clock_event_reasons) == [0, 0x40]
    assert list(batch.iterations.gap_time_s) == [0.0, 5.0]
    assert list(batch.iterations.gap_energy_j) == [0.0, 600.0]
    assert list(batch.iterations.gap_slowed_time_s) == [0.0, 0.01]
    assert list(batch.iterations.relative_work) == [0.0, 1.25]
    assert not batch.iterations.has_clock_change
    touched = replace(telemetry, iterations=(replace(telemetry.iterations[0], has_clock_change=True),))
    assert list(translate.request(Batch(6, touched, 0)).telemetry.iterations.has_clock_change) == [True]
    missing = replace(telemetry, iterations=telemetry.iterations[:1])
    assert not translate.request(Batch(6, missing, 0)).telemetry.iterations.relative_work
    assert list(batch.computations.kind) == [1, 2]
    assert list(batch.computations.microbatch) == [0, 2]
    assert list(batch.computations.chunk) == [0, 1]
    assert list(batch.computations.clock_mhz) == [1410, 0]
    assert list(batch.computations.begin_s) == [0.1, 0.2]
    assert not batch.energy.HasField("blocking_power_w")
    assert (batch.clocks.set_count, batch.clocks.late_raise_count, batch.clocks.missed_count) == (40, 2, 1)
    assert (batch.clocks.computation_time_s, batch.clocks.on_clock_time_s) == (4.0, 3.5)
    assert not batch.clocks.HasField("prediction_error_s")
    assert batch.energy.samples[0].energy_j == 20.0
    assert batch.energy.samples[0].clock_mhz == 0
    assert not translate.request(Batch(6, Telemetry(RANK, (), (), None, None), 0)).telemetry.HasField(
        "energy"
    )


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            wire.ConnectResponse(welcome=wire.Welcome(epoch="e", lease_s=3, acknowledged_sequence=4)),
            Welcome("e", 3.0, 4),
        ),
        (
            wire.ConnectResponse(welcome=wire.Welcome(epoch="e", lease_s=3, slot=2, slot_count=3)),
            Welcome("e", 3.0, 0, slot=2, slot_count=3),
        ),
        (
            wire.ConnectResponse(
                rank_accepted=wire.RankAccepted(
                    job_id="job",
                    rank=COORDINATES,
                    order=computation_pb2.StageOrder(computations=[WIRE_F0]),
                )
            ),
            RankAccepted(RANK, (F0,)),
        ),
        (
            wire.ConnectResponse(
                rank_refused=wire.RankRefused(job_id="job", rank=COORDINATES, reason="R", message="m")
            ),
            RankRefused(RANK, "R", "m"),
        ),
        (
            wire.ConnectResponse(
                rank_accepted=wire.RankAccepted(
                    job_id="job",
                    rank=COORDINATES,
                    order=computation_pb2.StageOrder(computations=[WIRE_F0]),
                    max_clock=wire.MaxClock(clock_mhz=900),
                )
            ),
            RankAccepted(RANK, (F0,), MaxClock(900)),
        ),
        (
            wire.ConnectResponse(
                rank_refused=wire.RankRefused(
                    job_id="job", rank=COORDINATES, reason="R", max_clock=wire.MaxClock(clock_mhz=900)
                )
            ),
            RankRefused(RANK, "R", "", MaxClock(900)),
        ),
        (
            wire.ConnectResponse(
                rank_refused=wire.RankRefused(job_id="job", rank=COORDINATES, reason="R", lease_left_s=2.5)
            ),
            RankRefused(RANK, "R", "", lease_left_s=2.5),
        ),
        (
            wire.ConnectResponse(
                rank_max_clock=wire.RankMaxClock(
                    job_id="job",
                    rank=COORDINATES,
                    max_clock=wire.MaxClock(clock_mhz=900, outlasts_lease=True),
                )
            ),
            RankMaxClock(RANK, MaxClock(900, outlasts_lease=True)),
        ),
        (
            wire.ConnectResponse(rank_max_clock=wire.RankMaxClock(job_id="job", rank=COORDINATES)),
            RankMaxClock(RANK, None),
        ),
        (wire.ConnectResponse(telemetry_ack=wire.TelemetryAck(sequence=9)), TelemetryAck(9)),
        (
            wire.ConnectResponse(
                telemetry_refused=wire.TelemetryRefused(
                    sequence=9, reason="R", field="f", expected="e", found="g"
                )
            ),
            TelemetryRefused(9, "R", "f", "e", "g"),
        ),
        (
            wire.ConnectResponse(
                message_refused=wire.MessageRefused(
                    reason="R", field="f", expected="e", found="g", job_id="job", rank=COORDINATES
                )
            ),
            MessageRefused("R", "f", "e", "g", RANK),
        ),
        (wire.ConnectResponse(heartbeat=wire.Heartbeat()), HeartbeatAnswer()),
        (
            wire.ConnectResponse(
                heartbeat=wire.Heartbeat(
                    power_interval_s=1.0,
                    savings=[wire.JobSaving(job_id="job", energy_percent=9.5, slowdown_percent=-0.5)],
                )
            ),
            HeartbeatAnswer(1.0, {"job": Saving(9.5, -0.5)}),
        ),
        (wire.ConnectResponse(drain=wire.Drain(reason="r")), Drain("r")),
    ],
)
def test_messages_of_the_coordinator(message: wire.ConnectResponse, expected: object) -> None:
    assert translate.response(message) == expected


def offer(**clocks: object) -> wire.ConnectResponse:
    return wire.ConnectResponse(
        plan_offer=wire.PlanOffer(
            job_id="job",
            rank=COORDINATES,
            epoch="e",
            version=3,
            start_iteration=8,
            lease_s=2.5,
            **clocks,  # type: ignore[arg-type]
        )
    )


@pytest.mark.parametrize(
    ("message", "clocks"),
    [
        (offer(stock=wire.StockClocks()), Stock()),
        (offer(hold=wire.HoldClock(clock_mhz=900)), Hold(900)),
        (
            offer(
                stage_plan=frontier_pb2.StagePlan(
                    computations=[frontier_pb2.PlannedComputation(kind=WIRE_F0.kind, clock_mhz=900)]
                )
            ),
            StageClocks((F0,), (900,)),
        ),
    ],
)
def test_offers(message: wire.ConnectResponse, clocks: Stock | Hold | StageClocks) -> None:
    assert translate.response(message) == PlanOffer(RANK, PlanId("e", 3), 8, 2.5, clocks)


def test_an_urgent_offer() -> None:
    message = offer(stock=wire.StockClocks(), is_urgent=True)
    assert translate.response(message) == PlanOffer(RANK, PlanId("e", 3), 8, 2.5, Stock(), is_urgent=True)


@pytest.mark.parametrize("clock_mhz", [0, -900, 100_001])
def test_an_invalid_max_clock_is_named(clock_mhz: int) -> None:
    max_clock = wire.MaxClock(clock_mhz=clock_mhz)
    message = wire.ConnectResponse(
        rank_max_clock=wire.RankMaxClock(job_id="job", rank=COORDINATES, max_clock=max_clock)
    )
    with pytest.raises(translate.MalformedMessageError) as caught:
        translate.response(message)
    assert str(caught.value) == f"rank_max_clock.max_clock.clock_mhz: expected 1 to 100000, found {clock_mhz}"
    assert caught.value.refused.rank == RANK


def test_violations_of_the_contract_are_named() -> None:
    def refused(message: wire.ConnectResponse) -> str:
        with pytest.raises(translate.MalformedMessageError) as caught:
            translate.response(message)
        return str(caught.value)

    assert refused(wire.ConnectResponse()) == "message: expected a message, found an empty one"
    assert refused(offer()) == "plan_offer.clocks: expected stock, hold or stage_plan, found none"
    for lease_s in (0.0, -1.0, 1e308, math.nan, math.inf):
        message = offer(stock=wire.StockClocks())
        message.plan_offer.lease_s = lease_s
        assert refused(message) == f"plan_offer.lease_s: expected 0.01 to 1000000.0, found {lease_s}"
    for slot in (-1, 3):
        message = wire.ConnectResponse(welcome=wire.Welcome(epoch="e", lease_s=3, slot=slot, slot_count=3))
        assert refused(message) == f"welcome.slot: expected 0 to 2, found {slot}"
    message = offer(stock=wire.StockClocks())
    message.plan_offer.version = 0
    assert refused(message) == "plan_offer.version: expected 1 to 9007199254740992, found 0"
    message = offer(stage_plan=frontier_pb2.StagePlan(computations=[frontier_pb2.PlannedComputation()]))
    assert refused(message) == "plan_offer.stage_plan.computations[0].kind: expected 1 to 6, found 0"
    message = wire.ConnectResponse(rank_accepted=wire.RankAccepted(job_id="job", rank=COORDINATES))
    message.rank_accepted.order.computations.extend([WIRE_F0, WIRE_F0])
    assert refused(message).endswith(
        "expected at least one computation, each once, found 2, of which 1 differ"
    )


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
