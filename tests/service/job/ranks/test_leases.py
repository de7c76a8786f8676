"""Leases compared with a plain list of them; renewing them costs no memory."""

from hypothesis import given
from hypothesis import strategies as st

from perseus.service.job.ranks.leases import Leases

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
