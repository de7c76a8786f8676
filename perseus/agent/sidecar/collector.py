"""The agent's state, as readings. Nothing waits here, the driver least of all: it was asked before."""

import time
from collections.abc import Mapping
from importlib.metadata import version

from perseus.agent.link.computation import Rank
from perseus.agent.rank.messages import GpuErrorReason
from perseus.agent.restore.restorer import Restorer
from perseus.agent.sidecar.served import ServedRank
from perseus.agent.sidecar.vitals import NOT_SERVED, Vitals
from perseus.agent.stream.coordinator import Coordinator
from perseus.metrics import names
from perseus.metrics.readings import Readings

_HZ_PER_MHZ = 1e6


class AgentCollector:
    """Reads an agent; to be called on its event loop. `ranks` are those that are served now."""

    def __init__(
        self,
        ranks: Mapping[Rank, ServedRank],
        coordinator: Coordinator,
        restorer: Restorer,
        vitals: Vitals,
    ) -> None:
        self._ranks = ranks
        self._coordinator = coordinator
        self._restorer = restorer
        self._vitals = vitals
        self._version = version("perseus-energy")

    def collect(self) -> Readings:
        """Read everything."""
        readings = Readings()
        readings.put(names.BUILD_INFO, 1, self._version)
        for file, expiry_s in self._coordinator.certificate_expiries_s.items():
            readings.put(names.CERTIFICATE_EXPIRY, expiry_s, file)
        self._read_stream(readings)
        for reason, count in sorted(self._vitals.refusal_counts.items()):
            readings.put(names.AGENT_TRAINERS_REFUSED, count, reason)
        for rank, served in self._ranks.items():
            _read_rank(readings, rank, served)
        for gpu_uuid, vitals in self._vitals.gpus.items():
            for error in GpuErrorReason:
                readings.put(names.GPU_ERRORS, vitals.error_counts[error], gpu_uuid, error.name.lower())
            if gpu_uuid != NOT_SERVED:
                readings.put(names.GPU_SETS, vitals.sets, gpu_uuid)
                readings.put(names.GPU_MARKS_DROPPED, vitals.dropped_mark_count, gpu_uuid)
        self._read_restores(readings)
        return readings

    def _read_stream(self, readings: Readings) -> None:
        coordinator, ring = self._coordinator, self._coordinator.telemetry
        readings.put(names.AGENT_CONNECTED, coordinator.is_connected)
        lease_s, heard_at_s = coordinator.lease_s, coordinator.heard_at_s
        if lease_s is not None:
            readings.put(names.AGENT_LEASE, lease_s)
            readings.put(names.AGENT_LEASE_LEFT, max(0.0, heard_at_s + lease_s - time.monotonic()))
        readings.put(names.AGENT_BATCHES_KEPT, ring.kept_count)
        readings.put(names.AGENT_BATCHES, ring.sequence)
        readings.put(names.AGENT_BATCHES_DROPPED, ring.dropped_batch_count)

    def _read_restores(self, readings: Readings) -> None:
        restored, failing = self._restorer.restore_counts, self._restorer.not_restored
        for gpu_uuid in sorted({*self._vitals.gpus, *restored, *failing} - {NOT_SERVED}):
            readings.put(names.GPU_RESTORES, restored[gpu_uuid], gpu_uuid)
            readings.put(names.GPU_NOT_RESTORED, gpu_uuid in failing, gpu_uuid)


def _read_rank(readings: Readings, rank: Rank, served: ServedRank) -> None:
    gpu_uuid, reading = served.gpu_uuid, served.reading
    labels = (gpu_uuid, rank.job_id, str(rank.pipeline), str(rank.stage), str(rank.tensor))
    readings.put(names.GPU_RANK, 1, *labels)
    readings.put(names.GPU_CLOCK_WANTED, (served.wanted_clock_mhz or 0) * _HZ_PER_MHZ, gpu_uuid)
    readings.put(names.GPU_PLANNED, served.has_plan, gpu_uuid)
    if served.is_set_known:
        readings.put(names.GPU_CLOCK_SET, (served.set_clock_mhz or 0) * _HZ_PER_MHZ, gpu_uuid)
    if reading is None:
        return
    if reading.sm_clock_mhz is not None:
        readings.put(names.GPU_CLOCK_IN_FORCE, reading.sm_clock_mhz * _HZ_PER_MHZ, gpu_uuid)
    readings.put(names.GPU_POWER, reading.power_w, gpu_uuid)
    readings.put(names.GPU_ENERGY, reading.energy_j, gpu_uuid)
