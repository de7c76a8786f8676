"""Where an agent's GPUs come from, which of them CUDA leaves visible, and their inventory."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from perseus.agent.gpu import Gpu, GpuError, GpuLostError, GpuNotFoundError, GpuUse
from perseus.agent.gpu.executor import GpuExecutor
from perseus.agent.sidecar.backends import (
    EmulatedBackend,
    Found,
    Inventory,
    VisibleGpus,
    backend,
    visible_uuids,
)
from perseus.agent.sidecar.settings import AgentSettings
from perseus.configuration import ConfigurationError, load

UUIDS = ["GPU-0a", "GPU-0b", "GPU-1c"]


class Listing:
    """A backend with a given list of GPUs and errors, or an error in its place."""

    def __init__(self, *found: str | GpuError, error: GpuError | None = None) -> None:
        self.found = list(found)
        self.error = error
        self.look_count = 0

    def listed(self) -> list[str | GpuError]:
        self.look_count += 1
        if self.error is not None:
            raise self.error
        return [*self.found]

    def open(self, uuid: str) -> Gpu:
        raise GpuNotFoundError(f"opened {uuid}")

    def inspect(self, uuid: str) -> GpuUse:
        return GpuUse(self.found.index(uuid), "node", ())


def test_emulated_gpus_need_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PERSEUS_AGENT_GPU_BACKEND", "emulated")
    with pytest.raises(ConfigurationError, match="expected a folder, as gpu_backend is emulated"):
        load(AgentSettings, None, {})
    assert isinstance(backend(load(AgentSettings, None, {"emulated_gpus": tmp_path})), EmulatedBackend)


# --- Visible GPUs -------------------------------------------------------------------------------------------


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


def test_an_agent_serves_only_visible_gpus() -> None:
    gpus = VisibleGpus(Listing(*UUIDS), "2,1")
    assert gpus.listed() == ["GPU-1c", "GPU-0b"]
    with pytest.raises(GpuNotFoundError, match="opened GPU-1c"):
        gpus.open("GPU-1c")
    with pytest.raises(GpuNotFoundError, match=r"CUDA_VISIBLE_DEVICES=2,1 leaves visible.*GPU-1c, GPU-0b"):
        gpus.open("GPU-0a")
    assert gpus.inspect("GPU-1c").index == 2, "among all, as nvidia-smi counts"
    with pytest.raises(GpuNotFoundError, match="leaves visible"):
        gpus.inspect("GPU-0a")


def test_a_lost_gpu_keeps_its_number() -> None:
    lost = GpuLostError("lost")
    node = Listing(lost, "GPU-0b", lost)
    gpus = VisibleGpus(node, "2,0,1")
    assert gpus.listed() == ["GPU-0b"]
    node.found = [*UUIDS]
    assert gpus.listed() == ["GPU-1c", "GPU-0a", "GPU-0b"], "once all are there"
    node.found[1] = lost
    assert gpus.listed() == ["GPU-1c", "GPU-0a", "GPU-0b"], "not listed again"


# --- Their inventory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "expected", "reported"),
    [
        (Listing("a", "b"), Found(2), ["GPUs found"]),
        (Listing("a", GpuError("GPU 1: lost")), Found(1, ("GPU 1: lost",)), ["GPU lost", "GPUs found"]),
        (Listing(GpuError("GPU 0: lost")), Found(0, ("GPU 0: lost",)), ["no GPU can be served"]),
        (Listing(error=GpuError("no driver")), Found(0, ("no driver",)), ["no GPU can be served"]),
        (
            Listing(),
            Found(0, ("this node has no GPU, or none that the agent may see (CUDA_VISIBLE_DEVICES)",)),
            ["no GPU can be served"],
        ),
    ],
)
async def test_gpus_and_problems_are_logged(backend: Listing, expected: Found, reported: list[str]) -> None:
    inventory = Inventory(backend, GpuExecutor())
    with capture_logs() as logs:
        await inventory.report()
    assert await inventory.refresh() == expected
    assert [line["event"] for line in logs] == reported
    assert [line["reason"] for line in logs if "reason" in line] == list(expected.problems)


async def test_the_inventory_is_cached_for_a_moment() -> None:
    now_s = 0.0
    backend = Listing(error=GpuError("no driver"))
    inventory = Inventory(backend, GpuExecutor(), lambda: now_s)
    assert (await inventory.refresh()).gpu_count == (await inventory.refresh()).gpu_count == 0
    assert backend.look_count == 1
    backend.error, backend.found, now_s = None, ["a"], 5.0
    assert await inventory.refresh() == Found(1)
