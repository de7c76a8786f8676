"""What `make test-gpu` needs torch for, on a CPU: training, and a whole run in which CUDA fails."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed here; `make test-frameworks` has it")

from perseus.demo import nvml_stub  # noqa: E402
from tests.gpu import check  # noqa: E402
from tests.gpu.edges import NotedProbe  # noqa: E402
from tests.gpu.pipeline import SCHEDULES, alone, hook_findings  # noqa: E402

pytestmark = pytest.mark.slow("imports torch, and trains with it")


@pytest.mark.filterwarnings("ignore")  # torch's own
def test_every_schedule_trains_and_its_computations_are_counted() -> None:
    probes: list[NotedProbe] = []

    def connect(**_arguments: object) -> NotedProbe:
        probes.append(NotedProbe())
        return probes[-1]

    torch.set_num_threads(1)
    with alone():
        findings = hook_findings(torch.device("cpu"), connect, lambda: None, turns=2, iterations=6)
    assert len(findings) == len(SCHEDULES) == len(probes) / 2
    # Two kinds; of four stages; three kinds, the first stage's backward whole.
    for finding, probe, (_, count) in zip(findings, probes[::2], SCHEDULES.values(), strict=True):
        assert f"({count} an iteration" in finding.found
        assert {len(iteration) for iteration in probe.begins_ns} == {count}


@pytest.mark.filterwarnings("ignore")
def test_what_fails_is_in_the_table_and_what_does_not_as_well(
    stub: Path,
    stub_library: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A GPU that NVML knows and CUDA does not."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for name, value in nvml_stub.environment(stub_library, stub).items():
        monkeypatch.setenv(name, value)

    def properties(_device: Any) -> Any:
        return SimpleNamespace(uuid="0a")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA Q1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    page = tmp_path / "gpus.md"
    page.write_text("# GPUs\n")
    assert not check.check(torch, page)
    lines = page.read_text().splitlines()
    assert "### NVIDIA Q1, driver emulated" in lines
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in lines if line.startswith("| ")}
    assert "| usable | usable | passed |" in rows["self-test"]
    assert "another rank runs on it" in rows["claim by a second process"]
    assert rows["claim by a second process"].endswith("| passed |")
    memory = "helper's memory on GPU 0, a trainer on GPU 0"
    for failed in ("energy", "edges", "hook", "training", "graphs", memory):
        assert rows[failed].endswith("| FAILED |"), rows
    assert "NVIDIA Q1, driver emulated" in capsys.readouterr().out
