"""Messages that are made once from a value and sent to many."""

from perseus.service.api.memo import Memo
from perseus.v1 import rank_pb2


def test_a_message_is_made_once_per_value_and_only_the_latest_are_kept() -> None:
    made: list[tuple[int, ...]] = []

    def make(value: tuple[int, ...]) -> rank_pb2.RankCoordinates:
        made.append(value)
        return rank_pb2.RankCoordinates(pipeline=value[0])

    kept = Memo(make, limit=2)
    values = [(number,) for number in range(3)]
    assert kept.of(values[0]) is kept.of(values[0])
    assert kept.of(values[1]).pipeline == 1
    assert made == values[:2]
    assert kept.of(values[2]).pipeline == 2
    assert kept.of(values[1]).pipeline == 1
    assert made == values
    assert kept.of(values[0]).pipeline == 0  # it was dropped before
    assert made == [*values, values[0]]


def test_equal_values_are_distinguished() -> None:
    def make(value: list[int]) -> rank_pb2.RankCoordinates:
        return rank_pb2.RankCoordinates(pipeline=len(value))

    kept = Memo(make, limit=8)
    assert kept.of([1]) is not kept.of([1])
