"""DeepSpeed without a GPU, for examples: it takes the CPU for its accelerator, and compiles nothing."""

import os


def do_without_cuda() -> None:
    """Settle this process's DeepSpeed; to be called before anything imports it."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    # Else it would compile its collectives for shared memory when they are set up.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
