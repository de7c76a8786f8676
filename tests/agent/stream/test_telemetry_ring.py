import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.agent.link.computation import Computation, Kind, Rank
from perseus.agent.rank.messages import ComputationRow, Telemetry
from perseus.agent.stream.telemetry import TelemetryRing, size_bytes

TELEMETRY = Telemetry(Rank("job", 0, 0, 0), (), (), None, None)


def filled(count: int, *, capacity: int = 8, window: int = 4) -> TelemetryRing:
    ring = TelemetryRing(capacity, window)
    for _ in range(count):
        ring.append(TELEMETRY)
    return ring


def sequences(ring: TelemetryRing) -> list[int]:
    return [batch.sequence for batch in ring.sendable()]


def test_batches_are_sent_once_a_window_at_a_time_and_after_a_reconnect_if_unacknowledged() -> None:
    ring = filled(2)
    assert [sequences(ring), sequences(ring)] == [[1, 2], []]
    for _ in range(4):
        ring.append(TELEMETRY)
    assert sequences(ring) == [3, 4]
    ring.acknowledge(3)
    assert sequences(ring) == [5, 6]
    ring.rewind()
    assert sequences(ring) == [4, 5, 6]


def test_a_full_ring_drops_the_oldest_and_counts() -> None:
    ring = filled(11)
    (batch, *_) = ring.sendable()
    assert (batch.sequence, batch.dropped_batch_count) == (4, 3)


def test_batches_never_sent_can_not_be_acknowledged() -> None:
    ring = filled(2)
    with pytest.raises(ValueError, match="expected an acknowledgement up to 2, found 3"):
        ring.acknowledge(3)


def test_a_refused_batch_is_dropped_counted_and_makes_room() -> None:
    ring = filled(6)
    assert sequences(ring) == [1, 2, 3, 4]
    assert ring.refuse(2) == 1
    assert ring.refuse(2) is None, "it is gone"
    assert ring.refuse(9) is None
    (batch,) = ring.sendable()
    assert (batch.sequence, batch.dropped_batch_count) == (5, 1)
    ring.acknowledge(3)
    ring.rewind()
    assert sequences(ring) == [4, 5, 6]


@given(
    st.lists(
        st.one_of(
            st.just("append"),
            st.just("send"),
            st.just("rewind"),
            st.tuples(st.just("ack"), st.floats(0, 1)),
            st.tuples(st.just("refuse"), st.floats(0, 1)),
        )
    )
)
def test_only_counted_batches_are_lost(steps: list[str | tuple[str, float]]) -> None:
    """A coordinator that acknowledges batches in order receives all that were not dropped.

    Refused batches are dropped.
    """
    ring = TelemetryRing(capacity=8, window=4)
    appended = stored = sent = refused = 0
    got: set[int] = set()
    dropped = 0
    under_way: list[int] = []

    def send() -> None:
        nonlocal dropped, sent
        for batch in ring.sendable():
            under_way.append(batch.sequence)
            assert batch.sequence > stored
            dropped = batch.dropped_batch_count

    for step in [*steps, "rewind", *["send", ("ack", 1.0)] * 4]:
        match step:
            case "append":
                ring.append(TELEMETRY)
                appended += 1
            case "send":
                send()
                assert len(under_way) <= 4 + dropped
            case "rewind":
                under_way.clear()
                ring.rewind()
            case ("ack", float(share)):
                count = round(share * len(under_way))
                got.update(under_way[:count])
                if count:
                    stored = under_way[count - 1]
                    ring.acknowledge(stored)
                del under_way[:count]
            case ("refuse", float(share)) if under_way:
                sequence = under_way.pop(round(share * (len(under_way) - 1)))
                if ring.refuse(sequence) is not None:
                    refused += 1
    ring.append(TELEMETRY)
    appended += 1
    (last,) = ring.sendable()
    assert last.sequence == appended
    assert last.dropped_batch_count >= refused
    assert len(got) >= appended - 1 - last.dropped_batch_count


def large(row_count: int) -> Telemetry:
    row = ComputationRow(0, Computation(Kind.FORWARD, 0), 0.0, 0.1, None)
    return Telemetry(Rank("job", 0, 0, 0), (), (row,) * row_count, None, None)


def test_batches_of_a_ring_of_its_own_keep_their_numbers_and_count_on() -> None:
    other = Telemetry(Rank("other", 0, 0, 0), (), (), None, None)
    ring = filled(2)
    ring.append(other)
    ring.append(TELEMETRY)
    moved = ring.split(lambda telemetry: telemetry is other)
    assert (ring.jobs, moved.jobs) == ({"job"}, {"other"})
    assert (ring.batch_count, moved.batch_count) == (4, 0), "each batch is counted once"
    moved.append(other)
    ring.rewind()
    assert (sequences(ring), sequences(moved)) == ([1, 2, 4], [3, 5])
    moved.acknowledge(5)
    assert moved.kept_count == 0


def test_large_batches_are_fewer() -> None:
    ring = TelemetryRing(capacity=1000, window=1000, capacity_bytes=3 * size_bytes(large(1000)))
    for _ in range(10):
        ring.append(large(1000))
    assert sequences(ring) == [8, 9, 10]
    ring.acknowledge(9)
    ring.refuse(10)
    for _ in range(50):
        ring.append(TELEMETRY)
    kept = ring.sendable()
    assert len(kept) == 50, "acknowledged and refused batches take no room"
    assert kept[-1].dropped_batch_count == 8


def test_a_batch_larger_than_the_ring_is_kept_until_the_next() -> None:
    ring = TelemetryRing(capacity_bytes=1000)
    ring.append(large(1000))
    assert sequences(ring) == [1]
    ring.append(TELEMETRY)
    assert sequences(ring) == [2]
