"""Fuzz one parser by coverage: `python -m tests.fuzz TARGET SECONDS`. `make fuzz` fuzzes all of them.

It starts from valid input. A finding is written to the folder that it prints: make it a test of the parser.
"""

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["perseus", "json"]):
    from tests.fuzz.targets import TARGETS


def main(name: str, duration_s: int) -> None:
    """Fuzz until the time is over or something is found."""
    target = TARGETS[name]
    corpus = Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-"))
    for number, data in enumerate(target.valid):
        (corpus / f"valid-{number}").write_bytes(data)
    atheris.Setup(
        [
            "fuzz",
            f"-max_total_time={duration_s}",
            "-timeout=20",
            "-rss_limit_mb=2048",
            "-max_len=4096",
            "-print_final_stats=1",
            f"-artifact_prefix={corpus}/finding-",
            str(corpus),
        ],
        target.run,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
