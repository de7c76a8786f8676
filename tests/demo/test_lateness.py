"""Whether a machine is too busy, with injected times."""

from perseus.demo.lateness import Lateness


class Clock:
    """A machine on which each sleep takes longer than asked."""

    def __init__(self, late_s: float) -> None:
        self.late_s = late_s
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s + self.late_s


def test_late_wake_ups_make_a_machine_too_busy_also_if_it_is_idle_later() -> None:
    clock = Clock(late_s=0.0024)
    lateness = Lateness(monotonic=clock.monotonic, sleep=clock.sleep)
    lateness.measure_span()
    lateness.measure_span()
    clock.late_s = 0.0002
    lateness.measure_span()
    assert lateness.explain() == "", "the start of the demo itself"
    clock.late_s = 0.0021
    lateness.measure_span()
    clock.late_s = 0.0
    lateness.measure_span()
    assert (
        "for 10 s, processes woke up 2.10 ms late on average, expected at most 0.25 ms;" in lateness.explain()
    )


def test_what_is_late_all_the_time_is_late_at_stock_too() -> None:
    clock = Clock(late_s=0.0)
    lateness = Lateness(monotonic=clock.monotonic, sleep=clock.sleep)
    for late_s, is_busy in ((0.0, False), (0.0, False), (0.00017, False), (0.0003, False), (0.0004, True)):
        clock.late_s = late_s
        lateness.measure_span()
        assert bool(lateness.explain()) == is_busy
    clock.late_s = 0.002
    always = Lateness(monotonic=clock.monotonic, sleep=clock.sleep)
    for _ in range(4):
        always.measure_span()
    assert always.explain(), "beyond what any idle machine does"


def test_it_ends_with_its_context() -> None:
    with Lateness() as lateness:
        pass
    assert lateness.explain() == ""
