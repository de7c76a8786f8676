import pytest

from perseus.agent.gpu import Gpu, GpuError, GpuLostError, GpuNotFoundError, GpuUse
from perseus.agent.sidecar.backends import VisibleGpus, visible_uuids

UUIDS = ["GPU-0a", "GPU-0b", "GPU-1c"]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("0,1,2", UUIDS),
        ("2, 0", ["GPU-1c", "GPU-0a"]),
        ("GPU-1c", ["GPU-1c"]),
        ("GPU-1", ["GPU-1c"]),
        ("GPU-0b,2", ["GPU-0b", "GPU-1c"]),
        ("", []),
        ("-1", []),
        ("1,-1,2", ["GPU-0b"]),
        ("1,7,2", ["GPU-0b"]),
        ("GPU-0,2", []),
        ("NoDevFiles", []),
        ("1,1", []),
        ("1,GPU-0b", []),
    ],
)
def test_the_gpus_that_cuda_leaves_visible(setting: str, expected: list[str]) -> None:
    assert visible_uuids(setting, UUIDS) == expected


class Node:
    def open(self, uuid: str) -> Gpu:
        raise GpuNotFoundError(f"opened {uuid}")

    def inspect(self, uuid: str) -> GpuUse:
        return GpuUse(UUIDS.index(uuid), "node", ())

    def listed(self) -> list[str | GpuError]:
        return [*UUIDS]


def test_an_agent_serves_only_visible_gpus() -> None:
    gpus = VisibleGpus(Node(), "2,1")
    assert gpus.listed() == ["GPU-1c", "GPU-0b"]
    with pytest.raises(GpuNotFoundError, match="opened GPU-1c"):
        gpus.open("GPU-1c")
    with pytest.raises(GpuNotFoundError, match=r"CUDA_VISIBLE_DEVICES=2,1 leaves visible.*GPU-1c, GPU-0b"):
        gpus.open("GPU-0a")
    assert gpus.inspect("GPU-1c").index == 2, "among all, as nvidia-smi counts"
    with pytest.raises(GpuNotFoundError, match="leaves visible"):
        gpus.inspect("GPU-0a")


class NodeWithLostGpus(Node):
    lost: tuple[int, ...] = (0, 2)

    def listed(self) -> list[str | GpuError]:
        return [GpuLostError("lost") if i in self.lost else uuid for i, uuid in enumerate(UUIDS)]


def test_a_lost_gpu_keeps_its_number() -> None:
    node = NodeWithLostGpus()
    gpus = VisibleGpus(node, "2,0,1")
    assert gpus.listed() == ["GPU-0b"]
    node.lost = ()
    assert gpus.listed() == ["GPU-1c", "GPU-0a", "GPU-0b"], "once all are there"
    node.lost = (1,)
    assert gpus.listed() == ["GPU-1c", "GPU-0a", "GPU-0b"], "not listed again"
