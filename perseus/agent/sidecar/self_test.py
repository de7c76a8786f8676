"""The features of this node's GPUs that Perseus needs, found by reading only: it never sets anything.

Every question is independent, so that a GPU that fails one still answers the others; a `Finding` has a value
or a problem. Whether clocks may be set can only be inferred without setting one: from the GPU's generation
and mode, and from this process's privileges.
"""

import contextlib
import itertools
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perseus.agent.energy.counter import ChangeDetector, PowerSample, disagreement
from perseus.agent.gpu import ClockEventReason, GpuError, GpuUnsupportedError
from perseus.agent.gpu.executor import TIMEOUT_S, GpuExecutor
from perseus.agent.gpu.nvml import (
    PYNVML,
    NvmlGpu,
    calling,
    connected,
    handle_of,
    module_description,
    module_problem,
    text,
)

_CAP_SYS_ADMIN = 21
_WATCH_S = 2.0
_POLL_S = 0.005
_POWER_INTERVALS_S = (0.01, 0.05)
_TIMEOUT_S = _WATCH_S + TIMEOUT_S


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer to one question: a value that JSON can hold, or (None and) a problem."""

    name: str
    value: object
    problem: str = ""


@dataclass(frozen=True, slots=True)
class GpuFindings:
    """One GPU's answers, in the order of the questions; a GPU without a UUID is named by its index."""

    uuid: str
    findings: tuple[Finding, ...]

    @property
    def is_usable(self) -> bool:
        """Whether Perseus can measure on it."""
        return not self.problem

    @property
    def problem(self) -> str:
        """Why Perseus can't measure on it; empty if it can."""
        return "; ".join(finding.problem for finding in self.findings if finding.name == "usable")

    @property
    def limitations(self) -> list[str]:
        """What Perseus can't do as well on it as on others, if it can be used at all."""
        named = [each.problem for each in self.findings if each.problem and each.name in _WANTED]
        return named if self.is_usable else []


_NEEDED = frozenset({"energy_counter_j", "counter_period_s", "clock_events", "sm_clock_mhz"})
_WANTED = frozenset({"model", "counter_scope", "power_w", "power_limit_w", "workload_power_profiles"})
# The other findings have a value on every GPU: none, or 0, is a problem.
_MAY_BE_EMPTY = frozenset(
    {
        "persistence_mode",
        "mig_mode",
        "workload_power_profiles",
        "clock_events",
        "energy_counter_j",
        "counter_period_s",
    }
)


def node_findings(nvml: Any = PYNVML) -> tuple[Finding, ...]:
    """Return the findings for all GPUs: module, driver, library and privileges. Raises `GpuError`."""
    with connected("GPUs", nvml):
        return (
            Finding("module", module_description(), module_problem()),
            _find("driver_version", lambda: text(nvml.nvmlSystemGetDriverVersion()), nvml),
            _find("nvml_version", lambda: text(nvml.nvmlSystemGetNVMLVersion()), nvml),
            Finding("may_set_clocks", may_set_clocks(), "" if may_set_clocks() else _UNPRIVILEGED),
        )


async def all_gpu_findings(
    listed: Sequence[str | GpuError],
    find: Callable[[str], GpuFindings],
    timeout_s: float = _TIMEOUT_S,
) -> list[GpuFindings]:
    """Return the findings of all listed GPUs; a failed query is a finding.

    One after the other: their drivers may serve a training, and share locks.
    """
    executor = GpuExecutor(timeout_s)

    async def ask(index: int, uuid: str | GpuError) -> GpuFindings:
        if isinstance(uuid, GpuError):
            return _unusable(f"GPU {index}", uuid)
        try:
            return await executor.run(uuid, lambda: find(uuid))
        except GpuError as error:
            return _unusable(uuid, error)
        except Exception as error:  # a bug, or the answer of an odd driver, is no reason to test no other
            return _unusable(uuid, f"GPU {uuid}: its test failed: {error!r}")

    return [await ask(index, uuid) for index, uuid in enumerate(listed)]


def _unusable(name: str, problem: object) -> GpuFindings:
    return GpuFindings(name, (Finding("usable", False, str(problem)),))


def gpu_findings(
    uuid: str,
    nvml: Any = PYNVML,
    *,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> GpuFindings:
    """Query one GPU; takes about 2 s of watching its energy counter. Raises `GpuError` without such a GPU."""
    with connected(f"GPU {uuid}", nvml):
        handle = handle_of(uuid, nvml)

        def ask(name: str, function: str, then: Callable[[Any], object] = lambda x: x) -> Finding:
            return _find(name, lambda: then(getattr(nvml, function)(handle)), nvml)

        findings = [
            ask("model", "nvmlDeviceGetName", text),
            ask("architecture", "nvmlDeviceGetArchitecture"),
            ask("compute_capability", "nvmlDeviceGetCudaComputeCapability", list),
            ask("persistence_mode", "nvmlDeviceGetPersistenceMode", bool),
            ask("mig_mode", "nvmlDeviceGetMigMode", lambda modes: bool(modes[0])),
            ask("memory_clocks_mhz", "nvmlDeviceGetSupportedMemoryClocks", list),
            ask("power_usage_w", "nvmlDeviceGetPowerUsage", lambda milliwatts: milliwatts / 1000),
        ]
        try:
            gpu = NvmlGpu(uuid, nvml=nvml)
        except GpuError as error:
            return GpuFindings(uuid, (*findings, Finding("usable", False, str(error))))
        try:
            powers: list[PowerSample] = []
            findings += [
                _find("supported_clocks_mhz", lambda: list(gpu.supported_clocks_mhz), nvml),
                _find("sm_clock_mhz", gpu.sm_clock_mhz, nvml),
                _find("power_w", gpu.power_w, nvml),
                _find("average_power_w", gpu.average_power_w, nvml),
                _find("power_limit_w", gpu.power_limit_w, nvml),
                _find("workload_power_profiles", lambda: _profile_names(gpu.power_profiles(), nvml), nvml),
                _find("clock_events", lambda: _event_names(gpu.clock_event_reasons()), nvml),
                _find("energy_counter_j", gpu.total_energy_j, nvml),
                _find("counter_period_s", lambda: _counter_period_s(gpu, powers, monotonic, sleep), nvml),
                _counter_scope(powers),
                Finding(
                    "may_lock_graphics_clock", may_set_clocks(), "" if may_set_clocks() else _UNPRIVILEGED
                ),
                _memory_lock(gpu),
            ]
        finally:
            gpu.close()
    problems = [finding.problem for finding in findings if finding.problem and finding.name in _NEEDED]
    return GpuFindings(uuid, (*findings, Finding("usable", not problems, "; ".join(dict.fromkeys(problems)))))


_UNPRIVILEGED = "needs root or CAP_SYS_ADMIN; otherwise run the agent with --observe"


def may_set_clocks() -> bool:
    """Whether this process has the privileges that NVML requires: root's, or CAP_SYS_ADMIN."""
    if os.geteuid() == 0:
        return True
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value, 16) >> _CAP_SYS_ADMIN & 1)
    return False


def _memory_lock(gpu: NvmlGpu) -> Finding:
    name = "may_lock_memory_clock"
    if not gpu.locks_memory:
        return Finding(name, False, "not needed, or not possible: one memory clock, or older than Ampere")
    return Finding(name, may_set_clocks(), "" if may_set_clocks() else _UNPRIVILEGED)


def _find(name: str, question: Callable[[], object], nvml: Any) -> Finding:
    try:
        with calling(name, "NVML", nvml):
            value = question()
    except GpuError as error:
        return Finding(name, None, str(error))
    is_missing = not value and name not in _MAY_BE_EMPTY
    return Finding(name, value, f"{name}: expected a value, found {value or 'none'}" if is_missing else "")


def _event_names(reasons: int) -> list[str]:
    """Return the names of clock events that discard samples; the others as one hexadecimal number."""
    names = {
        bit: name
        for name, bit in vars(ClockEventReason).items()
        if name.isupper() and bit.bit_count() == 1 and bit & ClockEventReason.THROTTLED
    }
    known = [name.lower() for bit, name in sorted(names.items()) if reasons & bit]
    others = reasons & ~ClockEventReason.THROTTLED
    return [*known, *([hex(others)] if others else [])]


def _profile_names(profiles: Sequence[int], nvml: Any) -> list[str]:
    """Return workload power profiles by NVML's names; one without a name by its number."""
    prefix = "NVML_POWER_PROFILE_"
    names = {
        getattr(nvml, name): name.removeprefix(prefix).lower()
        for name in dir(nvml)
        if name.startswith(prefix)
        and not name.startswith(f"{prefix}OPERATION_")
        and name != f"{prefix}MAX"  # the count of those that NVML knows
    }
    return [names.get(profile, str(profile)) for profile in profiles]


def _counter_period_s(
    gpu: NvmlGpu,
    powers: list[PowerSample],
    monotonic: Callable[[], float],
    sleep: Callable[[float], None],
) -> float | None:
    """Watch the energy counter, and fill `powers` with readings of the power meanwhile.

    A counter that moved once, as on a host that stalls, has no known period.
    """
    detector, times_s = ChangeDetector(), []
    first_j = energy_j = gpu.total_energy_j()
    before_s = power_at_s = monotonic()
    end_s = before_s + _WATCH_S
    while before_s < end_s:  # and once more after that, however long the process froze
        before_s = monotonic()
        energy_j, after_s = gpu.total_energy_j(), monotonic()
        if (change := detector.poll(before_s, after_s, energy_j, 0)) is not None:
            times_s.append(change.time_s)
        if after_s >= power_at_s:
            power_at_s = after_s + random.uniform(*_POWER_INTERVALS_S)
            with contextlib.suppress(GpuError):  # named by its own question
                powers.append(PowerSample(after_s, energy_j, gpu.power_w()))
        sleep(_POLL_S)
    if energy_j == first_j:
        raise GpuUnsupportedError(
            f"energy counter: expected it to move within {_WATCH_S:g} s, "
            f"found it at {energy_j:g} J all the time"
        )
    steps_s = [later_s - earlier_s for earlier_s, later_s in itertools.pairwise(times_s)]
    return round(statistics.median(steps_s), 4) if steps_s else None


def _counter_scope(powers: Sequence[PowerSample]) -> Finding:
    problem = disagreement(powers)
    return Finding("counter_scope", "the GPU" if powers and not problem else None, problem)
