"""Rehearse a cluster on machines without GPUs: emulated ones for agents, and a job that trains on them.

    python -m perseus.demo.rehearsal gpus node0 2

makes two emulated GPUs in the folder `node0`, for an agent that is started with `--gpu-backend emulated
--emulated-gpus node0`. Once the agents run, all on this machine and each with a socket of its own,

    python -m perseus.demo.rehearsal train --node node0.sock node0 --node node1.sock node1

trains a pipeline on each node's GPUs, a stage on each GPU, until Ctrl-C; another one ends it at once.
Certificates, tokens, metrics and alerts are as in production: trainers know of the agents' sockets only.
"""

import argparse
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from perseus.demo.tasks import rank_tasks
from perseus.demo.trainer import STOP_FILE
from perseus.demo.workload import DEMO
from perseus.emulation.gpu import EmulatedGpu


def main(arguments: Sequence[str] | None = None) -> int:
    """Run with the given arguments, by default the command line's; return the exit status."""
    parser = argparse.ArgumentParser(
        "perseus.demo.rehearsal", description="Rehearse a cluster on machines without GPUs."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    gpus = commands.add_parser("gpus", help="make a node's emulated GPUs")
    gpus.add_argument("folder", type=Path, help="folder for them; its name becomes part of their UUIDs")
    gpus.add_argument("count", type=int, choices=range(1, 17), metavar="count", help="1 to 16")
    training = commands.add_parser("train", help="train a pipeline on each node, until Ctrl-C")
    training.add_argument(
        "--node", nargs=2, type=Path, action="append", required=True, metavar=("SOCKET", "GPUS")
    )
    training.add_argument("--job", default="rehearsal", help="name of the job")
    given = parser.parse_args(arguments)
    if given.command == "gpus":
        make(given.folder, given.count)
        return 0
    return train(given.job, given.node)


def make(folder: Path, count: int) -> None:
    """Make `count` GPUs, except those that exist already."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        path = folder / f"gpu-{number}"
        if not path.exists():
            EmulatedGpu.create(path, DEMO.gpu, f"GPU-{folder.resolve().name}-{number}").close()


def train(job: str, nodes: Sequence[tuple[Path, Path]]) -> int:
    """Train on every GPU of the nodes, which all have equally many; return the ranks' highest exit status."""
    gpus = [sorted(path.resolve() for path in folder.glob("gpu-*")) for _, folder in nodes]
    if len({len(each) for each in gpus}) != 1 or not gpus[0]:
        counts = ", ".join(f"{len(each)} in {folder}" for each, (_, folder) in zip(gpus, nodes, strict=True))
        print(f"error: expected as many GPUs on each node, made by `gpus`, found {counts}", file=sys.stderr)
        return 2
    # The last stage is the heaviest, as one with a language model's head is.
    weights = [0.85] * (len(gpus[0]) - 1) + [1.0]
    workload = replace(
        DEMO, job_id=job, pipeline_count=len(nodes), stage_weights=weights, evaluation_interval=0
    )
    sockets = [socket.resolve() for socket, _ in nodes]
    with tempfile.TemporaryDirectory(prefix="perseus-") as run_dir:
        tasks = rank_tasks(
            workload, Path(run_dir), sockets.__getitem__, lambda pipeline, stage: gpus[pipeline][stage]
        )
        commands = [[sys.executable, "-m", "perseus.demo.trainer", task.to_json()] for task in tasks]
        ranks: list[subprocess.Popen[bytes]] = []
        stop_file = Path(run_dir) / STOP_FILE

        def stop(*_: object) -> None:
            if stop_file.exists():
                for rank in ranks:
                    rank.terminate()
            stop_file.touch()

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        ranks += [subprocess.Popen(command, start_new_session=True) for command in commands]
        return max(rank.wait() for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
