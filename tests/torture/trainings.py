"""Trainings with the product's own agents while their fleet is tortured, and a watch on their GPUs."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc

from perseus.demo.cluster import Cluster
from perseus.demo.security import Security
from perseus.demo.workload import Workload
from perseus.emulation.gpu import EmulatedGpu
from perseus.v1 import job_pb2, job_service_pb2, rank_pb2
from perseus.v1.job_service_pb2_grpc import JobServiceStub

_POLL_S = 0.05
_CALL_TIMEOUT_S = 10.0


class _Plaintext(Security):
    """The fleet's coordinators authenticate nobody."""

    def of_agent(self) -> Mapping[str, str]:
        return {}


class ForeignClocks:
    """How long after the loss of every coordinator a GPU was still at a clock other than stock.

    Attributes:
        longest_s: the longest time found.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._lost_s: dict[int, float] = {}

    def lost(self, slot: int, now_s: float) -> None:
        """Note that nobody serves a slot's agents from now on."""
        self._lost_s.setdefault(slot, now_s)

    def served(self, slot: int) -> None:
        """Note that somebody serves them again."""
        self._lost_s.pop(slot, None)

    def take(self, slot: int, is_stock: bool, now_s: float) -> None:
        """Note the clock of a GPU of a slot's job."""
        lost_s = self._lost_s.get(slot)
        if lost_s is not None and not is_stock:
            self.longest_s = max(self.longest_s, now_s - lost_s)


class Training(Cluster):
    """A job that the product's agent serves, and real processes train on emulated GPUs."""

    def __init__(self, folder: Path, workload: Workload, slot: int) -> None:
        super().__init__(workload, folder / workload.job_id, folder / "logs" / workload.job_id)
        self.security = _Plaintext(folder / f"{workload.job_id}-unused")
        self.job_id = workload.job_id
        self.slot = slot
        self.gpu_files = [self.gpu_file(*rank) for rank in workload.ranks]

    def plan(self, address: str) -> dict[int, int] | None:
        """Return the version in force by stage, as a coordinator says; None without a plan, or an answer."""
        with grpc.insecure_channel(address) as channel:
            stub = JobServiceStub(channel)
            request = job_service_pb2.GetJobRequest(job_id=self.job_id)
            try:
                job, ranks = stub.GetJob(request, timeout=_CALL_TIMEOUT_S).job, self._ranks(stub)
            except grpc.RpcError:
                return None
        if job.state != job_pb2.JOB_STATE_PLANNED or not all(each.in_force_version for each in ranks):
            return None
        return {each.coordinates.stage: each.in_force_version for each in ranks}

    def is_back(self, address: str) -> bool:
        """Whether a coordinator serves all its ranks."""
        with grpc.insecure_channel(address) as channel:
            try:
                ranks = self._ranks(JobServiceStub(channel))
            except grpc.RpcError:
                return False
        return {each.state for each in ranks} == {rank_pb2.RANK_STATE_CONNECTED}

    def _ranks(self, stub: JobServiceStub) -> Sequence[rank_pb2.Rank]:
        request = job_service_pb2.ListRanksRequest(job_id=self.job_id)
        return stub.ListRanks(request, timeout=_CALL_TIMEOUT_S).ranks


@contextmanager
def watched(trainings: Sequence[Training]) -> Iterator[ForeignClocks]:
    """Look at all GPUs' clocks during the block."""
    found = ForeignClocks()
    is_over = threading.Event()
    gpus = [(each.slot, EmulatedGpu(file)) for each in trainings for file in each.gpu_files]

    def look() -> None:
        while not is_over.wait(_POLL_S):
            for slot, gpu in gpus:
                found.take(slot, gpu.sm_clock_mhz() == gpu.model.highest_clock_mhz, time.monotonic())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        thread.join()
        for _, gpu in gpus:
            gpu.close()
