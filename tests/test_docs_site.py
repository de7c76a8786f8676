"""The documentation site builds without warnings, and is complete."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def build(pages: Path, site: Path) -> subprocess.CompletedProcess[str]:
    arguments = ["-m", "sphinx", "--fail-on-warning", "--fresh-env", "--quiet", "-b", "html"]
    return subprocess.run(
        [sys.executable, *arguments, str(pages), str(site)], capture_output=True, text=True, check=False
    )


@pytest.mark.slow("makes all pages, and the reference from the code")
@pytest.mark.timeout(300)
def test_every_page_is_in_the_site(tmp_path: Path) -> None:
    # Outside the checkout: the build writes files beside the pages.
    tree = tmp_path
    for name in ("docs", "protos", "benchmarks", "deploy", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("node_modules"))
    for name in ("README.md", "buf.gen.yaml"):
        shutil.copy(ROOT / name, tmp_path / name)
    done = build(tree / "docs", tree / "site")
    assert (done.returncode, done.stderr) == (0, "")
    pages = {path.relative_to(tree / "docs").with_suffix(".html") for path in (tree / "docs").rglob("*.md")}
    assert {page for page in pages if not (tree / "site" / page).exists()} == set()
    commands = (tree / "site" / "reference" / "commands.html").read_text()
    assert 'id="perseus-jobs-straggler"' in commands
    assert 'id="perseus.solver.solve"' in (tree / "site" / "reference" / "python.html").read_text()


@pytest.mark.slow("a process that makes a site, with the settings of the real one")
@pytest.mark.timeout(300)
def test_a_broken_link_fails(tmp_path: Path) -> None:
    pages = tmp_path / "docs"
    pages.mkdir()
    shutil.copy(ROOT / "docs" / "conf.py", pages)
    (pages / "index.md").write_text("# Title\n\n[gone](gone.md#there)\n")
    done = build(pages, tmp_path / "site")
    assert done.returncode != 0
    assert "gone.md" in done.stderr
