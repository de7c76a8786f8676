"""Layouts of data parallelism that `attach` and `attach_model` refuse, and those that they take."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("torch") is None:
    pytest.skip("torch is not installed; `make test-frameworks` has it", allow_module_level=True)

import torch
from torch import distributed, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from perseus.agent.link.computation import Kind
from perseus.agent.torch import attach, attach_model, stages_of
from tests.agent.marks_stub import MarksStub

pytestmark = pytest.mark.slow("makes modules of torch")

CPU = torch.device("cpu")


@pytest.fixture
def _two_ranks() -> Iterator[None]:
    """One of two ranks, whose collectives do nothing."""
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    distributed.destroy_process_group()


def tensor_parallel(model: nn.Module) -> nn.Module:
    return parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})


def data_and_tensor_parallel(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    return nn.Sequential(
        DistributedDataParallel(
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()}), device_mesh=mesh["dp"]
        )
    )


def sharded_and_tensor_parallel(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    return fully_shard(parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()}), mesh=mesh["dp"])


def fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=CPU)


def mesh_of_one() -> Any:
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))["dp"]


WRAPPINGS: list[tuple[Callable[[Any], Any], str, str]] = [
    (lambda model: model, "", ""),
    (fully_shard, "FSDP over 2 ranks", ""),
    (lambda model: nn.Sequential(fully_shard(model)), "FSDP over 2 ranks", ""),
    (lambda model: fully_shard(model, mesh=mesh_of_one()), "", ""),
    (replicate_with_fsdp, "", ""),
    (lambda model: nn.Sequential(replicate_with_fsdp(model)), "replicas on 2 ranks", ""),
    (fsdp1, "FullyShardedDataParallel of torch", r"FullyShardedDataParallel of .* \(use fully_shard: "),
    (DistributedDataParallel, "", ""),
    (lambda model: nn.Sequential(DistributedDataParallel(model)), "DistributedDataParallel", ""),
    (replicate, "replicate", ""),
    (lambda model: nn.Sequential(model, nn.SyncBatchNorm(8)), "SyncBatchNorm", "SyncBatchNorm"),
    (tensor_parallel, "", "tensor or expert parallelism"),
    (sharded_and_tensor_parallel, "", "tensor or expert parallelism"),
    (data_and_tensor_parallel, "DistributedDataParallel", "tensor parallelism"),
]


@pytest.mark.usefixtures("_two_ranks")
@pytest.mark.parametrize(("wrap", "in_stage", "in_replica"), WRAPPINGS)
def test_data_parallelism_that_waits_within_computations_is_refused(
    wrap: Callable[[Any], Any], in_stage: str, in_replica: str
) -> None:
    model = wrap(nn.Sequential(nn.Linear(8, 8)))
    schedule = Schedule1F1B(PipelineStage(model, 0, 2, CPU), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if in_stage:
        with pytest.raises(
            ValueError, match=f"stage 0: .* found {in_stage}.*, where waiting counts as computing"
        ):
            attach(schedule, job_id="gpt")
    else:
        assert stages_of(schedule)
    arguments: dict[str, Any] = {"job_id": "gpt", "connect": lambda **_: MarksStub()}
    if in_replica:
        with pytest.raises(
            ValueError, match=f"model .* found {in_replica}.*, where waiting counts as computing"
        ):
            attach_model(model, optimizer, **arguments)
    else:
        attach_model(model, optimizer, **arguments).detach()


@pytest.mark.usefixtures("one_rank")
def test_the_copy_of_buffers_before_a_forward_is_a_wait() -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    marks, sync_buffers = MarksStub(), DistributedDataParallel._sync_buffers
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach_model(model, optimizer, job_id="gpt", connect=lambda **_: marks):
        for _ in range(2):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
    forward = [("begin", Kind.FORWARD, 0, 0), ("begin_wait",), ("end_wait",), ("end", Kind.FORWARD, 0, 0)]
    for begin in (each for each, call in enumerate(marks.calls) if call == forward[0]):
        assert marks.calls[begin : begin + 4] == forward
    assert marks.calls.count(("begin_wait",)) == 2
    assert DistributedDataParallel._sync_buffers is sync_buffers, "left as it was"
