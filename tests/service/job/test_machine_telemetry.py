"""Batches of telemetry that arrive together lead where they lead one by one."""

import random
from functools import cache
from itertools import chain, groupby

import pytest

from perseus.service.domain.commands import Command, Refine, Solve, Store
from perseus.service.domain.errors import CoordinatorError, InvalidFieldError
from perseus.service.domain.inputs import Input, Refined, Solved, StragglerReported, TelemetryArrived
from perseus.service.domain.model import Straggler
from perseus.service.domain.records import IterationRows
from perseus.service.job import views
from perseus.service.job.machine import JobMachine, replay
from perseus.service.job.recording import Begun
from perseus.service.job.run import Run
from tests.service.job.machine_bench import planned
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
    cluster.send(StragglerReported(Straggler(0, slowdown_factor=1.2)))
    cluster.iterate(4)
    rank = cluster.ranks[next(iter(cluster.ranks))]
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


@pytest.mark.parametrize("seed", range(4))
def test_any_grouping_gives_the_same_commands(seed: int) -> None:
    begun, steps, alone = life()
    dice = random.Random(seed)
    machine = JobMachine(
        Run(begun.spec, begun.run_number, begun.rules, begun.epoch, begun.create_time_s, begun.created_s)
    )
    machine.register(begun.registration, begun.version)
    longest, asked = 0, None
    for (is_telemetry, now_s), some in groupby(
        steps, lambda step: (type(step[0]) is TelemetryArrived, step[1])
    ):
        rest = list(some)
        while rest:
            count = dice.randint(1, len(rest)) if is_telemetry else 1
            together, rest = rest[:count], rest[count:]
            longest = max(longest, count)
            events = [event for event, *_ in together if isinstance(event, TelemetryArrived)]
            if events:
                found = list(machine.handle_telemetry(events, now_s, together[0][2]))
            else:
                event = together[0][0]
                if asked is not None and isinstance(event, Solved | Refined):
                    event = solve(asked)  # an answer is to a request of the same machine
                found = [machine.handle(event, now_s, together[0][2])]
            for command in chain.from_iterable(some for some in found if isinstance(some, list)):
                asked = command if isinstance(command, Solve | Refine) else asked
            for answer, (*_, expected) in zip(found, together, strict=True):
                is_same = shown(answer) == shown(expected)  # pytest would show the problems to solve
                assert is_same, together[0][:2]
    machine.validate()
    assert longest > 1
    assert views.job(machine.run, is_full=True) == views.job(alone.run, is_full=True)
