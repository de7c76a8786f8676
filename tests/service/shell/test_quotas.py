"""The resources of each principal: counted up and down, in any order, and apart from others."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.service.domain.errors import LimitReachedError
from perseus.service.domain.limits import Limits
from perseus.service.shell.quotas import Quotas
from tests.service.service_fakes import make_spec

LIMITS = Limits(limit_streams=3, limit_solves=2, limit_jobs=3, limit_ranks=10, limit_computations=60)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["stream", "solve", "ledger listing"]), st.sampled_from("ab")),
            st.tuples(st.just("end"), st.integers(0, 20)),
        ),
        max_size=60,
    )
)
def test_counts_match_the_open_uses(steps: list[tuple[str, str | int]]) -> None:
    quotas = Quotas(LIMITS, lambda: 0.0)
    of_kind: dict[str, Callable[[str], AbstractContextManager[object]]] = {
        "stream": quotas.stream,
        "solve": quotas.solve,
        "ledger listing": quotas.listing,
    }
    open_: list[tuple[str, str, ExitStack]] = []
    for kind, what in steps:
        if isinstance(what, int):
            if open_:
                open_.pop(what % len(open_))[2].close()
            continue
        count = sum((one, name) == (kind, what) for one, name, _ in open_)
        stack = ExitStack()
        maximum = LIMITS.limit_streams if kind == "stream" else LIMITS.limit_solves
        if count < maximum:
            stack.enter_context(of_kind[kind](what))
            open_.append((kind, what, stack))
            continue
        with pytest.raises(LimitReachedError) as caught:
            stack.enter_context(of_kind[kind](what))
        assert caught.value.metadata == {
            "principal": what, "what": f"{kind}s at once", "limit": str(maximum), "found": str(maximum + 1)
        }  # fmt: skip


def test_a_principals_jobs_count_together() -> None:
    quotas = Quotas(LIMITS, lambda: 0.0)
    two = make_spec(pipelines=1, stages=2, microbatches=2)  # of 2 ranks and 8 computations
    quotas.check_job("a", two, [two, two])
    for others, what in (
        ([two, two, two], "4 including this one"),
        ([make_spec(pipelines=3, stages=3, microbatches=1)], "10 ranks, found 11"),
        ([make_spec(pipelines=1, stages=2, microbatches=14)], "60 computations, found 64"),
    ):
        with pytest.raises(LimitReachedError, match=what):
            quotas.check_job("a", two, others)


def test_a_stream_keeps_its_own_rate_and_its_principals() -> None:
    now_s = 10.0
    quotas = Quotas(Limits(limit_messages_per_s=100, limit_stream_messages_per_s=20), lambda: now_s)
    with ExitStack() as stack:
        streams = [stack.enter_context(quotas.stream("a")) for _ in range(10)]
        other = stack.enter_context(quotas.stream("b"))
        # Twenty at once, and then each stream at its own rate.
        assert [streams[0].take() for _ in range(22)][19:] == pytest.approx([0.0, 0.05, 0.1])
        # The other streams of its principal share the rest of a hundred; after that all wait.
        for stream in streams[1:5]:
            stream.take(19)
        assert streams[5].take(2) == pytest.approx(0.0)
        assert streams[6].take(10) == pytest.approx(0.1)
        assert other.take() == 0.0
        now_s += 60.0
        assert streams[6].take() == streams[0].take() == 0.0
