"""Attach to torchtitan: with another module name when starting training, or with one line.

    torchrun … -m perseus.agent.torchtitan --perseus.job-id llama --module llama3 --config llama3_8b …

in place of `-m torchtitan.train` trains in the same way, with all of its arguments, and attached. In a script
that starts torchtitan itself,

    from perseus.agent.torchtitan import wrap_training

    wrap_training(job_id="llama")

does the same: the `train` of any trainer, from any configuration, attaches for as long as it trains.
`attach(trainer, job_id=…)` is for custom loops.

The hook works like `perseus.agent.torch`: torchtitan's trainers train with a schedule of
`torch.distributed.pipelining` (`pp_schedule`). The rank's place follows from its number and `parallel_dims`,
which torchtitan lays out in the same order in all its versions.
"""

import argparse
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from perseus.agent.probe import placement as places
from perseus.agent.probe.attachment import Attachment, never_raises, stands_aside
from perseus.agent.probe.client import Probe
from perseus.agent.probe.framework import check_attributes
from perseus.agent.probe.job_spec import check_job
from perseus.agent.probe.marks import Connect
from perseus.agent.probe.tested_versions import note_versions
from perseus.agent.torch import attach_at

# torchtitan's numbering of ranks: the last of these dimensions varies fastest.
_DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
_PREFIX = "--perseus."


@never_raises
def attach(
    trainer: Any,
    *,
    job_id: str,
    connect: Connect = Probe.connect,
    max_slowdown_percent: float = 0.0,
) -> Attachment:
    """Attach this rank's trainer to the agent of its node. Called by all ranks of the job, before training.

    `max_slowdown_percent`: how much slower than stock plans may be. `connect` replaces `Probe.connect` in
    tests and demonstrations.

    Raises ValueError if `trainer` is not torchtitan's, trains without a pipeline, or lacks attributes that
    the hook needs, as in other versions. Without an agent the hook logs one line, and training continues as
    before.
    """
    import torch
    import torchtitan
    from torch import distributed

    version = str(getattr(torchtitan, "__version__", "of no version"))
    note_versions("torchtitan", version, str(torch.__version__))
    name = f"trainer {type(trainer).__name__}"
    check_attributes(trainer, name, "parallel_dims", "device")
    check_attributes(trainer.parallel_dims, f"{name}: parallel_dims", *_DIMENSIONS)
    schedule = getattr(trainer, "pp_schedule", None)
    if schedule is None:
        raise ValueError(
            f"{name}: expected a pipeline (parallelism.pipeline_parallel_degree above 1), found no "
            "pp_schedule; for data parallel alone use attach_model of perseus.agent.torch"
        )
    uuid = places.gpu_uuid(trainer.device)
    return attach_at(
        schedule,
        place_of(trainer.parallel_dims, distributed.get_rank(), uuid),
        job_id=job_id,
        connect=connect,
        max_slowdown_percent=max_slowdown_percent,
        torchtitan=version,
    )


def place_of(parallel_dims: Any, rank: int, gpu_uuid: str) -> places.Placement:
    """Return a global rank's place: data-parallel dimensions number pipelines, `cp` and `tp` tensor ranks.

    Raises ValueError for a rank beyond them.
    """
    sizes = [int(getattr(parallel_dims, name)) for name in _DIMENSIONS]
    coordinates: list[int] = []
    rest = rank
    for size in reversed(sizes):
        rest, coordinate = divmod(rest, size)
        coordinates.insert(0, coordinate)
    if rest:
        raise ValueError(f"parallel_dims: expected a rank below {math.prod(sizes)}, found {rank}")
    return places.place_in_mesh(_DIMENSIONS, sizes, coordinates, gpu_uuid)


def wrap_training(
    *, job_id: str, connect: Connect = Probe.connect, max_slowdown_percent: float = 0.0
) -> None:
    """Make every trainer of torchtitan attach when it trains, and detach when it ends; arguments as above.

    All ranks call this before training. Raises ValueError if it was called before, for invalid arguments, or
    for a torchtitan without `torchtitan.train.Trainer.train`. A trainer that can't be attached is logged, and
    trains as before.
    """
    check_job(job_id, max_slowdown_percent)
    from torchtitan import train

    check_attributes(train, "torchtitan.train", "Trainer")
    check_attributes(train.Trainer, "torchtitan.train.Trainer", "train")
    wrap_trainer(
        train.Trainer,
        lambda trainer: attach(
            trainer, job_id=job_id, connect=connect, max_slowdown_percent=max_slowdown_percent
        ),
    )


def wrap_trainer(trainer_class: Any, attach_trainer: Callable[[Any], Attachment]) -> None:
    """Make the `train` of a class and its subclasses attach. ValueError if it is wrapped already."""
    train, attach_trainer = trainer_class.train, stands_aside(attach_trainer)
    if hasattr(train, "is_attached_by_perseus"):
        raise ValueError("wrap_training: expected to be called once, found torchtitan's trainer wrapped")

    @wraps(train)
    def attached_train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        with attach_trainer(trainer):
            return train(trainer, *args, **kwargs)

    attached_train.is_attached_by_perseus = True  # type: ignore[attr-defined]
    trainer_class.train = attached_train


def main(arguments: Sequence[str], connect: Connect = Probe.connect) -> None:
    """Train as `torchtitan.train` does with these arguments, except those that begin with `--perseus.`."""
    ours, theirs = split_arguments(arguments)
    # Before importing torchtitan, which may read them on import.
    sys.argv[1:] = theirs
    wrap_training(job_id=ours.job_id, connect=connect, max_slowdown_percent=ours.max_slowdown_percent)
    from torchtitan import train

    run(train)


def run(train: Any) -> None:
    """Run `torchtitan.train` as a program.

    Up to 0.2 its `main` takes the trainer class; from 0.3 on the configuration selects it.
    """
    takes_trainer = bool(inspect.signature(train.main).parameters)
    train.main(*([train.Trainer] if takes_trainer else []))


def split_arguments(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split our arguments (`job_id`, `max_slowdown_percent`) from torchtitan's; SystemExit for mistakes."""
    parser = argparse.ArgumentParser(
        prog="perseus.agent.torchtitan", add_help=False, allow_abbrev=False,
        usage=f"-m %(prog)s {_PREFIX}job-id ID [{_PREFIX}max-slowdown-percent PERCENT] …",
    )  # fmt: skip
    parser.add_argument(f"{_PREFIX}job-id", dest="job_id", required=True)
    parser.add_argument(
        f"{_PREFIX}max-slowdown-percent", dest="max_slowdown_percent", type=float, default=0.0
    )
    ours, theirs = parser.parse_known_args(arguments)
    if unknown := [argument for argument in theirs if argument.startswith(_PREFIX)]:
        parser.error(f"expected {_PREFIX}job-id and {_PREFIX}max-slowdown-percent, found {unknown[0]}")
    return ours, theirs


if __name__ == "__main__":
    main(sys.argv[1:])
