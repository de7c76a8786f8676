"""Versions of the frameworks that the hooks were run with: one table, for the hooks and docs/frameworks.md.

`RUNS` is what the tests really trained with, attached. `make framework-versions` writes it, and the table of
the docs from it; `make test-frameworks` fails where it is not what it has just run.

Standard library only.
"""

import logging
import re
from collections.abc import Sequence

_log = logging.getLogger("perseus.versions")

Run = tuple[str, str, str]
"""A hook (the module's name below `perseus.agent`), its framework's version, and torch's."""

# Written by `make framework-versions`.
RUNS: Sequence[Run] = (
    ("deepspeed", "0.19.8", "2.13.0"),
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
)
# End of what is written.

FRAMEWORKS = {
    "deepspeed": "DeepSpeed",
    "megatron": "Megatron-Core",
    "torch": "torch",
    "torchtitan": "torchtitan",
}
"""What each hook is for, as its versions are told."""

met: dict[str, Run] = {}
"""What the hooks of this process have met, by hook."""


def warn_if_untested(hook: str, version: str, torch_version: str) -> None:
    """A warning, once in a process, where the hook was never run with this version of its framework or torch.

    Of another patch release than those that it was run with it is said, but no warning.
    """
    if hook in met:
        return
    met[hook] = hook, public(version), public(torch_version)
    mine = [run for run in RUNS if run[0] == hook]
    tested_with = {
        (FRAMEWORKS[hook], met[hook][1]): {run[1] for run in mine},
        (FRAMEWORKS["torch"], met[hook][2]): {run[2] for run in mine},
    }
    for (framework, release), tested in tested_with.items():
        if release not in tested:
            is_patch = release_of(release) in map(release_of, tested)
            _log.log(
                logging.INFO if is_patch else logging.WARNING,
                "%s %s: its hook was never run with it, but with %s (docs/frameworks.md); training goes on",
                framework,
                release,
                ", ".join(sorted(tested, key=version_key)) or "none",
            )


def public(version: str) -> str:
    """A version without what a build adds to it (`+cpu`)."""
    return version.partition("+")[0]


def release_of(version: str) -> tuple[int, ...]:
    """Major and minor number, which change where interfaces may."""
    return version_key(version)[:2]


def version_key(version: str) -> tuple[int, ...]:
    """What versions sort by: their numbers, as far as they are numbers."""
    return tuple(int(number) for number in re.findall(r"\d+", public(version)))
