"""The gain from each step of realisation: plans without it, compared with plans from all steps.

A step that gains less than a tenth of a percent is not worth its code: profiles are noisier. All times are
CPU times of one thread, from the same run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from unittest.mock import patch

import numpy as np

from benchmarks.harness import GPUS, Column, Table, main, published_pipeline, timed
from benchmarks.realised import gaps_percent
from perseus.solver import realisation, solve
from perseus.solver.realisation import SearchSettings

_PROBLEMS = (("a100-sxm", 24), ("a40", 24), ("a40", 48))
_ROUNDS = 2

_ALL = SearchSettings()
_ABLATIONS: Mapping[str, SearchSettings] = {
    "all steps": _ALL,
    "without rounding at prices": replace(_ALL, price_offsets=(None,)),
    "without block search": replace(_ALL, round_tries=0, search_tries=0),
    "without exchange": replace(_ALL, exchange_rounds=0),
    "one round of exchange": replace(_ALL, exchange_rounds=1),
}


def run() -> Sequence[Table]:
    whole_s = {problem: _figures(*problem)[-1] for problem in _PROBLEMS}
    rows: list[tuple[str | float, ...]] = []
    for name, settings in _ABLATIONS.items():
        row: list[str | float] = [name]
        with patch.object(realisation, "USUAL_SEARCH", settings):
            for problem in _PROBLEMS:
                *gaps, seconds = _figures(*problem)
                row += [*gaps, seconds / whole_s[problem]]
        rows.append(tuple(row))
    return [
        Table(
            "100 realised plans without some of the steps: energy above the bound, %, GPT-3 175B",
            (
                Column(""),
                *(
                    Column(f"{GPUS[gpu]} × {microbatch_count}: {figure}", form)
                    for gpu, microbatch_count in _PROBLEMS
                    for figure, form in (
                        ("T_min", ".3f"),
                        ("median", ".3f"),
                        ("worst", ".3f"),
                        ("CPU time to all steps'", ".2f"),
                    )
                ),
            ),
            tuple(rows),
            "Per point, relative to the relaxed optimum at the plan's own time. CPU time: the whole "
            "solve with the sweep, best of two.",
        )
    ]


def _figures(gpu: str, microbatch_count: int) -> tuple[float, float, float, float]:
    """Return a frontier's gap at T_min, its median and worst gaps, and its CPU time."""
    pipeline = published_pipeline(gpu, microbatch_count)
    times_s = []
    for _ in range(_ROUNDS):
        with timed() as watch:
            frontier = solve(pipeline)
        times_s.append(watch.seconds)
    gaps = gaps_percent(frontier)
    return gaps[0], float(np.median(gaps)), max(gaps), min(times_s)


if __name__ == "__main__":
    main("ablation", run)
