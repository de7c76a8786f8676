"""The latest release and this checkout work together: docs/versions.md.

The release is the latest tag, or the commit that set the version. Coordinator, agents and trainers of both
run as processes on one database and one set of sockets.
"""

import asyncio
import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from perseus.demo.cluster import Cluster
from perseus.demo.processes import ClusterError
from perseus.release import VERSION
from perseus.v1 import info_service_pb2, info_service_pb2_grpc, job_pb2
from tests.service.grpc_fakes import Client
from tests.small_jobs import JOBS, jobs_of, start_jobs, until, until_planned

CHECKOUT = Path(__file__).parent.parent


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", "-C", CHECKOUT, *arguments], check=False, capture_output=True).stdout


def latest_release() -> str:
    tag = git("describe", "--tags", "--match=v*", "--abbrev=0").decode().strip()
    return tag or git("log", "-1", "--format=%H", "--", "perseus/release.py").decode().strip()


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release")
    with tarfile.open(fileobj=io.BytesIO(git("archive", latest_release(), "perseus"))) as archive:
        archive.extractall(folder, filter="data")
    (folder / "perseus/commit.txt").write_text("release\n")
    return folder


@contextmanager
def code_of(folder: Path) -> Iterator[None]:
    """Let processes that start here run that folder's code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tempfile.gettempdir())  # Python imports from where it starts first
        patch.setenv("PYTHONPATH", str(folder))
        yield


def schema_of(folder: Path) -> str:
    code = "from perseus.service.storage.schema import HEAD; print(HEAD)"
    with code_of(folder):
        return subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout.strip()


def restart(cluster: Cluster, address: str) -> None:
    """Replace a job's agents, one after the other."""
    for agent in cluster.agents:
        assert agent.terminate() == 0
    cluster.start_agents(address)


def restart_coordinator(cluster: Cluster) -> None:
    assert cluster.coordinator is not None
    assert cluster.coordinator.terminate() == 0
    cluster.start_coordinator()


class Plans:
    """What is in force on all ranks, and how far they are."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def versions(self) -> dict[tuple[str, int], int]:
        return {
            (workload.job_id, rank.coordinates.stage): rank.in_force_version
            for workload in JOBS
            for rank in await self._client.ranks(workload.job_id)
        }

    async def kept(self, versions: dict[tuple[str, int], int]) -> None:
        """Wait until plans no older than these are in force on all ranks, without new measurements.

        Iterations come from every rank meanwhile.
        """
        begun = await self._iterations()
        measured = await self._measured()

        async def are_back() -> bool:
            now, iterations = await self.versions(), await self._iterations()
            return all(now[rank] >= versions[rank] and iterations[rank] > begun[rank] + 2 for rank in begun)

        await until(are_back, f"plans in force on all ranks: {versions}")
        for workload in JOBS:
            job = await self._client.job(workload.job_id)
            assert job.state == job_pb2.JOB_STATE_PLANNED, job.state_reason
        assert await self._measured() == measured

    async def _measured(self) -> list[tuple[int, int]]:
        jobs = [await self._client.job(workload.job_id) for workload in JOBS]
        return [(job.run_number, job.profiled_clock_count) for job in jobs]

    async def _iterations(self) -> dict[tuple[str, int], int]:
        return {
            (workload.job_id, rank.coordinates.stage): rank.iteration
            for workload in JOBS
            for rank in await self._client.ranks(workload.job_id)
        }


@pytest.mark.slow("two jobs are profiled and planned, and their processes replaced one after another")
@pytest.mark.skipif(not latest_release(), reason="needs a git checkout")
@pytest.mark.timeout(1200)
async def test_jobs_keep_their_plans_while_a_cluster_is_upgraded_and_taken_back(
    tmp_path: Path, release: Path
) -> None:
    with jobs_of(tmp_path, *JOBS) as (old, new):
        with code_of(release):
            address = await asyncio.to_thread(old.start_coordinator)
            await asyncio.to_thread(start_jobs, [old], address)
        with code_of(CHECKOUT):
            await asyncio.to_thread(start_jobs, [new], address)

        async def coordinators_release() -> str:
            async with old.security.channels(address).open() as channel:
                info = info_service_pb2_grpc.InfoServiceStub(channel)
                return (await info.GetInfo(info_service_pb2.GetInfoRequest(), timeout=10)).version

        assert await coordinators_release() == f"{VERSION}+grelease"
        async with old.security.channels(address).open() as channel:
            client = Client(channel)
            await until_planned(client, *JOBS)
            plans = Plans(client)
            versions = await plans.versions()
            assert all(versions.values()), versions

            # The coordinator first, as docs/versions.md says: no plan is made anew.
            with code_of(CHECKOUT):
                await asyncio.to_thread(restart_coordinator, old)
            assert await coordinators_release() != f"{VERSION}+grelease"
            await plans.kept(versions)

            # Then the agents. The trainers stay, run at stock for some seconds, and join the new agents. The
            # other job's agents go the other way.
            with code_of(CHECKOUT):
                await asyncio.to_thread(restart, old, address)
            with code_of(release):
                await asyncio.to_thread(restart, new, address)
            await plans.kept(versions)

            # And back, unless this checkout has changed the schema.
            with code_of(release):
                if schema_of(release) == schema_of(CHECKOUT):
                    await asyncio.to_thread(restart_coordinator, old)
                    assert await coordinators_release() == f"{VERSION}+grelease"
                    await plans.kept(versions)
                else:
                    with pytest.raises(ClusterError):
                        await asyncio.to_thread(restart_coordinator, old)
                    assert old.coordinator is not None
                    log = old.coordinator.log.read_text()
                    assert f"expected schema {schema_of(release)}, found {schema_of(CHECKOUT)}" in log
                    assert "Traceback" not in log
