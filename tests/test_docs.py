"""The documentation: what its pages name exists, their code blocks are valid, and its site is complete.

Code blocks are of commands with their flags, Python, TOML, JSON and YAML.
"""

import ast
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from perseus.cli.main import app

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
ALL_PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
GENERATED = ROOT / "docs" / "reference" / "commands.md"

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
# Ends of a command: another command, a pipe, a redirection, or a comment.
END = {"|", ";", "&&", "||", ">", ">>", "<", "&", "2>"}


@dataclass(frozen=True)
class Block:
    page: Path
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.text.strip().splitlines()[0][:60]}"


def blocks(*languages: str) -> list[Block]:
    return [
        Block(page, language, textwrap.dedent(text))
        for page in PAGES
        if page != GENERATED
        for language, text in BLOCK.findall(page.read_text())
        if language in languages
    ]


def commands(text: str, *, has_prompt: bool) -> Iterator[list[str]]:
    """Yield the words of each `perseus …` in a shell block; with prompts, only from lines with one."""
    for line in text.replace("\\\n", " ").splitlines():
        if has_prompt and not line.startswith(("$ ", "# ")):
            continue
        words = shlex.split(line.removeprefix("$ "), comments=not line.startswith("# "))
        while "perseus" in words:
            words = words[words.index("perseus") + 1 :]
            ends = [index for index, word in enumerate(words) if word in END]
            yield words[: min(ends, default=len(words))]


def check_command(words: list[str]) -> None:
    """Refuse an unknown command or flag."""
    command: Any = get_command(app)
    words = list(words)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"no command {words[0]!r}"
        command, words = command.get_command(None, words[0]), words[1:]
    flags = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    given = {word.partition("=")[0] for word in words if word.startswith("--") and word != "--"}
    assert given <= flags | {"--help"}, f"no flags {sorted(given - flags)}"


@pytest.mark.parametrize("block", blocks("sh", "console"), ids=str)
def test_commands_and_their_flags_exist(block: Block) -> None:
    has_prompt = block.language == "console"
    for words in commands(block.text, has_prompt=has_prompt):
        check_command(words)


@pytest.mark.parametrize("block", blocks("python", "toml", "json", "yaml"), ids=str)
def test_blocks_of_a_language_can_be_parsed(block: Block) -> None:
    match block.language:
        case "python":
            ast.parse(block.text)
        case "toml":
            tomllib.loads(block.text)
        case "json":
            json.loads(block.text)
        case "yaml":
            list(yaml.safe_load_all(block.text))


def test_names_imported_in_python_blocks_exist() -> None:
    missing = []
    for block in blocks("python"):
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("perseus"):
                source = ROOT.joinpath(*(node.module or "").split("."))
                text = next(
                    path.read_text()
                    for path in (source.with_suffix(".py"), source / "__init__.py")
                    if path.exists()
                )
                missing += [(str(block), name.name) for name in node.names if name.name not in text]
    assert missing == []


@pytest.mark.slow("solves and simulates what the examples hold")
def test_examples_need_nothing_but_themselves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("node_modules"))
    scenario = tmp_path / "examples/simulation/grid.toml"
    scenario.write_text(scenario.read_text().replace("duration_h = 48", "duration_h = 3"))
    monkeypatch.chdir(tmp_path)
    shown = [
        words
        for block in blocks("sh", "console")
        for words in commands(block.text, has_prompt=block.language == "console")
        if any(word.startswith("examples/") for word in words)
    ]
    assert {words[0] for words in shown} == {"demo", "simulate", "solve"}
    for words in shown:
        if words[0] == "demo":  # needs the framework: tests/frameworks
            assert Path(words[words.index("--script") + 1]).exists(), words
        else:
            result = CliRunner().invoke(app, words)
            assert result.exit_code == 0, f"{words}: {result.output}"


def test_an_unknown_command_is_detected() -> None:
    (words,) = commands("perseus jobs list --state planned | head", has_prompt=False)
    assert words == ["jobs", "list", "--state", "planned"]
    check_command(words)
    for wrong in (["jobs", "lists"], ["jobs", "list", "--stat", "planned"], ["sing"]):
        with pytest.raises(AssertionError, match="no "):
            check_command(wrong)


# --- What pages name ----------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.name)
def test_modules_named_on_a_page_exist(page: Path) -> None:
    text = page.read_text()
    missing = [name for name in MODULE.findall(text) if not (ROOT / "perseus" / name).exists()]
    missing += [name for name in DOTTED.findall(text) if not exists(name)]
    assert missing == []


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.name)
def test_files_linked_from_a_page_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_page_of_settings_matches_the_models() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "settings_page.py"))["page"]()
    assert (ROOT / "docs" / "settings.md").read_text() == made, "make settings"


# --- The site -----------------------------------------------------------------------------------------------


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
