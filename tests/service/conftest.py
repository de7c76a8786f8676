"""What all tests of the coordinator share."""

import pytest

from perseus.service.job.planning import stock_blocks

REAL = stock_blocks.EARLY_COUNT, stock_blocks.SHARE


@pytest.fixture(autouse=True)
def no_stock_beside_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans stay in force in all tests but those of stock beside them."""
    monkeypatch.setattr(stock_blocks, "EARLY_COUNT", 0)
    monkeypatch.setattr(stock_blocks, "SHARE", 1e-9)


@pytest.fixture
def stock_beside_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are compared with stock beside them, as they really are."""
    early_count, share = REAL
    monkeypatch.setattr(stock_blocks, "EARLY_COUNT", early_count)
    monkeypatch.setattr(stock_blocks, "SHARE", share)
