"""A job under a carbon policy in real processes: slower while energy is dirty, and not once nothing is known.

The "hours" of the signal, in a CSV file, last 20 seconds.
"""

import asyncio
import json
import math
import os
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest

from perseus.v1 import event_pb2, job_pb2, job_service_pb2
from tests.service.grpc_fakes import Client
from tests.small_jobs import small_job, training, until, until_planned

JOB = small_job("steered", 0.7, 1.0)
HOUR_S, STALE_S = 20.0, 5.0
DIRTY, CLEAN = 600.0, 60.0
VALUES = (DIRTY, CLEAN, DIRTY, CLEAN)
SETTLED_S = 10.0
"""Of each hour: until then it may run as in the one before."""


def write_signal(path: Path) -> float:
    """Write the signal, all hours of it, from the next one on; return when that begins."""
    begin_s = HOUR_S * math.ceil(time.time() / HOUR_S)
    rows = "".join(f"{begin_s + HOUR_S * index:.0f},{value}\n" for index, value in enumerate(VALUES))
    new = path.with_suffix(".new")
    new.write_text(f"timestamp,g_per_kwh\n{rows}")
    os.replace(new, path)
    return begin_s


class Measured(NamedTuple):
    """Medians over some seconds: others use this machine, too."""

    iteration_time_s: float
    power_w: float
    planned_s: float


async def measured(client: Client, until_s: float) -> Measured:
    """Return what was measured, and planned, until a time of the wall clock."""
    found = []
    while time.time() < until_s:
        job = await client.job(JOB.job_id)
        figures = job.figures
        found.append((figures.iteration_time_s, figures.power_w, job.max_planned_iteration_time_s))
        await asyncio.sleep(0.25)
    return Measured(*map(median, zip(*found, strict=True)))


@pytest.mark.timeout(500)
async def test_a_job_is_slower_in_dirty_hours_and_is_not_once_the_signal_is_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    csv = tmp_path / "carbon.csv"
    grid = {"kind": "carbon", "csv": str(csv), "column": "g_per_kwh", "stale_s": STALE_S}
    monkeypatch.setenv("PERSEUS_COORDINATOR_SIGNALS", json.dumps({"grid": grid}))
    with training(tmp_path, JOB) as (cluster, address):
        async with cluster.security.channels(address).open() as channel:
            client = Client(channel)
            await until_planned(client, JOB)
            full = await measured(client, time.time() + 5.0)
            least_carbon = job_pb2.LeastSignal(extra_time=job_pb2.ExtraTime(percent=5, horizon_s=3600))
            request = job_service_pb2.SetPolicyRequest(
                job_id=JOB.job_id, policy=job_pb2.OperatingPolicy(least_carbon=least_carbon)
            )
            begin_s = write_signal(csv)
            await client.jobs.SetPolicy(request)
            hours = []
            for hour in range(3):
                await asyncio.sleep(begin_s + HOUR_S * hour + SETTLED_S - time.time())
                hours.append(await measured(client, begin_s + HOUR_S * (hour + 1) - 1.0))
                told = (await client.job(JOB.job_id)).signal_pacing
                assert told.value_per_kwh == VALUES[hour]
            first, clean, second = hours
            for dirty in (first, second):
                assert dirty.planned_s > 1.05 * clean.planned_s
            assert first.iteration_time_s + second.iteration_time_s > 2.04 * clean.iteration_time_s
            assert first.power_w + second.power_w < 1.94 * clean.power_w
            assert clean.planned_s == pytest.approx(full.planned_s, rel=0.01)

            async def is_blind() -> bool:
                told = (await client.job(JOB.job_id)).signal_pacing
                return told.state == job_pb2.SIGNAL_PACING_STATE_BLIND

            await until(is_blind, "the signal is stale")
            assert time.time() >= begin_s + HOUR_S * len(VALUES) + STALE_S
            await asyncio.sleep(5.0)
            blind = await measured(client, time.time() + 5.0)
            assert blind.planned_s == pytest.approx(full.planned_s, rel=0.01)
            job = await client.job(JOB.job_id)
            assert not job.signal_pacing.HasField("iteration_time_s")
            assert job.signal_pacing.done_count > 100
            events = job_service_pb2.ListJobEventsRequest(
                job_id=JOB.job_id, types=[event_pb2.JOB_EVENT_TYPE_SIGNAL_PACED]
            )
            (*_, last) = (await client.jobs.ListJobEvents(events)).events
            assert last.signal_paced.pacing.state == job_pb2.SIGNAL_PACING_STATE_BLIND
            assert "nothing is known of the carbon signal" in last.message
            cluster.check()
