"""`make torture`: every kill many times, at random points; writes benchmarks/results/torture.md.

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

from perseus.agent.restore.supervisor import SILENCE_S
from perseus.agent.sidecar.clock_worker import LEASE_S
from perseus.demo import nvml_stub
from tests.nvml.stack import COORDINATOR_LEASE_S, KILLS, Outcome, try_kills

AT_A_TIME = 3


def report(outcomes: dict[str, list[Outcome]], seed: int, took_s: float) -> str:
    """Return the results as a page."""
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
    return f"""# GPUs after a process is killed

`make torture` kills the processes of a running job at random points after its first locked clock: during
profiling, during planning and under the plan. Each stack has one emulated GPU behind the stand-in for NVML,
an agent with its supervisor, a trainer and a coordinator; {AT_A_TIME} stacks run at a time. A kill passes
if the GPU is unlocked and at its highest clock within the limit and no restore record is left. The first
kill that fails ends the run. "Children live on" leaves two child processes, one of which holds the
trainer's connection. "Trainer hangs" stops the trainer (SIGSTOP) and passes only if its GPU gets clocks
again after it continues. An agent that is stopped or holds its GIL sends no beats: after {SILENCE_S:g} s its
supervisor kills it and restores the GPUs. Where only its event loop hangs, here with the supervisor stopped,
the thread that sets clocks goes to stock after {LEASE_S:g} s.

The coordinator's lease is {COORDINATOR_LEASE_S:g} s here (30 s by default). An agent that loses its
coordinator keeps the plan until the lease ends, so the time to stock is the rest of the lease plus the
agent's own time.

| killed | times | of these, GPU locked | to stock, median | at most | limit |
|---|---|---|---|---|---|
{chr(10).join(rows)}

Last run: {today}, {took_s / 60:.0f} minutes, {cores} cores, {python}, seed {seed}. Every kill passed.
"""


def main(count: int, path: Path) -> None:
    """Kill, and write the results."""
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
