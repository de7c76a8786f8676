"""The random changes of a job that is restarted repeatedly, from a seed. Pure."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

LAYERS = 6
"""Layers of the model, in any split."""
MAX_RANKS = 6
_STAGES = (2, 3, 4)
_MICROBATCHES = (2, 3, 4, 6)
_REPLICAS = (1, 2)
_LONG_SHARE = 0.7
_KILLED_SHARE = 0.5
# Iterations after attaching at which a short launch ends: in the baseline, in profiling, or after it.
_SHORT_ITERATIONS = (3, 8, 20, 60)
_CHANGES = ("nothing", "microbatches", "split", "stages", "replicas")


@dataclass(frozen=True, slots=True)
class Layout:
    """The layers of every stage, and the number of replicas.

    As torch's 1F1B requires, there are no fewer microbatches than stages.
    """

    pipeline_count: int
    layers: tuple[int, ...]
    microbatch_count: int

    def __str__(self) -> str:
        layers = "+".join(map(str, self.layers))
        return f"{self.pipeline_count} × ({layers}) layers, {self.microbatch_count} microbatches"

    @property
    def stage_count(self) -> int:
        """Number of stages of each replica."""
        return len(self.layers)


@dataclass(frozen=True, slots=True)
class Launch:
    """One of the runs. `short_iterations`: it ends after that many; None: once its plan has been measured."""

    number: int
    change: str
    layout: Layout
    short_iterations: int | None
    is_killed: bool

    def __str__(self) -> str:
        ends = "killed" if self.is_killed else "ended"
        when = (
            "under its plan" if self.short_iterations is None else f"after {self.short_iterations} iterations"
        )
        return f"launch {self.number}, {self.layout} (changed: {self.change}), {ends} {when}"


def launches(count: int, seed: int) -> Iterator[Launch]:
    """Yield `count` launches, the same for a seed; the first of them is long."""
    chance = random.Random(seed)
    layout = Layout(1, _split(chance, 2), 4)
    for number in range(count):
        change = chance.choice(_CHANGES) if number else "nothing"
        layout = _changed(chance, layout, change)
        is_long = number == 0 or chance.random() < _LONG_SHARE
        short_iterations = None if is_long else chance.choice(_SHORT_ITERATIONS)
        yield Launch(number, change, layout, short_iterations, chance.random() < _KILLED_SHARE)


def _changed(chance: random.Random, before: Layout, change: str) -> Layout:
    if change == "nothing":
        return before
    while True:
        match change:
            case "microbatches":
                after = replace(before, microbatch_count=chance.choice(_MICROBATCHES))
            case "split":
                after = replace(before, layers=_split(chance, before.stage_count))
            case "stages":
                after = replace(before, layers=_split(chance, chance.choice(_STAGES)))
            case _:
                after = replace(before, pipeline_count=chance.choice(_REPLICAS))
        if after.pipeline_count * after.stage_count > MAX_RANKS:
            after = replace(after, layers=_split(chance, MAX_RANKS // after.pipeline_count))
        if after != before and after.microbatch_count >= after.stage_count:
            return after


def _split(chance: random.Random, stage_count: int) -> tuple[int, ...]:
    """Split the layers over stages, at least one each, and no more than half of them on one."""
    while True:
        cuts = sorted(chance.sample(range(1, LAYERS), stage_count - 1))
        layers = tuple(end - begin for begin, end in zip([0, *cuts], [*cuts, LAYERS], strict=True))
        if max(layers) <= LAYERS // 2 + 1:
            return layers
