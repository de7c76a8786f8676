"""Train torchtitan's debug model a little, attached to a notebook: `-m …torchtitan_orders TASK`.

Two ranks. Each rank writes a file with its marks and losses, and stage 0's registration.
"""

import json
import sys
from pathlib import Path

import torch

from tests.frameworks.notebook import Notebook
from tests.frameworks.torchtitan_trainer import be_a_rank, prepare, run
from tests.frameworks.trainers import TrainerTask, main


def train(task: TrainerTask, rank: int) -> None:
    """Train one rank; alone if the job's name says so."""
    torch.set_num_threads(1)
    be_a_rank(task, rank)
    notebook = Notebook()
    losses = run(task, rank, None if task.job_id == "alone" else notebook.connect)
    found = {
        "registration": notebook.registration,
        "iterations": notebook.iterations,
        "is_finished": notebook.is_finished,
        "losses": [loss.hex() for loss in losses],
    }
    Path(task.losses_dir, f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main(train, prepare))
