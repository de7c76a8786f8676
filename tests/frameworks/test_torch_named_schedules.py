"""Schedules known by name run their computations in torch's order."""

import re
from importlib import import_module
from importlib.util import find_spec
from itertools import product

import pytest

if find_spec("torch") is None:
    pytest.skip("torch is not installed; `make test-frameworks` has it", allow_module_level=True)

from perseus.solver import Computation, Kind, Schedule, dual_pipe_v, zero_bubble_v

pytestmark = pytest.mark.slow("imports torch")

KINDS = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "I": Kind.BACKWARD_INPUT, "W": Kind.BACKWARD_WEIGHT}
STAGE_COUNTS = (1, 2, 3, 4, 6)


def torch_orders(name: str, stage_count: int, microbatch_count: int) -> tuple[tuple[Computation, ...], ...]:
    """Return torch's table; overlapped computations in the order of their names: forward, then backward."""
    visualizer = import_module("torch.distributed.pipelining._schedule_visualizer")
    table = visualizer.get_schedule_ops(name, stage_count, microbatch_count, num_stages_per_rank=2)
    return tuple(
        tuple(
            Computation(stage, KINDS[kind], int(microbatch), 0 if int(place) == stage else 1)
            for action in actions
            if action is not None
            for place, kind, microbatch in re.findall(r"(\d+)([FBIW])(\d+)", str(action))
        )
        for stage, actions in enumerate(table)
    )


def check(name: str, schedule: Schedule, microbatch_count: int) -> None:
    expected = torch_orders(name, schedule.stage_count, microbatch_count)
    assert schedule.orders == expected, f"{schedule.stage_count} stages, {microbatch_count} microbatches"


def test_zero_bubble_v() -> None:
    for stage_count, microbatch_count in product(STAGE_COUNTS, (1, 2, 3, 5, 8, 13, 16)):
        check("ZBVZeroBubble", zero_bubble_v(stage_count, microbatch_count), microbatch_count)


def test_dual_pipe_v() -> None:
    for stage_count, more in product(STAGE_COUNTS, (0, 1, 2, 7)):
        microbatch_count = 2 * stage_count + more
        check("DualPipeV", dual_pipe_v(stage_count, microbatch_count), microbatch_count)
