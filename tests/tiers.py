"""Three tiers: `make test` leaves out tests marked slow, CI those marked nightly, `make test-all` none.

`slow("why")` is for tests of more than a second. The one that is also marked `smoke` runs the whole loop in
real processes, and is in every tier. `nightly("why")` is for slow tests of what another test in CI would
mostly find as well.

No test fails for its duration, which depends on the machine. `make test-times` (``--times``) lists the tests
that want the marker: those that need more of the processor than a reference loop, run between tests on the
same machine, or wait longer. Fixtures of a wider scope do not count.
"""

import os
from collections.abc import Generator
from time import monotonic, process_time  # by their names: tests put their own clock into `time`
from typing import cast

import pytest

MAX_REFERENCES = 200.0
"""An unmarked test may need this many times the processor time of the reference loop: one or two seconds."""

MAX_WAIT_S = 5.0
"""An unmarked test may wait this long, which a slow machine does not change."""

_REFERENCE_STEPS = 100_000
_REFERENCE_AGE_S = 5.0
"""The reference loop runs again after this time, as a busy machine gets slower."""

_PROPERTY = "times"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", action="store_true", help="list the tests that want the marker `slow`")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow(why): takes more than a second, and `make test` leaves it out")
    config.addinivalue_line("markers", "smoke: slow, and `make test` runs it")
    config.addinivalue_line("markers", "nightly(why): CI leaves it out, and `make test-all` runs it")
    if config.getoption("times"):
        config.pluginmanager.register(_Times())


def pytest_itemcollected(item: pytest.Item) -> None:
    for marker in (*item.iter_markers("slow"), *item.iter_markers("nightly")):
        if not (len(marker.args) == 1 and isinstance(marker.args[0], str) and marker.args[0]):
            name = marker.name
            raise pytest.UsageError(f'{item.nodeid}: expected {name}("why"), found {name}{marker.args}')


class _Times:
    """Measures unmarked tests, in whichever process they run, and lists the long ones at the end."""

    def __init__(self) -> None:
        self._measured_s = -_REFERENCE_AGE_S
        self._reference_s = 0.0
        self._begun = (0.0, 0.0)
        self._long: list[tuple[float, float, str]] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if monotonic() - self._measured_s >= _REFERENCE_AGE_S:
            self._reference_s = min(reference_loop_s() for _ in range(5))
            self._measured_s = monotonic()
        self._begun = _now()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
        before = _now()
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                begun, after = self._begun, _now()
                self._begun = begun[0] + after[0] - before[0], begun[1] + after[1] - before[1]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            cpu_s, clock_s = (now - begun for now, begun in zip(_now(), self._begun, strict=True))
            if item.get_closest_marker("slow") is None:
                references = cpu_s / self._reference_s
                item.user_properties.append((_PROPERTY, (references, max(0.0, clock_s - cpu_s))))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            for name, times in report.user_properties:
                if name == _PROPERTY:
                    references, wait_s = cast("tuple[float, float]", times)
                    if references > MAX_REFERENCES or wait_s > MAX_WAIT_S:
                        self._long.append((references, wait_s, report.nodeid))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section('tests that want slow("why"), or have to become faster')
        for references, wait_s, test in sorted(self._long, reverse=True):
            line = (
                f"{references / MAX_REFERENCES:5.1f} × allowed processor time, waits {wait_s:4.1f} s: {test}"
            )
            terminalreporter.write_line(line)
        terminalreporter.write_line(f"{len(self._long)} tests")


def _now() -> tuple[float, float]:
    """Return the seconds of the processor, with those of ended children, and by the clock."""
    return sum(os.times()[:4]), monotonic()


def reference_loop_s() -> float:
    """Run the loop that stands for the machine's speed, some 10 ms; return its processor time."""
    begun_s = process_time()
    kept = {}
    for step in range(_REFERENCE_STEPS):
        kept[step % 1000] = str(step)
    return process_time() - begun_s
