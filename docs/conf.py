"""How Sphinx makes the site (`make docs`): the pages as they are, and the reference from the code."""

import subprocess
import sys
from pathlib import Path

from sphinx.application import Sphinx

from perseus.release import VERSION

HERE = Path(__file__).parent
GENERATED = HERE / "reference" / "commands.md"

project = "Perseus"
author = "the Perseus developers"
copyright = "the Perseus developers"  # noqa: A001 (Sphinx names it)
version = release = VERSION

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"Perseus {version}"
nitpicky = False  # types of the standard library and of numpy are not linked
autodoc_typehints = "description"
autodoc_member_order = "bysource"
exclude_patterns = ["_build"]


def write_commands(app: Sphinx) -> None:
    """Write the reference of the commands, from what they say of themselves."""
    GENERATED.parent.mkdir(exist_ok=True)
    arguments = ["perseus.cli.main", "utils", "docs", "--name", "perseus", "--output", str(GENERATED)]
    subprocess.run([sys.executable, "-m", "typer", *arguments], check=True, stdout=subprocess.DEVNULL)


# What pages link to for readers of the repository, and where it stands in the site.
PLACES = {
    "](../benchmarks/README.md": "](benchmarks.md",
    "](../protos/perseus/v1)": "](reference/contract.md)",
    "](../examples/nodejs)": "](protocol.md)",
    "](../benchmarks/results/": "](path:../benchmarks/results/",  # a download: these are no pages of the site
}


def find_in_site(app: Sphinx, page: str, source: list[str]) -> None:
    """Let links to files and folders of the repository lead to their place in the site."""
    for link, place in PLACES.items():
        source[0] = source[0].replace(link, place)


def setup(app: Sphinx) -> None:
    """See Sphinx."""
    app.connect("builder-inited", write_commands)
    app.connect("source-read", find_in_site)
