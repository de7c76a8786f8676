"""The recipe for nanotron in docs/frameworks.md, as far as it can be run without nanotron: its places."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perseus.agent.probe.placement import Placement

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
SIZES = {"pp_pg": 2, "dp_pg": 2, "beside": 3, "tp_pg": 2}


def recipe() -> str:
    """The recipe's beginning, down to its `marks`, which finds a rank's place."""
    _, _, section = PAGE.read_text().partition("## nanotron")
    return section.partition("```python\n")[2].partition("marks = ")[0]


def contexts(name: str) -> Iterator[Any]:
    """nanotron's `ParallelContext` of every rank, its third group under this name."""
    for ranks in product(*map(range, SIZES.values())):
        yield SimpleNamespace(
            **{
                name if of == "beside" else of: SimpleNamespace(rank=lambda r=rank: r, size=lambda s=size: s)
                for (of, size), rank in zip(SIZES.items(), ranks, strict=True)
            }
        )


@pytest.mark.parametrize("name", ["cp_pg", "expert_pg"])
def test_every_rank_has_a_place_of_its_own(name: str) -> None:
    """Context-parallel ranks too (in 0.4 there are expert-parallel ones in their stead)."""
    torch = SimpleNamespace(device=lambda *_: None, cuda=SimpleNamespace(current_device=lambda: 0))
    places = []
    for context in contexts(name):
        names: dict[str, Any] = {
            "torch": torch,
            "trainer": SimpleNamespace(parallel_context=context),
            "Placement": Placement,
            "gpu_uuid": lambda _: "GPU-1",
        }
        exec(recipe(), names)
        places.append(names["place"])
    assert len({(place.pipeline, place.stage, place.tensor) for place in places}) == len(places) == 24
    assert {(p.pipeline_count, p.stage_count, p.tensor_count) for p in places} == {(2, 2, 6)}
