"""What each step of realisation is worth: plans made without it, beside those of all steps.

A step that brings less than a tenth of a percent is not worth its code: profiles are noisier. All times are
CPU times of one thread, from the same run.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.harness import GPUS, Column, Table, main, published_pipeline, timed
from benchmarks.realised import gaps_percent
from perseus.solver import realisation, refinement, rounding, solve
from perseus.solver.block_search import BlockSearch
from perseus.solver.exchange import Exchange
from perseus.solver.graph import Int64Array
from perseus.solver.realisation import Realiser
from perseus.solver.refinement import Refiner

_PROBLEMS = (("a100-sxm", 24), ("a40", 24), ("a40", 48))
_ROUNDS = 2


def _best(refiner: Refiner, choices: Int64Array, _: object) -> Int64Array:
    best = int(refiner._columns.effective_energies_j(choices).argmin())
    return choices[:, [best]]


_NO_LOCAL_HULLS = {
    how: refinement._Means(means.far_share, means.close_share, ()) for how, means in refinement._MEANS.items()
}
_STEPS: Mapping[str, Sequence[tuple[Any, str, Any]]] = {
    "rounding at prices": ((rounding, "_RUNGS_BELOW", (None,)), (realisation, "ROUNDING_COUNT", 1)),
    "block search": ((BlockSearch, "search", lambda _, choices, *__: choices),),
    "exchange": ((Exchange, "improve", lambda *_: None),),
    "fusion in refining": ((Refiner, "_fused", _best),),
    "local hulls": ((refinement, "_MEANS", _NO_LOCAL_HULLS),),
    "refining": ((Realiser, "_refine", lambda *_: False), (Realiser, "_search_once_more", lambda *_: None)),
}
"""What is put in the place of each step."""

_ABLATIONS: Mapping[str, Sequence[str]] = {
    "all steps": (),
    **{f"without {step}": (step,) for step in _STEPS},
    "without exchange and fusion": ("exchange", "fusion in refining"),
    "rounding and block search alone": ("exchange", "refining"),
}


def run() -> Sequence[Table]:
    whole_s = {problem: _figures(*problem)[-1] for problem in _PROBLEMS}
    rows: list[tuple[str | float, ...]] = []
    for name, steps in _ABLATIONS.items():
        row: list[str | float] = [name]
        with ExitStack() as stack:
            for patched in (patched for step in steps for patched in _STEPS[step]):
                stack.enter_context(patch.object(*patched))
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
            "Per point against the relaxed optimum at the plan's own time. CPU time: the whole solve, sweep "
            "included, best of two.",
        )
    ]


def _figures(gpu: str, microbatch_count: int) -> tuple[float, float, float, float]:
    """Return a frontier's gaps at T_min, in the median and at worst, and the CPU time that it took."""
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
