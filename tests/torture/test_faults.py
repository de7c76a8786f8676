"""A coordinator with a failing database. `make torture-coordinator` runs every fault."""

import os
from pathlib import Path

import pytest

from perseus.demo import nvml_stub
from tests.torture.faults import strike


@pytest.mark.timeout(300)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a disk")
@pytest.mark.skipif(nvml_stub.compiler() is None, reason="no C compiler here to build the NVML stub with")
@pytest.mark.slow("a coordinator's process fails under load, its agents' leases run out, and it comes back")
def test_faults_end_with_a_clear_error_and_no_unnoticed_loss(tmp_path: Path) -> None:
    names = ("disk full", "log truncated")
    outcomes = strike(tmp_path, nvml_stub.build(tmp_path), *names)
    assert {each.name: each.problems for each in outcomes} == {name: [] for name in names}
