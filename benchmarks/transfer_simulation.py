"""Event-driven simulation of iterations with many transfers, as a reference for the fit of transfers.

It simulates stages and links, not longest paths, and shares nothing with the fit:

- A computation takes the time of its work at its planned clock, with lognormal noise.
- A boundary between two stages is a link with its own bandwidth in each direction. A transfer takes a
  latency, then the time of its bytes, with noise. In each direction transfers travel one at a time, in order.
- *shared links*: while both directions have bytes on their way, each gets half of the bandwidth.
- *blocking*: after each computation a stage posts the sends of its outputs and the receives of the next
  computation's inputs, and waits until all of them are done (a batched exchange, as in frameworks). A
  transfer begins when both ends have posted it (rendezvous), so a late receiver delays its sender. Otherwise
  a transfer begins as soon as possible, and both stages compute meanwhile.
- *contention*: while bytes go in or out of a stage, its computation runs slower, by a share for each
  transfer. Measured times of computations include this, to a degree that varies from plan to plan.
- *fixed costs*: data is loaded before stage 0's first forward, with noise; at the end all stages wait for
  each other, and each takes its own optimizer step.

As with real runs, a plan's data are means over some steps: of each computation's time from start to end, and
of the iteration's time. The share of transfers is one minus the busiest stage's share of computing, in the
iteration with every computation at its highest clock.

Plans are drawn like those along a frontier: from fast to slow, with each stage stretched by its own amount
and neighbouring clocks mixed within a stage.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from perseus.solver import Computation, Kind, Schedule, one_forward_one_backward
from perseus.solver.study import MeasuredIteration

CLOCKS_MHZ = tuple(range(1410, 900, -60))

_Link = tuple[int, int]
"""(sending stage, receiving stage)."""


@dataclass(frozen=True, slots=True)
class Mechanisms:
    """The mechanisms of transfers, and the noise of measurements.

    Attributes:
        is_blocking, has_shared_links: see above.
        has_uneven_links: boundaries and directions differ in bandwidth, by up to 1 : 4.
        contention: share of its time by which each transfer of its stage prolongs a computation.
        has_fixed_costs: data loading and steps of 2 to 6 % of the iteration; otherwise there are none.
        noise: of a computation's time, from step to step; that of transfers is three times as large.
    """

    is_blocking: bool = False
    has_shared_links: bool = False
    has_uneven_links: bool = False
    contention: float = 0.0
    has_fixed_costs: bool = False
    noise: float = 0.01


@dataclass(frozen=True, slots=True)
class SimulatedPlan:
    """The clocks of one plan, and the measurement under it."""

    clocks_mhz: Mapping[Computation, int]
    measured: MeasuredIteration


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """Some plans' iterations of one job.

    Attributes:
        schedule: 1F1B without any FIXED computation.
        profile_s: the mean time by (stage, kind, clock), each measured while all computations had that clock.
        transfer_share: see above.
    """

    schedule: Schedule
    profile_s: Mapping[tuple[int, Kind, int], float]
    plans: Sequence[SimulatedPlan]
    transfer_share: float


@dataclass(frozen=True, slots=True)
class _Job:
    """A job's quantities, without noise.

    ``work_s`` is at the highest clock, ``clocked`` the share of it that clocks stretch.
    """

    schedule: Schedule
    work_s: Mapping[tuple[int, Kind], float]
    clocked: Mapping[tuple[int, Kind], float]
    latency_s: float
    transfers_s: Mapping[_Link, float]
    load_s: float
    steps_s: Sequence[float]

    def time_s(self, c: Computation, clock_mhz: int) -> float:
        part = self.clocked[c.stage, c.kind]
        return self.work_s[c.stage, c.kind] * (1 - part + part * CLOCKS_MHZ[0] / clock_mhz)


def simulate_run(
    seed: int,
    mechanisms: Mechanisms,
    transfer_share: float = 0.4,
    stage_count: int = 4,
    microbatch_count: int = 24,
    plan_count: int = 36,
    step_count: int = 6,
) -> SimulatedRun:
    """Simulate the plans of one job, drawn from the seed; transfers have that share, or a little more."""
    random = np.random.default_rng(seed)
    job = _scaled(_draw_job(random, mechanisms, stage_count, microbatch_count), mechanisms, transfer_share)
    fastest = dict.fromkeys(job.schedule.computations, CLOCKS_MHZ[0])

    def measure(clocks_mhz: Mapping[Computation, int]) -> SimulatedPlan:
        steps = [_simulate(job, mechanisms, clocks_mhz, random) for _ in range(step_count)]
        times_s = {c: float(np.mean([step.times_s[c] for step in steps])) for c in clocks_mhz}
        iteration_time_s = float(np.mean([step.iteration_time_s for step in steps]))
        return SimulatedPlan(clocks_mhz, MeasuredIteration(times_s, iteration_time_s))

    last = max(plan_count - 1, 1)
    plans = [measure(_draw_plan(random, job.schedule, number / last)) for number in range(plan_count)]
    seen_s: dict[tuple[int, Kind, int], list[float]] = {}
    for clock_mhz in CLOCKS_MHZ:
        held = measure(dict.fromkeys(job.schedule.computations, clock_mhz))
        for c, time_s in held.measured.times_s.items():
            seen_s.setdefault((c.stage, c.kind, clock_mhz), []).append(time_s)
    profile_s = {key: float(np.mean(some)) for key, some in seen_s.items()}
    share = _transfer_share(_simulate(job, mechanisms, fastest, None))
    return SimulatedRun(job.schedule, profile_s, plans, share)


def _draw_job(
    random: np.random.Generator, mechanisms: Mechanisms, stage_count: int, microbatch_count: int
) -> _Job:
    schedule = one_forward_one_backward(stage_count, microbatch_count)
    forward_s = 0.1 * random.uniform(0.75, 1.25, stage_count)
    backward_s = 2 * forward_s * random.uniform(0.9, 1.1, stage_count)
    work_s = {(s, Kind.FORWARD): float(forward_s[s]) for s in range(stage_count)}
    work_s |= {(s, Kind.BACKWARD): float(backward_s[s]) for s in range(stage_count)}
    links = [link for s in range(stage_count - 1) for link in ((s, s + 1), (s + 1, s))]
    spread = 2.0 if mechanisms.has_uneven_links else 1.0
    mean_s = 3 * microbatch_count * float(forward_s.mean())
    costs_s = mean_s * random.uniform(0.01, 0.03, stage_count + 1) * mechanisms.has_fixed_costs
    return _Job(
        schedule,
        work_s,
        {key: float(random.uniform(0.5, 0.9)) for key in work_s},
        0.002,
        {link: float(0.05 * spread ** random.uniform(-1, 1)) for link in links},
        float(costs_s[0]),
        costs_s[1:].tolist(),
    )


def _scaled(job: _Job, mechanisms: Mechanisms, transfer_share: float) -> _Job:
    """Return the job with its transfers scaled to the share."""
    fastest = dict.fromkeys(job.schedule.computations, CLOCKS_MHZ[0])

    def longer(factor: float) -> _Job:
        return replace(job, transfers_s={link: factor * t_s for link, t_s in job.transfers_s.items()})

    low, high = 0.0, 64.0
    for _ in range(12):
        middle = (low + high) / 2
        share = _transfer_share(_simulate(longer(middle), mechanisms, fastest, None))
        low, high = (low, middle) if share >= transfer_share else (middle, high)
    return longer(high)


def _draw_plan(random: np.random.Generator, schedule: Schedule, slowness: float) -> dict[Computation, int]:
    """Stretch stages up to the plan's slowness, each kind by its own amount, between neighbouring clocks."""
    last = len(CLOCKS_MHZ) - 1
    place = {
        (stage, kind): last * min(1.0, slowness * random.uniform(0.4, 1.0) + random.uniform(0, 0.15))
        for stage in range(schedule.stage_count)
        for kind in (Kind.FORWARD, Kind.BACKWARD)
    }
    clocks_mhz = {}
    for c in schedule.computations:
        whole, rest = divmod(place[c.stage, c.kind], 1.0)
        clocks_mhz[c] = CLOCKS_MHZ[min(last, int(whole) + (random.uniform() < rest))]
    return clocks_mhz


# ------------------------------------------------------------- one iteration, event by event


def _transfer_share(iteration: MeasuredIteration) -> float:
    busy_s: dict[int, float] = {}
    for c, time_s in iteration.times_s.items():
        busy_s[c.stage] = busy_s.get(c.stage, 0.0) + time_s
    return 1 - max(busy_s.values()) / iteration.iteration_time_s


@dataclass(slots=True)
class _Transfer:
    """From the end of one computation to another stage's; begins when both ends have posted it."""

    source: Computation
    target: Computation
    latency_s: float
    bytes_s: float
    posted_count: int = 0


@dataclass(slots=True)
class _Stage:
    """A stage's state: it computes while ``work_s`` is left, and otherwise waits."""

    order: Sequence[Computation]
    position: int = 0
    work_s: float | None = None
    started_s: float = 0.0
    awaits: set[Computation] = field(default_factory=set)
    """Transfers that the stage waits for, by the computation that they come from."""


class _Iteration:
    """An iteration under way. Rates are constant between events, so time advances from event to event."""

    def __init__(
        self,
        job: _Job,
        mechanisms: Mechanisms,
        clocks_mhz: Mapping[Computation, int],
        random: np.random.Generator | None,
    ) -> None:
        self._job, self._mechanisms, self._clocks_mhz, self._random = job, mechanisms, clocks_mhz, random
        self._stages = [_Stage(order) for order in job.schedule.orders]
        self._transfers: dict[Computation, list[_Transfer]] = {}
        """Posted by either end."""
        for source, target in job.schedule.dependencies:
            length_s = job.transfers_s[source.stage, target.stage] * self._noise(3 * mechanisms.noise)
            transfer = _Transfer(source, target, job.latency_s, length_s)
            for end in (source, target):
                self._transfers.setdefault(end, []).append(transfer)
        self._queues: dict[_Link, deque[_Transfer]] = {link: deque() for link in job.transfers_s}
        self._now_s = 0.0
        self._times_s: dict[Computation, float] = {}

    def run(self) -> MeasuredIteration:
        self._now_s = self._job.load_s * self._noise(0.02)
        for stage in self._stages:
            self._go_on(stage)
        while any(stage.position < len(stage.order) for stage in self._stages):
            self._advance()
        step_s = max(step_s * self._noise(0.02) for step_s in self._job.steps_s)
        return MeasuredIteration(self._times_s, self._now_s + step_s)

    def _noise(self, amount: float) -> float:
        return 1.0 if self._random is None else float(np.exp(self._random.normal(0.0, amount)))

    def _go_on(self, stage: _Stage) -> None:
        """Post the transfers between two computations; compute once none is awaited."""
        before = stage.order[stage.position - 1] if stage.position else None
        after = stage.order[stage.position] if stage.position < len(stage.order) else None
        stage.awaits = set()
        for c in (before, after):
            for transfer in self._transfers.get(c, ()) if c else ():
                is_send = transfer.source == c
                if is_send != (c is before):
                    continue
                if not is_send and transfer.bytes_s < 0:
                    continue
                if self._mechanisms.is_blocking or not is_send:
                    stage.awaits.add(transfer.source)
                transfer.posted_count += 1
                if transfer.posted_count == 2 if self._mechanisms.is_blocking else is_send:
                    self._queues[transfer.source.stage, transfer.target.stage].append(transfer)
        if not stage.awaits:
            self._compute(stage)

    def _compute(self, stage: _Stage) -> None:
        if stage.position < len(stage.order):
            c = stage.order[stage.position]
            stage.work_s = self._job.time_s(c, self._clocks_mhz[c]) * self._noise(self._mechanisms.noise)
            stage.started_s = self._now_s

    def _rate(self, link: _Link) -> float:
        """Return the share of a link's bandwidth that its first transfer gets."""
        other = self._queues[link[::-1]]
        return 0.5 if self._mechanisms.has_shared_links and other and other[0].latency_s <= 0 else 1.0

    def _advance(self) -> None:
        """Advance to the next event: the end of a computation, of a latency, of a transfer's bytes."""
        active = {link: queue[0] for link, queue in self._queues.items() if queue}
        rates = {link: self._rate(link) for link in active}
        loads = [0] * len(self._stages)
        for link, transfer in active.items():
            for end in link:
                loads[end] += transfer.latency_s <= 0
        speeds = [1 / (1 + self._mechanisms.contention * load) for load in loads]
        step_s = inf
        stages = list(zip(self._stages, speeds, strict=True))
        for stage, speed in stages:
            if stage.work_s is not None:
                step_s = min(step_s, stage.work_s / speed)
        for link, transfer in active.items():
            left_s = transfer.latency_s if transfer.latency_s > 0 else transfer.bytes_s / rates[link]
            step_s = min(step_s, left_s)
        self._now_s += step_s
        ended = []
        for link, transfer in active.items():
            if transfer.latency_s > 0:
                transfer.latency_s -= step_s
                if transfer.latency_s < 1e-12:
                    transfer.latency_s = 0.0
            else:
                transfer.bytes_s -= step_s * rates[link]
                if transfer.bytes_s < 1e-12:
                    ended.append(self._queues[link].popleft())
        computed = []
        for stage, speed in stages:
            if stage.work_s is not None:
                stage.work_s -= step_s * speed
                if stage.work_s < 1e-12:
                    computed.append(stage)
        for transfer in ended:
            self._arrive(transfer)
        for stage in computed:
            self._times_s[stage.order[stage.position]] = self._now_s - stage.started_s
            stage.work_s = None
            stage.position += 1
            self._go_on(stage)

    def _arrive(self, transfer: _Transfer) -> None:
        transfer.bytes_s = -1.0
        for end in (transfer.source, transfer.target):
            stage = self._stages[end.stage]
            if transfer.source in stage.awaits:
                stage.awaits.remove(transfer.source)
                if not stage.awaits:
                    self._compute(stage)


def _simulate(
    job: _Job,
    mechanisms: Mechanisms,
    clocks_mhz: Mapping[Computation, int],
    random: np.random.Generator | None,
) -> MeasuredIteration:
    return _Iteration(job, mechanisms, clocks_mhz, random).run()
