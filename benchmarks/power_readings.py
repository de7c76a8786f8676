"""The cost of agents' power readings for a coordinator, once a second: 4,096 ranks, 8 per agent.

One message of 8 GPUs per agent and second, compared with no messages and with a server that only echoes.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Cell, Column, Table, main
from benchmarks.load.control import Agents, CoordinatorProcess, echo, raise_file_limit

RANKS, RANKS_PER_AGENT, STAGES = 4096, 8, 4
MEASURED_S = 15.0

_REST_LIMIT_S = 120.0
_POWER_W = 300.0


def run() -> Sequence[Table]:
    """Measure the coordinator and the echo."""
    raise_file_limit()
    with tempfile.TemporaryDirectory(prefix="perseus-load-") as name:
        folder = Path(name)
        with CoordinatorProcess(folder, str(folder / "jobs.db")) as coordinator:
            coordinator.start()
            with Agents(coordinator.address) as agents:
                ours = _measure(agents, coordinator.pid, is_echo=False)
    with echo() as (address, pid), Agents(address) as agents:
        bare = _measure(agents, pid, is_echo=True)
    rows: list[tuple[Cell, ...]] = [("coordinator", *ours), ("echo", *bare)]
    return [
        Table(
            f"Power readings of {RANKS} GPUs, {RANKS // RANKS_PER_AGENT} agents",
            (
                Column("server"),
                Column("messages/s", ".0f"),
                Column("idle, of a core [%]", ".1f"),
                Column("with readings, of a core [%]", ".1f"),
                Column("CPU per message [µs]", ".0f"),
            ),
            tuple(rows),
            "The agents' ranks have joined a job, and report no iterations. The echo answers each message; "
            "readings get no answer. The coordinator's cost includes adding them up once a second.",
        )
    ]


def _measure(agents: Agents, pid: int, *, is_echo: bool) -> tuple[float, float, float, float]:
    agents.ask(
        "add",
        job_id="load",
        pipeline_count=RANKS // STAGES,
        stage_count=STAGES,
        ranks_per_agent=RANKS_PER_AGENT,
        is_echo=is_echo,
    )
    agents.ask("rest", limit_s=_REST_LIMIT_S)
    idle = agents.ask("tell_power", seconds=MEASURED_S, server_pid=pid, power_w=None)
    reported = agents.ask("tell_power", seconds=MEASURED_S, server_pid=pid, power_w=_POWER_W)
    idle_share, reported_share = (each["server_cpu_s"] / each["wall_s"] for each in (idle, reported))
    per_s = reported["message_count"] / reported["wall_s"]
    return per_s, 100 * idle_share, 100 * reported_share, 1e6 * (reported_share - idle_share) / per_s


if __name__ == "__main__":
    main("power_readings", run)
