"""The whole agent on real sockets: a real probe, a real gRPC coordinator stub, an emulated GPU."""

import asyncio
import fcntl
import os
import signal
import termios
import time
from pathlib import Path

import pytest
import structlog

from perseus.agent import Kind, Probe
from perseus.agent.link.packets import Saving
from perseus.agent.probe import agent_connection
from perseus.agent.probe.job_spec import NamedSchedule
from perseus.agent.rank import join_state
from perseus.agent.sidecar import admission, clock_worker
from perseus.agent.sidecar.shell import Agent, run, serving
from perseus.agent.stream import registration
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A100_SXM
from perseus.v1 import agent_service_pb2 as wire
from perseus.v1 import frontier_pb2, rank_pb2
from tests.agent.coordinator_stub import Inbox, until
from tests.agent.sidecar.training import (
    HELD_MHZ,
    ORDER,
    RANK,
    STOCK_MHZ,
    UUID,
    Start,
    Trainer,
    connected_probe,
    hold,
    in_force,
    measured_under,
    settings,
)


async def test_a_rank_from_hello_to_finish_with_a_coordinator_that_restarts(
    tmp_path: Path, gpu: EmulatedGpu, start: Start
) -> None:
    coordinator = await start(Inbox())
    async with serving(settings(tmp_path, coordinator.port)):
        trainer = Trainer(tmp_path / "run" / "agent.sock", gpu)
        await coordinator.until(lambda inbox: len(inbox.all("telemetry")) > 0, "telemetry at stock")
        assert trainer.is_registered
        joined = coordinator.inbox.all("rank_joined")[-1].rank_joined
        assert joined.gpu.uuid == UUID
        assert tuple(joined.gpu.supported_clocks_mhz) == A100_SXM.clocks_mhz
        assert joined.in_force_version == 0

        coordinator.send(hold(version=1, start_iteration=trainer.iteration_count + 3))
        await coordinator.until(in_force(1), "plan 1 in force")
        assert coordinator.inbox.all("plan_answer")[-1].plan_answer.accepted
        await coordinator.until(measured_under(1), "telemetry under plan 1")
        # On a busy host a gap may be long, and the GPU is at stock in gaps.
        await until(lambda: gpu.sm_clock_mhz() == HELD_MHZ, "the held clock")
        under_plan = next(
            request.telemetry
            for request in coordinator.inbox.all("telemetry")
            if 1 in request.telemetry.iterations.plan_version
        )
        assert all(energy_j > 0 for energy_j in under_plan.iterations.energy_j)

        await coordinator.stop()
        await asyncio.sleep(0.2)
        await until(
            lambda: gpu.sm_clock_mhz() == HELD_MHZ, "the plan, which stays in force while the lease runs"
        )
        earlier = coordinator.inbox
        remembered = Inbox(jobs=earlier.jobs, acknowledged_sequence=earlier.acknowledged_sequence)
        coordinator = await start(remembered, coordinator.port)
        await coordinator.until(measured_under(1), "telemetry again")
        joined = coordinator.inbox.all("rank_joined")[-1].rank_joined
        assert (joined.in_force_epoch, joined.in_force_version) == ("e", 1)
        first = coordinator.inbox.all("telemetry")[0].telemetry
        assert first.sequence == earlier.acknowledged_sequence + 1
        assert first.dropped_batch_count == 0

        await coordinator.until(
            lambda inbox: any(r.telemetry.HasField("energy") for r in inbox.all("telemetry")),
            "an energy estimate",
        )
        await trainer.stop()
        await coordinator.until(lambda inbox: len(inbox.all("rank_left")) > 0, "rank left")
        left = coordinator.inbox.all("rank_left")[-1].rank_left
        assert left.reason == rank_pb2.RANK_LEFT_REASON_FINISHED
        assert gpu.sm_clock_mhz() == STOCK_MHZ
    await coordinator.until(lambda inbox: len(inbox.all("goodbye")) == 1, "goodbye")
    assert not (tmp_path / "run" / "agent.sock").exists()


async def test_a_departed_trainer_is_reported_before_its_successor(
    tmp_path: Path, gpu: EmulatedGpu, start: Start
) -> None:
    """Otherwise the coordinator would attribute RankLeft and resent telemetry to the new trainer."""
    coordinator = await start(Inbox())
    async with serving(settings(tmp_path, coordinator.port)):
        first = Trainer(tmp_path / "run" / "agent.sock", gpu)
        await coordinator.until(lambda inbox: len(inbox.all("telemetry")) > 0, "telemetry")
        assert coordinator.inbox.all("rank_joined")[-1].rank_joined.after_sequence == 0
        await coordinator.stop()
        await first.stop()
        socket = tmp_path / "run" / "agent.sock"
        second = await asyncio.to_thread(connected_probe, socket, is_registered=True)
        remembered = Inbox(acknowledged_sequence=coordinator.inbox.acknowledged_sequence)
        coordinator = await start(remembered, coordinator.port)
        await coordinator.until(lambda inbox: len(inbox.all("telemetry")) > 0, "resent telemetry")
        (joined,) = coordinator.inbox.all("rank_joined")
        (left,) = coordinator.inbox.all("rank_left")
        (again, *_) = coordinator.inbox.all("telemetry")
        heard = coordinator.inbox.heard
        assert heard.index(left) < heard.index(joined) < heard.index(again)
        assert again.telemetry.sequence <= joined.rank_joined.after_sequence
        second.close()


async def test_a_stage_plan_sets_a_clock_per_computation(
    tmp_path: Path, gpu: EmulatedGpu, start: Start
) -> None:
    coordinator = await start(Inbox())
    async with serving(settings(tmp_path, coordinator.port)):
        trainer = Trainer(tmp_path / "run" / "agent.sock", gpu)
        await coordinator.until(lambda inbox: len(inbox.all("telemetry")) > 0, "telemetry at stock")
        plan = frontier_pb2.StagePlan(
            computations=[
                # Not the first one: after a long gap on a busy host it begins at stock.
                frontier_pb2.PlannedComputation(kind=ORDER[0].kind, clock_mhz=STOCK_MHZ),
                frontier_pb2.PlannedComputation(kind=ORDER[1].kind, clock_mhz=HELD_MHZ),
            ]
        )
        offer = hold(version=5, start_iteration=trainer.iteration_count + 3)
        offer.plan_offer.stage_plan.CopyFrom(plan)
        coordinator.send(offer)
        await coordinator.until(measured_under(5), "telemetry under plan 5")
        await coordinator.until(
            lambda inbox: (
                {HELD_MHZ, STOCK_MHZ}
                <= {clock for r in inbox.all("telemetry") for clock in r.telemetry.computations.clock_mhz}
            ),
            "computations at both clocks",
        )
        # The agent stops while the plan is in force and the trainer continues.
    assert gpu.sm_clock_mhz() == STOCK_MHZ
    trained = trainer.iteration_count
    await until(lambda: trainer.iteration_count > trained, "training that continues without the agent")
    await trainer.stop()


async def test_without_a_coordinator_training_runs_and_the_job_is_registered_later(
    tmp_path: Path, gpu: EmulatedGpu, start: Start
) -> None:
    coordinator = await start(Inbox())
    await coordinator.stop()
    async with serving(settings(tmp_path, coordinator.port)):
        trainer = Trainer(tmp_path / "run" / "agent.sock", gpu)
        await until(lambda: trainer.iteration_count >= 2, "training")
        assert trainer.is_registered
        coordinator = await start(Inbox(), coordinator.port)
        await coordinator.until(lambda inbox: "job" in inbox.jobs, "the job registered")
        await coordinator.until(lambda inbox: len(inbox.all("telemetry")) > 0, "telemetry")
        trainer.finishes = False
        await trainer.stop()
        await coordinator.until(lambda inbox: len(inbox.all("rank_left")) > 0, "rank left")
        left = coordinator.inbox.all("rank_left")[-1].rank_left
        assert left.reason == rank_pb2.RANK_LEFT_REASON_TRAINER_GONE


async def test_a_refused_registration_reaches_the_probe(
    tmp_path: Path, gpu: EmulatedGpu, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator = await start(Inbox(refusal="job 'job' has 4 stages, found 1"))
    async with serving(settings(tmp_path, coordinator.port)):
        trainer = Trainer(tmp_path / "run" / "agent.sock", gpu)
        await until(lambda: trainer.is_registered is not None, "an answer")
        await trainer.stop()
    assert not trainer.is_registered
    assert "job 'job' has 4 stages, found 1" in caplog.text


async def test_marks_are_read_while_the_coordinator_is_slow_to_register_the_job(
    tmp_path: Path, gpu: EmulatedGpu, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "_DEADLINE_S", 600.0)
    coordinator = await start(Inbox(is_silent=True))
    async with serving(settings(tmp_path, coordinator.port)):
        probe = await asyncio.to_thread(
            Probe.connect, tmp_path / "run" / "agent.sock", job_id="job", pipeline=0, stage=0, gpu_uuid=UUID
        )
        probe.register(pipeline_count=1, stage_count=1, schedule=NamedSchedule("1f1b", 1), waits=False)
        await coordinator.until(lambda inbox: inbox.register_count > 0, "a registration")
        with probe.iteration():
            pass
        sock = probe._connection._socket
        assert sock is not None
        await until(lambda: not any(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4))), "marks that were read")
        probe.close()


async def test_a_bug_in_registering_is_answered(
    tmp_path: Path,
    gpu: EmulatedGpu,
    start: Start,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registration.Registrar, "register", None)
    coordinator = await start(Inbox())
    async with serving(settings(tmp_path, coordinator.port)):
        trainer = Trainer(tmp_path / "run" / "agent.sock", gpu)
        await until(lambda: trainer.is_registered is not None, "an answer")
        await until(lambda: trainer.iteration_count >= 2, "training")
        await trainer.stop()
    assert "job not registered: the agent failed to register the job: see its log" in caplog.text


async def test_a_rank_is_announced_once_its_trainer_has_sent_its_specification(
    tmp_path: Path, gpu: EmulatedGpu, start: Start
) -> None:
    coordinator = await start(Inbox())
    async with serving(settings(tmp_path, coordinator.port)):
        trainer = Trainer(tmp_path / "run" / "agent.sock", gpu, registers=False)
        await until(lambda: trainer.iteration_count > 0, "training")
        await coordinator.until(lambda inbox: len(inbox.all("heartbeat")) > 1, "time to pass")
        assert coordinator.inbox.all("rank_joined") == []
        await trainer.stop()
        trainer = Trainer(tmp_path / "run" / "agent.sock", gpu)
        await coordinator.until(lambda inbox: len(inbox.all("telemetry")) > 0, "telemetry")
        request = coordinator.inbox.jobs["job"]
        joined = coordinator.inbox.all("rank_joined")[-1].rank_joined
        assert joined.spec_fingerprint == request.spec_fingerprint != ""
        assert joined.gpu.power_limit_w == A100_SXM.board_power_w
        await trainer.stop()


async def test_the_coordinator_learns_of_training_without_marks_on_every_stream_until_it_is_marked(
    tmp_path: Path, gpu: EmulatedGpu, start: Start
) -> None:
    def reported(inbox: Inbox) -> list[str]:
        return [request.trainer_unmarked.message for request in inbox.all("trainer_unmarked")]

    inbox = Inbox()
    coordinator = await start(inbox)
    async with serving(settings(tmp_path, coordinator.port)):
        probe = await asyncio.to_thread(connected_probe, tmp_path / "run" / "agent.sock")
        probe.report_unmarked("in eval()")
        await coordinator.until(lambda inbox: reported(inbox) == ["in eval()"], "a report")
        (request,) = inbox.all("trainer_unmarked")
        assert (request.trainer_unmarked.job_id, request.trainer_unmarked.rank) == ("job", RANK)
        for _ in range(50):
            probe.report_unmarked("a client that floods the agent")
        await coordinator.stop()
        coordinator = await start(inbox, coordinator.port)
        await coordinator.until(lambda inbox: reported(inbox) == 2 * ["in eval()"], "the report again")
        with probe.iteration():
            pass
        await coordinator.until(lambda inbox: reported(inbox)[2:] == [""], "its end")
        probe.close()


async def test_every_training_registers_with_a_new_request(
    tmp_path: Path, gpu: EmulatedGpu, start: Start
) -> None:
    coordinator = await start(Inbox())
    requests = []
    async with serving(settings(tmp_path, coordinator.port)):
        for _ in range(2):
            coordinator.inbox.jobs.clear()
            trainer = Trainer(tmp_path / "run" / "agent.sock", gpu)
            await coordinator.until(lambda inbox: "job" in inbox.jobs, "the job registered")
            requests.append(coordinator.inbox.jobs["job"])
            # A coordinator that lost its state receives the same request again.
            coordinator.inbox.jobs.clear()
            refused = wire.RankRefused(job_id="job", rank=RANK, reason="JOB_NOT_FOUND")
            coordinator.send(wire.ConnectResponse(rank_refused=refused))
            await coordinator.until(lambda inbox: "job" in inbox.jobs, "the job registered again")
            assert coordinator.inbox.jobs["job"] == requests[-1]
            await trainer.stop()
    first, second = requests
    assert first.request_id != second.request_id
    assert (first.spec, first.spec_fingerprint) == (second.spec, second.spec_fingerprint)


async def test_a_jobs_labels_are_those_of_its_trainers_grant(
    tmp_path: Path, gpu: EmulatedGpu, start: Start
) -> None:
    folder = tmp_path / "grants"
    folder.mkdir(mode=0o755)
    (folder / "slurm-17").write_text(f"{os.geteuid()}: {UUID} slurm-job=17 slurm-account=physics\n")
    (folder / "slurm-18").write_text("1005: GPU-of-another slurm-job=18\n")
    coordinator = await start(Inbox())
    async with serving(settings(tmp_path, coordinator.port, grants=folder)):
        trainer = Trainer(tmp_path / "run" / "agent.sock", gpu)
        await coordinator.until(lambda inbox: "job" in inbox.jobs, "the job registered")
        found = [(label.key, label.value) for label in coordinator.inbox.jobs["job"].labels]
        await trainer.stop()
    assert found == [("slurm-account", "physics"), ("slurm-job", "17")]


async def test_hellos_that_are_refused(
    tmp_path: Path, gpu: EmulatedGpu, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "_LEAVE_S", 0.1)

    def connect(stage: int, uuid: str) -> Probe:
        return Probe.connect(
            tmp_path / "run" / "agent.sock", job_id="job", pipeline=0, stage=stage, gpu_uuid=uuid
        )

    def connect_when_free(stage: int) -> Probe:
        while not (probe := connect(stage, UUID)).is_connected:
            time.sleep(0.02)
        return probe

    async with serving(settings(tmp_path, port=1)):
        foreign = await asyncio.to_thread(connect, 0, "GPU-7")
        assert "GPU GPU-7: expected one of this node's 1 GPUs (GPU-0)" in caplog.text
        foreign.close()
        served = await asyncio.to_thread(connect, 0, UUID)
        assert served.is_connected
        same_rank = await asyncio.to_thread(connect, 0, UUID)
        assert not same_rank.is_connected
        assert "another trainer is connected as this rank" in caplog.text
        same_gpu = await asyncio.to_thread(connect, 1, UUID)
        assert not same_gpu.is_connected
        assert "another rank runs on it" in caplog.text
        served.close()
        again = await asyncio.to_thread(connect_when_free, 1)
        again.close()


async def test_an_observing_agent_refuses_clocks_and_measures(
    tmp_path: Path, gpu: EmulatedGpu, start: Start
) -> None:
    gpu.set_clock_mhz(A100_SXM.clocks_mhz[5])
    coordinator = await start(Inbox())
    async with serving(settings(tmp_path, coordinator.port, observe=True)):
        trainer = Trainer(tmp_path / "run" / "agent.sock", gpu)
        await coordinator.until(lambda inbox: len(inbox.all("telemetry")) > 0, "telemetry")
        coordinator.send(hold(version=1, start_iteration=trainer.iteration_count + 3))
        await coordinator.until(lambda inbox: len(inbox.all("plan_answer")) > 0, "an answer")
        answer = coordinator.inbox.all("plan_answer")[-1].plan_answer
        assert answer.refusal_reason == rank_pb2.PLAN_REFUSAL_REASON_NOT_PERMITTED
        await trainer.stop()
    assert gpu.sm_clock_mhz() == A100_SXM.clocks_mhz[5], "not even reset"


async def test_sigterm_ends_the_agent_with_its_gpus_at_stock(
    tmp_path: Path, gpu: EmulatedGpu, start: Start
) -> None:
    coordinator = await start(Inbox())
    running = asyncio.create_task(run(settings(tmp_path, coordinator.port)))
    await until((tmp_path / "run" / "agent.sock").exists, "the socket")
    trainer = Trainer(tmp_path / "run" / "agent.sock", gpu)
    await coordinator.until(lambda inbox: len(inbox.all("telemetry")) > 0, "telemetry")
    coordinator.send(hold(version=1, start_iteration=trainer.iteration_count + 3))
    await until(lambda: gpu.sm_clock_mhz() == HELD_MHZ, "the held clock")
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, 10)
    assert gpu.sm_clock_mhz() == STOCK_MHZ
    assert coordinator.inbox.heard[-1].WhichOneof("message") == "goodbye"
    await trainer.stop()


async def test_what_ends_the_agent_is_logged_before_its_end(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(agent: Agent) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Agent, "_tick", fail)
    coordinator = await start(Inbox())
    with structlog.testing.capture_logs() as entries, pytest.raises(ExceptionGroup):
        await run(settings(tmp_path, coordinator.port))
    events = [entry["event"] for entry in entries]
    assert [event for event in events if event in ("ends with an error", "stopped")] == [
        "ends with an error",
        "stopped",
    ]


async def test_a_loop_that_hangs_leaves_the_gpu_at_stock_until_it_goes_on(
    tmp_path: Path, gpu: EmulatedGpu, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock_worker, "LEASE_S", 0.3)
    coordinator = await start(Inbox())
    async with serving(settings(tmp_path, coordinator.port)):
        trainer = Trainer(tmp_path / "run" / "agent.sock", gpu)
        await coordinator.until(lambda inbox: len(inbox.all("telemetry")) > 0, "telemetry")
        coordinator.send(hold(version=1, start_iteration=trainer.iteration_count + 3))
        await until(lambda: gpu.sm_clock_mhz() == HELD_MHZ, "the held clock")
        deadline_s = time.monotonic() + 30
        while gpu.sm_clock_mhz() != STOCK_MHZ:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)  # noqa: ASYNC251 - it hangs
        await until(lambda: gpu.sm_clock_mhz() == HELD_MHZ, "the held clock again")
        await trainer.stop()


async def test_a_trainer_that_leaves_and_is_back_at_once_is_served(
    tmp_path: Path, gpu: EmulatedGpu, start: Start
) -> None:
    coordinator = await start(Inbox())

    def leave_and_return(marks: int) -> list[bool]:
        found = []
        for _ in range(5):
            probe = Probe.connect(
                tmp_path / "run" / "agent.sock", job_id="job", pipeline=0, stage=0, gpu_uuid=UUID
            )
            found.append(probe.is_connected)
            for _ in range(marks):
                with probe.iteration(), probe.computation(Kind.FORWARD, 0):
                    pass
            probe.finish()
            probe.close()
        return found

    async with serving(settings(tmp_path, coordinator.port)):
        assert await asyncio.to_thread(leave_and_return, 0) == [True] * 5
        assert await asyncio.to_thread(leave_and_return, 50) == [True] * 5, (
            "the agent still has marks to read"
        )


async def test_a_lasting_refusal_of_a_rank_and_its_end_are_logged_once_by_the_trainer(
    tmp_path: Path,
    gpu: EmulatedGpu,
    start: Start,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(join_state, "JOIN_RETRY_S", 0.05)
    caplog.set_level("INFO", "perseus.probe")
    coordinator = await start(Inbox())

    def notices() -> list[str]:
        return [text for text in caplog.messages if "the coordinator" in text]

    async with serving(settings(tmp_path, coordinator.port)):
        trainer = Trainer(tmp_path / "run" / "agent.sock", gpu)
        await coordinator.until(lambda inbox: len(inbox.all("telemetry")) > 0, "telemetry")
        refused = wire.RankRefused(job_id="job", rank=RANK, reason="JOB_FINISHED", message="run 1 has ended")
        for _ in range(5):
            coordinator.send(wire.ConnectResponse(rank_refused=refused))
        await until(lambda: bool(notices()), "a notice in the trainer's log")
        await coordinator.until(
            lambda inbox: len(inbox.all("rank_joined")) > 1, "announced again and accepted"
        )
        await until(lambda: len(notices()) == 2, "another notice")
        await trainer.stop()
    assert notices() == [
        "job[pipeline 0, stage 0, tensor 0]: the coordinator does not accept the rank: run 1 has ended: "
        "training continues at stock clocks",
        "job[pipeline 0, stage 0, tensor 0]: the coordinator now accepts the rank",
    ]


async def test_a_job_s_saving_reaches_its_first_rank_s_trainer(
    tmp_path: Path, gpu: EmulatedGpu, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_connection, "_NOTICE_PERIOD_NS", 0)
    coordinator = await start(Inbox())

    async with serving(settings(tmp_path, coordinator.port)):
        probe = await asyncio.to_thread(connected_probe, tmp_path / "run" / "agent.sock", is_registered=True)

        async def until_known(saving: Saving | None) -> None:
            def is_known() -> bool:
                probe.begin_iteration()
                return probe.saving == saving

            await until(is_known, f"{saving} in the trainer")

        await coordinator.until(lambda inbox: bool(inbox.all("rank_joined")), "the rank")
        other = wire.JobSaving(job_id="other", energy_percent=50.0)
        job = wire.JobSaving(job_id="job", energy_percent=13.24, slowdown_percent=0.06)
        coordinator.inbox.savings = [other, job]
        await until_known(Saving(13.2, 0.1))
        coordinator.inbox.savings = [other]
        await until_known(None)
        await asyncio.to_thread(probe.close)
