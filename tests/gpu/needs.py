"""What the base install needs beside numpy and grpcio, a line each: `python -m tests.gpu.needs`."""

import re
import tomllib
from pathlib import Path

ALREADY_THERE = ("numpy", "grpcio")


def needs(pyproject: str) -> list[str]:
    """The requirements, from the text of pyproject.toml."""
    requirements: list[str] = tomllib.loads(pyproject)["project"]["dependencies"]
    return [each for each in requirements if re.split(r"[<>=\[; ]", each, maxsplit=1)[0] not in ALREADY_THERE]


if __name__ == "__main__":
    print("\n".join(needs(Path("pyproject.toml").read_text())))
