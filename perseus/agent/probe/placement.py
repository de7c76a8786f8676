"""A rank's place in its job, from torch.distributed or a device mesh; torch is imported on demand.

Data-parallel replicas are pipelines. Tensor- and context-parallel ranks of a stage do the same computations
at the same time and so share its plan: both count as tensor-parallel.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from perseus.agent.probe.exchange import default_store

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

STAGE_DIMENSION = "pp"
TENSOR_DIMENSIONS = ("cp", "tp")

TIMEOUT_S = 600.0
"""How long ranks wait for others to attach, which may still be loading their stages."""

_meetings = count()

_PROCESS_COUNT_VARIABLE = "WORLD_SIZE"

NO_GPU = "none"
"""No GPU's UUID: an agent refuses it, so training on a CPU continues as without an agent."""


class UnplacedError(Exception):
    """A rank's place in its job can't be determined."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A rank's place, all counted from 0, and the UUID of its GPU as NVML spells it."""

    pipeline: int
    pipeline_count: int
    stage: int
    stage_count: int
    tensor: int = 0
    tensor_count: int = 1
    gpu_uuid: str = NO_GPU

    def __post_init__(self) -> None:
        for name in ("pipeline", "stage", "tensor"):
            index, count = getattr(self, name), getattr(self, f"{name}_count")
            if not 0 <= index < count:
                raise ValueError(f"{name}: expected 0 to {count - 1}, found {index}")


def place_in_mesh(
    names: Sequence[str],
    sizes: Sequence[int],
    coordinates: Sequence[int],
    gpu_uuid: str,
    *,
    stage_dimension: str = STAGE_DIMENSION,
    tensor_dimensions: Sequence[str] = TENSOR_DIMENSIONS,
) -> Placement:
    """Return the place of a mesh's coordinates: dimensions that are neither stages nor tensors number
    pipelines.

    Several dimensions of one kind count row by row, the last one fastest. Raises ValueError for a mesh
    without the stages' dimension.
    """
    if stage_dimension not in names:
        raise ValueError(f"device mesh: expected a dimension {stage_dimension!r}, found {', '.join(names)}")
    index = {"pipeline": 0, "stage": 0, "tensor": 0}
    count = {"pipeline": 1, "stage": 1, "tensor": 1}
    for name, size, coordinate in zip(names, sizes, coordinates, strict=True):
        sort = "pipeline"
        if name == stage_dimension:
            sort = "stage"
        elif name in tensor_dimensions:
            sort = "tensor"
        index[sort] = index[sort] * size + coordinate
        count[sort] *= size
    return Placement(
        index["pipeline"],
        count["pipeline"],
        index["stage"],
        count["stage"],
        index["tensor"],
        count["tensor"],
        gpu_uuid,
    )


def place_among_pipelines(rank: int, pipelines: Sequence[Sequence[int]], gpu_uuid: str) -> Placement:
    """Return a global rank's place, given every pipeline's ranks, stage 0 first; pipelines may be repeated.

    Raises ValueError if the rank is in no pipeline.
    """
    distinct = sorted({tuple(ranks) for ranks in pipelines})
    for pipeline, ranks in enumerate(distinct):
        if rank in ranks:
            return Placement(pipeline, len(distinct), ranks.index(rank), len(ranks), gpu_uuid=gpu_uuid)
    raise ValueError(f"pipelines: expected rank {rank} in one of {len(distinct)}, found it in none")


def from_device_mesh(mesh: "DeviceMesh", device: "torch.device") -> Placement:
    """Return this process's place in a device mesh with named dimensions; ValueError if it has none."""
    names, coordinates = mesh.mesh_dim_names, mesh.get_coordinate()
    if names is None or coordinates is None:
        raise ValueError("device mesh: expected named dimensions, and this process among its ranks")
    return place_in_mesh(names, tuple(mesh.mesh.shape), coordinates, gpu_uuid(device))


def from_pipeline_group(group: "ProcessGroup | None", device: "torch.device", meeting: str) -> Placement:
    """Return this process's place if all parallelism is pipeline and data: every group is one pipeline.

    The first rank of each group posts the group's ranks; the others wait for all posts, within `meeting`.

    Raises:
        UnplacedError: another rank failed to attach, or did not attach in time.
    """
    from torch import distributed

    ranks = distributed.get_process_group_ranks(group)
    store, rank = default_store(), distributed.get_rank()
    if rank == ranks[0]:
        number = store.add(f"{meeting}/count", 1)
        store.set(f"{meeting}/{number}", json.dumps(ranks))
    pipeline_count = distributed.get_world_size() // len(ranks)
    keys = [f"{meeting}/{number}" for number in range(1, pipeline_count + 1)]
    until_s, pause_s = time.monotonic() + TIMEOUT_S, 0.01
    while not store.check(keys):
        if store.check([f"{meeting}/failed"]):
            raise UnplacedError(store.get(f"{meeting}/failed").decode())
        if time.monotonic() > until_s:
            raise UnplacedError(f"other ranks have not attached in {TIMEOUT_S:.0f} s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 1.0)
    pipelines = [json.loads(store.get(key)) for key in keys]
    return place_among_pipelines(rank, pipelines, gpu_uuid(device))


def from_replicas(group: "ProcessGroup | None", device: "torch.device") -> Placement:
    """Return this process's place if there are no pipelines: each process of the group (None: all processes)
    has a whole model, or a shard. Without `torch.distributed` it is alone.

    Raises ValueError if it is not alone according to WORLD_SIZE, which launchers set.
    """
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        pipeline, pipeline_count = distributed.get_rank(group), distributed.get_world_size(group)
        return Placement(pipeline, pipeline_count, 0, 1, gpu_uuid=gpu_uuid(device))
    process_count = os.environ.get(_PROCESS_COUNT_VARIABLE, "1")
    if process_count != "1":
        raise ValueError(
            "torch.distributed: expected it to be initialised before attach, as "
            f"{_PROCESS_COUNT_VARIABLE} is {process_count}, found it is not"
        )
    return Placement(0, 1, 0, 1, gpu_uuid=gpu_uuid(device))


@contextlib.contextmanager
def meeting() -> Iterator[str]:
    """Yield the store key at which ranks meet as they attach, all the same number of times.

    A rank that fails in the block posts its failure there.
    """
    key = f"perseus/meeting-{next(_meetings)}"
    try:
        yield key
    except UnplacedError:
        raise
    except Exception as error:
        with contextlib.suppress(Exception):  # there may be no store
            from torch import distributed

            default_store().set(f"{key}/failed", f"rank {distributed.get_rank()}: {error}")
        raise


def gpu_uuid(device: "torch.device") -> str:
    """Return the device's UUID as NVML spells it; NO_GPU for a device other than CUDA."""
    if device.type != "cuda":
        return NO_GPU
    from torch import cuda

    return f"GPU-{cuda.get_device_properties(device).uuid}"
