"""What is left out of telemetry under overload, and when it is whole again."""

from perseus.service.shell.thinning import KEPT_EVERY, Part, Thinning


def overloaded(ticks: int, per_s: float = 1000.0) -> Thinning:
    thinning = Thinning()
    for _ in range(ticks):
        thinning.tick(1.0, per_s)
    return thinning


def test_rows_go_first_and_sums_only_if_that_does_not_help() -> None:
    assert overloaded(1).part is None, "a burst is no overload"
    assert overloaded(2).part is Part.ROWS
    assert overloaded(6).part is Part.ROWS
    assert overloaded(7).part is Part.SUMS
    assert overloaded(40).part is Part.SUMS


def test_every_fourth_iteration_is_taken_whole() -> None:
    thinning = overloaded(7)
    left_out = [thinning.left_out([iteration]) for iteration in range(2 * KEPT_EVERY)]
    assert left_out == 2 * [None, *(KEPT_EVERY - 1) * [Part.SUMS]]
    assert thinning.left_out([5, 6]) is Part.SUMS
    assert thinning.left_out([7, 8]) is None, "one of them must be taken whole"
    assert thinning.left_out([]) is None
    assert Thinning().left_out([1]) is None


def test_it_is_whole_again_once_agents_send_less_than_was_taken_before() -> None:
    thinning = overloaded(7, 1000.0)
    thinning.tick(0.0, 1500.0)
    assert thinning.part is Part.SUMS, "the same load would be too much again"
    thinning.tick(0.0, 800.0)
    thinning.tick(0.0, 800.0)
    assert thinning.part is None


def test_an_overload_whose_cause_has_ended_is_forgotten() -> None:
    thinning = overloaded(2, 1000.0)
    ticks = 0
    while thinning.part is not None:
        thinning.tick(0.0, 1200.0)
        ticks += 1
    assert 10 < ticks < 60
