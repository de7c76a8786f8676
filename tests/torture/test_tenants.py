"""Hostile tenants take nothing from others. `make torture-coordinator` attacks at full strength."""

from pathlib import Path

import pytest

from tests.torture.tenants import torture_tenants


@pytest.mark.slow("processes of a coordinator, a broker and a gateway, which are attacked")
@pytest.mark.timeout(120)
async def test_a_tenant_loses_nothing_to_others(tmp_path: Path) -> None:
    outcome = await torture_tenants(tmp_path, 3.0, flood_messages=8, connection_count=100)
    assert outcome.problems == []
    assert outcome.reading_count > 0
    assert outcome.max_measured_w > 0
