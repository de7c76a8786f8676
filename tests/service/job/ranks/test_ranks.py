"""Highest iterations, leases and missing ranks, each compared with a plain search."""

from hypothesis import given
from hypothesis import strategies as st

from perseus.service.domain.specification import Parallelism
from perseus.service.job.ranks.counts import IterationCounts
from perseus.service.job.ranks.leases import Leases
from perseus.service.job.ranks.missing import MissingRanks


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


LEASE_S = 10.0

steps = st.lists(
    st.tuples(st.sampled_from(["hear", "end", "expire"]), st.sampled_from("abcd"), st.floats(0, 20)),
    max_size=60,
)


@given(steps)
def test_leases_run_out_as_a_plain_list_of_them_would(some: list[tuple[str, str, float]]) -> None:
    leases, heard_s, now_s = Leases(LEASE_S), dict[str, float](), 0.0
    for what, instance_id, passed_s in some:
        now_s += passed_s
        match what:
            case "hear":
                leases.hear(instance_id, now_s)
                heard_s[instance_id] = now_s
            case "end":
                leases.end(instance_id)
                heard_s.pop(instance_id, None)
            case _:
                due = sorted(each for each, at_s in heard_s.items() if at_s + LEASE_S <= now_s)
                assert sorted(leases.expired(now_s)) == due
                for each in due:
                    del heard_s[each]
        leases.validate()
        assert leases.next_deadline_s() == min((at_s + LEASE_S for at_s in heard_s.values()), default=None)
        assert len(leases) == len(heard_s)
        for each, at_s in heard_s.items():
            assert leases.left_s(each, now_s) == max(0.0, at_s + LEASE_S - now_s)


def test_ended_leases_leave_nothing_behind() -> None:
    leases = Leases(LEASE_S)
    for turn in range(1000):
        leases.hear("again and again", float(turn))
        leases.end("again and again")
        leases.hear("always there", float(turn))
        leases.next_deadline_s()
    assert len(leases._heap) <= 12  # at most those of one lease's time


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
