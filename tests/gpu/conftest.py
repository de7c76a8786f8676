"""The stand-in for NVML is that of `tests/nvml`."""

from tests.nvml.conftest import gpu_files, stub, stub_library

__all__ = ["gpu_files", "stub", "stub_library"]
