"""An emulated GPU behind a probe, in real time: longer than a busy machine delays a reading."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from perseus.agent.link.computation import Computation, Kind
from perseus.agent.probe.attachment import Attachment
from perseus.agent.probe.exchange import LocalExchange
from perseus.agent.probe.placement import Placement
from perseus.demo.emulated_probe import Works, emulated_connect
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A40, Work

WORKS: Works = {
    (Kind.FORWARD, 0): Work(compute_s=0.1, memory_s=0.0),
    (Kind.BACKWARD, 0): Work(compute_s=0.15, memory_s=0.0),
}


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[EmulatedGpu]:
    gpu = EmulatedGpu.create(tmp_path / "gpu", A40.with_clocks(4), "GPU-emulated")
    yield gpu
    gpu.close()


def test_computations_take_the_gpu_s_time_and_energy_not_their_own(
    gpu: EmulatedGpu, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    connect = emulated_connect(tmp_path / "gpu", WORKS)
    probe = connect(socket_path=tmp_path / "nothing.sock", job_id="job", pipeline=0, stage=0, gpu_uuid="none")
    assert "no agent" in caplog.text, "at stock, then"
    attachment = Attachment(Placement(0, 1, 0, 1), probe, LocalExchange())
    begin_s = time.monotonic()
    attachment.begin_iteration()
    for computation in (Computation(Kind.FORWARD, 0), Computation(Kind.BACKWARD, 0)):
        attachment.begin(computation.kind, computation.microbatch)
        assert gpu.power_w() == pytest.approx(300), "busy"
        time.sleep(0.05)
        attachment.end(computation.kind, computation.microbatch)
        assert gpu.power_w() == pytest.approx(70.38), "waiting"
    attachment.end_iteration()
    took_s = time.monotonic() - begin_s
    attachment.detach()
    assert took_s >= 0.25

    cut = connect(socket_path=tmp_path / "nothing.sock", job_id="job", pipeline=0, stage=0, gpu_uuid="none")
    begin_s = time.monotonic()
    cut.begin_computation(Kind.FORWARD, 0, 0)
    cut.begin_wait()
    assert gpu.power_w() == pytest.approx(70.38), "waiting"
    cut.end_wait()
    cut.end_computation(Kind.FORWARD, 0, 0)
    assert time.monotonic() - begin_s >= 0.2, "the work of each part"
    cut.close()

    gpu.set_clock_mhz(gpu.supported_clocks_mhz[-1])
    slow = connect(socket_path=tmp_path / "nothing.sock", job_id="job", pipeline=0, stage=0, gpu_uuid="none")
    begin_s = time.monotonic()
    slow.begin_computation(Kind.FORWARD, 0, 0)
    slow.end_computation(Kind.FORWARD, 0, 0)
    assert time.monotonic() - begin_s >= 0.2, "at half the clock"
    slow.close()
