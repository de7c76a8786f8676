from collections.abc import Iterator
from contextlib import suppress
from ctypes import CDLL
from pathlib import Path

import pynvml
import pytest

from perseus.demo import nvml_stub
from perseus.emulation.gpu import EmulatedGpu
from tests.nvml.stub_gpus import MODEL, UUIDS


@pytest.fixture(scope="session")
def stub_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the library once; skip the test without a compiler."""
    if nvml_stub.compiler() is None:
        pytest.skip("no C compiler here to build the NVML stub with")
    return nvml_stub.build(tmp_path_factory.mktemp("stub"))


@pytest.fixture
def gpu_files(tmp_path: Path) -> list[Path]:
    """Three emulated A100s in a separate folder."""
    folder = tmp_path / "gpus"
    folder.mkdir()
    files = [folder / f"gpu-{index}" for index in range(len(UUIDS))]
    for file, uuid in zip(files, UUIDS, strict=True):
        EmulatedGpu.create(file, MODEL, uuid).close()
    return files


@pytest.fixture
def stub(stub_library: Path, gpu_files: list[Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The stub library under pynvml, in this process; yields the folder of its GPUs.

    The loader identifies a loaded library by its name: pynvml's request for libnvidia-ml.so.1 gets this one.
    """
    CDLL(str(stub_library))
    folder = gpu_files[0].parent
    monkeypatch.setenv("PERSEUS_NVML_STUB", str(folder))
    yield folder
    nvml_stub.instruct(folder, [])
    with suppress(pynvml.NVMLError_Uninitialized):  # repeats a shutdown with an injected error
        while True:
            pynvml.nvmlShutdown()
