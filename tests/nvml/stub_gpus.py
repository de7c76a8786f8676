"""The emulated GPUs that the tests read through the NVML stub."""

from perseus.emulation.physics import A100_SXM

MODEL = A100_SXM
UUIDS = ("GPU-0a", "GPU-0b", "GPU-1c")
