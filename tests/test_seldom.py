"""What is told once in a while: each kind, with what was left out, and in bounded memory."""

from hypothesis import given
from hypothesis import strategies as st

from perseus.seldom import Seldom


def test_the_like_is_due_again_after_the_period_with_how_often_it_was_left_out() -> None:
    now_s = 0.0
    seldom = Seldom(10.0, 4, lambda: now_s)
    assert seldom.due("a", 1) == {}
    assert [seldom.due("a", 1), seldom.due("a", 1)] == [None, None]
    assert seldom.due("a", 2) == {}, "another kind"
    now_s = 10.0
    assert seldom.due("a", 1) == {"left_out": 2}
    assert seldom.due("a", 1) is None
    seldom.forget()
    assert seldom.due("a", 1) == {}


@given(kinds=st.lists(st.integers(0, 9), max_size=60), most=st.integers(1, 5))
def test_no_more_kinds_are_remembered_and_the_oldest_makes_room(kinds: list[int], most: int) -> None:
    seldom = Seldom(10.0, most, lambda: 0.0)
    remembered: list[int] = []
    for kind in kinds:
        is_new = kind not in remembered
        assert (seldom.due(kind) is not None) == is_new
        if is_new:
            remembered = [*remembered, kind][-most:]
