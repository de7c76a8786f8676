"""A rank at another iteration keeps all its other fields."""

from dataclasses import fields, replace
from typing import Any

from perseus.service.domain.model import Rank


def test_a_rank_at_another_iteration_keeps_all_else() -> None:
    values: dict[str, Any] = {field.name: object() for field in fields(Rank)}
    rank = Rank(**values)
    expected = replace(rank, iteration=7, clock_event_reasons=4)
    assert rank.at(7, 4) == expected
