"""Megatron-Core in every version that is supported, training a little under each of its schedules."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("megatron", reason="Megatron-Core is not installed; `make test-frameworks` has it")

from perseus import solver
from tests.frameworks.cases import MICROBATCHES, Case, identities

VERSIONS = ["0.12.3", "0.13.1", "0.14.0", "0.15.3", "0.16.1"]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_is_registered_as_it_executes_and_left_as_it_was(version: str, tmp_path: Path) -> None:
    """Without agents: all schedules by all seams, with evaluations between the iterations."""
    paths = [os.environ.get("PYTHONPATH", "")]
    if version != metadata.version("megatron-core"):
        folder = Path(sys.prefix, f"megatron-core-{version}")
        if not folder.exists():
            pytest.skip(f"Megatron-Core {version} is not installed beside; `make test-frameworks` has it")
        paths.insert(0, str(folder))
    case = Case("megatron_orders", "all", (1.0, 1.0), 1, 0.0, 0.0)
    done = subprocess.run(
        [sys.executable, *case.command(case.alone(tmp_path / "run", 0))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / "run" / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert ranks[0]["version"] == version
    one_chunk = identities(solver.one_forward_one_backward(2, MICROBATCHES))
    two_chunks = identities(solver.interleaved_one_forward_one_backward(2, MICROBATCHES, 2))
    for name, expected in {"1f1b": one_chunk, "1f1b-timers": one_chunk, "interleaved": two_chunks}.items():
        assert [[tuple(c) for c in order] for order in ranks[0][name]["registration"]["orders"]] == expected
        assert ranks[0][name]["registration"]["paths"] == []
        for stage, rank in enumerate(ranks):
            executed = [[tuple(c) for c in iteration] for iteration in rank[name]["iterations"]]
            assert executed == [expected[stage]] * 3, name
            alone, attached = rank[name]["losses"]
            assert attached == alone, name
    works = {name: ranks[0][name]["registration"]["stage_work"] for name in ("1f1b", "interleaved")}
    assert all("parameters, " in work for some in works.values() for work in some), works
    assert works["1f1b"] != works["interleaved"], "other chunks"
