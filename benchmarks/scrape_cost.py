"""What scraping costs a coordinator: the job's 1,024 ranks alone, with every rank told, and beside many jobs.

A coordinator in a process of its own, scraped over HTTP from here, about once a second: an answer serves that
long, and so each scrape reads anew. While its agents rest, its processor time over a moment with a scrape is
compared with that over the moment after; scraped every five seconds, the median is a share of a core.
What a scraper waits for its answer while the agents report, each rank a batch a second, is shown as well.
"""

import http.client
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Cell, Column, Table, main
from benchmarks.load.control import LOAD_FLAGS, Agents, CoordinatorProcess, quantile, raise_file_limit
from tests.service.web.scraping import free_port

EVERY_S = 5.0
"""How often a Prometheus is meant to scrape."""

STAGES = 4
_RANKS_PER_AGENT = 64
_PLAN_LIMIT_S = 240.0
_REST_LIMIT_S = 120.0
_SCRAPES = 30
_LOADED_SCRAPES = 10
_APART_S = 1.1


@dataclass(frozen=True, slots=True)
class Configuration:
    """Jobs of so many pipelines of 4 stages."""

    job_count: int
    pipeline_count: int
    has_ranks: bool = False


CONFIGURATIONS = (
    Configuration(1, 256),
    Configuration(1, 256, has_ranks=True),
    Configuration(64, 4),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one configuration; seconds of the processor that each scrape took, and of waiting under load."""

    series_count: int
    size_bytes: int
    cpu_s: list[float]
    loaded_s: list[float]


def measure(wanted: Configuration) -> Outcome:
    """Load a coordinator, scrape it, let it rest, and scrape it again."""
    port = free_port()
    flags = [*LOAD_FLAGS, "--http", f"127.0.0.1:{port}", *(["--metrics-ranks"] if wanted.has_ranks else [])]
    job_ids = [f"load-{number}" for number in range(wanted.job_count)]
    ranks_per_agent = min(_RANKS_PER_AGENT, wanted.pipeline_count * STAGES)
    with tempfile.TemporaryDirectory(prefix="perseus-scrape-") as name:
        folder = Path(name)
        with CoordinatorProcess(folder, str(folder / "jobs.db"), flags) as coordinator:
            coordinator.start()
            with Agents(coordinator.address) as agents:
                for job_id in job_ids:
                    agents.ask(
                        "add",
                        job_id=job_id,
                        pipeline_count=wanted.pipeline_count,
                        stage_count=STAGES,
                        ranks_per_agent=ranks_per_agent,
                        is_echo=False,
                    )
                for job_id in job_ids:
                    agents.ask("planned", job_id=job_id, limit_s=_PLAN_LIMIT_S)
                loaded_s = []
                for _ in range(_LOADED_SCRAPES):
                    loaded_s.append(_scrape(port)[0])
                    time.sleep(_APART_S)
                agents.ask("rest", limit_s=_REST_LIMIT_S)
                cpu_s, text = _cost_s(port, coordinator.pid)
    series_count = sum(not line.startswith("#") for line in text.splitlines())
    return Outcome(series_count, len(text), cpu_s, loaded_s)


def _cost_s(port: int, pid: int) -> tuple[list[float], str]:
    """Scrape a coordinator at rest; the processor time of each scrape, and the last answer."""
    cpu_s, text = [], ""
    for _ in range(_SCRAPES):
        before_s, ends_s = _cpu_s(pid), time.monotonic() + _APART_S / 2
        _, text = _scrape(port)
        time.sleep(max(0.0, ends_s - time.monotonic()))
        scraped_s = _cpu_s(pid)
        time.sleep(_APART_S / 2)
        cpu_s.append((scraped_s - before_s) - (_cpu_s(pid) - scraped_s))
    return cpu_s, text


def _scrape(port: int) -> tuple[float, str]:
    """Scrape; the seconds that the answer took, and its text."""
    began_s = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics")
    response = connection.getresponse()
    text = response.read().decode()
    took_s = time.monotonic() - began_s
    connection.close()
    if response.status != 200:
        raise RuntimeError(f"expected 200, found {response.status}: {text[:200]}")
    return took_s, text


def _cpu_s(pid: int) -> float:
    """Processor time of a process's threads, to the nanosecond; that of its children, who solve, is apart."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def run() -> list[Table]:
    """Measure all configurations."""
    raise_file_limit()
    rows: list[tuple[Cell, ...]] = []
    for wanted in CONFIGURATIONS:
        outcome = measure(wanted)
        cpu_s = quantile(outcome.cpu_s, 0.5)
        rows.append(
            (
                wanted.job_count,
                wanted.job_count * wanted.pipeline_count * STAGES,
                "yes" if wanted.has_ranks else "no",
                outcome.series_count,
                outcome.size_bytes / 1024,
                1e3 * cpu_s,
                100 * cpu_s / EVERY_S,
                1e3 * quantile(outcome.loaded_s, 0.5),
                1e3 * quantile(outcome.loaded_s, 1.0),
            )
        )
        print(rows[-1], flush=True)
    return [
        Table(
            "Scraping a coordinator",
            (
                Column("jobs"),
                Column("ranks"),
                Column("every rank told"),
                Column("series"),
                Column("answer [KiB]", ".0f"),
                Column("CPU per scrape [ms]", ".2f"),
                Column(f"of a core, every {EVERY_S:g} s [%]", ".2f"),
                Column("answered under load p50 [ms]", ".1f"),
                Column("slowest [ms]", ".1f"),
            ),
            tuple(rows),
            "Under load every rank reports once a second. Processor time is the process's own, the median of "
            f"{_SCRAPES} scrapes.",
        )
    ]


if __name__ == "__main__":
    main("scrape_cost", run)
