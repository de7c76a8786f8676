"""Tested framework versions of the hooks: one table, for the hooks and docs/frameworks.md.

`RUNS` lists the versions with which the tests trained, attached. `make framework-versions` writes it, and
from it the table in the docs; `make test-frameworks` fails if a version just run is not in it, and with
`NIGHTLY=yes` also if one in it was not run.

Standard library only.
"""

import re
from collections.abc import Sequence

Run = tuple[str, str, str]
"""A hook, its framework's version, and torch's. A hook is a module below `perseus.agent`, or Accelerate."""

# Written by `make framework-versions`.
RUNS: Sequence[Run] = (
    ("accelerate", "1.15.0", "2.13.0"),
    ("deepspeed", "0.19.8", "2.13.0"),
    ("lightning", "2.6.6", "2.13.0"),
    ("megatron", "0.12.3", "2.13.0"),
    ("megatron", "0.13.1", "2.13.0"),
    ("megatron", "0.14.0", "2.13.0"),
    ("megatron", "0.15.3", "2.13.0"),
    ("megatron", "0.16.1", "2.13.0"),
    ("megatron", "0.19.2", "2.13.0"),
    ("megatron", "0.16.1", "2.15.0"),
    ("torch", "2.13.0", "2.13.0"),
    ("torch", "2.15.0", "2.15.0"),
    ("torchtitan", "0.2.2", "2.13.0"),
    ("torchtitan", "0.3.0", "2.15.0"),
    ("transformers", "5.24.0", "2.13.0"),
)
# End of the generated part.

FRAMEWORKS = {
    "accelerate": "Accelerate",
    "deepspeed": "DeepSpeed",
    "lightning": "Lightning",
    "megatron": "Megatron-Core",
    "torch": "torch",
    "torchtitan": "torchtitan",
    "transformers": "Transformers",
}
"""Each hook's framework, by its distribution name."""

met: dict[str, Run] = {}
"""The versions that this process has used, by hook."""

untested: list[str] = []
"""Those that the tests have not trained with, apart from other patch releases; for the line in the log."""


def note_versions(hook: str, version: str, torch_version: str) -> None:
    """Note, once per process, which version of its framework and of torch a hook meets."""
    if hook in met:
        return
    met[hook] = hook, public(version), public(torch_version)
    mine = [run for run in RUNS if run[0] == hook]
    tested_with = {
        (FRAMEWORKS[hook], met[hook][1]): {run[1] for run in mine},
        (FRAMEWORKS["torch"], met[hook][2]): {run[2] for run in mine},
    }
    for (framework, release), tested in tested_with.items():
        if release_of(release) not in map(release_of, tested):
            untested.append(f"{framework} {release}")


def public(version: str) -> str:
    """Return a version without a build's suffix (`+cpu`)."""
    return version.partition("+")[0]


def release_of(version: str) -> tuple[int, ...]:
    """Return the major and minor number, which change if interfaces may change."""
    return version_key(version)[:2]


def version_key(version: str) -> tuple[int, ...]:
    """Return the sort key of versions: their numeric parts."""
    return tuple(int(number) for number in re.findall(r"\d+", public(version)))
