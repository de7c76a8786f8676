"""Orders of the named schedules, and the refusal of impossible orders."""

import sys
from collections.abc import Callable
from itertools import chain, pairwise

import pytest
from hypothesis import given

from perseus.solver import (
    Computation,
    Kind,
    Path,
    Schedule,
    ScheduleError,
    early_recomputation,
    gpipe,
    one_forward_one_backward,
)
from tests.solver.pipelines import awaited, schedules

LETTERS = {
    "F": Kind.FORWARD,
    "B": Kind.BACKWARD,
    "I": Kind.BACKWARD_INPUT,
    "W": Kind.BACKWARD_WEIGHT,
    "R": Kind.RECOMPUTATION,
    "X": Kind.FIXED,
}


def order(stage: int, text: str) -> tuple[Computation, ...]:
    """Read "F0 F1 B0 B1"; a prime marks chunk 1."""
    return tuple(
        Computation(stage, LETTERS[word[0]], int(word[1:].rstrip("'")), int(word.endswith("'")))
        for word in text.split()
    )


def orders(*texts: str) -> tuple[tuple[Computation, ...], ...]:
    return tuple(order(stage, text) for stage, text in enumerate(texts))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (gpipe(2, 3), ("F0 F1 F2 B2 B1 B0", "F0 F1 F2 B2 B1 B0")),
        (
            one_forward_one_backward(3, 4),
            ("F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"),
        ),
        (one_forward_one_backward(3, 1), ("F0 B0", "F0 B0", "F0 B0")),
        (early_recomputation(2, 2), ("F0 F1 R0 B0 R1 B1", "F0 B0 F1 B1")),
    ],
    ids=["gpipe", "1F1B", "fewer microbatches than stages", "early recomputation"],
)
def test_orders_of_the_named_schedules(schedule: Schedule, expected: tuple[str, ...]) -> None:
    assert schedule.orders == orders(*expected)


V: tuple[Path, ...] = (((0, 0), (1, 0), (1, 1), (0, 1)),)
CHUNKS = orders("F0 F0' B0' B0", "F0 F0' B0' B0")


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # Each as "earlier > later", a computation as its stage and its word in an order.
        (Schedule(orders("F0 B0", "F0 B0")), ["0F0 > 1F0", "1B0 > 0B0"]),
        (
            Schedule(CHUNKS),
            ["0F0 > 1F0", "1F0 > 0F0'", "0F0' > 1F0'", "1B0' > 0B0'", "0B0' > 1B0", "1B0 > 0B0"],
        ),
        (Schedule(CHUNKS, V), ["0F0 > 1F0", "1F0' > 0F0'", "0B0' > 1B0'", "1B0 > 0B0"]),
        (Schedule(orders("X0 F0 B0 X1", "F0 R0 I0 W0")), ["0F0 > 1F0", "1I0 > 0B0"]),
        (
            Schedule(orders("F0 F1' B1' B0", "F1' F0 B0 B1'"), (((0, 0), (1, 0)), ((1, 1), (0, 1)))),
            ["0F0 > 1F0", "1F1' > 0F1'", "1B0 > 0B0", "0B1' > 1B1'"],
        ),
    ],
    ids=[
        "across stages only",
        "chunks wrap from the last stage to the first",
        "a V turns round at the last stage",
        "a split backward passes the gradient on before the weights",
        "two paths from both ends",
    ],
)
def test_dependencies(schedule: Schedule, expected: list[str]) -> None:
    def computation(text: str) -> Computation:
        return order(int(text[0]), text[1:])[0]

    pairs = [each.split(" > ") for each in expected]
    assert set(schedule.dependencies) == {(computation(a), computation(b)) for a, b in pairs}
    assert len(schedule.dependencies) == len(expected)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ((V[0][:3],), "stage 0 chunk 1 forward of microbatch 0 is on no path"),
        ((V[0], ((0, 0),)), "expected each stage's chunk once, found stage 0, chunk 0 again"),
        ((V[0][:2], ((2, 1),)), "paths: expected stages 0 to 1 .* found stage 2, chunk 1"),
        (((*V[0], (1, 2)),), "stage 1, chunk 2, microbatch 0: .* found nothing"),
    ],
)
def test_wrong_paths_are_refused(paths: tuple[Path, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule(CHUNKS, paths)


def test_a_path_that_no_computation_is_on_is_kept() -> None:
    paths = (V[0], ((1, 2), (0, 2)))
    assert Schedule(CHUNKS, paths).paths == paths


@pytest.mark.parametrize(
    ("deadlocked", "cycle"),
    [
        (("F0 F1 B0 B1", "F0 B0 F1 B1", "F1 F0 B0 B1"), "→.*stage 2 forward of microbatch 0.*→"),
        (("B0 F0",), "stage 0 backward of microbatch 0 → .*stage 0 forward of microbatch 0"),
    ],
)
def test_a_deadlock_names_the_cycle(deadlocked: tuple[str, ...], cycle: str) -> None:
    with pytest.raises(ScheduleError, match=f"deadlock: .*{cycle}") as caught:
        Schedule(orders(*deadlocked))
    assert caught.value.details["cycle"] in str(caught.value)


@pytest.mark.parametrize(
    ("bad_orders", "message"),
    [
        ((), "at least one stage"),
        (((),), "stage 0: expected at least one computation, found none"),
        ((order(1, "F0 B0"),), "expected computations of stage 0, found stage 1 forward of microbatch 0"),
        (orders("F0 F0 B0"), "stage 0 forward of microbatch 0 stands there twice"),
        (orders("F0", "F0 B0"), "found forward$"),
        (orders("F0 B0 W0"), "found backward, backward-weight, forward"),
        (orders("F0 I0"), "found backward-input, forward"),
        (orders("F0 B0", "F0 B0 F1 B1"), "stage 0, chunk 0, microbatch 1: .* found nothing"),
        (orders("F0 F0' B0' B0", "F0 B0"), "stage 1, chunk 1, microbatch 0"),
        (((Computation(0, Kind.FORWARD, -1),),), "0 or more"),
    ],
)
def test_inconsistent_orders_are_refused(
    bad_orders: tuple[tuple[Computation, ...], ...], message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule(bad_orders)


def calls_of(work: Callable[[], object]) -> int:
    """Count calls of Python and C functions."""
    count = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    "given_orders",
    [
        lambda width: one_forward_one_backward(4, width).orders,
        lambda width: one_forward_one_backward(width, 4).orders,
        lambda width: gpipe(width, 8).orders,
    ],
)
def test_checks_are_linear_in_the_size_of_the_schedule(
    given_orders: Callable[[int], tuple[tuple[Computation, ...], ...]],
) -> None:
    small, large = given_orders(32), given_orders(128)
    assert calls_of(lambda: Schedule(large)) < 4.4 * calls_of(lambda: Schedule(small))


@given(schedule=schedules())
def test_arcs_and_levels_follow_their_definitions(schedule: Schedule) -> None:
    computations = list(schedule.computations)
    named = tuple((computations[earlier], computations[later]) for earlier, later in schedule.arcs.tolist())
    assert named == schedule.dependencies
    waits_for: dict[Computation, list[Computation]] = {c: [] for c in computations}
    for c in computations:
        waits_for[c] += awaited(c, waits_for, schedule.paths)
    assert set(named) == {(a, b) for b in computations for a in waits_for[b] if a.stage != b.stage}
    for earlier, later in chain.from_iterable(map(pairwise, schedule.orders)):
        waits_for[later].append(earlier)
    levels = dict(zip(computations, schedule.levels.tolist(), strict=True))
    for c in computations:
        assert levels[c] == 1 + max((levels[earlier] for earlier in waits_for[c]), default=-1)


def test_numbers_may_have_large_gaps() -> None:
    far = 2**40
    found = Schedule(
        tuple(
            tuple(Computation(stage, kind, m * far) for kind in (Kind.FORWARD, Kind.BACKWARD) for m in (0, 1))
            for stage in (0, 1)
        )
    )
    assert len(found.dependencies) == 4
    with pytest.raises(ScheduleError, match="below 2"):
        Schedule(((Computation(0, Kind.FORWARD, 2**63),),))
    with pytest.raises(ScheduleError, match=r"stage 0, chunk 0, microbatch 0: .* found nothing"):
        Schedule(((Computation(0, Kind.FORWARD, 0, far), Computation(0, Kind.BACKWARD, 0, far)),))
