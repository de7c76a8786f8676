"""Adds to what is built, wheel or source distribution, the commit that it is built from."""

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CommitHook(BuildHookInterface[Any]):
    """Writes `perseus/commit.txt`, which a wheel built from a source distribution takes over.

    An editable install gets none: its commit changes.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the file to the build, unless the source has it already."""
        source = Path(self.root)
        if version == "editable" or (source / "perseus/commit.txt").exists():
            return
        commit = runpy.run_path(str(source / "perseus/release.py"))["commit_of_checkout"]()
        if commit:
            written = Path(self.directory) / "commit.txt"
            written.parent.mkdir(parents=True, exist_ok=True)
            written.write_text(f"{commit}\n")
            build_data["force_include"][str(written)] = "perseus/commit.txt"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was written beside the result."""
        (Path(self.directory) / "commit.txt").unlink(missing_ok=True)
