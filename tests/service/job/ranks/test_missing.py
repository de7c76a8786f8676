"""The missing ranks compared with a plain dictionary of them."""

from hypothesis import given
from hypothesis import strategies as st

from perseus.service.domain.specification import Parallelism
from perseus.service.job.ranks.missing import MissingRanks

PLACES = list(Parallelism(2, 2, 2).all_coordinates())


@given(st.lists(st.tuples(st.sampled_from(PLACES), st.booleans(), st.booleans())))
def test_the_first_and_since_when_are_those_of_a_plain_search(steps: list[tuple[object, bool, bool]]) -> None:
    missing = MissingRanks(PLACES, 0.0)
    expected = dict.fromkeys(PLACES, 0.0)
    for number, (place, is_missing, is_looked_at) in enumerate(steps, start=1):
        assert place in PLACES
        if is_missing:
            missing.miss(place, float(number))
            expected.setdefault(place, float(number))
        else:
            missing.find(place)
            expected.pop(place, None)
        assert len(missing) == len(expected)
        if is_looked_at:
            first = min(expected, default=None)
            assert missing.first() == (None if first is None else (first, expected[first]))
