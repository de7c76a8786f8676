"""`make torture`: every kill many times, at random points of a running job; figures to docs/torture.md.

python tests/nvml/torture.py COUNT REPORT
"""

import os
import platform
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from perseus.demo import nvml_stub
from tests.nvml.stack import KILLS, LEASE_S, Outcome, try_kills

AT_A_TIME = 3


def report(outcomes: dict[str, list[Outcome]], seed: int, took_s: float) -> str:
    """The figures as a page."""
    rows = []
    for name, tried in outcomes.items():
        times_s = [outcome.restored_after_s for outcome in tried]
        locked = sum(outcome.was_locked for outcome in tried)
        rows.append(
            f"| {name} | {len(tried)} | {locked} | {statistics.median(times_s):.2f} s | "
            f"{max(times_s):.2f} s | {KILLS[name][1]:g} s |"
        )
    today, cores = time.strftime("%Y-%m-%d"), os.cpu_count()
    python = f"Python {platform.python_version()}"
    return f"""# What dies, and what becomes of the GPU

`make torture` kills the processes of a running job at random points, from its first locked clock on: while it
is profiled, planned, and under its plan. Each stack has one emulated GPU behind the stand-in for NVML,
an agent with its supervisor, a trainer and a coordinator; {AT_A_TIME} stacks run at a time. A kill passes if,
within its limit, the GPU is unlocked and at its highest clock, and no record of what to restore is left; one
that does not pass ends the run. Children that live on are two, one of which holds the trainer's connection. A
trainer that hangs is stopped (SIGSTOP), and passes only if its GPU gets clocks again once it goes on.

The coordinator's lease is {LEASE_S:g} s here (30 s by default): an agent that has lost its coordinator keeps
the plan while the lease runs, so the time to stock is the lease's rest and what the agent needs.

| killed | times | of these, GPU locked | to stock, median | at most | limit |
|---|---|---|---|---|---|
{chr(10).join(rows)}

Last run: {today}, {took_s / 60:.0f} minutes, {cores} cores, {python}, seed {seed}. Every kill passed.
"""


def main(count: int, path: Path) -> None:
    """Kill, and write down what came of it."""
    seed = random.randrange(2**32)
    print(f"seed {seed}", flush=True)
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="perseus-") as folder:
        library = nvml_stub.build(Path(folder))
        outcomes = try_kills(Path(folder), library, list(KILLS), count, seed, AT_A_TIME)
    text = report(outcomes, seed, time.monotonic() - begun_s)
    path.write_text(text)
    print(text)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
