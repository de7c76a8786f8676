"""The usable clocks of a job's stages: those common to all its GPUs, less the refused ones.

Pipelines share one frontier, so a clock that one rank of a stage can't set is not offered to any rank of that
stage. A stage with fewer than two clocks has no choice and stays at stock. It is planned as if stock were the
highest of all clocks, where unconstrained GPUs run.

A stage does without the clocks that a rank currently does not reach (power limit, heat), except the two
lowest: stock would be capped as well.
"""

from collections.abc import Collection, Iterable, Sequence

from perseus.service.domain.model import Rank

MIN_CLOCKS = 2
"""Clocks that a stage needs for planning."""

UsableClocks = Sequence[Sequence[int]]
"""Each stage's clocks, highest first; empty while no GPU is known, a single one for stock."""


def usable_clocks_mhz(ranks: Iterable[Rank], stage_count: int) -> UsableClocks:
    """Return the usable clocks of every stage."""
    common_mhz: set[int] | None = None
    refused_mhz: list[set[int]] = [set() for _ in range(stage_count)]
    at_stock: set[int] = set()
    capped_mhz: dict[int, int] = {}
    for rank in ranks:
        if rank.capped_clock_mhz:
            stage = rank.coordinates.stage
            capped_mhz[stage] = min(capped_mhz.get(stage, rank.capped_clock_mhz), rank.capped_clock_mhz)
        if rank.gpu is not None:
            own_mhz = rank.gpu.supported_clocks_mhz
            common_mhz = set(own_mhz) if common_mhz is None else common_mhz.intersection(own_mhz)
        refused_mhz[rank.coordinates.stage].update(rank.refused_clocks_mhz)
        if rank.is_stock_only:
            at_stock.add(rank.coordinates.stage)
    falling_mhz = sorted(common_mhz or (), reverse=True)
    usable_mhz = [[mhz for mhz in falling_mhz if mhz not in refused] for refused in refused_mhz]
    for stage, cap_mhz in capped_mhz.items():
        lowest_mhz = usable_mhz[stage][-MIN_CLOCKS:]
        usable_mhz[stage] = [mhz for mhz in usable_mhz[stage] if mhz <= cap_mhz or mhz in lowest_mhz]
    return [
        falling_mhz[:1] if stage in at_stock or len(own_mhz) < MIN_CLOCKS else own_mhz
        for stage, own_mhz in enumerate(usable_mhz)
    ]


def stages_at_stock(clocks_mhz: UsableClocks) -> Collection[int]:
    """Return the stages that stay at stock."""
    return {stage for stage, own_mhz in enumerate(clocks_mhz) if len(own_mhz) == 1}
