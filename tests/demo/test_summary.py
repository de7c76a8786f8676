"""Phases and their evaluation, from incoming iterations."""

import pytest

from perseus.demo.summary import (
    Evaluations,
    Iteration,
    Measurements,
    as_json,
    evaluation_problems,
    problems,
)


def measurements(*rows: tuple[int, int, int, float, float]) -> Measurements:
    found = Measurements(pipeline_count=2)
    for row in rows:
        found.add(Iteration(*row))
    return found


def two_pipelines(
    number: int, version: int, time_s: float, energy_j: float
) -> list[tuple[int, int, int, float, float]]:
    return [(0, number, version, time_s, energy_j), (1, number, version, time_s * 0.9, energy_j)]


def test_a_phase_has_the_slowest_pipeline_and_all_energies_and_is_compared_with_the_named_one() -> None:
    rows = [*two_pipelines(1, 0, 1.5, 50.0), *two_pipelines(2, 0, 2.5, 150.0)]
    found = measurements(*rows, *two_pipelines(3, 7, 2.1, 80.0))
    stock = found.close_phase("stock", [1, 2])
    assert (stock.iteration_time_s, stock.energy_j_per_iteration) == (2.0, 200.0)
    assert (stock.slowdown_percent, stock.saving_percent, stock.compared_with) == (0.0, 0.0, "stock")
    plan = found.close_phase("plan", [3], "stock")
    assert (plan.slowdown_percent, plan.saving_percent) == pytest.approx((5.0, 20.0))
    assert as_json(found.phases)["phases"][1]["name"] == "plan"  # type: ignore[index]


def test_iterations_of_some_pipelines_only_are_left_out() -> None:
    found = measurements(*two_pipelines(1, 0, 2.0, 100.0), (0, 2, 0, 50.0, 5000.0))
    assert not found.are_complete([1, 2])
    assert found.close_phase("stock", [1, 2]).iteration_count == 1
    with pytest.raises(ValueError, match="phase plan: expected at least one iteration"):
        found.close_phase("plan", [2])


def test_stock_iterations_leave_out_the_first_and_all_under_a_plan() -> None:
    rows = [row for number in range(3) for row in two_pipelines(number, 0, 1.0, 1.0)]
    assert measurements(*rows, *two_pipelines(3, 1, 1.0, 1.0)).at_stock() == [1, 2]


def test_latest_iterations() -> None:
    found = measurements((0, 3, 0, 1.0, 1.0), (1, 2, 0, 2.0, 2.0))
    assert found.latest == 3
    assert (newest := found.latest_of(1)) is not None
    assert newest.number == 2
    assert Measurements(2).latest == -1
    assert Measurements(2).latest_of(0) is None


def test_slow_or_wasteful_phases_are_reported() -> None:
    found = measurements(
        *two_pipelines(1, 0, 2.0, 100.0), *two_pipelines(2, 7, 2.1, 80.0), *two_pipelines(3, 8, 2.0, 110.0)
    )
    found.close_phase("stock", [1])
    found.close_phase("slow", [2], "stock")
    found.close_phase("wasteful", [3], "stock")
    assert problems(found.phases, {"slow": ("stock", 1.0)}) == [
        "slow: expected an iteration time of at most 2.040 s (1 × stock + 2.0 %), found 2.100 s"
    ]
    assert problems(found.phases, {"slow": ("stock", 1.2)}) == []
    assert problems(found.phases, {"wasteful": ("stock", 1.0)}) == [
        "wasteful: expected a saving against stock, found -10.00 %"
    ]
    assert problems(found.phases, {}) == []


def test_evaluations_may_take_no_longer_than_at_stock() -> None:
    found = Evaluations.of([(7, 5.01), (7, 5.03), (15, 5.0), (23, 5.1)], stock_iterations=8)
    assert (found.stock_count, found.later_count) == (2, 2)
    assert (found.stock_time_s, found.later_time_s) == pytest.approx((5.02, 5.05))
    assert found.longest_later_time_s == 5.1
    assert evaluation_problems(found, 5.0) == []
    assert evaluation_problems(found, 4.9) == [
        "evaluations: expected at most 4.998 s on average (4.9 s + 2.0 %), found 5.050 s"
    ]
    assert as_json([], found)["evaluations"]["later_count"] == 2  # type: ignore[index]
    assert evaluation_problems(Evaluations.of([], 8), 5.0) == []
