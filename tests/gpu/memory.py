"""What the helper's thread takes of GPU 0: `python -m tests.gpu.memory DEVICE` prints it in MiB.

A process of its own, whose only context is on DEVICE: were the helper to make one on GPU 0, it would show.
"""

import sys
import time

import torch
from torch import cuda

from tests.gpu.edges import NotedProbe
from tests.gpu.pipeline import attach_marks


def main(index: int) -> None:
    device = torch.device("cuda", index)
    cuda.set_device(device)
    torch.ones(1, device=device)
    cuda.synchronize(device)
    before = used_of_gpu_0()
    marks = attach_marks(NotedProbe(), device)
    for _ in range(3):
        marks.begin_iteration()
        marks.end_iteration()
        time.sleep(0.05)
    after = used_of_gpu_0()
    marks.close()
    print(f"{(after - before) / 2**20:.1f}")


def used_of_gpu_0() -> int:
    """Bytes, by the driver: asking CUDA would make the context that is looked for."""
    import pynvml

    pynvml.nvmlInit()
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)
    finally:
        pynvml.nvmlShutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
