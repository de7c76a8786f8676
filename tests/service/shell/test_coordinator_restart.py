"""A coordinator that is killed and started again continues where it was."""

import asyncio
import signal
import socket
from pathlib import Path

import grpc
import pytest

from perseus.demo.processes import Coordinator, entries
from perseus.service.domain.errors import AddressUnavailableError, StartupError
from perseus.service.signal_settings import SignalSettings
from perseus.v1 import job_pb2, rank_pb2
from tests.ports import free_port
from tests.processes import is_gone
from tests.service.grpc_fakes import (
    ALL_PLACES,
    TIMEOUT_S,
    Client,
    connected,
    job_once,
    joined,
    make_settings,
    planned,
    running_here,
    until,
)


async def test_agents_resume_after_a_restart_without_a_new_profile(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    async with connected(settings) as client:
        agent = await planned(client)
        before = await client.job()
        await client.ask("ReportStraggler", job_id="job", pipeline=1, slowdown_factor=1.3)
        await agent.settle()
        report = (await client.ask("GetReport", job_id="job")).periods
        offers = len(agent.offers)

    async with connected(settings) as client:
        assert (await client.job()).state == job_pb2.JOB_STATE_PLANNED
        assert await client.rank_states() == {rank_pb2.RANK_STATE_DISCONNECTED}
        agent.use(client)
        await agent.join()
        assert agent.welcome.epoch == before.epoch
        assert agent.welcome.acknowledged_sequence == agent.sequence
        await agent.iterate(4)
        job = await job_once(client, lambda job: job.t_min_s > 0)
        assert job.t_min_s == before.t_min_s
        assert job.profiled_clock_count == 6
        assert [straggler.pipeline for straggler in job.stragglers] == [1]
        assert len(agent.offers) == offers
        await client.ask("ClearStraggler", job_id="job", pipeline=1)
        await agent.iterate(3)
        highest = max(offer.version for offer in agent.offers[:offers])
        assert {offer.version for offer in agent.offers[offers:]} == {highest + 1}
        longer = (await client.ask("GetReport", job_id="job")).periods
        assert longer[: len(report) - 1] == report[:-1]
        assert longer[len(report) - 1].iteration_count == report[-1].iteration_count + 4


async def test_telemetry_is_not_taken_twice(tmp_path: Path) -> None:
    async with connected(make_settings(tmp_path, baseline_iterations=100)) as client:
        agent = await joined(client)
        await agent.iterate(2)
        rank = agent.ranks[ALL_PLACES[0]]
        rank.begin()
        batch = agent.telemetry(rank)
        for _ in range(3):
            await agent.send(telemetry=batch)
        await agent.until(lambda: agent.acknowledged == batch.sequence)
        await agent.end()
        agent.use(client)
        await agent.join()
        assert agent.welcome.acknowledged_sequence == batch.sequence
        await agent.send(telemetry=batch)
        for place in ALL_PLACES[1:]:
            agent.ranks[place].begin()
            await agent.send(telemetry=agent.telemetry(agent.ranks[place]))
        await agent.until(lambda: agent.acknowledged == agent.sequence)
        (period,) = (await client.ask("GetReport", job_id="job")).periods
        assert period.iteration_count == 2
        assert period.energy_j == pytest.approx(4 * 80.0)


async def test_a_second_coordinator_on_the_port_fails_clearly(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    async with running_here(make_settings(tmp_path, listen=address)):
        other = make_settings(tmp_path, listen=address, database=tmp_path / "other.db")
        with pytest.raises(AddressUnavailableError, match=address):
            async with running_here(other):
                raise AssertionError("two coordinators on one port")


async def test_a_failed_first_start_leaves_no_file_behind(tmp_path: Path) -> None:
    port = free_port()
    taken = f"127.0.0.1:{port}"
    with socket.create_server(("127.0.0.1", port)):
        (tmp_path / "bad.pem").write_text("no certificate")
        bad = str(tmp_path / "bad.pem")
        free = f"127.0.0.1:{free_port()}"
        keyless = SignalSettings(kind="carbon", provider="electricity-maps", zone="DE")
        for wrong in (
            {"listen": taken},
            {"http": taken},
            {"listen": free, "http": free},
            {"listen": f"unix:{tmp_path / 'none' / 'socket'}"},
            {"listen": f"unix:{bad}"},
            {"listen": "dns:localhost:0"},
            {"tls_certificate": bad, "tls_key": bad},
            {"operator_token_file": bad},
            {"signals": {"grid": keyless}},
            {"database": tmp_path},
        ):
            folder = tmp_path / "first"
            folder.mkdir()
            own = {"insecure": False, "operator_token_file": folder / "operator.token"}
            settings = make_settings(folder, **(own | wrong))
            with pytest.raises(StartupError):
                async with running_here(settings):
                    raise AssertionError("it started")
            assert list(folder.iterdir()) == []
            folder.rmdir()


@pytest.mark.slow("a real coordinator is killed and started again, with its solver's processes")
async def test_a_killed_process_loses_nothing_and_sigterm_ends_gracefully(tmp_path: Path) -> None:
    flags = ("--baseline-iterations=2", "--profile-iterations=2", "--shutdown-grace-s=0.5")
    coordinator = Coordinator(tmp_path, tmp_path / "perseus.db", *flags)

    async def stop(number: signal.Signals) -> int:
        coordinator.signal(number)
        return await asyncio.to_thread(coordinator.wait)

    async with grpc.aio.insecure_channel(await asyncio.to_thread(coordinator.start)) as channel:
        client = Client(channel)
        agent = await joined(client)
        await agent.iterate_until(client, job_pb2.JOB_STATE_PROFILING)
        await agent.iterate(8)
        before = await client.job()
        assert before.profiled_clock_count > 1
        workers = children(coordinator.pid)
        assert workers
        assert await stop(signal.SIGKILL) == -signal.SIGKILL
        await agent.end()

        async def have_ended() -> bool:
            return all(map(is_gone, workers))

        await until(have_ended)

    async with grpc.aio.insecure_channel(await asyncio.to_thread(coordinator.start)) as channel:
        client = Client(channel)
        after = await client.job()
        assert (after.epoch, after.profiled_clock_count) == (before.epoch, before.profiled_clock_count)
        agent.use(client)
        await agent.join()
        assert agent.welcome.acknowledged_sequence == agent.sequence
        highest = max(offer.version for offer in agent.offers)
        await agent.iterate_until(client, job_pb2.JOB_STATE_PLANNED)
        await agent.iterate(3)
        versions = [offer.version for offer in agent.offers]
        assert versions == sorted(versions)
        assert versions[-1] > highest

        assert await stop(signal.SIGTERM) == 0
        events = [entry["event"] for entry in entries(coordinator.log)]
        # The end of its agents' streams is still stored and logged.
        assert [event for event in events if event != "job event"][-2:] == ["stopping", "stopped"]
        assert agent.received[-1].HasField("drain")
        await asyncio.wait_for(agent.reader, TIMEOUT_S)


def children(pid: int) -> list[int]:
    """Return the processes that any thread of a process has started."""
    of_threads = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for each in of_threads for child in each.read_text().split()]
