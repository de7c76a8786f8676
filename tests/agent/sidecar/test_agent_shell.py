"""The whole agent on real sockets: a real probe, a real gRPC coordinator stub, an emulated GPU."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog
from typer.testing import CliRunner, Result

from perseus.agent import Kind, Probe
from perseus.agent.clocks import foreign, keeper
from perseus.agent.probe.job_spec import NamedSchedule
from perseus.agent.rank import session
from perseus.agent.sidecar.health_client import FOREIGN_CLOCK, ask_health
from perseus.agent.sidecar.shell import Agent, run, serving
from perseus.agent.stream import registration
from perseus.cli.main import app
from perseus.doctor.checks import Verdict
from perseus.doctor.node import node_checks
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A100_SXM
from perseus.v1 import agent_service_pb2 as wire
from perseus.v1 import rank_pb2
from tests.agent.coordinator_stub import Inbox, until
from tests.agent.sidecar.training import (
    HELD_MHZ,
    RANK,
    STOCK_MHZ,
    UUID,
    Node,
    Trainer,
    connected_probe,
    settings,
)


async def test_a_rank_from_hello_to_finish_with_a_coordinator_that_restarts(node: Node) -> None:
    async with node.serving():
        trainer = await node.train()
        assert trainer.is_registered
        joined = node.latest("rank_joined")
        assert (joined.gpu.uuid, joined.gpu.power_limit_w) == (UUID, A100_SXM.board_power_w)
        assert tuple(joined.gpu.supported_clocks_mhz) == A100_SXM.clocks_mhz
        own = node.inbox.jobs["job"].spec_fingerprint
        assert own
        assert [each.rank_joined.spec_fingerprint for each in node.inbox.all("rank_joined")] == [own]
        assert joined.in_force_version == 0

        await node.hold(trainer)
        assert node.latest("plan_answer").accepted
        await node.coordinator.until(is_measured, "telemetry under the plan")
        under_plan = next(
            each.telemetry.iterations for each in node.inbox.all("telemetry") if is_planned(each)
        )
        assert min(under_plan.energy_j) > 0

        earlier = node.inbox
        await node.restart_coordinator()
        await node.is_at(HELD_MHZ)  # the plan stays in force while the lease runs
        await node.coordinator.until(is_measured, "telemetry again")
        joined = node.latest("rank_joined")
        assert (joined.in_force_epoch, joined.in_force_version) == ("e", 1)
        first = node.inbox.all("telemetry")[0].telemetry
        assert first.sequence == earlier.acknowledged_sequence + 1
        assert first.dropped_batch_count == 0

        await node.coordinator.until(
            lambda inbox: any(r.telemetry.HasField("energy") for r in inbox.all("telemetry")),
            "an energy estimate",
        )
        await trainer.stop()
        assert (await node.hears("rank_left")).reason == rank_pb2.RANK_LEFT_REASON_FINISHED
        assert node.gpu.sm_clock_mhz() == STOCK_MHZ
    await node.hears("goodbye")
    assert not node.socket.exists()


async def test_a_long_gap_between_iterations_passes_at_stock(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "_MIN_SILENCE_S", 600.0)  # it does not count as hung
    async with node.serving():
        trainer = await node.train()
        await node.hold(trainer)
        trainer.goes_on.clear()
        await node.is_at(STOCK_MHZ)
        trainer.goes_on.set()
        await node.is_at(HELD_MHZ)
        await trainer.stop()


def is_planned(request: wire.ConnectRequest) -> bool:
    return 1 in request.telemetry.iterations.plan_version


def is_measured(inbox: Inbox) -> bool:
    return any(map(is_planned, inbox.all("telemetry")))


async def test_a_departed_trainer_is_reported_before_its_successor(node: Node) -> None:
    """Otherwise the coordinator would attribute RankLeft and resent telemetry to the new trainer."""
    async with node.serving():
        first = await node.train()
        assert node.latest("rank_joined").after_sequence == 0
        await node.coordinator.stop()
        await first.stop()
        second = await asyncio.to_thread(connected_probe, node.socket, is_registered=True)
        await node.restart_coordinator(Inbox(acknowledged_sequence=node.inbox.acknowledged_sequence))
        await node.hears("telemetry")
        (joined,) = node.inbox.all("rank_joined")
        (left,) = node.inbox.all("rank_left")
        (again, *_) = node.inbox.all("telemetry")
        heard = node.inbox.heard
        assert heard.index(left) < heard.index(joined) < heard.index(again)
        assert again.telemetry.sequence <= joined.rank_joined.after_sequence
        second.close()


async def test_without_a_coordinator_training_runs_and_the_job_is_registered_later(node: Node) -> None:
    await node.coordinator.stop()
    async with node.serving():
        trainer = Trainer(node.socket, node.gpu)
        await until(lambda: trainer.iteration_count >= 2, "training")
        assert trainer.is_registered
        await node.restart_coordinator(Inbox())
        await node.hears("telemetry")
        assert "job" in node.inbox.jobs
        trainer.finishes = False
        await trainer.stop()
        assert (await node.hears("rank_left")).reason == rank_pb2.RANK_LEFT_REASON_TRAINER_GONE


@pytest.mark.parametrize(
    ("is_broken", "expected"),
    [
        pytest.param(False, "job 'job' has 4 stages, found 1", id="by the coordinator"),
        pytest.param(
            True, "job not registered: the agent failed to register the job: see its log", id="by a bug"
        ),
    ],
)
async def test_a_refused_registration_reaches_the_probe_and_training_goes_on(
    node: Node,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    is_broken: bool,
    expected: str,
) -> None:
    node.inbox.refusal = "job 'job' has 4 stages, found 1"
    if is_broken:
        monkeypatch.setattr(registration.Registrar, "register", None)
    async with node.serving():
        trainer = Trainer(node.socket, node.gpu)
        await until(lambda: trainer.iteration_count >= 2, "training")
        await trainer.stop()
    assert not trainer.is_registered
    assert expected in caplog.text


async def test_marks_are_read_while_the_coordinator_is_slow_to_register_the_job(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "_DEADLINE_S", 600.0)
    node.inbox.is_silent = True
    async with node.serving():
        probe = await node.connect()
        probe.report_unmarked("in eval()")
        probe.register(pipeline_count=1, stage_count=1, schedule=NamedSchedule("1f1b", 1), waits=False)
        await node.coordinator.until(lambda inbox: inbox.register_count > 0, "a registration")
        with probe.iteration():
            pass
        await node.hears("trainer_unmarked", 2)
        probe.close()


async def test_the_coordinator_learns_of_training_without_marks_on_every_stream_until_it_is_marked(
    node: Node,
) -> None:
    def reported(inbox: Inbox) -> list[str]:
        return [request.trainer_unmarked.message for request in inbox.all("trainer_unmarked")]

    async with node.serving():
        probe = await node.connect()
        probe.report_unmarked("in eval()")
        await node.coordinator.until(lambda inbox: reported(inbox) == ["in eval()"], "a report")
        unmarked = node.latest("trainer_unmarked")
        assert (unmarked.job_id, unmarked.rank) == ("job", RANK)
        for _ in range(50):
            probe.report_unmarked("a client that floods the agent")
        await node.restart_coordinator(node.inbox)
        await node.coordinator.until(lambda inbox: reported(inbox) == 2 * ["in eval()"], "the report again")
        with probe.iteration():
            pass
        await node.coordinator.until(lambda inbox: reported(inbox)[2:] == [""], "its end")
        probe.close()


async def test_a_jobs_labels_are_those_of_its_trainers_grant(node: Node) -> None:
    folder = node.folder / "grants"
    folder.mkdir(mode=0o755)
    (folder / "slurm-17").write_text(f"{os.geteuid()}: {UUID} slurm-job=17 slurm-account=physics\n")
    (folder / "slurm-18").write_text("1005: GPU-of-another slurm-job=18\n")
    async with node.serving(grants=folder):
        trainer = Trainer(node.socket, node.gpu)
        await node.coordinator.until(lambda inbox: "job" in inbox.jobs, "the job registered")
        labels = [(label.key, label.value) for label in node.inbox.jobs["job"].labels]
        await trainer.stop()
    assert labels == [("slurm-account", "physics"), ("slurm-job", "17")]


async def test_a_trainer_hears_why_it_has_no_gpu(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    async with node.serving():
        (await node.connect(gpu_uuid="GPU-7")).close()
        assert "GPU GPU-7: expected one of this node's 1 GPUs (GPU-0)" in caplog.text
        served = await node.connect()
        assert not (await node.connect(stage=1)).is_connected
        assert "another rank runs on it" in caplog.text
        served.close()


async def test_an_observing_agent_refuses_clocks_and_measures(node: Node) -> None:
    node.gpu.set_clock_mhz(A100_SXM.clocks_mhz[5])
    async with node.serving(observe=True):
        trainer = await node.train()
        node.offer_hold(trainer)
        answer = await node.hears("plan_answer")
        assert answer.refusal_reason == rank_pb2.PLAN_REFUSAL_REASON_NOT_PERMITTED
        await trainer.stop()
    assert node.gpu.sm_clock_mhz() == A100_SXM.clocks_mhz[5], "not even reset"


async def test_what_ends_the_agent_is_logged_before_its_end(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(agent: Agent) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Agent, "_tick", fail)
    with structlog.testing.capture_logs() as entries, pytest.raises(ExceptionGroup):
        await run(node.settings())
    ends = ("ends with an error", "stopped")
    assert tuple(entry["event"] for entry in entries if entry["event"] in ends) == ends


async def test_a_trainer_that_leaves_and_is_back_at_once_is_served(node: Node) -> None:
    def leave_and_return(marks: int) -> list[bool]:
        served = []
        for turn in range(5):  # as the same rank, and as another on the GPU
            probe = Probe.connect(node.socket, job_id="job", pipeline=0, stage=turn // 2, gpu_uuid=UUID)
            served.append(probe.is_connected)
            for _ in range(marks):
                with probe.iteration(), probe.computation(Kind.FORWARD, 0):
                    pass
            probe.finish()
            probe.close()
        return served

    async with node.serving():
        for marks in (0, 50):  # the agent still has marks to read
            assert await asyncio.to_thread(leave_and_return, marks) == [True] * 5


async def test_an_agents_health_depends_on_its_gpus(tmp_path: Path) -> None:
    (tmp_path / "gpus").mkdir()
    (tmp_path / "gpus" / "README").write_text("not a GPU")
    own = settings(tmp_path, 1)

    async def asked(*flags: str) -> Result:
        """What the command says, without the log of an agent in its process."""
        with structlog.testing.capture_logs():
            arguments = ["health", "--agent", str(own.socket), "--timeout-s", "60", *flags]
            return await asyncio.to_thread(CliRunner().invoke, app, arguments)

    async with serving(own):
        answer = await asyncio.to_thread(ask_health, own.socket, 60.0)
        assert (answer.ok, answer.reason) == (False, "NO_GPU")
        result = await asked("--format", "json")
        assert result.exit_code == 1
        assert "error: expected an agent that serves, found GPUs: 0; ranks: 0; " in result.stderr
        row = json.loads(result.stdout)
        assert (row["who"], row["is_serving"]) == ("agent", False)
        assert row["status"].startswith("GPUs: 0; ranks: 0; ")
        result = await asked("--alive")
        assert (result.exit_code, result.stdout.startswith("GPUs: 0; ranks: 0; ")) == (0, True)
    EmulatedGpu.create(tmp_path / "gpus" / "0", A100_SXM, UUID).close()
    async with serving(own):
        answer = await asyncio.to_thread(ask_health, own.socket, 60.0)
        assert answer.ok
        assert answer.message == "GPUs: 1; ranks: 0; not connected to 127.0.0.1:1"


async def test_another_clients_reset_is_undone_and_its_lock_is_named(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As nvidia-smi sets and resets clocks. They are judged, and undone again and again, in moments here."""
    monkeypatch.setattr(foreign, "WINDOW_S", 0.3)
    monkeypatch.setattr(foreign, "_INTERVAL_S", 0.001)
    monkeypatch.setattr(session, "FIRST_REPEAT_S", 0.1)

    def reported() -> list[tuple[int, int]]:
        clocks = [each.telemetry.foreign_clock for each in node.inbox.all("telemetry")]
        return [(each.clock_mhz, each.wanted_clock_mhz) for each in clocks]

    @asynccontextmanager
    async def repeated(change: Callable[..., None], *arguments: int) -> AsyncIterator[None]:
        """Change the clock against the plan, whose own sets may undo it at any time."""

        async def repeat() -> None:
            while True:
                await asyncio.to_thread(change, *arguments)

        repeating = asyncio.create_task(repeat())
        yield
        repeating.cancel()
        await asyncio.wait([repeating])

    with contextlib.closing(EmulatedGpu(node.folder / "gpus" / "0")) as client:
        async with node.serving():
            trainer = await node.train()
            await node.hold(trainer)
            async with repeated(client.reset_clock):
                await until(lambda: (STOCK_MHZ, HELD_MHZ) in reported(), "the resets are noticed")
            await until(
                lambda: client.sm_clock_mhz() == HELD_MHZ and reported()[-1] == (0, 0), "they are undone"
            )
            async with repeated(client.set_clock_mhz, 705):
                await until(lambda: reported()[-1] == (705, HELD_MHZ), "the locks are noticed")
                answer = await asyncio.to_thread(ask_health, node.socket, 60.0)
                checks = await asyncio.to_thread(lambda: list(node_checks(node.settings())))
            await trainer.stop()
    assert (answer.ok, answer.reason) == (True, FOREIGN_CLOCK)
    (check,) = [check for check in checks if check.subject == "agent"]
    assert f"{UUID} of job" in check.found
    assert f"705 MHz, wanted {HELD_MHZ} MHz: another client of the driver holds it" in check.found
    assert (check.verdict, "nvidia-smi -rgc" in check.advice) == (Verdict.WARNING, True)
