"""Messages of a load, serialised beforehand: the generator must be cheaper than the server under load.

On the wire, a message is its fields one after another, in any order. So a batch is made by appending bytes:
the rank's constant part (job and place), and a stage's common part for an iteration.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from perseus.solver import Computation, Kind
from perseus.v1 import agent_service_pb2 as pb
from perseus.v1 import computation_pb2, rank_pb2

CLOCKS_MHZ = (1400, 1200, 1000)
ITERATION_S = 0.8
BLOCKING_POWER_W = 60.0

_TELEMETRY_TAG = bytes([pb.ConnectRequest.TELEMETRY_FIELD_NUMBER << 3 | 2])
_BUNDLE_TAG = bytes([pb.ConnectRequest.BUNDLE_FIELD_NUMBER << 3 | 2])
_MESSAGES_TAG = bytes([pb.ConnectRequestBundle.MESSAGES_FIELD_NUMBER << 3 | 2])
_KINDS = {kind: computation_pb2.ComputationKind.Value(f"COMPUTATION_KIND_{kind.name}") for kind in Kind}


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A rank's place; one tensor-parallel rank per stage."""

    pipeline: int
    stage: int

    def to_proto(self) -> rank_pb2.RankCoordinates:
        """Return it as on the wire."""
        return rank_pb2.RankCoordinates(pipeline=self.pipeline, stage=self.stage)


def time_s(kind: Kind, clock_mhz: int) -> float:
    """Return the time of a computation at a clock; stock is the highest."""
    base_s = 0.02 if kind is Kind.FORWARD else 0.04
    return base_s * (0.3 + 0.7 * CLOCKS_MHZ[0] / (clock_mhz or CLOCKS_MHZ[0]))


def energy_j(kind: Kind, clock_mhz: int) -> float:
    """Return its energy: from static power, and power that grows steeply with the clock."""
    share = (clock_mhz or CLOCKS_MHZ[0]) / CLOCKS_MHZ[0]
    return time_s(kind, clock_mhz) * (110.0 + 150.0 * share**3)


def iteration_energy_j(iteration: int) -> float:
    """Return each rank's energy of an iteration; it varies so that a report's sum identifies iterations."""
    return 150.0 + iteration % 64


def stage_body(
    order: Sequence[Computation], iteration: int, version: int, clocks_mhz: Sequence[int], held: int | None
) -> bytes:
    """Return the report of every rank of a stage on an iteration, with short rows, as an agent's.

    `held`: iterations under one held clock.
    """
    begin_s, begins_s, durations_s = 0.0, [], []
    for computation, clock_mhz in zip(order, clocks_mhz, strict=True):
        begins_s.append(begin_s)
        durations_s.append(time_s(computation.kind, clock_mhz))
        begin_s += durations_s[-1]
    batch = pb.TelemetryBatch(
        iterations=pb.IterationColumns(
            iteration=[iteration],
            plan_version=[version],
            duration_s=[ITERATION_S],
            energy_j=[iteration_energy_j(iteration)],
            is_regular=[True],
            clock_event_reasons=[0],
        ),
        computations=pb.ComputationColumns(
            begin_s=begins_s if iteration % 4 == 0 or not any(clocks_mhz) else (),
            duration_s=durations_s,
            clock_mhz=list(clocks_mhz),
        ),
    )
    if held is not None:
        batch.energy.CopyFrom(_estimate(order, version, clocks_mhz[0], held))
    return batch.SerializeToString()


def _estimate(
    order: Sequence[Computation], version: int, clock_mhz: int, iteration_count: int
) -> pb.EnergyEstimate:
    return pb.EnergyEstimate(
        plan_version=version,
        iteration_count=iteration_count,
        samples=[
            pb.EnergySample(
                kind=_KINDS[kind],
                clock_mhz=clock_mhz,
                computation_count=iteration_count,
                time_s=time_s(kind, clock_mhz),
                time_se_s=1e-5,
                energy_j=energy_j(kind, clock_mhz),
                energy_se_j=1e-3,
            )
            for kind in sorted({c.kind for c in order})
        ],
        blocking_power_w=BLOCKING_POWER_W,
        blocking_power_se_w=0.5,
        window_count=100,
    )


def rank_prefix(job_id: str, place: Place) -> bytes:
    """Return the constant part of a rank's batches."""
    return pb.TelemetryBatch(job_id=job_id, rank=place.to_proto()).SerializeToString()


def telemetry(prefix: bytes, body: bytes, sequence: int) -> bytes:
    """Return a whole request of the stream."""
    numbered = prefix + pb.TelemetryBatch(sequence=sequence).SerializeToString() + body
    return _TELEMETRY_TAG + _varint(len(numbered)) + numbered


def bundle(messages: Sequence[bytes]) -> bytes:
    """Return several requests as one."""
    inner = b"".join([part for each in messages for part in (_MESSAGES_TAG, _varint(len(each)), each)])
    return _BUNDLE_TAG + _varint(len(inner)) + inner


def _varint(number: int) -> bytes:
    """Return a number in protobuf's varint format."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)
