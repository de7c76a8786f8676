"""One word for one thing: the words that `docs/glossary.md` replaced come back nowhere."""

import re
import subprocess
from itertools import product
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

REPLACED = {
    "ceiling": "maximum clock, or power cap",
    "check word": "commit marker",
    "comeback": "retry with backoff",
    "complaints": "refusal log",
    "door": "gateway",
    "farewell": "final message",
    "get on": "make progress",
    "how-manieth": "index",
    "house": "package, architecture",
    "outlook": "forecast",
    "pace": "target iteration time, rate limit, or operating point",
    "pacer": "iteration tracker",
    "pacing": "signal target",
    "broken promise": "prediction violated",
    "promised time": "predicted time",
    "put aside": "quarantine",
    "rung": "price level",
    "seldom": "rate-limited log",
    "stranger": "other user",
    "tally": "counters",
    "told": "reported, published",
    "untold": "unreported",
    "vitals": "counters",
    "wish": "desired state",
}
WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

EXEMPT = ("CHANGELOG.md", "docs/glossary.md", "tests/test_vocabulary.py", "perseus/service/web/page/vendor/")
ENDINGS = (".py", ".proto", ".js", ".html", ".md", ".toml", ".yml", ".yaml", ".service", ".java", "Makefile")


def words(text: str) -> str:
    """The words of a text and of its identifiers, in lower case and singular, with single spaces."""
    found = (word.lower() for word in WORDS.findall(text))
    return " " + " ".join(word[:-1] if word[-1] == "s" and len(word) > 1 else word for word in found) + " "


def files() -> list[Path]:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [
        ROOT / name
        for name in names.splitlines()
        if name.endswith(ENDINGS) and not name.startswith(EXEMPT) and (ROOT / name).exists()
    ]


def replaced_words(text: str) -> list[str]:
    """Which of the old words a text has."""
    found = words(text)
    return [old for old in REPLACED if f" {words(old).strip()} " in found]


def test_no_replaced_word_has_come_back() -> None:
    found = {str(path.relative_to(ROOT)): replaced_words(path.read_text()) for path in files()}
    assert {name: old for name, old in found.items() if old} == {}


PROSE = ("The agent is told.", "put aside", "doors")
IDENTIFIERS = ("rank_ceiling", "class SignalPacing:", "checkWord", "CHECK_WORD = 1")
CONTAINING = ("space", "namespaces", "outdoor", "a marker", "spaced", "target")


@pytest.mark.parametrize(("text", "count"), [*product(PROSE + IDENTIFIERS, [1]), *product(CONTAINING, [0])])
def test_old_words_are_found_in_prose_and_in_identifiers_and_others_are_not(text: str, count: int) -> None:
    assert len(replaced_words(text)) == count
