"""Whether a machine is too busy, with injected times."""

from perseus.demo.lateness import Lateness


def explained(*late_s: float) -> str:
    """Return what is said after spans in which each sleep takes so much longer than asked."""
    now_s, late_now_s = 100.0, 0.0

    def sleep(duration_s: float) -> None:
        nonlocal now_s
        now_s += duration_s + late_now_s

    lateness = Lateness(monotonic=lambda: now_s, sleep=sleep)
    for each in late_s:
        late_now_s = each
        lateness.measure_span()
    return lateness.explain()


def test_late_wake_ups_make_a_machine_too_busy_also_if_it_is_idle_later() -> None:
    start = (0.0024, 0.0024, 0.0002)
    assert explained(*start) == "", "the start of the demo itself"
    late = "for 10 s, processes woke up 2.10 ms late on average, expected at most 0.25 ms;"
    assert late in explained(*start, 0.0021, 0.0)


def test_what_is_late_all_the_time_is_late_at_stock_too() -> None:
    spans = (0.0, 0.0, 0.00017, 0.0003, 0.0004)
    assert [count for count in range(6) if explained(*spans[:count])] == [5]
    assert explained(0.002, 0.002, 0.002, 0.002), "beyond what any idle machine does"


def test_it_ends_with_its_context() -> None:
    with Lateness() as lateness:
        pass
    assert lateness.explain() == ""
