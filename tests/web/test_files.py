"""The page's files: nothing third-party that is undeclared, nothing from elsewhere, nothing inline."""

import hashlib
import re
from pathlib import Path

import perseus.service.web

PAGE = Path(perseus.service.web.__file__).parent / "page"
UPLOT = PAGE / "vendor" / "uplot"


def own_files() -> list[Path]:
    return [path for path in PAGE.rglob("*") if path.is_file() and not path.is_relative_to(PAGE / "vendor")]


def test_uplot_is_what_was_published() -> None:
    reported = dict(re.findall(r"\| `(.+)` \| `([0-9a-f]{64})` \|", (UPLOT / "ORIGIN.md").read_text()))
    there = {path.name for path in UPLOT.iterdir()} - {"ORIGIN.md"}
    assert reported == {name: hashlib.sha256((UPLOT / name).read_bytes()).hexdigest() for name in there}
    assert "LICENSE" in reported


def test_nothing_is_loaded_from_other_sites() -> None:
    addresses = {
        address for path in own_files() for address in re.findall(r"\b\w+://[^\"'`\s)]+", path.read_text())
    }
    assert addresses == {"http://www.w3.org/2000/svg"}  # a namespace, not an address


def test_the_policy_of_the_page_can_be_kept() -> None:
    html = (PAGE / "index.html").read_text()
    scripts = re.findall(r"<script\b([^>]*)>(.*?)</script>", html, re.DOTALL)
    assert [body for _, body in scripts] == [""]
    assert not re.search(r"<style|\sstyle=|\son\w+=", html)
    markup = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|setAttribute\(\"style\"|\beval\("
    )
    assert [
        path.name for path in own_files() if path.suffix == ".js" and markup.search(path.read_text())
    ] == []


def test_every_file_is_used() -> None:
    text = "".join(path.read_text() for path in own_files())
    assert [path.name for path in own_files() if path.name != "index.html" and path.name not in text] == []
