"""The highest iteration, compared with a search over the ranks."""

from hypothesis import given
from hypothesis import strategies as st

from perseus.service.job.ranks.counts import IterationCounts


@given(st.lists(st.tuples(st.integers(0, 4), st.one_of(st.none(), st.integers(-1, 6))), max_size=60))
def test_the_highest_is_that_of_the_present_ranks(moves: list[tuple[int, int | None]]) -> None:
    counts, at = IterationCounts(), dict[int, int]()
    for rank, iteration in moves:
        if rank in at:
            counts.remove(at.pop(rank))
        if iteration is not None:
            counts.add(iteration)
            at[rank] = iteration
        assert counts.highest() == max(at.values(), default=-1)
