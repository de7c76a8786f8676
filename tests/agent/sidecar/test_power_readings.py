"""Power readings at a coordinator's request, of GPUs with and without a rank."""

from pathlib import Path
from statistics import fmean

import pytest
from structlog.testing import capture_logs

from perseus.agent.energy.mean_power import MeanPower
from perseus.agent.gpu import Gpu, GpuError
from perseus.agent.sidecar import optional
from perseus.agent.sidecar.backends import EmulatedBackend
from perseus.agent.sidecar.power_readings import OtherGpus
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A100_SXM
from perseus.v1 import agent_service_pb2 as wire
from tests.agent.coordinator_stub import Inbox
from tests.agent.sidecar.training import UUID, Node

INTERVAL_S = 0.1


async def test_the_power_of_a_ranks_gpu_and_of_an_idle_one_is_sent_once_it_is_asked_for(node: Node) -> None:
    """How a mean power comes from the counter is in the tests of `MeanPower`."""
    EmulatedGpu.create(node.folder / "gpus" / "1", A100_SXM, "GPU-idle").close()
    node.inbox.lease_s = 0.9

    def reported(inbox: Inbox) -> dict[str, list[float]]:
        powers_w: dict[str, list[float]] = {UUID: [], "GPU-idle": []}
        for each in inbox.all("power_reading"):
            for uuid, power_w in zip(each.power_reading.gpu_uuid, each.power_reading.power_w, strict=True):
                powers_w[uuid].append(power_w)
        return powers_w

    async with node.serving():
        trainer = await node.train()
        await node.hears("heartbeat", 5)
        assert not node.inbox.all("power_reading")
        asked = wire.Heartbeat(power_interval_s=INTERVAL_S)
        node.coordinator.send(wire.ConnectResponse(heartbeat=asked))
        # Further heartbeats without an interval change nothing.
        await node.coordinator.until(lambda inbox: min(map(len, reported(inbox).values())) >= 8, "readings")
        await trainer.stop()
    powers_w = reported(node.inbox)
    assert 0 < fmean(powers_w["GPU-idle"]) < fmean(powers_w[UUID]) < A100_SXM.board_power_w
    assert all(each.power_reading.duration_s > 0 for each in node.inbox.all("power_reading"))


async def test_an_unforeseen_error_in_power_readings_only_restarts_them(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optional, "_FIRST_DELAY_S", 0.05)
    errors = iter([ValueError("nobody has foreseen this")])
    take = MeanPower.take

    def failing(self: MeanPower, counters: dict[str, tuple[float, float]]) -> dict[str, float]:
        for error in errors:
            raise error
        return take(self, counters)

    monkeypatch.setattr(MeanPower, "take", failing)
    node.inbox.power_interval_s = INTERVAL_S
    with capture_logs() as logs:
        async with node.serving() as failure:
            await node.hears("power_reading", 2)
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
