"""Errors of the demo when its job can't continue."""

import grpc.aio
import pytest

from perseus.demo.observation import ObservationError, Observer
from perseus.demo.summary import Measurements
from perseus.v1 import job_pb2, job_service_pb2


class FakeJobs:
    async def GetJob(  # noqa: N802 - named by the contract
        self, request: job_service_pb2.GetJobRequest, **_: float
    ) -> job_service_pb2.GetJobResponse:
        job = job_pb2.Job(job_id=request.job_id, state=job_pb2.JOB_STATE_STOCK, state_reason="made up")
        return job_service_pb2.GetJobResponse(job=job)


async def test_waiting_ends_when_a_job_goes_back_to_stock() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        observer = Observer(channel, "job", Measurements(1), lambda: None)
        observer._jobs = FakeJobs()  # type: ignore[assignment]
        observer._state = job_pb2.JOB_STATE_STOCK
        with pytest.raises(ObservationError) as caught:
            await observer.until("a plan", lambda: False, timeout_s=600)
    assert str(caught.value) == "expected a plan, found the job at JOB_STATE_STOCK: made up"
