"""Any failure in a hook, on one rank or all: training continues without it, and the log has rank and reason.

No rank ever waits for one that has given up, during attaching or later: the trainings end.
"""

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("torch") is None:
    pytest.skip("torch is not installed; `make test-frameworks` has it", allow_module_level=True)

from tests.frameworks.cases import Case, losses_in

pytestmark = [pytest.mark.slow("trains for real, with the framework"), pytest.mark.timeout(300)]

# Places where a hook may fail: attaching, following the training, and the stages' common store.
OF_EACH = (
    "perseus.agent.{hook}.warn_if_untested",
    "perseus.agent.{hook}.connect_marks",
    "perseus.agent.{hook}.watch_steps",
    "perseus.agent.probe.attachment.Attachment.replace",
    "perseus.agent.probe.attachment.JobOrder.end_iteration",
)
OF_ALL = (
    *OF_EACH,
    "perseus.agent.probe.attachment.JobOrder.begin_iteration",
    "perseus.agent.probe.attachment.JobOrder.begin",
    "perseus.agent.probe.exchange.StoreExchange.post",
    "perseus.agent.probe.exchange.StoreExchange.poll",
    "perseus.agent.probe.client.Probe.register",
    "perseus.agent.probe.client.Probe.begin_iteration",
    "perseus.agent.probe.client.Probe.end_computation",
    "perseus.agent.probe.client.Probe.end_iteration",
)
OF_A_MODEL = [
    *(place for place in OF_ALL if ".StoreExchange." not in place and not place.endswith(".replace")),
    "perseus.agent.probe.attachment.Attachment.note_step",
    "perseus.agent.probe.whole_model.MarkedModel.mark",
    "perseus.agent.probe.whole_model.MarkedModel._is_forward",
    "perseus.agent.probe.whole_model.MarkedModel._await_gradient",
    "perseus.agent.probe.whole_model.MarkedModel._begin_backward",
]
OF_SHARDS = [place for place in OF_A_MODEL if ".Probe." not in place]
OF_TORCHTITAN = (
    "perseus.agent.torchtitan.warn_if_untested",
    "perseus.agent.torch.connect_marks",
    *OF_EACH[3:],
)
OF_CALLBACKS = (
    "perseus.agent.{hook}.warn_if_untested",
    "perseus.agent.torch.connect_marks",
    "perseus.agent.probe.attachment.Attachment.replace",
)
ITERATIONS = 25  # ranks give up waiting for an order after 20
TWO_STAGES = (1.0, 1.0)
EVERYDAY = {
    name: Case("everyday_trainer", f"{name} ddp", (1.0,), 1, 0.0, 0.0, pipeline_count=2)
    for name in ("transformers", "lightning")
}
PIPELINES = Case("torch_trainer", "1F1B", TWO_STAGES, 1, 0.0, 0.0, pipeline_count=2)


@pytest.mark.parametrize(
    ("case", "hook", "places"),
    [
        (PIPELINES, "torch", OF_ALL),
        (Case("replica_trainer", "ddp", (1.0,), 1, 0.0, 0.0, pipeline_count=2), "torch", OF_A_MODEL),
        (Case("replica_trainer", "fsdp2", (1.0,), 1, 0.0, 0.0, pipeline_count=2), "torch", OF_SHARDS),
        (
            Case("torchtitan_trainer", "1F1B", TWO_STAGES, 1, 0.0, 0.0, logs_one_loss=True),
            "torchtitan",
            OF_TORCHTITAN,
        ),
        (Case("megatron_trainer", "1f1b", TWO_STAGES, 1, 0.0, 0.0), "megatron", OF_EACH),
        (Case("deepspeed_trainer", "1f1b", TWO_STAGES, 1, 0.0, 0.0), "deepspeed", OF_EACH),
        (EVERYDAY["transformers"], "transformers", OF_CALLBACKS),
        (EVERYDAY["lightning"], "lightning", OF_CALLBACKS),
    ],
    ids=[
        "pipelining",
        "DistributedDataParallel",
        "fully_shard",
        "torchtitan",
        "Megatron-Core",
        "DeepSpeed",
        "Transformers",
        "Lightning",
    ],
)
def test_training_continues_with_equal_losses_and_the_log_has_rank_and_reason(
    case: Case, hook: str, places: Sequence[str], tmp_path: Path
) -> None:
    alone = case.alone(tmp_path / "alone", ITERATIONS)
    ranks = range(alone.rank_count)
    tasks = [alone]
    for place in places:
        for failing in ([1], list(ranks)):
            folder = tmp_path / f"planted-{len(tasks)}"
            task = case.alone(folder, ITERATIONS)
            tasks.append(replace(task, planted=place.format(hook=hook), planted_ranks=failing))
    subprocess.run([sys.executable, *case.command(*tasks)], check=True, timeout=250)
    expected = losses_in(tmp_path / "alone")
    assert expected
    for task in tasks[1:]:
        folder = Path(task.losses_dir)
        assert losses_in(folder) == expected, task.planted
        logs = [(folder / f"log-{rank}").read_text() for rank in ranks]
        for rank in task.planted_ranks:
            assert "training continues at stock clocks: planted" in logs[rank], task.planted
        # The other rank of the pipeline sees the failure if the orders have not been exchanged by then.
        is_late = task.planted.endswith((".register", ".poll"))
        if case is PIPELINES and task.planted_ranks == [1] and not is_late:
            why = re.search(r"training continues at stock clocks: (rank|stage) 1: (.+)", logs[0])
            assert why is not None, task.planted
            assert why[2] in ("planted", "its order is missing"), task.planted


def test_a_caught_error_of_a_step_on_one_rank_blocks_no_rank(tmp_path: Path) -> None:
    alone = PIPELINES.alone(tmp_path / "alone", ITERATIONS)
    attached = replace(PIPELINES.alone(tmp_path / "attached", ITERATIONS), planted="step", planted_ranks=[1])
    subprocess.run([sys.executable, *PIPELINES.command(alone, attached)], check=True, timeout=250)
    assert losses_in(tmp_path / "attached") == losses_in(tmp_path / "alone")
