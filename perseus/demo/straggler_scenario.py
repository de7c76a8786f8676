"""The demo's scenario: stock, profiling, plan, straggler, answer, recovery, and the cost of each."""

import asyncio
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from perseus import pictures
from perseus.demo import nvml_stub
from perseus.demo.cluster import Cluster
from perseus.demo.observation import Observer
from perseus.demo.summary import Evaluations, Measurements, as_json, evaluation_problems, problems
from perseus.demo.workload import Workload
from perseus.v1 import (
    computation_pb2,
    frontier_pb2,
    job_pb2,
    job_service_pb2,
)

STOCK, PROFILING, PLAN = "stock", "profiling", "plan"
STRAGGLER, ANSWERED, RECOVERED = "straggler", "answered", "recovered"
STEPS = (STOCK, PROFILING, PLAN, STRAGGLER, ANSWERED, RECOVERED)
# The straggler itself is slower than stock, so its answer is compared with not answering.
_COMPARED_WITH = {PROFILING: STOCK, PLAN: STOCK, STRAGGLER: STOCK, ANSWERED: STRAGGLER, RECOVERED: STOCK}

_START_TIMEOUT_S = 40.0
_PROFILING_TIMEOUT_S = 150.0
_STEP_TIMEOUT_S = 40.0
_SHORT_LABELS = {
    computation_pb2.COMPUTATION_KIND_FORWARD: "F",
    computation_pb2.COMPUTATION_KIND_BACKWARD: "B",
}


@dataclass(frozen=True, slots=True)
class Script:
    """The scenario's parameters: which pipeline straggles, by how much, iterations measured per step."""

    straggler: int
    slowdown: float
    watched_iterations: int


DEMO_SCRIPT = Script(straggler=1, slowdown=1.2, watched_iterations=8)


class Display(Protocol):
    """Shows the scenario while it runs."""

    def begin(self, step: str) -> None:
        """Show that a step has begun."""

    def refresh(self, observer: Observer) -> None:
        """Show the observer's current state."""

    def note(self, lines: list[str]) -> None:
        """Print lines that stay."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The measurements, the job's frontier, and an iteration of one pipeline at stock and under the plan."""

    measurements: Measurements
    frontier: frontier_pb2.Frontier
    stock: job_service_pb2.GetTimelineResponse
    planned: job_service_pb2.GetTimelineResponse


async def run_scenario(
    workload: Workload, script: Script, out_dir: Path, display: Display, *, through_nvml: bool = False
) -> Outcome:
    """Run the whole scenario; write summary.json to `out_dir`.

    `through_nvml`: the agents use the stand-in for NVML over the emulated GPUs.

    Raises:
        StubError: the stand-in can't be built.
        ClusterError: a process did not start, or died.
        ObservationError: something did not happen in time.
        OSError: `out_dir` can't be written.
    """
    with (
        tempfile.TemporaryDirectory(prefix="perseus-") as run_dir,
        Cluster(
            workload,
            Path(run_dir),
            out_dir / "logs",
            nvml_library=nvml_stub.build(Path(run_dir)) if through_nvml else None,
            serves_page=True,
        ) as cluster,
    ):
        address = cluster.start_coordinator()
        display.note(cluster.page_lines(address))
        cluster.start_agents(address)
        cluster.start_trainers()
        async with cluster.security.channels(address).open() as channel:
            measurements = Measurements(workload.pipeline_count)
            observer = Observer(channel, workload.job_id, measurements, lambda: display.refresh(observer))
            async with asyncio.TaskGroup() as tasks:
                watchers = [tasks.create_task(observer.follow()), tasks.create_task(_keep_watch(cluster))]
                outcome = await _play(observer, cluster, script, display)
                for watcher in watchers:
                    watcher.cancel()
        await asyncio.to_thread(cluster.stop_services)
        measurements.evaluations = Evaluations.of(
            cluster.evaluations(but=script.straggler), measurements.stock_iterations
        )
    summary = as_json(measurements.phases, measurements.evaluations)
    (out_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return outcome


def judge(measurements: Measurements, script: Script, workload: Workload) -> list[str]:
    """Return the problems of the measurements; empty if there are none.

    The answer may not be slower than the straggler. As the straggler is answered within a few iterations, its
    own time is better known from the plan.
    """
    expected = {PLAN: (STOCK, 1.0), ANSWERED: (PLAN, script.slowdown), RECOVERED: (STOCK, 1.0)}
    found = problems(measurements.phases, expected)
    if measurements.evaluations is not None:
        found += evaluation_problems(measurements.evaluations, workload.evaluation_s)
    return found


async def _keep_watch(cluster: Cluster) -> None:
    while True:
        cluster.check()
        await asyncio.sleep(0.5)


async def _play(
    observer: Observer,
    cluster: Cluster,
    script: Script,
    display: Display,
) -> Outcome:
    measurements = observer.measurements
    count = script.watched_iterations
    shown_pipeline = 0

    async def collect(step: str) -> None:
        await observer.collect(step, count, _STEP_TIMEOUT_S, _COMPARED_WITH[step])

    display.begin(STOCK)
    await observer.until(
        "the stock baseline", lambda: observer.state >= job_pb2.JOB_STATE_PROFILING, _START_TIMEOUT_S
    )
    before = await observer.timeline(shown_pipeline)
    stock = measurements.at_stock()
    measurements.close_phase(STOCK, stock)
    measurements.stock_iterations = stock[-1] + 1

    display.begin(PROFILING)
    await observer.until(
        "a plan in force",
        lambda: observer.state == job_pb2.JOB_STATE_PLANNED and observer.is_in_force(),
        _PROFILING_TIMEOUT_S,
    )
    measurements.close_phase(PROFILING, range(stock[-1] + 1, measurements.latest + 1), STOCK)

    display.begin(PLAN)
    await collect(PLAN)
    after = await observer.timeline(shown_pipeline)
    frontier = await observer.frontier()

    display.begin(STRAGGLER)
    cluster.degrade(script.straggler, script.slowdown)
    first = observer.next_whole_iteration
    await observer.until(
        "the straggler detected, and its answer in force",
        lambda: (
            observer.stragglers == {script.straggler}
            and observer.is_in_force()
            and observer.in_force_since() > first
        ),
        _STEP_TIMEOUT_S,
    )
    unanswered = range(first, observer.in_force_since())
    await observer.until(
        "the iterations before the answer", lambda: measurements.are_complete(unanswered), _STEP_TIMEOUT_S
    )
    measurements.close_phase(STRAGGLER, unanswered, _COMPARED_WITH[STRAGGLER])

    display.begin(ANSWERED)
    await collect(ANSWERED)

    display.begin(RECOVERED)
    cluster.degrade(script.straggler, 1.0)
    await observer.until(
        "the recovery noticed, and the plan without a slowdown in force again",
        lambda: not observer.stragglers and observer.is_in_force(),
        _STEP_TIMEOUT_S,
    )
    await collect(RECOVERED)

    await asyncio.to_thread(cluster.stop_training)
    await observer.until(
        "the end of the job", lambda: observer.state == job_pb2.JOB_STATE_FINISHED, _STEP_TIMEOUT_S
    )
    return Outcome(measurements, frontier, before, after)


def draw(outcome: Outcome, out_dir: Path) -> None:
    """Write frontier.png and timeline.png to `out_dir`.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: `out_dir` can't be written.
    """
    frontier = outcome.frontier
    problem = frontier.problem
    waiting_w = [max(powers.power_w) for powers in problem.blocking_powers] or problem.blocking_power_w
    picture = pictures.FrontierPicture(
        iteration_time_s=[point.iteration_time_s for point in frontier.points],
        energy_j=[point.energy_j for point in frontier.points],
        bound_energy_j=[point.bound_energy_j for point in frontier.points],
        t_star_index=frontier.t_star_index,
        baseline_time_s=frontier.baseline.iteration_time_s,
        baseline_energy_j=frontier.baseline.energy_j,
        blocking_power_w=sum(waiting_w),
    )
    (out_dir / "frontier.png").write_bytes(pictures.draw_frontier(picture, "png"))
    powers_w = {
        (profile.stage, profile.kind): {
            measurement.clock_mhz: measurement.energy_j / measurement.time_s
            for measurement in profile.measurements
        }
        for profile in frontier.problem.profiles
    }

    def power_w(entry: job_pb2.TimelineEntry) -> float:
        # Stock is the highest clock. For a clock at which a stage was not measured, use the nearest.
        by_clock_w = powers_w[entry.stage, entry.computation.kind]
        clock_mhz = entry.clock_mhz or max(by_clock_w)
        return by_clock_w[min(by_clock_w, key=lambda known_mhz: abs(known_mhz - clock_mhz))]

    def timeline(when: str, measured: job_service_pb2.GetTimelineResponse) -> pictures.Timeline:
        return pictures.Timeline(
            title=f"{when}: iteration {measured.iteration}, {measured.iteration_time_s:.3f} s, as measured",
            iteration_time_s=measured.iteration_time_s,
            bars=[
                pictures.Bar(
                    entry.stage,
                    f"{_SHORT_LABELS[entry.computation.kind]}{entry.computation.microbatch}",
                    entry.start_s,
                    entry.duration_s,
                    power_w(entry),
                )
                for entry in measured.entries
            ],
            blocking_power_w=waiting_w,
        )

    pictures.draw_timelines(
        out_dir / "timeline.png",
        [timeline("at stock", outcome.stock), timeline("under the plan", outcome.planned)],
    )
