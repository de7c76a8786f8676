"""An emulated GPU behind a probe, in real time, also in a script that runs as one rank."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from perseus.agent.link.computation import Computation, Kind
from perseus.agent.probe.attachment import Attachment
from perseus.agent.probe.exchange import LocalExchange
from perseus.agent.probe.placement import Placement
from perseus.demo.emulated_probe import Works, emulated_connect
from perseus.demo.example_rank import RankOfScript
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
    place = {"job_id": "job", "pipeline": 0, "stage": 0, "gpu_uuid": "none"}
    probe = connect(socket_path=tmp_path / "nothing.sock", **place)
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

    cut = connect(socket_path=tmp_path / "nothing.sock", **place)
    begin_s = time.monotonic()
    cut.begin_computation(Kind.FORWARD, 0, 0)
    cut.begin_wait()
    assert gpu.power_w() == pytest.approx(70.38), "waiting"
    cut.end_wait()
    cut.end_computation(Kind.FORWARD, 0, 0)
    assert time.monotonic() - begin_s >= 0.2, "the work of each part"
    cut.close()


SCRIPT = """
import json, os, sys, time
from perseus.agent.torch import attach

if __name__ == "__main__":
    marks = attach.keywords["connect"](job_id="job", pipeline=0, stage=1, tensor=0, gpu_uuid="no GPU of ours")
    marks.begin_iteration()
    begin_s = time.monotonic()
    marks.begin_computation(1, 0, 0)
    marks.end_computation(1, 0, 0)
    took_s = time.monotonic() - begin_s
    marks.close()
    print(json.dumps([took_s, sys.argv, __file__, os.environ["CUDA_VISIBLE_DEVICES"]]))
"""


@pytest.fixture
def task(tmp_path: Path) -> RankOfScript:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    return RankOfScript(
        script=str(script),
        hook="perseus.agent.torch.attach",
        agent_sockets=[str(tmp_path / "agent.sock")],
        gpu_files=[[str(tmp_path / f"gpu-{stage}") for stage in range(2)]],
        works=[[(0.001, 0.0, 0.9), (0.001, 0.0, 0.9)], [(0.1, 0.0, 0.9), (0.001, 0.0, 0.9)]],
    )


def test_a_script_s_computations_are_those_of_its_stage_s_emulated_gpu(task: RankOfScript) -> None:
    for path in task.gpu_files[0]:
        EmulatedGpu.create(Path(path), A40.with_clocks(4), "GPU-emulated").close()
    command = [sys.executable, "-m", "perseus.demo.example_rank", task.to_json()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    took_s, *others = json.loads(done.stdout)
    assert took_s >= 0.1, "the forward of stage 1"
    assert others == [[task.script], task.script, ""], "as torchrun starts it, with no GPU of this machine"
    assert f"no agent at {task.agent_sockets[0]}" in done.stderr


@pytest.mark.parametrize(("pipeline", "stage"), [(1, 0), (0, 2)])
def test_a_rank_without_an_emulated_gpu_is_refused(task: RankOfScript, pipeline: int, stage: int) -> None:
    expected = f"up to 1 pipelines of up to 2 stages, found pipeline {pipeline}, stage {stage}"
    with pytest.raises(ValueError, match=expected):
        task.connect(pipeline=pipeline, stage=stage, job_id="job", tensor=0, gpu_uuid="none")
