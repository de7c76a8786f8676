"""Schedules known by name run their computations in torch's order."""

import re
from collections.abc import Callable, Sequence
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


@pytest.mark.parametrize(
    ("name", "make", "least_per_stage", "more"),
    [
        ("ZBVZeroBubble", zero_bubble_v, 0, (1, 2, 3, 5, 8, 13, 16)),
        ("DualPipeV", dual_pipe_v, 2, (0, 1, 2, 7)),
    ],
)
def test_a_named_schedule_has_torchs_order(
    name: str, make: Callable[[int, int], Schedule], least_per_stage: int, more: Sequence[int]
) -> None:
    for stage_count, more_count in product(STAGE_COUNTS, more):
        microbatch_count = least_per_stage * stage_count + more_count
        expected = torch_orders(name, stage_count, microbatch_count)
        assert make(stage_count, microbatch_count).orders == expected, (stage_count, microbatch_count)
