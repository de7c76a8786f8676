"""The same measurements give the same plans on every processor, although BLAS kernels add in other orders."""

import os
import subprocess
import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.solver import Kind, Measurement, Pipeline, one_forward_one_backward, shrink_profiles, solve
from perseus.solver.graph import build_event_graph
from tests.solver.pipelines import pipelines

STAGES, MICROBATCHES, CLOCKS_MHZ = 2, 6, range(900, 1401, 100)


def noisy_pipeline(seed: int) -> Pipeline:
    """Two stages with measurement errors of 1 %, shrunk. Stage 1 is no faster above 1200 MHz."""
    random = np.random.default_rng(seed)

    def measurement(stage: int, kind: Kind, mhz: int) -> Measurement:
        effective_mhz = min(mhz, 1200) if stage else mhz
        time_s = (0.05 if kind is Kind.FORWARD else 0.1) * 1410 / effective_mhz
        energy_j = time_s * (60 + 240 * (mhz / 1410) ** 3)
        times, energies = 1 + 0.01 * random.standard_normal(2)
        return Measurement(mhz, time_s * times, energy_j * energies, 0.01 * time_s, 0.01 * energy_j)

    return Pipeline(
        schedule=one_forward_one_backward(STAGES, MICROBATCHES),
        profiles=shrink_profiles(
            {
                (stage, 0, kind): tuple(measurement(stage, kind, mhz) for mhz in CLOCKS_MHZ)
                for stage in range(STAGES)
                for kind in (Kind.FORWARD, Kind.BACKWARD)
            }
        ),
        blocking_power_w=(60.0,) * STAGES,
    )


def print_plans() -> None:
    for seed in range(5):
        pipeline = noisy_pipeline(seed)
        frontier = solve(pipeline, point_count=8)
        for point in frontier.points:
            plan = frontier.plan_within(point.iteration_time_s)
            print([p.clock_mhz for stage in plan.stages for p in stage])


def plans_of(**environment: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", f"from {__name__} import print_plans; print_plans()"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment},
        check=True,
        capture_output=True,
        text=True,
    ).stdout


@pytest.mark.slow("starts Python for each kind of processor")
def test_plans_are_the_same_on_other_processors() -> None:
    expected = plans_of(OPENBLAS_NUM_THREADS="1")
    assert len(expected.splitlines()) == 40
    for kind in ("Prescott", "Nehalem", "Sandybridge", "Haswell", "Zen", "SkylakeX"):
        assert plans_of(OPENBLAS_CORETYPE=kind) == expected, kind
    assert plans_of(OPENBLAS_NUM_THREADS="4") == expected
    extensions = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
    assert plans_of(NPY_DISABLE_CPU_FEATURES=" ".join(extensions)) == expected


@given(pipeline=pipelines(), random=st.randoms(use_true_random=False))
def test_energies_are_the_same_in_any_order(pipeline: Pipeline, random: Random) -> None:
    """So that no rounding error chooses between plans that only exchange computations of one profile."""
    graph = build_event_graph(pipeline)
    energies_j = [random.choice(graph.options[p]).effective_energy_j for p in graph.profile_of.tolist()]
    shuffled_j = random.sample(energies_j, len(energies_j))
    assert sum(energies_j) == sum(shuffled_j)
