"""The usable clocks of a job's stages: those common to all its GPUs, less the refused ones.

Pipelines share one frontier, so a clock that one rank of a stage can't set is not offered to any rank of that
stage. A stage with fewer than two clocks has no choice and stays at stock. It is planned as if stock were the
highest of all clocks, where unconstrained GPUs run.

A stage does without the clocks that a rank currently does not reach (power limit, heat), except the two
lowest: stock would be capped as well.

Each property of a rank is counted by stage, so that a change of one rank costs as much as it changes, not a
pass over the others.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar

from perseus.service.domain.model import Rank
from perseus.service.job.ranks.counts import move

T = TypeVar("T")

MIN_CLOCKS = 2
"""Clocks that a stage needs for planning."""

UsableClocks = Sequence[Sequence[int]]
"""Each stage's clocks, highest first; empty while no GPU is known, a single one for stock."""


class ClockCounts:
    """What the clocks of a job's stages depend on, counted over their ranks."""

    def __init__(self, stage_count: int) -> None:
        self._supported_mhz: Counter[tuple[int, ...]] = Counter()
        self._refused_mhz: list[Counter[int]] = [Counter() for _ in range(stage_count)]
        self._capped_mhz: list[Counter[int]] = [Counter() for _ in range(stage_count)]
        self._at_stock: Counter[int] = Counter()
        self._usable_mhz: UsableClocks | None = None

    def move(self, before: Rank, after: Rank) -> None:
        """Count a rank as it is now in place of how it was."""
        stage = after.coordinates.stage
        if before.gpu is not after.gpu:
            self._move(self._supported_mhz, _supported_mhz(before), _supported_mhz(after))
        self._move(self._refused_mhz[stage], before.refused_clocks_mhz, after.refused_clocks_mhz)
        if before.capped_clock_mhz != after.capped_clock_mhz:
            self._move(self._capped_mhz[stage], _capped_mhz(before), _capped_mhz(after))
        if before.is_stock_only != after.is_stock_only:
            self._move(self._at_stock, [stage] * before.is_stock_only, [stage] * after.is_stock_only)

    def usable_mhz(self) -> UsableClocks:
        """Return the usable clocks of each stage."""
        if self._usable_mhz is None:
            self._usable_mhz = self._computed_mhz()
        return self._usable_mhz

    def _move(self, counts: Counter[T], before: Iterable[T], after: Iterable[T]) -> None:
        if before != after and move(counts, before, after):
            self._usable_mhz = None

    def _computed_mhz(self) -> UsableClocks:
        common_mhz = set.intersection(*map(set, self._supported_mhz)) if self._supported_mhz else set()
        falling_mhz = sorted(common_mhz, reverse=True)
        usable_mhz = [[mhz for mhz in falling_mhz if mhz not in refused] for refused in self._refused_mhz]
        for stage, capped_mhz in enumerate(self._capped_mhz):
            if capped_mhz:
                cap_mhz, lowest_mhz = min(capped_mhz), usable_mhz[stage][-MIN_CLOCKS:]
                usable_mhz[stage] = [mhz for mhz in usable_mhz[stage] if mhz <= cap_mhz or mhz in lowest_mhz]
        return [
            falling_mhz[:1] if stage in self._at_stock or len(own_mhz) < MIN_CLOCKS else own_mhz
            for stage, own_mhz in enumerate(usable_mhz)
        ]


def _supported_mhz(rank: Rank) -> Sequence[tuple[int, ...]]:
    return () if rank.gpu is None else (rank.gpu.supported_clocks_mhz,)


def _capped_mhz(rank: Rank) -> Sequence[int]:
    return (rank.capped_clock_mhz,) if rank.capped_clock_mhz else ()


def stages_at_stock(clocks_mhz: UsableClocks) -> Collection[int]:
    """Return the stages that stay at stock."""
    return {stage for stage, own_mhz in enumerate(clocks_mhz) if len(own_mhz) == 1}
