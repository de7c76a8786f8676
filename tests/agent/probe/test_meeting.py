"""Ranks meet in a store: stages exchange orders, and ranks find their places, or learn why not."""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from perseus.agent.link.computation import Computation, Kind
from perseus.agent.probe import exchange, placement
from perseus.agent.probe.exchange import ExecutedOrder, StoreExchange
from perseus.agent.probe.placement import Placement, UnplacedError, from_pipeline_group, meeting
from perseus.agent.probe.torch_marks import connect_marks

CPU: Any = SimpleNamespace(type="cpu")


class Store:
    """The used part of torch.distributed's store: all ranks can get what one has set."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        return self._values.keys() >= set(keys)

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
        return total


class Ranks:
    """torch.distributed of four ranks in two pipelines; each rank is a thread."""

    GROUPS = ([0, 2], [1, 3])

    def __init__(self) -> None:
        self.own = threading.local()

    def get_rank(self) -> int:
        return int(self.own.rank)

    @staticmethod
    def get_world_size() -> int:
        return 4

    def get_process_group_ranks(self, _group: object) -> list[int]:
        return next(ranks for ranks in self.GROUPS if self.own.rank in ranks)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    found, store = Ranks(), Store()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(distributed=found))
    for module in (exchange, placement):
        monkeypatch.setattr(module, "default_store", lambda: store)
    return found


def test_every_rank_finds_its_place_among_all_pipelines(ranks: Ranks) -> None:
    def place(rank: int) -> Placement:
        ranks.own.rank = rank
        return from_pipeline_group(None, CPU, "meeting")

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(place, range(4)))
    assert [(each.pipeline, each.stage) for each in found] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert {(each.pipeline_count, each.stage_count) for each in found} == {(2, 2)}


def test_a_failing_rank_ends_the_others_wait_with_its_reason(ranks: Ranks) -> None:
    with meeting() as key:
        pass

    def fail() -> None:
        ranks.own.rank = 1
        raise ValueError("no schedule")

    ranks.own.rank = 1
    with pytest.raises(ValueError, match="no schedule"), meeting() as key:
        fail()
    ranks.own.rank = 0
    with pytest.raises(UnplacedError, match="rank 1: no schedule"):
        from_pipeline_group(None, CPU, key)


def test_the_wait_for_a_rank_that_never_attaches_ends(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(time, "sleep", lambda pause_s: now_s.__setitem__(0, now_s[0] + pause_s))
    ranks.own.rank = 0
    with pytest.raises(UnplacedError, match="have not attached in 600 s"):
        from_pipeline_group(None, CPU, "meeting")


@pytest.mark.usefixtures("ranks")
def test_stages_of_one_pipeline_see_each_other_s_orders_and_no_others() -> None:
    orders = [
        ExecutedOrder(
            stage, (Computation(Kind.FORWARD, 0), Computation(Kind.BACKWARD, 0)), (stage,), "work", ""
        )
        for stage in range(2)
    ]
    own, other = StoreExchange(0, 0), StoreExchange(1, 0)
    assert own.poll("first", 2) == [None, None]
    own.post("first", orders[1])
    assert own.poll("first", 2) == [None, orders[1]]
    own.post("first", orders[0])
    assert own.poll("first", 2) == orders
    assert own.poll("second", 2) == [None, None]
    assert other.poll("first", 2) == [None, None]


def mesh(names: tuple[str, ...] | None, coordinates: tuple[int, ...] | None) -> Any:
    return SimpleNamespace(
        mesh_dim_names=names, mesh=SimpleNamespace(shape=(2, 4)), get_coordinate=lambda: coordinates
    )


def test_a_device_mesh_gives_a_ranks_place() -> None:
    found = placement.from_device_mesh(mesh(("dp", "pp"), (1, 2)), CPU)
    assert (found.pipeline, found.pipeline_count, found.stage, found.stage_count) == (1, 2, 2, 4)
    assert found.gpu_uuid == placement.NO_GPU


@pytest.mark.parametrize(("names", "coordinates"), [(None, (0, 0)), (("dp", "pp"), None)])
def test_a_device_mesh_without_names_or_without_this_rank_is_refused(
    names: tuple[str, ...] | None, coordinates: tuple[int, ...] | None
) -> None:
    with pytest.raises(ValueError, match="expected named dimensions, and this process among its ranks"):
        placement.from_device_mesh(mesh(names, coordinates), CPU)


def test_a_rank_is_connected_for_its_place_and_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(get_device_properties=lambda device: SimpleNamespace(uuid=f"of-{device.index}"))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    device: Any = SimpleNamespace(type="cuda", index=3)
    place = Placement(1, 2, 0, 4, gpu_uuid=placement.gpu_uuid(device))
    asked: dict[str, object] = {}

    def connect(**arguments: object) -> Any:
        asked.update(arguments)
        return "marks"

    assert connect_marks(connect, "job", place, device) == "marks"  # type: ignore[comparison-overlap]
    expected = {"job_id": "job", "pipeline": 1, "stage": 0, "tensor": 0, "gpu_uuid": "GPU-of-3"}
    assert asked == expected


def test_a_failure_without_a_store_passes_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ValueError, match="no schedule"), meeting():
        raise ValueError("no schedule")
