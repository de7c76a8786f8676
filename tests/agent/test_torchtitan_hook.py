"""The hook into torchtitan's trainers, with a stand-in; tests/frameworks uses the real ones."""

from types import SimpleNamespace
from typing import Any

import pytest

from perseus.agent.probe.attachment import Attachment
from perseus.agent.probe.placement import Placement
from perseus.agent.torchtitan import place_of, split_arguments, wrap_trainer
from tests.agent.marks_stub import MarksStub, attached


class Trainer:
    """Trains nothing."""

    def train(self, steps: int, *, fails: bool = False) -> str:
        if fails:
            raise RuntimeError("out of data")
        return f"{steps} steps"


def wrapped(marks: MarksStub) -> Any:
    """A fresh wrapped class, and a subclass of it."""
    trainer_class = type("Trainer", (Trainer,), {"train": Trainer.train})
    wrap_trainer(trainer_class, lambda _: attached(marks))
    return type("Derived", (trainer_class,), {})


def test_any_trainer_is_attached_while_it_trains_and_finishes_unless_it_fails() -> None:
    marks = MarksStub()
    assert wrapped(marks)().train(3) == "3 steps"
    assert marks.calls == [("finish",), ("close",)]
    marks.calls.clear()
    with pytest.raises(RuntimeError, match="out of data"):
        wrapped(marks)().train(3, fails=True)
    assert marks.calls == [("close",)]


def refused(_: object) -> Attachment:
    raise ValueError("no pipeline")


def test_a_trainer_that_cannot_be_attached_trains_as_before(caplog: pytest.LogCaptureFixture) -> None:
    trainer_class = type("Trainer", (Trainer,), {"train": Trainer.train})
    wrap_trainer(trainer_class, refused)
    assert trainer_class().train(3) == "3 steps"
    assert caplog.messages == ["not attached, training continues at stock clocks: no pipeline"]
    assert (caplog.records[0].levelname, caplog.records[0].exc_info) == ("WARNING", None), "in one line"


def test_wrapping_twice_is_refused() -> None:
    trainer_class = wrapped(MarksStub())
    with pytest.raises(ValueError, match="called once"):
        wrap_trainer(trainer_class, lambda _: None)  # type: ignore[arg-type,return-value]


def dims(**sizes: int) -> Any:
    return SimpleNamespace(**{"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, **sizes})


def test_places_are_counted_as_torchtitan_lays_its_meshes_out() -> None:
    """Pipelines are the replicas and shards, stages vary slowest, and `cp` and `tp` share a stage."""
    of = dims(pp=2, dp_replicate=2, dp_shard=3, cp=2, tp=2)
    found = [place_of(of, rank, "GPU-1") for rank in range(48)]
    assert found == [
        Placement(replicate * 3 + shard, 6, stage, 2, cp * 2 + tp, 4, "GPU-1")
        for stage in range(2)
        for replicate in range(2)
        for shard in range(3)
        for cp in range(2)
        for tp in range(2)
    ]
    with pytest.raises(ValueError, match="expected a rank below 48, found 48"):
        place_of(of, 48, "GPU-1")


def test_our_arguments_are_split_off() -> None:
    ours, theirs = split_arguments(
        [
            *("--module", "llama3", "--perseus.job-id=llama"),
            *("--training.steps", "5", "--perseus.max-slowdown-percent", "2"),
        ]
    )
    assert (ours.job_id, ours.max_slowdown_percent) == ("llama", 2.0)
    assert theirs == ["--module", "llama3", "--training.steps", "5"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--module", "llama3"], "--perseus.job-id"),
        (["--perseus.job-id=x", "--perseus.job=y"], "found --perseus.job=y"),
    ],
)
def test_mistakes_in_our_arguments_are_reported(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        split_arguments(arguments)
    assert message in capsys.readouterr().err
