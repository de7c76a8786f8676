from pathlib import Path

import pytest

from perseus.agent.gpu import GpuNotFoundError
from perseus.agent.sidecar.backends import EmulatedBackend, NvmlBackend, backend
from perseus.agent.sidecar.settings import AgentSettings
from perseus.configuration import ConfigurationError, load
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A100_SXM


def test_defaults_suit_a_node() -> None:
    settings = load(AgentSettings, None, {})
    assert settings.socket == Path("/run/perseus/agent.sock")
    assert settings.gpu_backend == "nvml"
    assert not settings.observe
    assert isinstance(backend(settings), NvmlBackend)


def test_emulated_gpus_need_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PERSEUS_AGENT_GPU_BACKEND", "emulated")
    with pytest.raises(ConfigurationError, match="expected a folder, as gpu_backend is emulated"):
        load(AgentSettings, None, {})
    settings = load(AgentSettings, None, {"emulated_gpus": tmp_path})
    assert isinstance(backend(settings), EmulatedBackend)


def test_a_gpu_is_found_among_other_files(tmp_path: Path) -> None:
    for number in range(2):
        EmulatedGpu.create(tmp_path / str(number), A100_SXM, f"GPU-{number}").close()
    (tmp_path / "README").write_text("not a GPU")
    gpu = EmulatedBackend(tmp_path).open("GPU-1")
    assert gpu.uuid == "GPU-1"
    gpu.close()
    with pytest.raises(GpuNotFoundError, match=r"GPU-9: expected one of this node's 2 GPUs \(GPU-0, GPU-1\)"):
        EmulatedBackend(tmp_path).open("GPU-9")
    with pytest.raises(GpuNotFoundError, match=r"0 GPUs \(none\)"):
        EmulatedBackend(tmp_path / "nowhere").open("GPU-9")
