"""The checks of `make test-gpu`, as far as they run without a GPU: that they pass, and that they can fail."""

import json
from dataclasses import dataclass
from pathlib import Path

import pynvml
import pytest

from perseus.agent.energy.counter import CounterChange
from perseus.agent.energy.regression import Span
from perseus.agent.gpu.nvml import NvmlGpu
from perseus.agent.sidecar.self_test import gpu_findings
from perseus.demo import nvml_stub
from perseus.demo.processes import ClusterError
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import Work
from tests.agent.counter_simulation import POWER_W, simulate
from tests.agent.probe.test_device_marks import Device, Event
from tests.gpu import edges
from tests.gpu.check import self_test_findings
from tests.gpu.claims import claim_findings, observing_agent
from tests.gpu.edges import edge_findings
from tests.gpu.energy import Recording, fitting_sequence, judge, judging_sequence, regression_findings
from tests.gpu.report import Finding, Verdict

UUID = "GPU-0a"


@dataclass
class EmulatedLoads:
    """Work of an emulated GPU."""

    gpu: EmulatedGpu
    kinds: tuple[str, str] = ("heavy", "light")

    def run(self, kind: str) -> None:
        self.gpu.execute(Work(0.05, 0.0, 0.95) if kind == "heavy" else Work(0.02, 0.06, 0.6))


def verdicts(findings: list[Finding]) -> dict[str, Verdict]:
    return {finding.name: finding.verdict for finding in findings}


def simulated(sequence: list[str], seed: int) -> Recording:
    """A sequence in simulated time; the loads are those of the simulation."""
    units = {"0": ("forward", 0.05), "1": ("backward", 0.08), "wait": ("wait", 0.03)}
    found = simulate([units[each] for each in sequence], seed=seed, iterations=1, power_noise=0.02)
    return Recording(found.changes, found.spans, 0.0, found.end_s)


KINDS = ("forward", "backward")


@pytest.mark.parametrize("seed", range(5))
def test_powers_of_one_sequence_predict_the_counter_over_another(seed: int) -> None:
    first, second = simulated(fitting_sequence(250), seed), simulated(judging_sequence(120), seed + 100)
    findings = judge(KINDS, first, second)
    assert verdicts(findings)["energy by regression"] is Verdict.PASSED, findings
    assert verdicts(findings)["energy counter, period"] is Verdict.PASSED


def test_powers_predict_a_real_counter() -> None:
    """An H200's: `h200.json` has both sequences as these checks recorded them."""
    first, second = (
        Recording(
            [CounterChange(*change) for change in each["changes"]],
            [Span(*span) for span in each["spans"]],
            each["begin_s"],
            each["end_s"],
        )
        for each in json.loads(Path(__file__).with_name("h200.json").read_text())
    )
    findings = judge(("float32 8192", "bfloat16 512"), first, second)
    assert verdicts(findings)["energy by regression"] is Verdict.PASSED, findings


def test_a_load_that_draws_otherwise_than_it_did_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    first = simulated(fitting_sequence(250), 1)
    monkeypatch.setitem(POWER_W, "forward", 0.93 * POWER_W["forward"])
    findings = judge(KINDS, first, simulated(judging_sequence(120), 2))
    assert verdicts(findings)["energy by regression"] is Verdict.FAILED, findings


def test_too_little_to_judge_by_is_a_failure() -> None:
    little = simulated(fitting_sequence(3), 1)
    assert verdicts(judge(KINDS, little, little)) == {
        "energy counter": Verdict.FAILED,
        "clock events": Verdict.REPORTED,
        "energy by regression": Verdict.FAILED,
    }


def test_a_gpu_behind_nvml_is_recorded(gpu_files: list[Path], stub: Path) -> None:
    """In real time: how precise periods and powers are depends on the load of the machine."""
    seen, computes = NvmlGpu(UUID), EmulatedGpu(gpu_files[0])
    findings = regression_findings(seen, EmulatedLoads(computes), fitted=20, judged_by=6)
    seen.close()
    computes.close()
    reported = {finding.name: finding.found for finding in findings}
    assert {"energy counter, period", "energy by regression"} <= reported.keys()
    assert reported["energy counter, resolution"] == "1 mJ"
    assert reported["clock events"].startswith("0 of ")


def test_the_self_test_shows_what_bounds_the_gpu(gpu_files: list[Path], stub: Path) -> None:
    gpu = EmulatedGpu(gpu_files[0])
    gpu.limit_power(300.0)
    gpu.enforce_power_profiles([7])
    pynvml.nvmlInit()
    findings = self_test_findings(gpu_findings(UUID))
    pynvml.nvmlShutdown()
    gpu.close()
    assert verdicts(findings)["self-test"] is Verdict.PASSED, findings
    reported = {finding.name: finding.found for finding in findings}
    assert reported["power limit, W"] == "300.0"
    assert reported["workload power profiles"] == "llm_training"
    assert reported["clock event reasons, now"] == "sw_power_cap"
    problems = [finding.found for finding in findings if finding.name == "self-test, reported"]
    assert any(problem.startswith("average_power_w: ") for problem in problems)


@dataclass
class LateBegins(Device):
    """Computations take a millisecond, and begin this much late."""

    late_ms: float = 0.0

    def record(self, event: Event) -> None:
        # In the order: the iteration's begin, begin and end of each computation, the iteration's end.
        place = self.recorded_count % (2 + 2 * edges.COMPUTATIONS)
        super().record(event)
        event.at_ms += self.late_ms * (place % 2 == 1 and place < 2 * edges.COMPUTATIONS)

    def compute(self, _each: int) -> None:
        self.now_ms += 1.0


@pytest.mark.parametrize(("late_ms", "verdict"), [(0.0, Verdict.PASSED), (0.3, Verdict.FAILED)])
def test_begins_by_events_that_are_late_are_found(late_ms: float, verdict: Verdict) -> None:
    device = LateBegins([0.0] * edges.ITERATIONS * (2 + 2 * edges.COMPUTATIONS), late_ms=late_ms)
    findings = edge_findings(
        device, device.compute, lambda: None, has_helper=False, monotonic_ns=device.monotonic_ns
    )
    assert verdicts(findings)["durations by events"] is verdict, findings


@pytest.fixture
def environment(stub_library: Path, gpu_files: list[Path]) -> dict[str, str]:
    return nvml_stub.environment(stub_library, gpu_files[0].parent)


def test_a_second_process_that_claims_the_gpu_is_refused(environment: dict[str, str], tmp_path: Path) -> None:
    with observing_agent(tmp_path, environment) as socket:
        (finding,) = claim_findings(socket, UUID)
        assert finding.verdict is Verdict.PASSED, finding
        assert "another rank runs on it" in finding.found
        (finding,) = claim_findings(socket, "GPU-nowhere")
        assert finding.verdict is Verdict.FAILED, "what is not refused for that is seen"
    assert (tmp_path / "agent.log").exists()
    assert nvml_stub.Locks.read(tmp_path / "gpus" / "gpu-0") == nvml_stub.NO_LOCKS


def test_an_agent_that_does_not_come_up_says_why(tmp_path: Path) -> None:
    broken = {"PERSEUS_AGENT_GPU_BACKEND": "emulated"}
    with (
        pytest.raises(ClusterError, match=r"expected an agent that listens .*; it said: ..."),
        observing_agent(tmp_path, broken),
    ):
        pass
