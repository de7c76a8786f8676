"""Power readings in spite of failures. What they report, and to whom, is in the tests of slots."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from perseus.agent.energy.mean_power import MeanPower
from perseus.agent.gpu import Gpu, GpuError
from perseus.agent.sidecar import optional
from perseus.agent.sidecar.backends import EmulatedBackend
from perseus.agent.sidecar.power_readings import OtherGpus
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A100_SXM
from tests.agent.sidecar.training import UUID, Node


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
    node.inbox.power_interval_s = 0.1
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
