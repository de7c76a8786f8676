"""A Slurm job's share of one node, from slurmd's variables for its prolog and epilog, and its grant.

Slurm counts GPUs by their device files: number 3 is /dev/nvidia3, wherever nvidia-smi lists it. So a grant
names GPUs by UUID, found through their device files.

    SlurmError
     ├─ SlurmEnvironmentError     this is not a prolog or epilog of slurmd
     └─ NoSuchGpuError            the job has a GPU that the node's driver does not know
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

_NOT_IN_LABELS = re.compile(r"[^A-Za-z0-9_.,:;@/+=-]")
_MAX_LABEL_LENGTH = 256
_NUMBERS = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")
_NODE_NUMBER = re.compile(r"\d+$")


class SlurmError(Exception):
    """The job can't be prepared or ended on this node; the message has the reason."""


class SlurmEnvironmentError(SlurmError):
    """A variable of slurmd is missing or malformed."""


class NoSuchGpuError(SlurmError):
    """The job has a GPU that the node's driver does not know."""


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job on this node. `gpu_numbers` count its GPUs' device files; `account` is "" if unknown."""

    job_id: str
    uid: int
    gpu_numbers: tuple[int, ...]
    account: str = ""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self:
        """Read the job from a prolog's or epilog's environment. Raises `SlurmEnvironmentError`."""
        job_id, uid = (_number(environment, name) for name in ("SLURM_JOB_ID", "SLURM_JOB_UID"))
        return cls(
            str(job_id),
            uid,
            _gpu_numbers(environment.get("SLURM_JOB_GPUS", "")),
            environment.get("SLURM_JOB_ACCOUNT", ""),
        )

    @property
    def file_name(self) -> str:
        """The name of its grant's file."""
        return f"slurm-{self.job_id}"

    def grant(self, gpu_uuids: Sequence[str]) -> str:
        """Return the content of its grant; it has the user's number, as a node may not know the name."""
        labels = {"slurm-job": self.job_id, "slurm-account": self.account}
        words = [f"{key}={_as_label(value)}" for key, value in labels.items() if value]
        return f"{self.uid}: {' '.join([*gpu_uuids, *words])}\n"


def uuids_of(numbers: Sequence[int], device_nodes: Mapping[str, str]) -> list[str]:
    """Return the UUIDs of numbered GPUs; `device_nodes` are paths by UUID. Raises `NoSuchGpuError`."""
    by_number = {
        int(found[0]): uuid
        for uuid, path in device_nodes.items()
        if (found := _NODE_NUMBER.search(path)) is not None
    }
    missing = [number for number in numbers if number not in by_number]
    if missing:
        known = ", ".join(map(str, sorted(by_number))) or "none"
        others = ", ".join(map(str, missing))
        raise NoSuchGpuError(f"SLURM_JOB_GPUS: expected GPUs of this node ({known}), found {others}")
    return [by_number[number] for number in numbers]


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    if not (value.isascii() and value.isdecimal() and len(value) <= 10):
        raise SlurmEnvironmentError(
            f"{name}: expected a number, as slurmd gives its prolog and epilog, found {value[:80]!r}"
        )
    return int(value)


def _gpu_numbers(text: str) -> tuple[int, ...]:
    """Parse "0,1" or "0-3,6"; empty for a job without GPUs."""
    numbers: list[int] = []
    for part in filter(None, text.split(",")):
        found = _NUMBERS.fullmatch(part)
        if found is None:
            raise SlurmEnvironmentError(f"SLURM_JOB_GPUS: expected numbers of GPUs, found {text[:80]!r}")
        first = int(found[1])
        numbers += range(first, int(found[2] or first) + 1)
    return tuple(numbers)


def _as_label(value: str) -> str:
    return _NOT_IN_LABELS.sub("_", value)[:_MAX_LABEL_LENGTH]
