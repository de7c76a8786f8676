"""Batches of telemetry that arrive together lead where they lead one by one."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby

import pytest

from perseus.service.domain.commands import Command, Refine, Solve, Store
from perseus.service.domain.errors import CoordinatorError, InvalidFieldError
from perseus.service.domain.inputs import Input, Refined, Solved, TelemetryArrived
from perseus.service.domain.records import IterationRows
from perseus.service.domain.telemetry import ComputationColumns, TelemetryBatch
from perseus.service.job import views
from perseus.service.job.machine import JobMachine, replay
from perseus.service.job.recording import Begun
from perseus.service.job.run import Run
from tests.service.job.machine_bench import FIRST, planned, straggler
from tests.service.job.test_recording import recording_of, solve

Step = tuple[Input, float, float, list[Command] | CoordinatorError]


def shown(answer: list[Command] | CoordinatorError) -> object:
    """Return what can be compared: some commands and records are only equal to themselves."""
    if isinstance(answer, CoordinatorError):
        return str(answer)
    return [_shown(each.record if isinstance(each, Store) else each) for each in answer]


def _shown(output: object) -> object:
    match output:
        case IterationRows():
            return output.rank, output.rows, output.closed_through
        case Solve() | Refine():
            return type(output)
    return output


@cache
def life() -> tuple[Begun, list[Step], JobMachine]:
    """A run's inputs, each with the times of its arrival and its commands, or why it was refused."""
    cluster = planned()
    cluster.send(straggler())
    cluster.iterate(4)
    rank = cluster.ranks[FIRST]
    rank.begin()
    unmeasured = rank.end(0.8)
    odd = unmeasured.batch._replace(
        computations=unmeasured.batch.computations._replace(clock_mhz=[1] * len(rank.order))
    )
    with pytest.raises(InvalidFieldError):
        cluster.handle(TelemetryArrived(rank.place, rank.instance_id, odd))
    cluster.send(unmeasured)
    recording = recording_of(cluster.machine)
    (_, machine, _), *replayed = replay(recording, solve)
    times_s = [(now_s, wall_time_s) for _, now_s, wall_time_s in recording.inputs]
    assert isinstance(recording.beginning, Begun)
    steps: list[Step] = [
        (event, *at_s, answer)
        for (event, _, answer), at_s in zip(replayed, times_s, strict=True)
        if event is not None
    ]
    return recording.beginning, steps, machine


def shortened(batch: TelemetryBatch) -> TelemetryBatch:
    """Return the batch with short rows, where it may have them; begins only in every fourth iteration."""
    if [*batch.iterations.is_regular] != [True] or len(set(batch.computations.iteration)) != 1:
        return batch
    begin_s = batch.computations.begin_s if batch.iterations.iteration[0] % 4 == 0 else ()
    rows = batch.computations._replace(iteration=(), kind=(), microbatch=(), chunk=(), begin_s=begin_s)
    return batch._replace(computations=rows)


class Again:
    """Another machine for the same run, which takes the steps in any grouping and has to answer alike."""

    def __init__(self, begun: Begun) -> None:
        run = Run(
            begun.spec, begun.run_number, begun.rules, begun.epoch, begun.create_time_s, begun.created_s
        )
        self.machine = JobMachine(run)
        self.machine.register(begun.registration, begun.version)
        self._asked: Solve | Refine | None = None

    def take(self, together: Sequence[Step]) -> None:
        """Take a step, or the telemetry of several at once."""
        event, now_s, wall_time_s, _ = together[0]
        answers: list[list[Command] | CoordinatorError]
        if isinstance(event, TelemetryArrived):
            telemetry = [each for each, *_ in together if isinstance(each, TelemetryArrived)]
            answers = list(self.machine.handle_telemetry(telemetry, now_s, wall_time_s))
        else:
            if self._asked is not None and isinstance(event, Solved | Refined):
                event = solve(self._asked)  # an answer is to a request of the same machine
            answers = [self.machine.handle(event, now_s, wall_time_s)]
        for answer, (*_, expected) in zip(answers, together, strict=True):
            for command in answer if isinstance(answer, list) else ():
                self._asked = command if isinstance(command, Solve | Refine) else self._asked
            is_same = shown(answer) == shown(expected)  # pytest would show the problems to solve
            assert is_same, (event, now_s)


def test_short_rows_give_the_same_commands_and_the_same_timeline() -> None:
    begun, steps, alone = life()
    again, short_count = Again(begun), 0
    reported: dict[tuple[int, int], ComputationColumns] = {}
    for event, now_s, wall_time_s, expected in steps:
        given = event
        if isinstance(event, TelemetryArrived):
            given = replace(event, batch=shortened(event.batch))
            given.batch.check()
            short_count += given.batch.computations.is_short
            if (event.rank.pipeline, event.rank.tensor) == (0, 0):
                for iteration in event.batch.iterations.iteration:
                    reported[iteration, event.rank.stage] = event.batch.computations
        again.take([(given, now_s, wall_time_s, expected)])
    assert short_count > 50
    assert views.job(again.machine.run, is_full=True) == views.job(alone.run, is_full=True)
    shown_now = again.machine.run.timelines.latest(0)
    assert shown_now is not None
    assert shown_now.iteration % 4 == 0
    for stage, columns in enumerate(shown_now.stages):
        assert [*map(list, columns)] == [*map(list, reported[shown_now.iteration, stage])]


def test_short_rows_of_another_order_are_refused() -> None:
    cluster = planned()
    rank = cluster.ranks[FIRST]
    rank.begin()
    event = rank.end(0.8)
    rows = shortened(event.batch).computations
    fewer = rows._replace(duration_s=rows.duration_s[1:], clock_mhz=rows.clock_mhz[1:], begin_s=())
    with pytest.raises(InvalidFieldError, match=r"^computations\.duration_s: expected \d+ rows, as many"):
        cluster.handle(replace(event, batch=event.batch._replace(computations=fewer)))


@pytest.mark.parametrize("seed", range(4))
def test_any_grouping_gives_the_same_commands(seed: int) -> None:
    begun, steps, alone = life()
    dice, again, longest = random.Random(seed), Again(begun), 0
    for (is_telemetry, _), some in groupby(steps, lambda step: (type(step[0]) is TelemetryArrived, step[1])):
        rest = list(some)
        while rest:
            count = dice.randint(1, len(rest)) if is_telemetry else 1
            longest = max(longest, count)
            again.take(rest[:count])
            rest = rest[count:]
    again.machine.validate()
    assert longest > 1
    assert views.job(again.machine.run, is_full=True) == views.job(alone.run, is_full=True)
