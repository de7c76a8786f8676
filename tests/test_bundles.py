"""Messages of a stream in bundles: each once, in order, within the bounds."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.bundles import MAX_MESSAGES, bundled, encoded_bundles
from perseus.v1 import agent_service_pb2 as wire


def request(number: int, size: int = 0) -> wire.ConnectRequest:
    return wire.ConnectRequest(goodbye=wire.Goodbye(reason=f"{number} {'x' * size}"))


@given(sizes=st.lists(st.integers(0, 300), max_size=600), max_bytes=st.sampled_from([0, 1, 200, 2000, 2**20]))
def test_every_message_comes_once_in_order_and_no_bundle_is_too_large(
    sizes: list[int], max_bytes: int
) -> None:
    messages = [request(number, size) for number, size in enumerate(sizes)]
    found = list(bundled(messages, max_bytes))
    inner = [[*each.bundle.messages] if each.HasField("bundle") else [each] for each in found]
    assert [each for some in inner for each in some] == messages
    for whole, some in zip(found, inner, strict=True):
        assert whole.HasField("bundle") == (len(some) > 1)
        assert len(some) == 1 or whole.ByteSize() <= max_bytes
        assert len(some) <= MAX_MESSAGES
    for before, after in pairwise(inner):  # none could have held the next message, too
        whole = wire.ConnectRequest(bundle=wire.ConnectRequestBundle(messages=[*before, after[0]]))
        assert len(before) == MAX_MESSAGES or whole.ByteSize() + 2 * len(before) + 12 > max_bytes


@pytest.mark.parametrize("max_bytes", [0, 2**20])
def test_a_single_message_is_no_bundle(max_bytes: int) -> None:
    assert list(bundled([request(1)], max_bytes)) == [request(1)]
    assert list(bundled([], max_bytes)) == []


@given(sizes=st.lists(st.integers(0, 20_000), max_size=30), max_bytes=st.sampled_from([0, 1, 200, 2**17]))
def test_the_coordinators_messages_are_bundled_encoded(sizes: list[int], max_bytes: int) -> None:
    answers = [wire.ConnectResponse(drain=wire.Drain(reason="x" * size)) for size in sizes]
    encoded = [each.SerializeToString() for each in answers]
    found = [wire.ConnectResponse.FromString(data) for data in encoded_bundles(encoded, max_bytes)]
    assert found == list(bundled(answers, max_bytes))
