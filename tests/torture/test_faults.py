"""What a coordinator does when its database fails it. `make torture-coordinator` lets every fault strike."""

import os
from pathlib import Path

import pytest

from perseus.demo import nvml_stub
from tests.torture.faults import LEASE_S, strike


@pytest.mark.timeout(300)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a disk")
@pytest.mark.skipif(nvml_stub.compiler() is None, reason="no C compiler here to build the NVML stub with")
@pytest.mark.parametrize("name", ["disk full", "log truncated"])
def test_a_fault_is_said_clearly_and_loses_nothing_unnoticed(tmp_path: Path, name: str) -> None:
    outcome = strike(tmp_path, nvml_stub.build(tmp_path), name)
    assert outcome.stock_after_s <= LEASE_S + 2.0
    assert outcome.problems == []
