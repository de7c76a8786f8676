"""The release that runs, and the commit that it was built from."""

import subprocess
from functools import cache
from pathlib import Path

VERSION = "0.2.0"
"""The only place that has the version: builds, the chart's test and every process read it here."""

_FOLDER = Path(__file__).parent
_GIT_S = 5.0


@cache
def release() -> str:
    """Return the version, with the commit as a semantic version's build: `0.2.0+g1a2b3c4d5e6f`.

    Built packages carry the commit in a file, which the build writes. A checkout asks git. The version stands
    alone where neither knows it.
    """
    commit = commit_of_build() or commit_of_checkout()
    return f"{VERSION}+g{commit}" if commit else VERSION


def commit_of_build() -> str:
    """Return what the build wrote into `commit.txt`; empty in a checkout."""
    try:
        return (_FOLDER / "commit.txt").read_text().strip()
    except FileNotFoundError:
        return ""


def commit_of_checkout() -> str:
    """Return the commit of the git checkout that this file is in, 12 digits; empty outside of one."""
    if not (_FOLDER.parent / ".git").exists():
        return ""
    command = ["git", "-C", str(_FOLDER.parent), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=_GIT_S
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
