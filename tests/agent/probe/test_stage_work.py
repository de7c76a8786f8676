"""Texts of stages' work, with stand-ins for modules; tests/frameworks uses real ones."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from perseus.agent.probe.stage_work import StageWork, layer_count, shapes_of, stage_work, work_text


def parameter(*shape: int, dtype: str = "bfloat16", requires_grad: bool = True) -> SimpleNamespace:
    count = 1
    for size in shape:
        count *= size
    return SimpleNamespace(shape=shape, dtype=dtype, requires_grad=requires_grad, numel=lambda: count)


class Module:
    """A module with parameters of its own and numbered or named children."""

    def __init__(self, *children: "Module", own: tuple[Any, ...] = (), **named: "Module") -> None:
        self._own = own
        self._children = {**{str(index): child for index, child in enumerate(children)}, **named}

    def named_children(self) -> Iterator[tuple[str, "Module"]]:
        yield from self._children.items()

    def children(self) -> Iterator["Module"]:
        yield from self._children.values()

    def parameters(self) -> Iterator[Any]:
        yield from self._own
        for child in self.children():
            yield from child.parameters()

    def modules(self) -> Iterator["Module"]:
        yield self
        for child in self.children():
            yield from child.modules()


class Linear(Module):
    """A layer."""

    def __init__(self, *own: Any) -> None:
        super().__init__(own=own)


class Attention(Linear):
    """Another one."""


class Block(Module):
    """A layer, which has numbered parts of its own."""

    def __init__(self) -> None:
        super().__init__(experts=Module(Module(), Module(), Module()))


def test_the_same_work_has_the_same_text_with_its_size() -> None:
    text = work_text([Module(Linear(parameter(4, 8)), Linear(parameter(8)))], torch="2.13", shapes=[[2, 16]])
    again = work_text([Module(Linear(parameter(4, 8)), Linear(parameter(8)))], torch="2.13", shapes=[[2, 16]])
    assert text == again
    assert text.startswith("40 parameters, ")
    assert text.isascii()
    assert len(text) <= 128


LAYER = Linear(parameter(4, 8))


@pytest.mark.parametrize(
    "other",
    [
        work_text([Module(LAYER, LAYER)], torch="2.13"),
        work_text([Module(LAYER), Module(LAYER)], torch="2.13"),
        work_text([Module(Attention(parameter(4, 8)))], torch="2.13"),
        work_text([Module(Linear(parameter(8, 4)))], torch="2.13"),
        work_text([Module(Linear(parameter(4, 8, dtype="float32")))], torch="2.13"),
        work_text([Module(Linear(parameter(4, 8, requires_grad=False)))], torch="2.13"),
        work_text([Module(LAYER)], torch="2.12"),
        work_text([Module(LAYER)], torch="2.13", shapes=[[4, 16]]),
        work_text([], torch="2.13"),
    ],
)
def test_other_work_has_another_text(other: str) -> None:
    assert other != work_text([Module(LAYER)], torch="2.13")


def test_shapes_are_those_of_tensors_alone() -> None:
    assert shapes_of((parameter(2, 16), None, "mask", parameter(3))) == [[2, 16], [3]]
    assert shapes_of(None) == []


def test_layers_are_the_most_frequent_numbered_modules_nearest_to_the_root() -> None:
    blocks = Block(), Block()
    assert layer_count(Module(module=Module(layers=Module(*blocks), head=Module()))) == 2
    assert layer_count(Module(Module(), *blocks, Module())) == 2
    assert layer_count(Module(head=Module())) == 0
    assert layer_count(LAYER) == 0


def test_a_stages_layers_are_known_for_all_of_its_chunks_or_none() -> None:
    whole, head = Module(layers=Module(Block(), Block())), Module(head=Module())
    assert stage_work([whole, whole], torch="2.13") == StageWork(
        work_text([whole, whole], torch="2.13"), (2, 2)
    )
    assert stage_work([whole, head]).layer_counts == ()
