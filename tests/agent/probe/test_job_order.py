"""The registered order is the one that stages execute, at first and after a change."""

import logging

import pytest

from perseus.agent.link.computation import Computation, Kind
from perseus.agent.probe.attachment import Attachment
from perseus.agent.probe.changing_order import STABLE_AFTER
from perseus.agent.probe.exchange import ExecutedOrder, LocalExchange, decode_order, encode_order
from perseus.agent.probe.job_order import paths_through, table_if_any
from perseus.agent.probe.placement import Placement
from perseus.agent.probe.stage_work import StageWork
from tests.agent.marks_stub import ALONE, ORDER, OTHER, MarksStub, beside, train


def test_the_first_iteration_registers_the_job_as_it_was_executed(marks: MarksStub) -> None:
    attachment = Attachment(ALONE, marks, beside(OTHER), max_slowdown_percent=1.5)
    for _ in range(3):
        train(attachment)
    assert marks.registered == [
        {
            "pipeline_count": 3,
            "stage_count": 2,
            "tensor_count": 4,
            "schedule": [ORDER, OTHER.computations],
            "paths": [],
            "max_slowdown_percent": 1.5,
            "stage_work": [],
            "stage_layers": [],
            "waits": False,
        }
    ]
    iteration = [
        ("begin_iteration",),
        ("begin", Kind.FORWARD, 0, 0),
        ("end", Kind.FORWARD, 0, 0),
        ("begin", Kind.BACKWARD, 0, 0),
        ("end", Kind.BACKWARD, 0, 0),
        ("end_iteration",),
    ]
    assert marks.calls == [*iteration, ("register",), *iteration, *iteration]


@pytest.mark.parametrize(
    "place",
    [
        Placement(pipeline=0, pipeline_count=2, stage=1, stage_count=2),
        Placement(pipeline=1, pipeline_count=2, stage=0, stage_count=2),
        Placement(pipeline=0, pipeline_count=2, stage=0, stage_count=2, tensor=1, tensor_count=2),
    ],
)
def test_every_rank_declares_its_pipelines_order(marks: MarksStub, place: Placement) -> None:
    other = ExecutedOrder(1 - place.stage, OTHER.computations)
    train(Attachment(place, marks, beside(other)))
    (message,) = marks.registered
    in_order = [ORDER, OTHER.computations] if place.stage == 0 else [OTHER.computations, ORDER]
    assert message["schedule"] == in_order


def test_an_iteration_that_was_not_executed_whole_is_not_registered(marks: MarksStub) -> None:
    attachment = Attachment(ALONE, marks, beside(OTHER))
    attachment.begin_iteration()
    attachment.begin(Kind.FORWARD, 7)
    train(attachment)  # the step raised, and was tried again
    assert marks.registered[0]["schedule"][0] == ORDER


def test_a_table_that_differs_from_the_executed_order_is_ignored(
    marks: MarksStub, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    train(Attachment(ALONE, marks, beside(OTHER), table=[*ORDER, Computation(Kind.FORWARD, 1)]))
    assert "computation 2: the framework's table has FORWARD 1.0, None was executed" in caplog.text
    assert marks.registered[0]["schedule"][0] == ORDER


def test_every_stages_work_is_registered(marks: MarksStub) -> None:
    other = ExecutedOrder(1, ORDER, work="one", layer_counts=(9,))
    train(Attachment(ALONE, marks, beside(other), work=lambda: StageWork("another", (12,))))
    assert [each["stage_work"] for each in marks.registered] == [["another", "one"]]
    assert [each["stage_layers"] for each in marks.registered] == [[(12,), (9,)]]


@pytest.mark.parametrize("counts", [(), (6, 6)])
def test_layers_that_are_not_known_for_every_chunk_are_not_registered(
    marks: MarksStub, counts: tuple[int, ...]
) -> None:
    other = ExecutedOrder(1, ORDER, work="one", layer_counts=counts)
    train(Attachment(ALONE, marks, beside(other), work=lambda: StageWork("another", (12,))))
    assert [each["stage_layers"] for each in marks.registered] == [[]]


def test_unknown_work_does_not_end_marking(marks: MarksStub) -> None:
    def work() -> StageWork:
        raise AttributeError("no parameters")

    train(Attachment(ALONE, marks, beside(ExecutedOrder(1, ORDER, work="9 layers")), work=work))
    assert [each["stage_work"] for each in marks.registered] == [["", "9 layers"]]


def test_no_rank_registers_a_stage_that_could_not_be_followed(
    marks: MarksStub, caplog: pytest.LogCaptureFixture
) -> None:
    attachment = Attachment(ALONE, marks, beside(ExecutedOrder(1, (), lost="no fwd_chunk_id")))
    train(attachment)
    train(attachment)
    assert not marks.registered
    assert marks.calls[-1] == ("close",)
    assert caplog.messages == [
        "no longer marked, training continues at stock clocks: stage 1: no fwd_chunk_id"
    ]


def test_all_stages_learn_which_one_gave_up_and_why(caplog: pytest.LogCaptureFixture) -> None:
    exchange = LocalExchange()
    stages = [Attachment(Placement(0, 1, stage, 3), MarksStub(), exchange) for stage in range(3)]
    for attachment in stages[:2]:
        train(attachment)
    stages[2].ask(failed)
    for _ in range(2):
        for attachment in stages:
            train(attachment)
    why = "no longer marked, training continues at stock clocks: "
    assert caplog.messages == [f"{why}disk full", f"{why}stage 2: disk full", f"{why}stage 2: disk full"]


def failed() -> None:
    raise OSError("disk full")


def test_no_rank_waits_for_a_stage_whose_iteration_fails(marks: MarksStub) -> None:
    exchange = LocalExchange()
    other = MarksStub()
    first = Attachment(Placement(0, 1, 0, 2), marks, exchange)
    second = Attachment(Placement(0, 1, 1, 2), other, exchange)
    for _ in range(3):
        train(first)
        second.begin_iteration()  # its step raises, and the trainer continues
    assert not marks.registered
    for attachment in (second, first, second):
        train(attachment)
    assert [each["schedule"] for each in marks.registered + other.registered] == 2 * [[ORDER, ORDER]]


def test_polling_for_a_missing_order_ends(marks: MarksStub, caplog: pytest.LogCaptureFixture) -> None:
    attachment = Attachment(ALONE, marks, LocalExchange())
    for _ in range(30):
        train(attachment)
    assert caplog.messages == [
        "no longer marked, training continues at stock clocks: stage 1: its order is missing"
    ]
    assert marks.calls[-1] == ("close",)


def test_a_table_that_fails_is_not_compared() -> None:
    def make() -> list[Computation]:
        raise AttributeError("no _step_to_micro_batch")

    assert table_if_any(make) is None
    assert table_if_any(lambda: ORDER) == ORDER


def test_a_failing_exchange_does_not_raise_into_training(
    marks: MarksStub, caplog: pytest.LogCaptureFixture
) -> None:
    meeting = Meeting()
    meeting.failure = ConnectionError("no network")
    train(Attachment(ALONE, marks, meeting))
    assert "no network" in caplog.text


def test_paths_follow_the_chunks_positions_in_the_model() -> None:
    v_shaped = [ExecutedOrder(0, (), (0, 3)), ExecutedOrder(1, (), (1, 2))]
    assert paths_through(v_shaped) == [[(0, 0), (1, 0), (1, 1), (0, 1)]]
    assert paths_through([ExecutedOrder(0, ()), ExecutedOrder(1, ())]) == []
    with pytest.raises(ValueError, match="chunk positions: expected each once, found 1 on stage 0 and on"):
        paths_through([ExecutedOrder(0, (), (0, 1)), ExecutedOrder(1, (), (1, 2))])


class Meeting(LocalExchange):
    """Posts orders as texts, like a store, or fails."""

    failure: Exception | None = None

    def post(self, name: str, order: ExecutedOrder) -> None:
        if self.failure is not None:
            raise self.failure
        super().post(name, decode_order(encode_order(order)))


LONGER = (*ORDER, Computation(Kind.FORWARD, 1), Computation(Kind.BACKWARD, 1))


def two_stages(meeting: Meeting) -> list[tuple[Attachment, MarksStub]]:
    """Both stages of a pipeline; the first iteration has registered them."""
    stages = []
    for stage in (0, 1):
        marks = MarksStub()
        place = Placement(0, 1, stage, 2)
        stages.append((Attachment(place, marks, meeting, work=lambda: StageWork("12 layers")), marks))
    for _ in range(2):  # the first one finds the order that the other has posted since
        for attachment, _ in stages:
            train(attachment)
    for _, marks in stages:
        assert [each["schedule"] for each in marks.registered] == [[ORDER, ORDER]]
    return stages


def test_a_changed_order_is_logged_at_once_and_registered_when_stable(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stages = two_stages(Meeting())
    for iteration in range(STABLE_AFTER):
        assert all(len(marks.registered) == 1 for _, marks in stages), iteration
        for attachment, _ in stages:
            train(attachment, LONGER)
        assert caplog.messages == [
            "stage 0 executes 2 microbatches (4 computations) instead of 1 (2): "
            "these iterations run at stock clocks until the new order is stable and registered"
        ]
    for attachment, _ in stages:
        train(attachment, LONGER)  # the first one finds the order that the other has posted since
    for _, marks in stages:
        first, second = marks.registered
        assert second == {**first, "schedule": [LONGER, LONGER]}
    for attachment, marks in stages:
        train(attachment, LONGER)
        assert len(marks.registered) == 2, "it is as registered"


def test_single_iterations_that_differ_are_not_registered() -> None:
    stages = two_stages(Meeting())
    for _ in range(3):
        for order in [LONGER] * (STABLE_AFTER - 1) + [ORDER]:
            for attachment, _ in stages:
                train(attachment, order)
    assert all(len(marks.registered) == 1 for _, marks in stages)


def test_an_alternating_job_is_registered_more_and_more_rarely() -> None:
    stages = two_stages(Meeting())
    for _ in range(32):
        for order in (LONGER, ORDER):
            for _ in range(STABLE_AFTER):
                for attachment, _ in stages:
                    train(attachment, order)
    assert len(stages[0][1].registered) == 2, "to begin with, and once"


def test_a_stage_alone_with_another_order_logs_it_and_no_rank_waits(caplog: pytest.LogCaptureFixture) -> None:
    stages = two_stages(Meeting())
    for _ in range(60):
        for (attachment, _), order in zip(stages, (LONGER, ORDER), strict=True):
            train(attachment, order)
    assert all(len(marks.registered) == 1 for _, marks in stages)
    assert caplog.messages[1:] == [
        "stage 0 executes another order and other stages of its pipeline do not: "
        "it is not registered and runs at stock clocks"
    ]


def test_a_failing_store_ends_following_but_not_marking(caplog: pytest.LogCaptureFixture) -> None:
    meeting = Meeting()
    stages = two_stages(meeting)
    meeting.failure = ConnectionError("the store is gone")
    for _ in range(2 * STABLE_AFTER):
        for attachment, _ in stages:
            train(attachment, LONGER)
    assert caplog.text.count("other orders run at stock clocks until the training is restarted: the") == 2
    for _, marks in stages:
        assert marks.calls[-1] == ("end_iteration",)
        assert ("close",) not in marks.calls


def test_shorter_iterations_are_other_orders_too() -> None:
    stages = two_stages(Meeting())
    for _ in range(STABLE_AFTER + 1):
        for attachment, _ in stages:
            train(attachment, ORDER[:1])
    assert [each["schedule"] for each in stages[0][1].registered] == [[ORDER] * 2, [ORDER[:1]] * 2]
