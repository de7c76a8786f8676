"""`make test-gpu`: all that can be checked on a real NVIDIA GPU without changing any of its settings.

python -m tests.gpu.check PAGE

Prints one table and puts it at the end of PAGE. Exit status: 0 if everything passed, 1 if something failed, 2
if there is nothing to check on, with one line that says why.
"""

import datetime
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from tests.gpu.report import Finding, Report, append, judged

NOTHING_TO_CHECK = 2
_MAX_HELPER_MIB = 16.0
_SHOWN = {
    "power_limit_w": "power limit, W",
    "workload_power_profiles": "workload power profiles",
    "clock_events": "clock event reasons, now",
}
"""What there is nothing to be expected of, by its name in the self-test."""


class NothingToCheckError(Exception):
    """There is no GPU that could be checked, or something to check it with is missing."""


def cuda_or_why_not() -> Any:
    """The module torch. NothingToCheckError where it can't compute on a GPU."""
    try:
        import torch
    except ImportError:
        raise NothingToCheckError(
            f"expected PyTorch with CUDA in {sys.executable}, found no torch (PYTHON=… names another Python)"
        ) from None
    if torch.version.cuda is None:
        raise NothingToCheckError(
            f"expected PyTorch with CUDA in {sys.executable}, found torch {torch.__version__}, without"
        )
    if not torch.cuda.is_available():
        raise NothingToCheckError(f"expected an NVIDIA GPU, torch {torch.__version__} finds none")
    return torch


def driver_or_why_not() -> str:
    """The driver's version; NVML stays initialised. NothingToCheckError where NVML fails."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError as error:
        raise NothingToCheckError(f"expected NVML, the driver's libnvidia-ml.so.1, found: {error}") from None


def check(torch: Any, page: Path) -> bool:
    """Check the current GPU, print what was found and put it on the page; whether nothing has failed."""
    from perseus.agent.gpu.nvml import NvmlGpu
    from perseus.agent.probe.placement import gpu_uuid
    from perseus.agent.sidecar.self_test import gpu_findings
    from perseus.demo.processes import ClusterError
    from tests.gpu import claims, edges, energy, pipeline
    from tests.gpu.edges import NotedProbe
    from tests.gpu.loads import MatrixProducts

    driver = driver_or_why_not()
    device = torch.device("cuda", torch.cuda.current_device())
    uuid = gpu_uuid(device)
    findings: list[Finding] = []

    def add(name: str, find: Callable[[], list[Finding]]) -> None:
        print(f"{name} …", file=sys.stderr, flush=True)
        try:
            findings.extend(find())
        except Exception as error:  # of one check; the others go on
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            findings.append(judged(name, text, "no error", False))

    def self_test() -> list[Finding]:
        return self_test_findings(gpu_findings(uuid))

    def regression() -> list[Finding]:
        with closing(NvmlGpu(uuid)) as gpu:
            loads = MatrixProducts(torch, device, gpu)
            return [Finding("known loads", ", ".join(loads.kinds)), *energy.regression_findings(gpu, loads)]

    def events() -> list[Finding]:
        from perseus.agent.probe.torch_marks import CudaEvents

        matrix = torch.randn(2048, 2048, device=device)

        def launch(each: int) -> None:
            for _ in range(1 + each % 7):
                torch.mm(matrix, matrix)

        launch(0)
        source = CudaEvents(torch.cuda, device.index)
        return edges.edge_findings(source, launch, lambda: torch.cuda.synchronize(device))

    def hook() -> list[Finding]:
        from perseus.agent.probe.client import Probe

        probes: list[Probe] = []

        def connect(**arguments: Any) -> Probe:
            probes.append(Probe.connect(socket, **arguments))
            return probes[-1]

        with pipeline.alone():
            found = pipeline.hook_findings(device, connect, lambda: torch.cuda.synchronize(device))
        dropped = sum(probe.dropped_mark_count for probe in probes)
        return [*found, judged("marks dropped meanwhile", str(dropped), "0", dropped == 0)]

    add("self-test", self_test)
    add("energy", regression)
    add("edges", events)
    with tempfile.TemporaryDirectory(prefix="perseus-") as folder:
        try:
            with claims.observing_agent(Path(folder), {}) as socket:
                add("claims", lambda: claims.claim_findings(socket, uuid))
                add("hook", hook)
        except ClusterError as error:
            findings.append(judged("agent", str(error), "one that listens", False))

    def training() -> list[Finding]:
        with closing(NvmlGpu(uuid)) as gpu:
            synchronize = partial(torch.cuda.synchronize, device)
            return pipeline.training_findings(gpu, device, NotedProbe(), synchronize)

    add("training", training)
    add("graphs", lambda: pipeline.capture_findings(device))
    add("helper's memory", lambda: [memory_finding(torch.cuda.device_count() - 1)])
    versions = f"torch {torch.__version__}, Python {sys.version.split()[0]}"
    name = str(torch.cuda.get_device_name(device))
    report = Report(name, driver, versions, datetime.date.today().isoformat(), tuple(findings))
    print(report.markdown())
    append(page, report)
    print(f"put at the end of {page}", file=sys.stderr)
    return report.has_passed


def self_test_findings(found: Any) -> list[Finding]:
    """The self-test's verdict, what bounds the GPU, and what could not be answered."""
    text = "usable" if found.is_usable else "not usable"
    findings = [judged("self-test", text, "usable", found.is_usable)]
    for each in found.findings:
        if each.problem:
            findings.append(Finding("self-test, reported", f"{each.name}: {each.problem}"))
        elif each.name in _SHOWN:
            value = each.value
            shown = (", ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)
            findings.append(Finding(_SHOWN[each.name], shown))
    return findings


def memory_finding(index: int) -> Finding:
    """What the helper takes of GPU 0 in a process that computes on the GPU of an index."""
    name = f"helper's memory on GPU 0, a trainer on GPU {index}"
    expected = f"at most {_MAX_HELPER_MIB:.0f} MiB"
    command = [sys.executable, "-m", "tests.gpu.memory", str(index)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode != 0:
        message = done.stderr.strip().splitlines() or ["nothing"]
        return judged(name, message[-1], expected, False)
    return judged(name, f"{done.stdout.strip()} MiB", expected, float(done.stdout) <= _MAX_HELPER_MIB)


def main(arguments: list[str]) -> int:
    """See above."""
    page = Path(arguments[0])
    try:
        torch = cuda_or_why_not()
        return 0 if check(torch, page) else 1
    except NothingToCheckError as error:
        print(f"test-gpu: {error}", file=sys.stderr)
    except ModuleNotFoundError as error:
        print(
            f"test-gpu: expected the module {error.name} in {sys.executable}, found none: `make gpu-wheels`, "
            "where there is a network, fills a folder that brings it along",
            file=sys.stderr,
        )
    return NOTHING_TO_CHECK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
