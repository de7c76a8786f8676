"""Messages to agents: those that wait for a slow one stay few, and what goes to many is made once."""

import pytest

from perseus.service.api import outbox
from perseus.service.api.memo import Memo
from perseus.service.api.outbox import Outbox
from perseus.service.domain.errors import LeaseExpiredError, ReaderTooSlowError
from perseus.v1 import agent_service_pb2, rank_pb2
from perseus.v1.agent_service_pb2 import ConnectResponse


def offer(version: int) -> ConnectResponse:
    return ConnectResponse(plan_offer=agent_service_pb2.PlanOffer(version=version))


def accepted(job_id: str) -> ConnectResponse:
    return ConnectResponse(rank_accepted=agent_service_pb2.RankAccepted(job_id=job_id))


async def test_only_the_latest_offer_for_a_rank_waits_and_answers_go_first() -> None:
    box = Outbox()
    box.replace("rank 0", offer(1))
    box.replace("rank 1", offer(2))
    box.replace("rank 0", offer(3))
    box.enqueue(accepted("a"))
    box.enqueue(accepted("b"))
    assert await box.take() == ([accepted("a"), accepted("b"), offer(2), offer(3)], False)


async def test_an_ended_outbox_sends_nothing_and_raises_the_first_reason() -> None:
    box = Outbox()
    box.enqueue(accepted("a"))
    box.end(LeaseExpiredError(instance_id="x", lease_s=3))
    box.end(ReaderTooSlowError(limit=1))
    with pytest.raises(LeaseExpiredError, match="'x' was silent for longer than its lease of 3 s"):
        await box.take()


async def test_the_stream_of_an_agent_that_never_reads_answers_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbox, "BYTES_LIMIT", 1000)
    box = Outbox()
    while not box.ended.done():
        box.enqueue(accepted("a" * 63))
    assert len(box._queue) == 0
    for _ in range(3):  # nothing accumulates any more
        box.enqueue(accepted("b"))
        box.replace("rank 0", offer(1))
    assert (len(box._queue), len(box._latest)) == (0, 0)
    with pytest.raises(ReaderTooSlowError, match="more than 1000 unread bytes"):
        await box.take()


async def test_replaced_dropped_and_taken_messages_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "BYTES_LIMIT", 1000)
    box = Outbox()
    for version in range(1, 100):
        box.replace("acknowledgement", offer(version))
        box.replace(("job", version), offer(version))
        box.drop(("job", version))
        box.enqueue(accepted(str(version)))
        assert await box.take() == ([accepted(str(version)), offer(version)], False)
    waiting_count = 0
    while not box.ended.done():
        box.enqueue(accepted("a" * 63))
        waiting_count += 1
    assert waiting_count == 6, "as many as at first"


async def test_the_latest_acknowledgement_follows_the_answers() -> None:
    box = Outbox()
    box.acknowledge(1)
    for index in range(outbox._TAKE_BATCH + 1):
        box.enqueue(accepted(str(index)))
    box.acknowledge(2)
    first, _ = await box.take()
    assert first == [accepted(str(index)) for index in range(outbox._TAKE_BATCH)]
    (last, ack), _ = await box.take()
    assert isinstance(ack, ConnectResponse)
    assert (last, ack.telemetry_ack.sequence) == (accepted(str(outbox._TAKE_BATCH)), 2)
    box.end(ReaderTooSlowError(limit=1))
    box.acknowledge(3)
    assert box._acknowledged is None, "nobody will take it"


async def test_a_message_larger_than_the_whole_limit_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbox, "BYTES_LIMIT", 10)
    box = Outbox()
    box.enqueue(accepted("job"))
    assert await box.take() == ([accepted("job")], False)


async def test_many_messages_are_taken_a_few_at_a_time_in_their_order() -> None:
    box = Outbox()
    for index in range(100):
        box.enqueue(accepted(str(index)))
        box.replace(index, offer(index))
    box.close()
    taken, is_last = [], False
    while not is_last:
        messages, is_last = await box.take()
        assert len(messages) <= outbox._TAKE_BATCH
        taken += messages
    assert taken == [*(accepted(str(index)) for index in range(100)), *(offer(index) for index in range(100))]


def test_a_message_is_made_once_per_value_and_only_the_latest_are_kept() -> None:
    made: list[tuple[int, ...]] = []

    def make(value: tuple[int, ...]) -> rank_pb2.RankCoordinates:
        made.append(value)
        return rank_pb2.RankCoordinates(pipeline=value[0])

    kept = Memo(make, limit=2)
    values = [(number,) for number in range(3)]
    assert kept.of(values[0]) is kept.of(values[0])
    assert kept.of(values[1]).pipeline == 1
    assert made == values[:2]
    assert kept.of(values[2]).pipeline == 2
    assert kept.of(values[1]).pipeline == 1
    assert made == values
    assert kept.of(values[0]).pipeline == 0  # it was dropped before
    assert made == [*values, values[0]]


def test_equal_values_are_distinguished() -> None:
    def make(value: list[int]) -> rank_pb2.RankCoordinates:
        return rank_pb2.RankCoordinates(pipeline=len(value))

    kept = Memo(make, limit=8)
    assert kept.of([1]) is not kept.of([1])
