"""The next problem: fair by the time each job has had, oldest first among equals."""

from hypothesis import given
from hypothesis import strategies as st

from perseus.service.solving.fair_queue import FairQueue


def served(queue: FairQueue, costs_s: dict[str, float], turns: int) -> list[str]:
    """Queue each job again at once after its turn; return the jobs in the order of their turns."""
    for key in costs_s:
        queue.put(key)
    order = []
    for _ in range(turns):
        taken = queue.take(0.0)
        assert taken is not None
        order.append(taken)
        queue.end(taken, costs_s[taken])
        queue.put(taken)
    return order


def test_equal_jobs_take_turns() -> None:
    assert served(FairQueue(), {"a": 1.0, "b": 1.0, "c": 1.0}, 6) == ["a", "b", "c", "a", "b", "c"]


def test_an_idle_job_saves_up_no_credit() -> None:
    queue = FairQueue()
    served(queue, {"a": 5.0, "b": 5.0}, 20)
    queue.put("idle")
    order = []
    for _ in range(4):
        key = queue.take(0.0)
        assert key is not None
        order.append(key)
        queue.end(key, 5.0)
        queue.put(key)
    assert order.count("idle") <= 2


def test_a_job_that_is_not_ready_makes_way() -> None:
    queue = FairQueue()
    queue.put("later", 5.0)
    queue.put("now")
    assert queue.next_ready_s() == 0.0
    assert queue.take(1.0) == "now"
    assert not queue.is_anybody_ready(1.0)
    assert queue.take(1.0) is None
    assert queue.next_ready_s() == 5.0
    assert queue.take(5.0) == "later"
    assert queue.next_ready_s() is None


def test_a_removed_job_gets_no_turn() -> None:
    queue = FairQueue()
    queue.put("a")
    queue.remove("a")
    queue.remove("a")
    assert queue.take(0.0) is None
    assert len(queue) == 0


@given(
    costs_s=st.dictionaries(st.sampled_from("abcdef"), st.floats(0.1, 100), min_size=2),
    turns=st.integers(1, 200),
)
def test_always_waiting_jobs_differ_by_at_most_their_longest_turns(
    costs_s: dict[str, float], turns: int
) -> None:
    order = served(FairQueue(), costs_s, turns)
    had_s = {key: order.count(key) * cost_s for key, cost_s in costs_s.items()}
    for one in had_s:
        for other in had_s:
            assert had_s[one] - had_s[other] <= costs_s[one] + costs_s[other] + 1e-6
