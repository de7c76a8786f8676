"""Runs without a state machine: ended ones, and ones whose machine failed.

A machine that raised an unexpected exception may have stopped halfway, so it can't be trusted any more. It
receives no further inputs, and a snapshot of its published state takes its place: the job is shown at stock,
its ranks are sent there, calls that concern it are refused, and it can be finished, abandoned, deleted or
resumed. Resuming builds a new machine from the stored state (`LiveRuns.revive`). The store holds the job as
one at stock, so that a restart does the same and no plan returns with it.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from perseus.service.domain.commands import Command, RefuseRank, SendMaxClock
from perseus.service.domain.errors import RankNotServedError
from perseus.service.domain.inputs import (
    Abandoned,
    AgentDisconnected,
    AgentHeard,
    AgentLeft,
    BaselineRequested,
    EpochRenewed,
    FinishRequested,
    GpuErrorReported,
    Input,
    LagNotFound,
    MaxClockSet,
    OfferAnswered,
    PlanInForce,
    ProfileFound,
    RankLeft,
    Refined,
    RefineFailed,
    RegisteredAgain,
    ResumeRequested,
    Solved,
    SolveFailed,
    SolveRetried,
    TelemetryArrived,
    Tick,
)
from perseus.service.domain.messages import NUMBERS, time_to_proto
from perseus.service.domain.model import LOST_VERSIONS, NO_VERSION, JobState, Rank, RankState
from perseus.service.domain.records import EndedRun, ForgetIterations, JobRecord, StoredJob
from perseus.service.domain.snapshot import Fault, RunSnapshot
from perseus.service.domain.specification import Coordinates
from perseus.service.domain.stall import StockReason, next_step
from perseus.service.job.command_buffer import CommandBuffer
from perseus.service.job.ranks.rank_table import LIVE
from perseus.service.job.rules import Rules
from perseus.service.job.views import stored_job
from perseus.v1 import event_pb2, job_pb2

_Change = tuple[RunSnapshot, list[Command]]


def quarantine(known: StoredJob, fault: Fault, rules: Rules, epoch: str, wall_time_s: float) -> _Change:
    """Put a run at stock whose machine failed; a run that had ended stays ended.

    Returns its snapshot, and the commands to store, announce and send to its ranks.
    """
    record = known.record or JobRecord(known.spec.policy)
    before, why = record.state, f"quarantined: {fault}"
    at_stock = replace(
        record, state=JobState.STOCK, state_reason=why, stock_reason=StockReason.QUARANTINED, stall=None
    )
    served = tuple(rank for rank in known.ranks if rank.state in LIVE)
    states = Counter(rank.state for rank in lost(known.ranks).values())
    states[RankState.EXPECTED] += known.spec.rank_count - len(known.ranks)
    buffer = CommandBuffer(wall_time_s=wall_time_s)
    buffer.sequence = known.last_sequence
    snapshot = RunSnapshot(
        known.spec,
        known.run_number,
        known.create_time_s,
        known.registrations,
        record,
        stored_job(known, record, rules, epoch, states),
        fault,
        served,
    )
    if before is JobState.FINISHED:
        return _given_out(replace(snapshot, fault=None, ranks=()), buffer, has_ended=True)
    if before is JobState.STOCK:
        snapshot = _keep(snapshot, at_stock, buffer)
    else:
        snapshot = _enter(snapshot, at_stock, buffer)
    buffer.store(ForgetIterations())
    buffer.announce(
        event_pb2.JOB_EVENT_TYPE_QUARANTINED,
        why,
        event_pb2.Quarantined(part=NUMBERS[fault.part], error=fault.error, before=NUMBERS[before]),
    )
    error = snapshot.refusal()
    for rank in served:
        buffer.do(RefuseRank(rank.coordinates, rank.instance_id, error, record.max_clock))
    return _given_out(snapshot, buffer, has_ended=False)


def lost(ranks: Iterable[Rank]) -> dict[Coordinates, Rank]:
    """Return the stored ranks of a run without a machine; those that were served are lost."""
    return {
        rank.coordinates: replace(rank, state=RankState.LOST, in_force_version=NO_VERSION)
        if rank.state in LIVE
        else rank
        for rank in ranks
    }


def handle(snapshot: RunSnapshot, event: Input, now_s: float, wall_time_s: float) -> _Change:
    """Take one input of a run without a machine, like `JobMachine.handle`.

    Raises:
        JobFinishedError, JobQuarantinedError, RankNotServedError: the input needs a machine.
    """
    buffer, record = CommandBuffer(wall_time_s=wall_time_s), snapshot.record
    buffer.sequence = snapshot.last_event_sequence
    buffer.begin(now_s, wall_time_s)
    match event:
        case MaxClockSet():
            snapshot = _keep(snapshot, replace(record, max_clock=event.to_max_clock()), buffer)
            for rank in snapshot.ranks:
                buffer.do(SendMaxClock(rank.coordinates, rank.instance_id, event.to_max_clock()))
        case EpochRenewed(epoch):
            snapshot = _keep(snapshot, replace(record, version=record.version + LOST_VERSIONS), buffer)
            snapshot.job.epoch = epoch
        case AgentDisconnected() | AgentLeft() | AgentHeard() | RankLeft() | Tick():
            pass
        case Solved() | SolveRetried() | SolveFailed() | LagNotFound() | ProfileFound():
            pass
        case Refined() | RefineFailed():
            pass
        case FinishRequested() if record.has_finished:
            pass
        case FinishRequested():
            snapshot = _finish(snapshot, "ended on request", wall_time_s, buffer)
        case Abandoned(why) if not record.has_finished:
            snapshot = _finish(snapshot, f"abandoned: {why}", wall_time_s, buffer)
        case RegisteredAgain(registration) if not record.has_finished:
            registrations = snapshot.registrations.with_newest(registration)
            if registrations != snapshot.registrations:
                snapshot = replace(snapshot, registrations=registrations)
                buffer.store(registrations)
        case TelemetryArrived() if record.has_finished:
            place, job_id = event.rank, snapshot.spec.job_id
            raise RankNotServedError(
                job_id=job_id, pipeline=place.pipeline, stage=place.stage, tensor=place.tensor
            )
        case OfferAnswered() | PlanInForce() | GpuErrorReported() | ResumeRequested() if record.has_finished:
            pass
        case BaselineRequested(request_id) if request_id in record.baseline_request_ids:
            pass
        case _:
            raise snapshot.refusal()
    has_ended = snapshot.record.has_finished and not record.has_finished
    return _given_out(snapshot, buffer, has_ended=has_ended)


def _finish(snapshot: RunSnapshot, why: str, wall_time_s: float, buffer: CommandBuffer) -> RunSnapshot:
    record = replace(snapshot.record, state=JobState.FINISHED, state_reason=why, finish_time_s=wall_time_s)
    return _enter(snapshot, record, buffer)


def _enter(snapshot: RunSnapshot, record: JobRecord, buffer: CommandBuffer) -> RunSnapshot:
    before, why = snapshot.record.state, record.state_reason
    buffer.announce(
        event_pb2.JOB_EVENT_TYPE_STATE_CHANGED,
        f"{before.value} → {record.state.value}: {why}",
        event_pb2.StateChanged(before=NUMBERS[before], after=NUMBERS[record.state], reason=why),
    )
    return _keep(snapshot, replace(record, stall=None), buffer)


def _keep(snapshot: RunSnapshot, record: JobRecord, buffer: CommandBuffer) -> RunSnapshot:
    if record != snapshot.record:
        buffer.store(record)
    return replace(snapshot, record=record)


def _given_out(snapshot: RunSnapshot, buffer: CommandBuffer, *, has_ended: bool) -> _Change:
    """Return a run as it is shown now, and the collected commands; `has_ended`: whether it ended just now."""
    record, job = snapshot.record, job_pb2.Job()
    job.CopyFrom(snapshot.job)
    job.state, job.state_reason = NUMBERS[record.state], record.state_reason
    is_at_stock = record.state is JobState.STOCK
    job.next_step = next_step(record.stock_reason, job.job_id) if is_at_stock else ""
    job.last_event_sequence = buffer.sequence
    del job.labels[:]
    job.labels.extend(job_pb2.Label(key=key, value=value) for key, value in snapshot.registrations.labels)
    if record.finish_time_s is not None:
        job.finish_time.CopyFrom(time_to_proto(record.finish_time_s))
    if has_ended:
        buffer.store(EndedRun(job))
    return replace(snapshot, job=job), buffer.take()
