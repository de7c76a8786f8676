"""The effect of a transfer between two stages: the computation that needs it waits, or both stages do.

A transfer goes from computation A of its sender to computation C of its receiver, and takes a lag.

*Overlapping*: it starts when A ends, and both stages compute meanwhile. C starts no earlier than a lag after
A.

*Occupying*: between two computations a stage exchanges everything that it sends and receives there, and
computes nothing until that is done (a rendezvous: blocking sends and receives, batched). The transfer starts
when its sender has ended A and its receiver has ended the computation before C. So these two ends precede
both C and the computation after A by a lag: a late receiver delays its sender. The transfer itself needs no
event.
"""

import enum
from dataclasses import replace

import numpy as np

from perseus.solver.computation import Computation, Kind
from perseus.solver.errors import ScheduleError
from perseus.solver.order_table import IndexArray, OrderTable
from perseus.solver.pipeline import Pipeline
from perseus.solver.schedule import Schedule


class Transfers(enum.Enum):
    """How activations and gradients travel between stages."""

    OVERLAPPING = "overlapping"
    """Only the computation that needs them waits."""
    OCCUPYING = "occupying"
    """Neither sender nor receiver computes during the transfer, and each waits for the other to be ready."""


def lagged_arcs(schedule: Schedule, transfers: Transfers) -> IndexArray:
    """Return (earlier, later, dependency) for every wait for a transfer, shape (n, 3).

    The first two index the schedule's computations, the third its dependencies: ``later`` starts no earlier
    than that dependency's lag after the end of ``earlier``. The dependencies themselves come first, in order.

    Raises:
        ScheduleError: transfers that occupy their stages would deadlock; the message names the cycle.
    """
    senders, receivers = schedule.arcs[:, 0], schedule.arcs[:, 1]
    dependency = np.arange(len(schedule.arcs))
    direct = np.stack((senders, receivers, dependency), axis=1)
    if transfers is Transfers.OVERLAPPING:
        return direct
    firsts = np.cumsum([0, *(len(order) for order in schedule.orders)])
    waits_before = ~np.isin(receivers, firsts)
    is_followed = ~np.isin(senders + 1, firsts)
    both = waits_before & is_followed
    arcs = np.concatenate(
        (
            direct,
            np.stack((receivers - 1, receivers, dependency), axis=1)[waits_before],
            np.stack((senders, senders + 1, dependency), axis=1)[is_followed],
            np.stack((receivers - 1, senders + 1, dependency), axis=1)[both],
        )
    )
    try:
        OrderTable(schedule.orders).levels(arcs[:, :2])
    except ScheduleError as error:
        raise ScheduleError(f"with transfers that occupy their stages {error}", **error.details) from error
    return arcs


def with_occupying_transfers(pipeline: Pipeline) -> Pipeline:
    """Return the pipeline with transfers that occupy both of their stages, each for its own lag.

    Raises:
        ScheduleError: they would deadlock; the message names the cycle.
    """
    schedule = pipeline.schedule
    computations = list(schedule.computations)
    extra_lags_s: dict[tuple[Computation, Computation], float] = {}
    for earlier, later, dependency in lagged_arcs(schedule, Transfers.OCCUPYING)[
        len(schedule.arcs) :
    ].tolist():
        sender, receiver = schedule.dependencies[dependency]
        lags_s = pipeline.activation_lags_s if receiver.kind is Kind.FORWARD else pipeline.gradient_lags_s
        pair = computations[earlier], computations[later]
        lag_s = lags_s.get((sender.stage, receiver.stage), 0.0)
        extra_lags_s[pair] = max(lag_s, extra_lags_s.get(pair, 0.0))
    return replace(pipeline, extra_lags_s=extra_lags_s)
