"""Any failure in a hook, on one rank or all: training continues without it, and the log has rank and reason.

No rank ever waits for one that has given up, during attaching or later: the trainings end.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("torch") is None:
    pytest.skip("torch is not installed; `make test-frameworks` has it", allow_module_level=True)

from tests.frameworks.cases import Case, losses_in

pytestmark = [pytest.mark.slow("trains for real, with the framework"), pytest.mark.timeout(300)]

# Places where a hook may fail: attaching, following the training, and the stages' common store.
OF_EACH = (
    "perseus.agent.{hook}.note_versions",
    "perseus.agent.{hook}.connect_marks",
    "perseus.agent.{hook}.watch_steps",
    "perseus.agent.probe.attachment.Attachment.replace_methods",
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
    *(place for place in OF_ALL if ".StoreExchange." not in place and not place.endswith(".replace_methods")),
    "perseus.agent.probe.attachment.Attachment.note_step",
    "perseus.agent.probe.whole_model.MarkedModel.mark",
    "perseus.agent.probe.whole_model.MarkedModel._is_forward",
    "perseus.agent.probe.whole_model.MarkedModel._await_gradient",
    "perseus.agent.probe.whole_model.MarkedModel._begin_backward",
]
OF_SHARDS = [place for place in OF_A_MODEL if ".Probe." not in place]
OF_MEGATRON = tuple(place.removesuffix("_methods") for place in OF_EACH)  # of a module, not of an object
OF_TORCHTITAN = (
    "perseus.agent.torchtitan.note_versions",
    "perseus.agent.torch.connect_marks",
    *OF_EACH[3:],
)
OF_CALLBACKS = (
    "perseus.agent.{hook}.note_versions",
    "perseus.agent.torch.connect_marks",
    "perseus.agent.probe.attachment.Attachment.replace_methods",
)
ITERATIONS = 25  # ranks give up waiting for an order after 20
TWO_STAGES = (1.0, 1.0)
TRAININGS = {
    "pipelining": (Case("torch", "1F1B", TWO_STAGES, pipeline_count=2), "torch", OF_ALL),
    "DistributedDataParallel": (Case("replica", "ddp", pipeline_count=2), "torch", OF_A_MODEL),
    "fully_shard": (Case("replica", "fsdp2", pipeline_count=2), "torch", OF_SHARDS),
    "torchtitan": (Case("torchtitan", "1F1B", TWO_STAGES), "torchtitan", OF_TORCHTITAN),
    "Megatron-Core": (Case("megatron", "1f1b", TWO_STAGES), "megatron", OF_MEGATRON),
    "DeepSpeed": (Case("deepspeed", "1f1b", TWO_STAGES), "deepspeed", OF_EACH),
    "Transformers": (Case("everyday", "transformers ddp", pipeline_count=2), "transformers", OF_CALLBACKS),
    "Lightning": (Case("everyday", "lightning ddp", pipeline_count=2), "lightning", OF_CALLBACKS),
}
IN_CI = "DistributedDataParallel"
every_place_of_every_hook = pytest.mark.nightly("the other hooks, for minutes")


@pytest.mark.parametrize(
    ("case", "hook", "places"),
    [
        pytest.param(*training, marks=() if name == IN_CI else every_place_of_every_hook, id=name)
        for name, training in TRAININGS.items()
    ],
)
def test_training_continues_with_equal_losses_and_the_log_has_rank_and_reason(
    case: Case, hook: str, places: Sequence[str], tmp_path: Path
) -> None:
    alone = case.task(tmp_path / "alone", iteration_count=ITERATIONS)
    ranks = range(alone.rank_count)
    planted = [(place.format(hook=hook), failing) for place in places for failing in ([1], list(ranks))]
    tasks = [
        case.task(
            tmp_path / f"planted-{number}", iteration_count=ITERATIONS, planted=place, planted_ranks=failing
        )
        for number, (place, failing) in enumerate(planted)
    ]
    case.train(alone, *tasks)
    expected = losses_in(tmp_path / "alone")
    assert expected
    for task in tasks:
        folder = Path(task.folder)
        assert losses_in(folder) == expected, task.planted
        logs = [(folder / f"log-{rank}").read_text() for rank in ranks]
        for rank in task.planted_ranks:
            assert "training continues at stock clocks: planted" in logs[rank], task.planted
