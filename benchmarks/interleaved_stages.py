"""Realised plans of many distinct stages, interleaved with 4 chunks each, against the sweep alone."""

from collections.abc import Sequence

from benchmarks.distinct_stages import solved_table
from benchmarks.harness import Table, main

_CASES = ((16, 64), (32, 64), (32, 128))
_CHUNK_COUNT = 4


def run() -> Sequence[Table]:
    title = f"100 realised plans of distinct stages, interleaved with {_CHUNK_COUNT} chunks"
    return [solved_table(title, _CASES, _CHUNK_COUNT)]


if __name__ == "__main__":
    main("interleaved_stages", run)
