"""Input checks: bounds of numbers and texts, and regular iterations in the registered order only."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.service.domain.bounds import check_range, check_size, check_text
from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.telemetry import KINDS, ComputationColumns, Order, TelemetryBatch
from perseus.solver import Kind, one_forward_one_backward
from tests.service.service_fakes import batch

ORDER = one_forward_one_backward(2, 3).orders[0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10.001, -0.001, 1e308])
def test_a_number_out_of_bounds_is_refused(value: float) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        check_range("a.b", value, 0, 10.0)
    assert (caught.value.field, caught.value.expected, caught.value.found) == ("a.b", "0 to 10", str(value))


def test_both_bounds_are_accepted() -> None:
    check_range("a", 0, 0, 2**53)
    check_range("a", 2**53, 0, 2**53)
    with pytest.raises(InvalidFieldError, match="expected 0 to 9007199254740992, found 9007199254740993"):
        check_range("a", 2**53 + 1, 0, 2**53)


@pytest.mark.parametrize("text", ["", "abcd", "a\n", "\x00", "\x7f", "\u202e"])
def test_a_text_that_is_too_long_or_not_printable_is_refused(text: str) -> None:
    with pytest.raises(InvalidFieldError):
        check_text("a", text, minimum=1, maximum=3)


def test_other_texts_and_sizes_are_accepted() -> None:
    assert check_text("a", "é 1", minimum=1, maximum=3) == "é 1"
    check_size("a", 3, 3)
    with pytest.raises(InvalidFieldError, match="a: expected at most 3 of them, found 4"):
        check_size("a", 4, 3)


def flagged(iterations: list[tuple[int, bool]]) -> TelemetryBatch:
    """Return a batch of whole iterations, each regular or not as given."""
    whole = batch(1, [number for number, _ in iterations], 1, 0.8, order=ORDER)
    is_regular = [flag for _, flag in iterations]
    return whole._replace(iterations=whole.iterations._replace(is_regular=is_regular))


flags = st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=4, unique_by=lambda pair: pair[0])


@given(flags, st.data())
def test_regular_iterations_have_exactly_the_registered_order(
    iterations: list[tuple[int, bool]], data: st.DataObject
) -> None:
    """Compare with the plain rule: the computations of each regular iteration, one by one."""
    reported = flagged(iterations)
    count = len(reported.computations.iteration)
    index = list(range(count))
    match data.draw(st.sampled_from(["as it is", "without one", "one twice", "shuffled"])):
        case "without one" if count:
            index.pop(data.draw(st.integers(0, count - 1)))
        case "one twice" if count:
            index.append(data.draw(st.integers(0, count - 1)))
        case "shuffled":
            index = data.draw(st.permutations(index))
    chosen = ComputationColumns._make([column[row] for row in index] for column in reported.computations)
    reported = reported._replace(computations=chosen)
    reported.check()
    places = list(zip(chosen.iteration, chosen.kind, chosen.microbatch, chosen.chunk, strict=True))
    expected = [(KINDS.index(each.kind), each.microbatch, each.chunk) for each in ORDER]
    regular = [number for number, is_regular in iterations if is_regular]
    if all([place[1:] for place in places if place[0] == number] == expected for number in regular):
        reported.check_order(Order(ORDER))
    else:
        with pytest.raises(InvalidFieldError, match=r"^iterations.is_regular: expected the 6 computations"):
            reported.check_order(Order(ORDER))


def test_the_error_names_the_first_difference() -> None:
    reported = flagged([(7, True)])
    kinds = list(reported.computations.kind)
    kinds[2] = KINDS.index(Kind.FIXED)
    reported = reported._replace(computations=reported.computations._replace(kind=kinds))
    with pytest.raises(
        InvalidFieldError, match=r"in iteration 7, found fixed of microbatch \d, chunk 0 as computation 2"
    ):
        reported.check_order(Order(ORDER))
    nothing = flagged([]).iterations
    with pytest.raises(
        InvalidFieldError, match=r"computations.iteration\[0\]: expected one of iterations.iteration"
    ):
        reported._replace(iterations=nothing).check()
