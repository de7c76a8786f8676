"""Every schedule of every framework and version registers the order that it executes, and detaches cleanly.

Each trains a little, without agents: alone, and attached to a notebook, with evaluations between the
iterations where the framework has them. Losses are equal bit for bit.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("torch") is None:
    pytest.skip("torch is not installed; `make test-frameworks` has it", allow_module_level=True)

from perseus import solver
from perseus.agent.link.computation import Kind
from perseus.agent.probe.tested_versions import public
from tests.frameworks.cases import (
    MICROBATCHES,
    TWO_CHUNKS,
    Case,
    Orders,
    losses_in,
    notes_in,
    one_chunk,
    whole_model,
)
from tests.frameworks.trainers import TrainerTask
from tests.frameworks.versions import NEWEST_MEGATRON, NEWEST_TORCH, OTHER_MEGATRONS, skip_unless_there

pytestmark = [pytest.mark.slow("trains for real, with the framework"), pytest.mark.timeout(600)]

ITERATIONS = 3
# As in everyday_trainer, which imports the frameworks.
ACCUMULATED, EVERYDAY_ITERATIONS, SAVED_AFTER = 2, 4, 2
of_another_version = pytest.mark.nightly("another version than the installed one")

on_two = partial(Case, stage_weights=(1.0, 1.0), evaluate_every=1)
TORCH = {
    "GPipe": on_two("torch", "GPipe"),
    "1F1B": on_two("torch", "1F1B"),
    "interleaved 1F1B": on_two("torch", "Interleaved1F1B", chunk_count=2),
    "looped BFS": on_two("torch", "LoopedBFS", chunk_count=2),
    "interleaved zero-bubble": on_two("torch", "InterleavedZeroBubble", chunk_count=2),
    # torch can't evaluate these
    "ZBV": on_two("torch", "ZBVZeroBubble", chunk_count=2, evaluate_every=0),
    "DualPipeV": on_two("torch", "DualPipeV", chunk_count=2, evaluate_every=0),
}
MEGATRON = {
    "1F1B": on_two("megatron", "1f1b"),
    "1F1B by timers": on_two("megatron", "1f1b-timers"),
    "interleaved 1F1B": on_two("megatron", "interleaved", chunk_count=2),
}


def noted(folder: Path, cases: Mapping[str, Case], **more: Any) -> dict[str, list[dict[str, Any]]]:
    """Train alone and attached to a notebook, compare the losses, and return every rank's notes, by case.

    All cases have one trainer, which imports its framework once.
    """
    tasks = {
        name: [
            case.task(
                folder / name / how,
                iteration_count=ITERATIONS,
                is_noted=how == "noted",
                **more,
            )
            for how in ("alone", "noted")
        ]
        for name, case in cases.items()
    }
    log = next(iter(cases.values())).train(*(task for some in tasks.values() for task in some))
    assert "the framework's table has" not in log
    return {name: compared(*some) for name, some in tasks.items()}


def compared(alone: TrainerTask, attached: TrainerTask) -> list[dict[str, Any]]:
    """Compare the losses, and return every rank's notes."""
    losses = losses_in(Path(alone.folder))
    assert losses_in(Path(attached.folder)) == losses
    assert len({*losses[0]}) >= ITERATIONS, "it did train"
    notes = notes_in(Path(attached.folder))
    for rank in notes:
        for orders in (rank["registration"].get("orders", []), rank["iterations"]):
            orders[:] = [[tuple(identity) for identity in order] for order in orders]
    assert all(rank["is_whole"] and "finish" in rank["ends"] for rank in notes)
    return notes


def schedule_of(registration: dict[str, Any]) -> solver.Schedule:
    """Return the solver's schedule, which must be one that can be executed."""
    orders = tuple(
        tuple(
            solver.Computation(stage, solver.Kind[Kind(kind).name], microbatch, chunk)
            for kind, microbatch, chunk in order
        )
        for stage, order in enumerate(registration["orders"])
    )
    return solver.Schedule(orders, tuple(tuple(map(tuple, path)) for path in registration["paths"]))


@pytest.mark.parametrize("beside", [(), pytest.param((NEWEST_TORCH,), marks=of_another_version)], ids=str)
def test_torchs_schedules(beside: tuple[str, ...], tmp_path: Path) -> None:
    """The solver takes the orders, and marks follow them."""
    skip_unless_there(*beside)
    works = {}
    all_notes = noted(tmp_path, {name: replace(case, beside=beside) for name, case in TORCH.items()})
    for name, notes in all_notes.items():
        registration = notes[0]["registration"]
        kinds = {computation.kind for computation in schedule_of(registration).computations}
        is_split = name in ("interleaved zero-bubble", "ZBV", "DualPipeV")
        assert (solver.Kind.BACKWARD_WEIGHT in kinds) == is_split, name
        executed = [ITERATIONS * [order] for order in registration["orders"]]
        assert [rank["iterations"] for rank in notes] == executed, name
        assert {count for counts in registration["stage_layers"] for count in counts} == {1}, name
        works[name] = registration["stage_work"]
        assert all(re.fullmatch(r"\d+ parameters, [0-9a-f]{32}", work) for work in works[name]), works
        assert len({*works[name]}) == 2, "one has the embedding, the other one the head"
    assert works["GPipe"] == works["1F1B"], "the same work in whatever order"
    check_v(all_notes["ZBV"][0]["registration"])


def check_v(registration: dict[str, Any]) -> None:
    """Check the path of a V, and the kinds that torch executes.

    The first chunk has no input whose gradient could be computed apart from that of its weights.
    """
    assert registration["paths"] == [[[0, 0], [1, 0], [1, 1], [0, 1]]]
    whole = (Kind.FORWARD, Kind.BACKWARD)
    split = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    for stage, order in enumerate(registration["orders"]):
        assert sorted(order) == sorted(
            (int(kind), microbatch, chunk)
            for microbatch in range(MICROBATCHES)
            for chunk in range(2)
            for kind in (whole if (stage, chunk) == (0, 0) else split)
        )


@pytest.mark.parametrize(
    "folder",
    ["", *(pytest.param(folder, marks=of_another_version) for folder in (*OTHER_MEGATRONS, NEWEST_TORCH))],
)
def test_megatrons_schedules(folder: str, tmp_path: Path) -> None:
    """By all seams."""
    beside = (folder,) if folder else ()
    skip_unless_there(*beside)
    registered = {}
    all_notes = noted(tmp_path, {name: replace(case, beside=beside) for name, case in MEGATRON.items()})
    for name, notes in all_notes.items():
        chunk_count = MEGATRON[name].chunk_count
        expected = one_chunk(2) if chunk_count == 1 else TWO_CHUNKS
        registered[name] = notes[0]["registration"]
        assert (registered[name]["orders"], registered[name]["paths"]) == (expected, []), name
        assert [rank["iterations"] for rank in notes] == [ITERATIONS * [order] for order in expected], name
        has_layers = name != "1F1B by timers"
        assert not has_layers or registered[name]["stage_layers"] == 2 * [[1] * chunk_count], name
    version = folder.removeprefix("megatron-core-") if folder in OTHER_MEGATRONS else ""
    ran = next(run[1] for run in notes[0]["ran"] if run[0] == "megatron")
    assert ran == public(version or metadata.version("megatron-core"))
    works = [registered[name]["stage_work"] for name in ("1F1B", "interleaved 1F1B")]
    assert all("parameters, " in work for some in works for work in some), works
    assert works[0] != works[1], "other chunks"


@of_another_version
def test_the_loop_of_a_megatron_release_is_wrapped(tmp_path: Path) -> None:
    """Releases after 0.16 have it; it trains only on GPUs."""
    skip_unless_there(NEWEST_MEGATRON)
    case = Case("megatron", "release", beside=[NEWEST_MEGATRON])
    case.train(case.task(tmp_path / "release"))


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (on_two("deepspeed", "1f1b"), one_chunk(2)),
        (on_two("torchtitan", "1F1B"), one_chunk(2)),
        pytest.param(
            on_two("torchtitan", "Interleaved1F1B", beside=(NEWEST_TORCH,)),
            TWO_CHUNKS,
            marks=of_another_version,
        ),
    ],
    ids=["DeepSpeed, 1F1B", "torchtitan 0.2, 1F1B", "torchtitan 0.3, interleaved 1F1B"],
)
def test_schedules_of_whole_trainers(case: Case, expected: Orders, tmp_path: Path) -> None:
    skip_unless_there(*case.beside)
    notes = noted(tmp_path, {"": case})[""]
    assert notes[0]["registration"]["orders"] == expected
    assert all("parameters, " in work for work in notes[0]["registration"]["stage_work"])
    assert [rank["iterations"] for rank in notes] == [ITERATIONS * [order] for order in expected]


EVERYDAY = ("transformers ddp", "lightning ddp", "accelerate ddp")
OTHERS = ("transformers fsdp2", "lightning fsdp2", "accelerate fsdp2", "pytorch_lightning ddp")


@pytest.mark.parametrize(
    "names",
    [EVERYDAY, pytest.param(OTHERS, marks=pytest.mark.nightly("variants of trainers that CI runs"))],
    ids=", ".join,
)
def test_everyday_trainers(names: Sequence[str], tmp_path: Path) -> None:
    """With accumulation, evaluation, checkpoints, bfloat16, from a checkpoint, and through an exception."""
    cases = {name: Case("everyday", name, pipeline_count=2) for name in names}
    for name, notes in noted(tmp_path, cases, job_id="job").items():
        is_resumed = name in ("transformers ddp", "accelerate ddp")  # Lightning's ends when it saves
        count = EVERYDAY_ITERATIONS + (EVERYDAY_ITERATIONS - SAVED_AFTER) * is_resumed
        for rank in notes:
            assert rank["registration"]["orders"] == whole_model(ACCUMULATED), name
            assert rank["iterations"] == count * whole_model(ACCUMULATED), name
    failed = [
        case.task(tmp_path / name / "failed", is_noted=True, planted="failure")
        for name, case in cases.items()
    ]
    cases[names[0]].train(*failed)
    for task in failed:
        again = ["finish", "close"] if task.schedule.startswith("transformers") else []
        ends = [rank["ends"] for rank in notes_in(Path(task.folder))]
        assert ends == 2 * [["close", *again]], "a failed rank has not finished its training"
