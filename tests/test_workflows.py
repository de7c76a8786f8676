"""The files of GitHub's Actions and issues match GitHub's schemas, and call targets that exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GITHUB = ROOT / ".github"


@pytest.mark.slow("the checker takes a second to start")
@pytest.mark.parametrize(
    ("schema", "pattern"),
    [
        ("github-workflows", "workflows/*.yml"),
        ("github-issue-forms", "ISSUE_TEMPLATE/[!c]*.yml"),
        ("github-issue-config", "ISSUE_TEMPLATE/config.yml"),
    ],
)
def test_files_match_githubs_schemas(schema: str, pattern: str) -> None:
    files = sorted(GITHUB.glob(pattern))
    assert files
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "check_jsonschema",
        "--builtin-schema",
        f"vendor.{schema}",
        *files,
    ]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_workflows_make_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = [
        target
        for path in (GITHUB / "workflows").glob("*.yml")
        for line in re.findall(r"\bmake ([a-z -]+)", path.read_text())
        for target in line.split()
    ]
    assert called
    assert set(called) <= targets
