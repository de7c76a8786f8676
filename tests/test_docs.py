"""Modules, files and settings in the documentation exist."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])

MODULE = re.compile(r"(?<![\w./])(?:perseus/)?((?:agent|service|solver|cli|demo)/[a-z_/]+\.py)")
# perseus.db is the database, --perseus.… an option.
DOTTED = re.compile(r"(?<!--)\bperseus(?:\.(?!db\b)[a-z_0-9]+)+")


def exists(dotted: str) -> bool:
    """Whether a dotted name is a module, a package, or (its last part) a name in one."""
    parts = dotted.split(".")
    for end in (len(parts), len(parts) - 1):
        path = ROOT.joinpath(*parts[:end])
        if end > 1 and (path.with_suffix(".py").exists() or (path.is_dir() and end == len(parts))):
            return True
    return (ROOT.joinpath("protos", *parts)).is_dir()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_named_on_a_page_exist(page: Path) -> None:
    text = page.read_text()
    missing = [name for name in MODULE.findall(text) if not (ROOT / "perseus" / name).exists()]
    missing += [name for name in DOTTED.findall(text) if not exists(name)]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_linked_from_a_page_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_page_of_settings_matches_the_models() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "settings_page.py"))["page"]()
    assert (ROOT / "docs" / "settings.md").read_text() == made, "make settings"
