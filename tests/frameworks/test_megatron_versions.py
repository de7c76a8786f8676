"""Megatron-Core in every supported version, training a little under each of its schedules."""

import json
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("megatron") is None:
    pytest.skip("Megatron-Core is not installed; `make test-frameworks` has it", allow_module_level=True)

from perseus import solver
from perseus.agent.probe.tested_versions import public
from tests.frameworks.cases import MICROBATCHES, Case, identities
from tests.frameworks.versions import NEWEST_TORCH, beside, skip_unless_there

pytestmark = pytest.mark.slow("trains for real, with the framework")

NEWEST = "megatron-core-0.19.2"
VERSIONS = [
    *(f"megatron-core-{version}" for version in ("0.12.3", "0.13.1", "0.14.0", "0.15.3")),
    NEWEST,
    NEWEST_TORCH,
    "",
]
"""Folders with other versions; none: the installed one."""


@pytest.mark.parametrize("folder", VERSIONS)
def test_every_version_registers_its_executed_order_and_detaches_cleanly(folder: str, tmp_path: Path) -> None:
    """Run all schedules by all seams without agents, with evaluations between the iterations."""
    folders = [folder] if folder else []
    skip_unless_there(*folders)
    case = Case("megatron_orders", "all", (1.0, 1.0), 1, 0.0, 0.0, beside=folders)
    done = subprocess.run(
        [sys.executable, *case.command(case.alone(tmp_path / "run", 0))],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / "run" / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    version = folder.removeprefix("megatron-core-") if folder.startswith("megatron") else ""
    assert public(ranks[0]["version"]) == (version or metadata.version("megatron-core"))
    one_chunk = identities(solver.one_forward_one_backward(2, MICROBATCHES))
    two_chunks = identities(solver.interleaved_one_forward_one_backward(2, MICROBATCHES, 2))
    all_expected = {
        "1f1b": one_chunk,
        "1f1b-timers": one_chunk,
        "interleaved": two_chunks,
        "interleaved-loop": two_chunks,
    }
    for name, expected in all_expected.items():
        assert [[tuple(c) for c in order] for order in ranks[0][name]["registration"]["orders"]] == expected
        assert ranks[0][name]["registration"]["paths"] == []
        for stage, rank in enumerate(ranks):
            executed = [[tuple(c) for c in iteration] for iteration in rank[name]["iterations"]]
            assert executed == [expected[stage]] * 3, name
            alone, attached = rank[name]["losses"]
            assert attached == alone, name
    layers = {name: ranks[0][name]["registration"]["stage_layers"] for name in ("1f1b", "interleaved")}
    assert layers == {"1f1b": [[1], [1]], "interleaved": [[1, 1], [1, 1]]}
    works = {name: ranks[0][name]["registration"]["stage_work"] for name in ("1f1b", "interleaved")}
    assert all("parameters, " in work for some in works.values() for work in some), works
    assert works["1f1b"] != works["interleaved"], "other chunks"


def test_the_loop_of_a_release_is_wrapped() -> None:
    """Releases after 0.16 have it; it trains only on GPUs."""
    skip_unless_there(NEWEST)
    command = [sys.executable, *beside(NEWEST), "tests.frameworks.megatron_loop"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.stdout.endswith("wrapped\n"), done.stderr
