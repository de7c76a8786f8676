"""The highest iteration, compared with a search over the ranks."""

from hypothesis import given
from hypothesis import strategies as st

from perseus.service.job.ranks.counts import IterationCounts


@given(st.lists(st.tuples(st.integers(0, 4), st.one_of(st.none(), st.integers(-1, 6))), max_size=60))
def test_the_highest_is_that_of_the_present_ranks(moves: list[tuple[int, int | None]]) -> None:
    counts, at = IterationCounts(), dict[int, int]()
    for rank, iteration in moves:
        if rank in at:
            counts.move((at.pop(rank),), ())
        if iteration is not None:
            counts.move((), (iteration,))
            at[rank] = iteration
        assert counts.highest(9) == max(at.values(), default=-1)
        assert counts.highest(3) == max((each for each in at.values() if each <= 3), default=-1)
        falling = sorted(at.values(), reverse=True)
        for rank_count in range(1, 6):
            expected = falling[rank_count - 1] if rank_count <= len(falling) else -1
            assert counts.reached_by(rank_count) == expected
