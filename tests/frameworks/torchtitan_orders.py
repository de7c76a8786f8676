"""torchtitan's debug model, a little under a schedule, attached to a notebook: `-m …torchtitan_orders TASK`.

Two ranks. What stage 0 registered, what each rank marked and what it lost is left in a file for each rank.
"""

import json
import sys
from pathlib import Path

import torch

from tests.frameworks.notebook import Notebook
from tests.frameworks.torchtitan_trainer import be_a_rank, prepare, run
from tests.frameworks.trainers import TrainerTask, main


def train(task: TrainerTask, rank: int) -> None:
    """One rank; alone if the job's name says so."""
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
