"""Two tiers: `make test` leaves out tests marked slow, and `make test-all` runs everything.

`slow("why")` is for tests of more than a second. The one that is also marked `smoke` runs the whole loop in
real processes, and is in both tiers. Tests also marked `serial` measure a training: they run after the
others, when nothing else needs the processors. An unmarked test that exceeds the limits fails; the limits
leave room for other work on the machine. Fixtures of a wider scope do not count, and property tests may take
longer in a run with more examples than the default.
"""

import os
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from time import monotonic  # by its name: tests put their own clock into `time`

import pytest
from hypothesis import settings

MAX_CPU_S = 2.0
MAX_CLOCK_S = 5.0

_SCHEDSTAT = Path("/proc/thread-self/schedstat")
_PRESSURE = Path("/proc/pressure/cpu")
_CHILDREN_S = 0.1
"""CPU time of children below which their waiting does not count."""


class _Stopwatch:
    """CPU seconds, including ended children, and wall-clock seconds.

    Time waiting for a processor on a busy machine does not count: this thread's, and if the test has
    children, that of all processes, as the children's own is unknown.
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.cpu_s = -sum(os.times()[:4])
        self._children_s = -sum(os.times()[2:4])
        self._anybody_s = -_anybody_waited_s()
        self.clock_s = _waited_s() - monotonic()

    def stop(self) -> None:
        self.cpu_s += sum(os.times()[:4])
        self.clock_s += monotonic() - _waited_s()
        if max(self._children_s + sum(os.times()[2:4]), _living_children_s()) > _CHILDREN_S:
            self.clock_s -= self._anybody_s + _anybody_waited_s()


def _waited_s() -> float:
    """Return how long this thread was ready but did not run (proc(5), schedstat)."""
    return int(_SCHEDSTAT.read_text().split()[1]) / 1e9 if _SCHEDSTAT.exists() else 0.0


def _anybody_waited_s() -> float:
    """Return how long any thread of the machine was (Linux' pressure stall information)."""
    try:
        return int(_PRESSURE.read_text().splitlines()[0].rpartition("=")[2]) / 1e6
    except OSError:  # a kernel without it
        return 0.0


def _living_children_s() -> float:
    """Return the CPU seconds of the children that have not ended yet, also before this test."""
    ticks = 0
    for children in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread or a child has ended
            for number in children.read_text().split():
                stat = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
                ticks += int(stat[11]) + int(stat[12])
    return ticks / os.sysconf("SC_CLK_TCK")


_test = _Stopwatch()
"""Stopwatch of the running test; one runs at a time."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow(why): takes more than a second, and `make test` leaves it out")
    config.addinivalue_line("markers", "smoke: slow, and `make test` runs it")
    config.addinivalue_line("markers", "serial: slow, and measures: `make test-serial` runs it alone")


def pytest_itemcollected(item: pytest.Item) -> None:
    for marker in item.iter_markers("slow"):
        if not (len(marker.args) == 1 and isinstance(marker.args[0], str) and marker.args[0]):
            raise pytest.UsageError(f'{item.nodeid}: expected slow("why"), found slow{marker.args}')


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    _test.start()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
    fixture = _Stopwatch()
    try:
        return (yield)
    finally:
        if fixturedef.scope != "function":
            fixture.stop()
            _test.cpu_s -= fixture.cpu_s
            _test.clock_s -= fixture.clock_s


def _is_limited(item: pytest.Item) -> bool:
    has_more_examples = settings().max_examples > settings.get_profile("default").max_examples
    is_search = has_more_examples and item.get_closest_marker("hypothesis") is not None
    return not is_search and item.get_closest_marker("slow") is None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    yield
    _test.stop()
    if _is_limited(item) and (_test.cpu_s > MAX_CPU_S or _test.clock_s > MAX_CLOCK_S):
        pytest.fail(
            f"expected at most {MAX_CPU_S} s of the processor and {MAX_CLOCK_S} s by the clock, found "
            f'{_test.cpu_s:.1f} s and {_test.clock_s:.1f} s: make it faster, or mark it slow("why")'
        )
