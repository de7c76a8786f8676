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


class Linear:
    """A layer."""

    def __init__(self, *parameters: Any) -> None:
        self._parameters = parameters

    def parameters(self) -> Iterator[Any]:
        yield from self._parameters

    def modules(self) -> Iterator[Any]:
        yield self

    def children(self) -> Iterator[Any]:
        yield from ()


class Attention(Linear):
    """Another one."""


class Chunk(Linear):
    """Holds layers."""

    def __init__(self, *layers: Linear) -> None:
        super().__init__(*(parameter for layer in layers for parameter in layer.parameters()))
        self._layers = layers

    def modules(self) -> Iterator[Any]:
        yield self
        yield from self._layers

    def children(self) -> Iterator[Any]:
        yield from self._layers


def test_the_same_work_has_the_same_text_with_its_size() -> None:
    text = work_text([Chunk(Linear(parameter(4, 8)), Linear(parameter(8)))], torch="2.13", shapes=[[2, 16]])
    again = work_text([Chunk(Linear(parameter(4, 8)), Linear(parameter(8)))], torch="2.13", shapes=[[2, 16]])
    assert text == again
    assert text.startswith("40 parameters, ")
    assert text.isascii()
    assert len(text) <= 128


LAYER = Linear(parameter(4, 8))


@pytest.mark.parametrize(
    "other",
    [
        work_text([Chunk(LAYER, LAYER)], torch="2.13"),
        work_text([Chunk(LAYER), Chunk(LAYER)], torch="2.13"),
        work_text([Chunk(Attention(parameter(4, 8)))], torch="2.13"),
        work_text([Chunk(Linear(parameter(8, 4)))], torch="2.13"),
        work_text([Chunk(Linear(parameter(4, 8, dtype="float32")))], torch="2.13"),
        work_text([Chunk(Linear(parameter(4, 8, requires_grad=False)))], torch="2.13"),
        work_text([Chunk(LAYER)], torch="2.12"),
        work_text([Chunk(LAYER)], torch="2.13", shapes=[[4, 16]]),
        work_text([], torch="2.13"),
    ],
)
def test_other_work_has_another_text(other: str) -> None:
    assert other != work_text([Chunk(LAYER)], torch="2.13")


def test_shapes_are_those_of_tensors_alone() -> None:
    assert shapes_of((parameter(2, 16), None, "mask", parameter(3))) == [[2, 16], [3]]
    assert shapes_of(None) == []


class Named:
    """A module with named children."""

    def __init__(self, *layers: "Named", **children: "Named") -> None:
        self._children = {**{str(index): layer for index, layer in enumerate(layers)}, **children}

    def named_children(self) -> Iterator[tuple[str, "Named"]]:
        yield from self._children.items()

    def parameters(self) -> Iterator[Any]:
        yield from ()

    def modules(self) -> Iterator[Any]:
        yield from ()


class Block(Named):
    """A layer, which has numbered parts of its own."""

    def __init__(self) -> None:
        super().__init__(experts=Named(Named(), Named(), Named()))


def test_layers_are_the_most_frequent_numbered_modules_nearest_to_the_root() -> None:
    blocks = Block(), Block()
    assert layer_count(Named(module=Named(layers=Named(*blocks), head=Named()))) == 2
    assert layer_count(Named(Named(), *blocks, Named())) == 2
    assert layer_count(Named(head=Named())) == 0
    assert layer_count(LAYER) == 0


def test_a_stages_layers_are_known_for_all_of_its_chunks_or_none() -> None:
    whole, head = Named(layers=Named(Block(), Block())), Named(head=Named())
    assert stage_work([whole, whole], torch="2.13") == StageWork(
        work_text([whole, whole], torch="2.13"), (2, 2)
    )
    assert stage_work([whole, head]).layer_counts == ()
