"""An agent with jobs of two slots, and commands about them, while another coordinator takes a slot over."""

import asyncio
import json
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from perseus.agent.sidecar.shell import serving
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A100_SXM
from perseus.job_id import slot_of
from tests.agent import coordinator_stub
from tests.agent.sidecar.training import Trainer, settings
from tests.cli.processes import Ended, call
from tests.processes import Fleet
from tests.service.storage import postgresql
from tests.small_jobs import until

JOBS = [
    next(name for name in map("job-{}".format, range(9)) if slot_of(name, 2) == slot) for slot in range(2)
]


async def perseus(address: str, *arguments: str, stdout: Any = subprocess.PIPE) -> Ended:
    """Call a command as a process: in this one, it would log in its own way."""
    environment = {"PERSEUS_COORDINATOR": address}
    return await asyncio.to_thread(
        call, *arguments, "--format", "json", cwd=Path.cwd(), environment=environment, stdout=stdout
    )


async def is_served(address: str, job_id: str, iteration: int = 0) -> bool:
    """Whether a job's rank is connected, and has reported a later iteration."""
    shown = await perseus(address, "jobs", "ranks", job_id, "--state", "connected")
    return shown.exit_code == 0 and any(rank["iteration"] > iteration for rank in json.loads(shown.stdout))


async def jobs_in(address: str, *flags: str) -> tuple[int, list[str]]:
    listed = await perseus(address, "jobs", "list", *flags)
    return listed.exit_code, [job["job_id"] for job in json.loads(listed.stdout)]


def sequences_in(watch: Path) -> list[int]:
    """Return the numbers of the events that a watch has written so far."""
    updates = map(json.loads, watch.read_text().rpartition("\n")[0].splitlines())
    return [update["event"]["sequence"] for update in updates if "event" in update]


async def have_finished(address: str) -> bool:
    return await jobs_in(address, "--state", "finished") == (0, sorted(JOBS))


@pytest.mark.slow("three coordinators on a PostgreSQL server, one of which is killed")
@pytest.mark.skipif(bool(postgresql.MISSING), reason=str(postgresql.MISSING))
async def test_agents_and_commands_with_one_address_go_on_when_a_slot_is_taken_over(tmp_path: Path) -> None:
    gpus = []
    (tmp_path / "gpus").mkdir()
    with ExitStack() as stack:
        database = stack.enter_context(postgresql.running()).new_database()
        # Nobody serves a slot while a command runs, on a busy machine, too.
        fleet = stack.enter_context(Fleet(tmp_path, [database] * 3, member_lease_s=20.0))
        await asyncio.to_thread(fleet.start)
        # The one that will be killed is not the one whose address is known.
        known, killed = fleet.holder(0).address, fleet.holder(1)
        for job_id in JOBS:
            gpus.append(EmulatedGpu.create(tmp_path / "gpus" / job_id, A100_SXM, f"GPU-{job_id}"))
            stack.callback(gpus[-1].close)
        stack.callback(Trainer.stop_all)
        with capture_logs() as logs:
            async with serving(settings(tmp_path, int(known.rpartition(":")[2]))):
                socket = tmp_path / "run" / "agent.sock"
                trainers = [
                    Trainer(socket, gpu, job_id=job_id) for gpu, job_id in zip(gpus, JOBS, strict=True)
                ]
                for job_id in JOBS:
                    await until(partial(is_served, known, job_id), "the job's rank is served")
                assert await jobs_in(known) == (0, sorted(JOBS))
                seen = tmp_path / "watch"
                with seen.open("wb") as file:
                    watching = asyncio.create_task(perseus(known, "jobs", "watch", JOBS[1], stdout=file))
                    await coordinator_stub.until(lambda: b"caught_up" in seen.read_bytes(), "the watch")
                    assert streams(logs) == [known, killed.address]

                    await asyncio.to_thread(killed.kill)
                    before = sequences_in(seen)
                    assert await jobs_in(known) == (1, JOBS[:1]), "without those of the other slot"
                    successor = await asyncio.to_thread(fleet.holder, 1)
                    count = trainers[1].iteration_count
                    await until(partial(is_served, known, JOBS[1], count), "the rank is served again")
                    assert streams(logs) == [known, killed.address, successor.address]

                    for trainer in trainers:
                        await trainer.stop()
                    watched = await watching
        assert watched.exit_code == 0, watched.stderr
        sequences = sequences_in(seen)
        first = sequences[0]  # a watch begins with the latest events
        assert sequences == list(range(first, first + len(sequences))), "each event once"
        assert len(sequences) > len(before) > 0, "those of both coordinators"
        await until(partial(have_finished, known), "the job that was not watched has ended, too")


def streams(logs: Sequence[Any]) -> list[str]:
    """Return where the agent's streams were opened, in order."""
    return [line["coordinator"] for line in logs if line["event"] == "connected"]
