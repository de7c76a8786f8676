"""`make torture`: every kill many times, at random points; writes benchmarks/results/torture.md.

python -m tests.nvml.torture COUNT REPORT
"""

import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from perseus.demo import nvml_stub
from tests.nvml.stack import KILLS, try_kills
from tests.torture.report import last_run, publish

AT_A_TIME = 3
COLUMNS = ("killed", "times", "of these, GPU locked", "to stock, median", "at most", "limit")


def main(count: int, page: Path) -> None:
    """Kill, and write the results."""
    seed = random.randrange(2**32)
    print(f"seed {seed}", flush=True)
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="perseus-") as folder:
        library = nvml_stub.build(Path(folder))
        outcomes = try_kills(Path(folder), library, list(KILLS), count, seed, AT_A_TIME)
    rows, late = [], []
    for name, tried in outcomes.items():
        times_s, limit_s = [outcome.restored_after_s for outcome in tried], KILLS[name].limit_s
        locked = sum(outcome.was_locked for outcome in tried)
        times = [f"{time_s:.2f} s" for time_s in (statistics.median(times_s), max(times_s))]
        rows.append((name, len(tried), locked, *times, f"{limit_s:g} s"))
        late += [name] if max(times_s) > limit_s else []
    verdict = f"Too late: {', '.join(late)}." if late else "Every kill passed."
    publish(
        page,
        "# GPUs after a process is killed",
        COLUMNS,
        rows,
        f"{last_run(time.monotonic() - begun_s, seed)} {verdict}",
    )
    if late:
        raise SystemExit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
