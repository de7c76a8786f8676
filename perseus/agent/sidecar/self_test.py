"""The features of this node's GPUs that Perseus needs, found by reading only: it never sets anything.

Every question is independent, so that a GPU that fails one still answers the others; a `Finding` has a value
or a problem. Whether clocks may be set can only be inferred without setting one: from the GPU's generation
and mode, and from this process's privileges.
"""

import asyncio
import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from perseus.agent.energy.counter import ChangeDetector
from perseus.agent.gpu import ClockEventReason, GpuError, GpuUnsupportedError
from perseus.agent.gpu.executor import TIMEOUT_S, GpuExecutor
from perseus.agent.gpu.nvml import NvmlGpu, calling

_CAP_SYS_ADMIN = 21
_WATCH_S = 2.0
_POLL_S = 0.001
_MIN_CHANGES = 4
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
        return not any(finding.problem for finding in self.findings if finding.name in _NEEDED)


_NEEDED = frozenset({"usable", "energy_counter_j", "clock_events", "sm_clock_mhz"})


def node_findings(nvml: Any = pynvml) -> tuple[Finding, ...]:
    """Return the findings for all GPUs: driver, library and privileges. NVML must be initialised."""
    return (
        _find("driver_version", nvml.nvmlSystemGetDriverVersion, nvml),
        _find("nvml_version", nvml.nvmlSystemGetNVMLVersion, nvml),
        Finding("may_set_clocks", may_set_clocks(), "" if may_set_clocks() else _UNPRIVILEGED),
    )


async def all_gpu_findings(
    listed: Sequence[str | GpuError],
    find: Callable[[str], GpuFindings],
    timeout_s: float = _TIMEOUT_S,
) -> list[GpuFindings]:
    """Return the findings of all listed GPUs, which are queried in parallel; a failed query is a finding."""
    executor = GpuExecutor(timeout_s)

    async def ask(index: int, uuid: str | GpuError) -> GpuFindings:
        if isinstance(uuid, GpuError):
            return _unusable(f"GPU {index}", uuid)
        try:
            return await executor.run(uuid, lambda: find(uuid))
        except GpuError as error:
            return _unusable(uuid, error)

    return await asyncio.gather(*(ask(index, uuid) for index, uuid in enumerate(listed)))


def _unusable(name: str, error: GpuError) -> GpuFindings:
    return GpuFindings(name, (Finding("usable", False, str(error)),))


def gpu_findings(
    uuid: str,
    nvml: Any = pynvml,
    *,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> GpuFindings:
    """Query one GPU; takes about 2 s of watching its energy counter. NVML must be initialised.

    Raises `GpuError` if there is no such GPU.
    """
    with calling("nvmlDeviceGetHandleByUUID", f"GPU {uuid}", nvml):
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)

    def ask(name: str, function: Callable[..., Any], then: Callable[[Any], object] = lambda x: x) -> Finding:
        return _find(name, lambda: then(function(handle)), nvml)

    found = [
        ask("model", nvml.nvmlDeviceGetName),
        ask("architecture", nvml.nvmlDeviceGetArchitecture),
        ask("compute_capability", nvml.nvmlDeviceGetCudaComputeCapability, list),
        ask("persistence_mode", nvml.nvmlDeviceGetPersistenceMode, bool),
        ask("mig_mode", nvml.nvmlDeviceGetMigMode, lambda modes: bool(modes[0])),
        ask("memory_clocks_mhz", nvml.nvmlDeviceGetSupportedMemoryClocks, list),
        ask("power_usage_w", nvml.nvmlDeviceGetPowerUsage, lambda milliwatts: milliwatts / 1000),
    ]
    try:
        gpu = NvmlGpu(uuid, nvml=nvml)
    except GpuError as error:
        return GpuFindings(uuid, (*found, Finding("usable", False, str(error))))
    try:
        clocks_mhz = list(gpu.supported_clocks_mhz)
        found += [
            Finding("usable", True),
            Finding("supported_clocks_mhz", clocks_mhz),
            _find("sm_clock_mhz", gpu.sm_clock_mhz, nvml),
            _find("power_w", gpu.power_w, nvml),
            _find("average_power_w", gpu.average_power_w, nvml),
            _find("power_limit_w", gpu.power_limit_w, nvml),
            _find("workload_power_profiles", lambda: _profile_names(gpu.power_profiles(), nvml), nvml),
            _find("clock_events", lambda: _event_names(gpu.clock_event_reasons()), nvml),
            _find("energy_counter_j", gpu.total_energy_j, nvml),
            _find("counter_period_s", lambda: _counter_period_s(gpu, monotonic, sleep), nvml),
            Finding("may_lock_graphics_clock", may_set_clocks(), "" if may_set_clocks() else _UNPRIVILEGED),
            _memory_lock(gpu),
        ]
    finally:
        gpu.close()
    return GpuFindings(uuid, tuple(found))


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
            return Finding(name, question())
    except GpuError as error:
        return Finding(name, None, str(error))


def _event_names(reasons: int) -> list[str]:
    """Return the names of clock events that discard samples; the others as one hexadecimal number."""
    names = {
        bit: name for name, bit in vars(ClockEventReason).items() if name.isupper() and bit.bit_count() == 1
    }
    known = [name.lower() for bit, name in sorted(names.items()) if reasons & bit]
    others = reasons & ~ClockEventReason.THROTTLED
    return [*known, *([hex(others)] if others else [])]


def _profile_names(profiles: Sequence[int], nvml: Any) -> list[str]:
    """Return workload power profiles by NVML's names; one without a name by its number."""
    prefix = "NVML_POWER_PROFILE_"
    names = {
        number: name.removeprefix(prefix).lower()
        for name, number in vars(nvml).items()
        if name.startswith(prefix)
        and not name.startswith(f"{prefix}OPERATION_")
        and name != f"{prefix}MAX"  # the count of those that NVML knows
    }
    return [names.get(profile, str(profile)) for profile in profiles]


def _counter_period_s(gpu: NvmlGpu, monotonic: Callable[[], float], sleep: Callable[[float], None]) -> float:
    detector, times_s = ChangeDetector(), []
    end_s = monotonic() + _WATCH_S
    while (before_s := monotonic()) < end_s:
        energy_j = gpu.total_energy_j()
        if (change := detector.poll(before_s, monotonic(), energy_j, 0)) is not None:
            times_s.append(change.time_s)
        sleep(_POLL_S)
    if len(times_s) < _MIN_CHANGES:
        raise GpuUnsupportedError(
            f"energy counter: expected at least {_MIN_CHANGES} changes within {_WATCH_S:g} s, "
            f"found {len(times_s)}"
        )
    steps_s = [later_s - earlier_s for earlier_s, later_s in itertools.pairwise(times_s)]
    return round(statistics.median(steps_s), 4)
