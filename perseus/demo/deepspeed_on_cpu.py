"""DeepSpeed without a GPU, for examples: it uses the CPU as its accelerator, and compiles nothing."""

import os


def do_without_cuda() -> None:
    """Configure DeepSpeed in this process; call it before anything imports DeepSpeed."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    # Otherwise it would compile its shared-memory collectives during set-up.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
