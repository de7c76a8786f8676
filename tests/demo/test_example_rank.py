"""A script run as one rank: its `attach` uses an emulated GPU; the rest is as under torchrun."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from perseus.demo.example_rank import RankOfScript
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A40

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
    assert others == [[task.script], task.script, ""], (
        "as torchrun starts it, without a GPU of this machine's"
    )
    assert f"no agent at {task.agent_sockets[0]}" in done.stderr


@pytest.mark.parametrize(("pipeline", "stage"), [(1, 0), (0, 2)])
def test_a_rank_without_an_emulated_gpu_is_refused(task: RankOfScript, pipeline: int, stage: int) -> None:
    expected = f"up to 1 pipelines of up to 2 stages, found pipeline {pipeline}, stage {stage}"
    with pytest.raises(ValueError, match=expected):
        task.connect(pipeline=pipeline, stage=stage, job_id="job", tensor=0, gpu_uuid="none")
