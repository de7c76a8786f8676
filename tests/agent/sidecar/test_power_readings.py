"""Power readings at a coordinator's request, of GPUs with and without a rank."""

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from perseus.agent.energy.mean_power import MeanPower
from perseus.agent.gpu import Gpu, GpuError
from perseus.agent.sidecar import optional
from perseus.agent.sidecar.backends import EmulatedBackend
from perseus.agent.sidecar.power_readings import OtherGpus
from perseus.agent.sidecar.shell import serving
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A100_SXM
from perseus.v1 import agent_service_pb2 as wire
from tests.agent.coordinator_stub import Inbox
from tests.agent.sidecar.training import UUID, Start, Trainer, settings

INTERVAL_S = 0.1


async def test_the_power_of_a_ranks_gpu_and_of_an_idle_one_is_sent(
    tmp_path: Path, gpu: EmulatedGpu, start: Start
) -> None:
    idle = EmulatedGpu.create(tmp_path / "gpus" / "1", A100_SXM, "GPU-idle")
    idle_w = idle.power_w()
    coordinator = await start(Inbox(power_interval_s=INTERVAL_S))
    async with serving(settings(tmp_path, coordinator.port)):
        trainer = Trainer(tmp_path / "run" / "agent.sock", gpu)

        def reported(inbox: Inbox) -> dict[str, list[float]]:
            found: dict[str, list[float]] = {}
            for each in inbox.all("power_reading"):
                for uuid, power_w in zip(
                    each.power_reading.gpu_uuid, each.power_reading.power_w, strict=True
                ):
                    found.setdefault(uuid, []).append(power_w)
            return found

        await coordinator.until(lambda inbox: len(inbox.all("telemetry")) > 3, "training")
        begun_j = gpu.total_energy_j()
        begun_s = asyncio.get_running_loop().time()
        known = len(reported(coordinator.inbox).get(UUID, []))
        await coordinator.until(lambda inbox: len(reported(inbox).get(UUID, [])) >= known + 8, "readings")
        true_w = (gpu.total_energy_j() - begun_j) / (asyncio.get_running_loop().time() - begun_s)
        await trainer.stop()
        readings = reported(coordinator.inbox)
        mean_w = sum(readings[UUID][known + 1 :]) / len(readings[UUID][known + 1 :])
        assert mean_w == pytest.approx(true_w, rel=0.1)
        assert sum(readings["GPU-idle"]) / len(readings["GPU-idle"]) == pytest.approx(idle_w, rel=0.1)
        assert true_w > 1.5 * idle_w
        first = coordinator.inbox.all("power_reading")[1].power_reading
        assert 0.5 * INTERVAL_S < first.duration_s < 20 * INTERVAL_S
    idle.close()


async def test_no_readings_are_sent_until_the_coordinator_requests_them(
    tmp_path: Path, gpu: EmulatedGpu, start: Start
) -> None:
    coordinator = await start(Inbox(lease_s=0.9))
    async with serving(settings(tmp_path, coordinator.port)):
        await coordinator.until(lambda inbox: len(inbox.all("heartbeat")) > 4, "more than a second to pass")
        assert not coordinator.inbox.all("power_reading")
        coordinator.send(wire.ConnectResponse(heartbeat=wire.Heartbeat(power_interval_s=INTERVAL_S)))
        # Further heartbeats without an interval change nothing.
        await coordinator.until(lambda inbox: len(inbox.all("power_reading")) > 4, "readings")


async def test_an_unforeseen_error_in_power_readings_only_restarts_them(
    tmp_path: Path, gpu: EmulatedGpu, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optional, "_FIRST_DELAY_S", 0.05)
    errors = iter([ValueError("nobody has foreseen this")])
    take = MeanPower.take

    def failing(self: MeanPower, counters: dict[str, tuple[float, float]]) -> dict[str, float]:
        for error in errors:
            raise error
        return take(self, counters)

    monkeypatch.setattr(MeanPower, "take", failing)
    coordinator = await start(Inbox(power_interval_s=INTERVAL_S))
    with capture_logs() as logs:
        async with serving(settings(tmp_path, coordinator.port)) as failure:
            await coordinator.until(lambda inbox: len(inbox.all("power_reading")) > 1, "readings")
            assert not failure.done()
    (failed,) = [line for line in logs if line["event"] == "optional part failed"]
    assert failed["part"] == "power readings"
    assert "nobody has foreseen this" in repr(failed["exc_info"])


class Failing(EmulatedBackend):
    """A backend with one failing GPU."""

    def open(self, uuid: str) -> Gpu:
        if uuid == "GPU-lost":
            raise GpuError("made for the test")
        return super().open(uuid)


def test_a_failing_gpu_is_left_out_and_a_served_one_is_closed(tmp_path: Path, gpu: EmulatedGpu) -> None:
    EmulatedGpu.create(tmp_path / "gpus" / "1", A100_SXM, "GPU-lost").close()
    others = OtherGpus(Failing(tmp_path / "gpus"))
    first = others.read(())
    assert first.keys() == {UUID}
    assert others.read({UUID}) == {}
    again = others.read(())
    assert again[UUID][0] > first[UUID][0]
    assert again[UUID][1] >= first[UUID][1]
    others.close()
