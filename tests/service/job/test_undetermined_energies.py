"""Jobs whose computations are much shorter than their energy counters' windows reach plans.

Each rank's estimates are the real agent's, of a simulated counter, and take the way over the wire.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from perseus.agent.link.computation import Rank
from perseus.agent.rank.messages import Telemetry
from perseus.agent.rank.sampling import estimate
from perseus.agent.stream.telemetry import Batch
from perseus.agent.stream.translate import request
from perseus.emulation.physics import A100_SXM
from perseus.service.api.translate_agents import telemetry_from_proto
from perseus.service.domain.inputs import Input, TelemetryArrived
from perseus.service.domain.model import HoldClocks, JobState
from perseus.service.domain.specification import Coordinates
from perseus.service.domain.telemetry import EnergyEstimate
from perseus.v1 import event_pb2
from tests.agent.counter_simulation import Simulation, simulate
from tests.service.service_fakes import CLOCKS_MHZ, Cluster, make_spec

ITERATIONS = 700
"""Simulated under each clock: more than any is held for."""
GROWTH = 1.3
"""Of iterations from estimate to estimate, faster than the agent's."""
ACTIVITY = {"forward": 0.85, "backward": 0.95}

pytestmark = pytest.mark.slow("simulates counters, and regresses on their windows again and again")

Program = Callable[[float], list[tuple[str, float]]]
"""By slowness."""


def ddp(slowness: float) -> list[tuple[str, float]]:
    """5 ms and 10 ms, a short wait, and an optimizer step that is not marked."""
    return [("forward", 0.005 * slowness), ("backward", 0.01 * slowness), ("wait", 0.0015), ("gap", 0.003)]


def in_step(slowness: float) -> list[tuple[str, float]]:
    """Iterations of a quarter of the counter's period at every clock."""
    waits_s = (0.025 - 0.015 * slowness) / 2
    return [
        ("forward", 0.005 * slowness), ("wait", waits_s), ("backward", 0.01 * slowness), ("wait", waits_s)
    ]  # fmt: skip


def power_w(clock_mhz: int) -> dict[str, float]:
    return {
        **{key: A100_SXM.power_w(activity, clock_mhz) for key, activity in ACTIVITY.items()},
        "wait": A100_SXM.blocking_power_w(clock_mhz),
    }


class CountedCluster(Cluster):
    """Data-parallel ranks, whose estimates are made from what their GPUs' counters show.

    `duration_noise`: by pipeline. `has_information`: whether agents report what they can't determine alone.
    """

    def __init__(
        self, program: Program, duration_noise: list[float], seed: int, *, has_information: bool = True
    ) -> None:
        super().__init__(make_spec(pipelines=len(duration_noise), stages=1, microbatches=1))
        self._program = program
        self._duration_noise = duration_noise
        self._seed = seed
        self._has_information = has_information
        self._simulations: dict[tuple[Coordinates, int], Simulation] = {}
        self._next_counts: dict[Coordinates, tuple[int, int]] = {}

    def profile(self, limit: int = 12 * ITERATIONS) -> JobState:
        """Run until profiling has ended; return the state that it led to."""
        self.join_all()
        state = self.machine.record.state
        for _ in range(limit):
            state = self.machine.record.state
            if (
                state in (JobState.PLANNED, JobState.STOCK)
                and self.machine.run.counters.profiling_cost.time_s
            ):
                return state
            held = [rank.in_force.clocks for rank in self.ranks.values()]
            mhz = next((each.clocks_mhz[0] for each in held if isinstance(each, HoldClocks)), CLOCKS_MHZ[0])
            self.iterate(duration_s=sum(s for key, s in self._at(mhz) if key != "gap"))
        raise AssertionError(f"still {state}")

    def send(self, event: Input) -> None:
        if isinstance(event, TelemetryArrived):
            event = replace(event, batch=event.batch._replace(energy=self._energy(event)))
        super().send(event)

    def _at(self, clock_mhz: int) -> list[tuple[str, float]]:
        return self._program(0.2 + 0.8 * CLOCKS_MHZ[0] / clock_mhz)

    def _energy(self, event: TelemetryArrived) -> EnergyEstimate | None:
        """Return a new estimate, whenever one is due under a held clock."""
        reported = event.batch.energy
        if reported is None or not isinstance(self.ranks[event.rank].in_force.clocks, HoldClocks):
            return None
        version, count = self._next_counts.get(event.rank, (0, 0))
        if version == reported.plan_version and reported.iteration_count < count:
            return None
        due = int(GROWTH * reported.iteration_count) + 1
        self._next_counts[event.rank] = reported.plan_version, due
        (clock_mhz,) = {sample.clock_mhz for sample in reported.samples}
        found = estimate(self._simulation(event.rank, clock_mhz).request(reported.iteration_count, clock_mhz))
        if found is None:
            return None
        found = replace(found, plan_version=reported.plan_version)
        if not self._has_information:
            found = replace(found, undetermined=(), power_information=(), power_information_vector=())
        place = event.rank
        rank = Rank("job", place.pipeline, place.stage, place.tensor)
        sent = request(Batch(1, Telemetry(rank, (), (), found, None), 0)).telemetry
        return telemetry_from_proto(sent, event.instance_id).batch.energy

    def _simulation(self, place: Coordinates, clock_mhz: int) -> Simulation:
        if (place, clock_mhz) not in self._simulations:
            self._simulations[place, clock_mhz] = simulate(
                self._at(clock_mhz),
                seed=1000 * self._seed + 10 * clock_mhz + place.pipeline,
                iterations=ITERATIONS,
                duration_noise=self._duration_noise[place.pipeline],
                power_w=power_w(clock_mhz),
            )
        return self._simulations[place, clock_mhz]

    def given_up(self) -> list[str]:
        return [
            each.message for each in self.events() if each.type == event_pb2.JOB_EVENT_TYPE_CLOCK_GIVEN_UP
        ]

    def energy_ratios(self) -> list[float]:
        """Return measured over true energy of an iteration's computations, by clock."""
        ratios = []
        for profile in self.machine.run.profiler.profiles:
            found_j = sum(m.energy_j for m in profile.measurements.values())
            drawn_w, program = power_w(profile.clock_mhz), dict(self._at(profile.clock_mhz))
            ratios.append(found_j / sum(drawn_w[key] * program[key] for key in ACTIVITY))
        return ratios


@pytest.mark.parametrize("seed", range(10))
def test_short_iterations_with_gaps_are_planned(seed: int) -> None:
    """The 24 iterations after which a clock used to be given up took three windows of the counter."""
    cluster = CountedCluster(ddp, [0.01, 0.02], seed)
    assert cluster.profile() is JobState.PLANNED
    assert cluster.given_up() == []
    assert cluster.energy_ratios() == pytest.approx([1.0] * len(cluster.energy_ratios()), abs=0.05)


@pytest.mark.parametrize("seed", range(3))
def test_one_rank_in_step_with_its_counter_is_no_veto(seed: int) -> None:
    cluster = CountedCluster(in_step, [0.0, 0.03], seed)
    assert cluster.profile() is JobState.PLANNED
    assert cluster.given_up() == []
    assert cluster.energy_ratios() == pytest.approx([1.0] * len(cluster.energy_ratios()), abs=0.1)


def test_a_stage_in_step_with_its_counters_is_planned_on_sums() -> None:
    cluster = CountedCluster(in_step, [0.0, 0.0], 0)
    assert cluster.profile() is JobState.PLANNED
    assert cluster.energy_ratios() == pytest.approx([1.0] * len(cluster.energy_ratios()), abs=0.1)


def test_powers_alone_are_still_enough_where_they_are_determined() -> None:
    assert CountedCluster(ddp, [0.01, 0.02], 0, has_information=False).profile() is JobState.PLANNED
    cluster = CountedCluster(in_step, [0.0, 0.03], 0, has_information=False)
    assert cluster.profile() is JobState.STOCK
    assert "pipeline 0, stage 0, tensor 0 sent an energy estimate that lacks" in cluster.given_up()[0]
