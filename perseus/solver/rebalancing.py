"""Advice on layers: what moving single layers between stages would bring beside clocks.

Clocks save the energy that light stages waste while they wait. Another partition of the layers may remove
the waiting itself and shorten the iteration. Here the measurements of each stage are scaled to another number
of layers, and the frontier is solved again. It is advice only: memory, for example, is not considered.

Nothing measures single layers, so all layers are assumed to be equal. An inner stage consists of layers only:
each takes the stage's time and energy divided by their number. The first and the last stage also have an
embedding or a head: one of their layers takes the mean of the inner stages', and the rest is fixed. Times and
energies are divided at the highest clock; the shares are assumed to hold at every clock.

A move helps if its plan needs less energy than the present partition's plan for the same iteration time:
stock's, or the shortest of the new partition if that is longer.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from statistics import fmean

import numpy as np

from perseus.solver.bounds import MAX_LAYER_COUNT
from perseus.solver.columns import Columns
from perseus.solver.computation import Kind
from perseus.solver.errors import SolverError
from perseus.solver.frontier import MIN_POINT_COUNT, Frontier, solve
from perseus.solver.graph import Int64Array, build_event_graph
from perseus.solver.order_table import Path
from perseus.solver.pipeline import Pipeline, ProfileKey
from perseus.solver.plan import Plan
from perseus.solver.profile import Hull, Measurement, convex_hull, highest, pareto_options
from perseus.solver.scale import PS_PER_SCALED_S, UW_PER_W
from perseus.solver.sweep import sweep_frontier

Layers = tuple[int, ...]
"""Number of layers at each place (a stage's chunk), in the model's order."""

Move = tuple[int, int]
"""The place that gives a layer and the one that takes it, as indices into the layers."""

_MIN_GAIN_SHARE = 0.005
"""Gains that are a smaller share of stock's energy are not advised: plans differ from their bounds by some
0.3 %, and equal layers are an approximation."""

_ROUNDING = 1e-9
"""An iteration that is longer by this share is as long: sums of rounded times differ."""

_SWEPT_COUNT = 3
"""In each step, as many moves are compared exactly: those that are best by estimate."""

_PAIRED_COUNT = 8
"""In each step, moves are estimated between as many giving and as many taking places: those with the shortest
iterations if only they changed. So the cost does not grow with the square of the stages."""


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """A partition of the layers, and its plan for stock's iteration time, or for T_min if that is longer.

    Attributes:
        layers: per place.
        move: the last moved layer's old and new place, as indices into ``layers``; None for the present one.
        frontier: of this partition.
        plan: the plan.
        clocks_alone: the present partition's plan for the same iteration time.
    """

    layers: Layers
    move: Move | None
    frontier: Frontier
    plan: Plan
    clocks_alone: Plan


@dataclass(frozen=True, slots=True, eq=False)
class Rebalancing:
    """The result of :func:`rebalance`.

    Attributes:
        path: the places, in the model's order.
        fixed_shares: of the first and the last place, the share of its time at the highest clock that is not
            its layers'.
        present: the present partition.
        steps: partitions after one more moved layer each; every one helps more than the one before.
            All can be as fast as stock; only if none of those helps, there is a single slower one.
        other: without steps, the partition that helps most, but too little to be advised; None if none
            helps.
    """

    path: Path
    fixed_shares: tuple[float, float]
    present: Partition
    steps: tuple[Partition, ...]
    other: Partition | None


def rebalance(frontier: Frontier, layers: Sequence[int]) -> Rebalancing:
    """Find which layers to move, one at a time, as long as it helps.

    ``frontier`` is that of the present partition, and ``layers`` its layers per place: the stages, or with
    several chunks the stages' chunks as activations flow; a single number holds for all. A layer moves
    between any two places; those in between pass one on. No place is left without a layer. Each step takes a
    few times as long as solving.

    Raises:
        SolverError: the number of layers is not that of the places, or a place has none; or activations flow
            along several paths.
    """
    model = _Model(frontier.pipeline, layers_along_path(frontier.pipeline, layers))
    estimates = _Estimates(frontier.pipeline, model)
    stock_s, stock_j = frontier.baseline.iteration_time_s, frontier.baseline.energy_j
    present = _partition(model.layers, None, frontier, frontier)
    steps: list[Partition] = []
    now, least_j = model.layers, _MIN_GAIN_SHARE * stock_j
    other: Partition | None = None
    while not steps or steps[-1].frontier.t_min_s <= stock_s * (1 + _ROUNDING):
        gains: list[tuple[float, int, Move]] = []
        allowed, slower = estimates.best_moves(now, stock_s)
        for moves in [allowed] if steps else [allowed, slower]:
            # Of equal gains, that of the shorter move.
            gains += [
                (_gain_j(frontier, model.with_layers(_moved(now, *move))), -abs(move[0] - move[1]), move)
                for move in moves
            ]
            if gains and max(gains)[0] >= least_j:
                break
        gain_j, _, move = max(gains, default=(0.0, 0, (0, 0)))
        if gain_j < least_j and (steps or gain_j <= 0):
            break
        moved = _moved(now, *move)
        solved = solve(
            model.with_layers(moved),
            point_count=max(MIN_POINT_COUNT, len(frontier.points)),
            hull_tolerance=frontier.hull_tolerance,
            set_latency_s=frontier.set_latency_s,
        )
        partition = _partition(moved, move, solved, frontier)
        if gain_j < least_j:
            other = partition
            break
        steps.append(partition)
        now, least_j = moved, gain_j + _MIN_GAIN_SHARE * stock_j
    return Rebalancing(model.path, model.fixed_shares, present, tuple(steps), other)


def layers_along_path(pipeline: Pipeline, layers: Sequence[int]) -> Layers:
    """Return the layers per place; a single number holds for all.

    Raises:
        SolverError: as in `rebalance`.
    """
    path, *others = pipeline.schedule.paths
    if others:
        raise SolverError(
            f"layers: expected activations to flow along one path, found {1 + len(others)}",
            found=1 + len(others),
        )
    found = tuple(layers) * (len(path) if len(layers) == 1 else 1)
    if len(found) != len(path):
        each = "stage" if len(path) == pipeline.schedule.stage_count else "chunk of a stage"
        raise SolverError(
            f"layers: expected a number for each {each}, {len(path)} in all, found {len(found)}",
            found=len(found),
        )
    for (stage, chunk), count in zip(path, found, strict=True):
        if not 1 <= count <= MAX_LAYER_COUNT:
            raise SolverError(
                f"layers: expected 1 to {MAX_LAYER_COUNT} in stage {stage}, chunk {chunk}, found {count}",
                found=count,
            )
    return found


def _moved(layers: Layers, giving: int | None, taking: int | None) -> Layers:
    """Return the layers with one less at one place, and one more at the other."""
    return tuple(count - (place == giving) + (place == taking) for place, count in enumerate(layers))


def _partition(layers: Layers, move: Move | None, frontier: Frontier, present: Frontier) -> Partition:
    time_s = max(present.baseline.iteration_time_s, frontier.t_min_s)
    return Partition(layers, move, frontier, frontier.plan(time_s), present.plan(time_s))


def _gain_j(frontier: Frontier, pipeline: Pipeline) -> float:
    """Return by how much a pipeline's lower bound is below the frontier's for the same iteration time."""
    stock_s = frontier.baseline.iteration_time_s
    stop_ps = pipeline.scale.to_ps(stock_s)
    sweep = sweep_frontier(build_event_graph(pipeline, frontier.hull_tolerance), stop_ps=stop_ps)
    time_s = max(stock_s, sweep.t_min_s)
    bound_j = sweep.effective_energy_j_at(time_s) + sum(pipeline.blocking_power_w) * time_s
    return frontier.bound_energy_j(time_s) - bound_j


class _Model:
    """The measured pipeline, and the share of each computation that one layer takes.

    Attributes:
        path: the places, in the model's order.
        layers: as measured.
        fixed_shares: see `Rebalancing`.
    """

    def __init__(self, pipeline: Pipeline, layers: Layers) -> None:
        self.path = pipeline.schedule.paths[0]
        self.layers = layers
        self._pipeline = pipeline
        self._place_of = {place: index for index, place in enumerate(self.path)}
        self._keys = [key for key in sorted(pipeline.profiles) if key[:2] in self._place_of]
        self._time_shares = self._layer_shares(lambda m: m.time_s)
        self._energy_shares = self._layer_shares(lambda m: m.energy_j)
        self._hulls: dict[tuple[ProfileKey, int], Hull] = {}

    @property
    def fixed_shares(self) -> tuple[float, float]:
        """See `Rebalancing`."""

        def fixed_share(index: int) -> float:
            keys = [key for key in self._keys if self._place_of[key[:2]] == index]
            times_s = [highest(self._pipeline.profiles[key]).time_s for key in keys]
            layers_s = [
                self.layers[index] * self._time_shares[key] * time_s
                for key, time_s in zip(keys, times_s, strict=True)
            ]
            return 1 - sum(layers_s) / sum(times_s)

        return fixed_share(0), fixed_share(len(self.layers) - 1)

    def with_layers(self, layers: Layers) -> Pipeline:
        """Return the pipeline as it would be with these layers."""
        scaled = {key: self._scaled(key, layers[self._place_of[key[:2]]]) for key in self._keys}
        return replace(self._pipeline, profiles={**self._pipeline.profiles, **scaled})

    def hull(self, key: ProfileKey, layers: Layers) -> Hull:
        """Return the hull of a kind of computation with these layers, in the measured scale."""
        count = layers[self._place_of[key[:2]]]
        if (key, count) not in self._hulls:
            power_w = self._pipeline.blocking_power_w[key[0]]
            options = pareto_options(self._scaled(key, count), power_w, self._pipeline.scale)
            self._hulls[key, count] = convex_hull(options)
        return self._hulls[key, count]

    def _scaled(self, key: ProfileKey, count: int) -> tuple[Measurement, ...]:
        more = count - self.layers[self._place_of[key[:2]]]
        if not more:
            return self._pipeline.profiles[key]
        in_time, in_energy = 1 + more * self._time_shares[key], 1 + more * self._energy_shares[key]
        return tuple(
            replace(
                m,
                time_s=m.time_s * in_time,
                energy_j=m.energy_j * in_energy,
                time_se_s=m.time_se_s * in_time,
                time_common_se_s=m.time_common_se_s * in_time,
                energy_se_j=m.energy_se_j * in_energy,
            )
            for m in self._pipeline.profiles[key]
        )

    def _layer_shares(self, figure: Callable[[Measurement], float]) -> dict[ProfileKey, float]:
        """Return the share of each computation's figure that one layer takes."""
        shares = {}
        end = len(self.layers) - 1
        for kind in {kind for _, _, kind in self._keys}:
            own = {
                self._place_of[key[:2]]: figure(highest(self._pipeline.profiles[key]))
                / self.layers[self._place_of[key[:2]]]
                for key in self._keys
                if key[2] is kind
            }
            inner = [each for place, each in own.items() if 0 < place < end]
            most = fmean(inner) if inner else min(own.values())
            for place, each in own.items():
                whole = each * self.layers[place]
                shares[*self.path[place], kind] = (each if 0 < place < end else min(each, most)) / whole
        return shares


class _Estimates:
    """Quick estimates of what moves bring: the exact T_min, and each stage's energy by itself, all scaled.

    A stage computes between its first start and its last end in the fastest iteration, and during the time by
    which the iteration may be longer. Its estimated energy is the least in that time, as if it never waited
    in between.
    """

    def __init__(self, pipeline: Pipeline, model: _Model) -> None:
        graph = build_event_graph(pipeline)
        self._model = model
        self._to_ps = pipeline.scale.to_ps
        self._blocking_power_w = sum(pipeline.blocking_power_w) * pipeline.scale.power
        self._columns = Columns(graph)
        self._profile_of = graph.profile_of[self._columns.computation_of]
        self._fastest_ps = [options[0].time_ps for options in graph.options]
        self._key_of: dict[int, ProfileKey] = {}
        self._rows_of: list[list[int]] = [[] for _ in pipeline.blocking_power_w]
        self._counts: list[Counter[ProfileKey]] = [Counter() for _ in pipeline.blocking_power_w]
        for row, index in enumerate(self._columns.computation_of.tolist()):
            c = graph.computations[index]
            self._rows_of[c.stage].append(row)
            if c.kind is not Kind.FIXED:
                self._key_of[int(graph.profile_of[index])] = c.stage, c.chunk, c.kind
                self._counts[c.stage][c.stage, c.chunk, c.kind] += 1

    def best_moves(self, layers: Layers, stock_s: float) -> tuple[list[Move], list[Move]]:
        """Return the best moves, best first: those that allow stock's iteration time, and slower ones."""
        places = range(len(layers))
        giving = self._fastest({place: _moved(layers, place, None) for place in places if layers[place] > 1})
        taking = self._fastest({place: _moved(layers, None, place) for place in places})
        moves = [move for move in product(giving, taking) if move[0] != move[1]]
        partitions = [_moved(layers, *move) for move in moves]
        durations_ps, finishes_ps = self._replay([self._model.layers, *partitions])
        stock_ps = self._to_ps(stock_s)
        gains_j: list[list[tuple[float, Move]]] = [[], []]
        for column, (partition, move) in enumerate(zip(partitions, moves, strict=True), start=1):
            time_ps = max(stock_ps, int(finishes_ps[:, column].max()))
            before_j, after_j = (
                self._energy_j(some, durations_ps[:, at], finishes_ps[:, at], time_ps)
                for some, at in ((self._model.layers, 0), (partition, column))
            )
            gains_j[time_ps > stock_ps * (1 + _ROUNDING)].append((before_j - after_j, move))
        allowed, slower = (
            [move for _, move in sorted(some, reverse=True)[:_SWEPT_COUNT]] for some in gains_j
        )
        return allowed, slower

    def _fastest(self, partitions: Mapping[int, Layers]) -> list[int]:
        """Return the places whose partitions have the shortest iterations."""
        places = [*partitions]
        _, finishes_ps = self._replay([*partitions.values()])
        order = np.argsort(finishes_ps.max(axis=0), kind="stable")[:_PAIRED_COUNT]
        return [places[index] for index in order.tolist()]

    def _replay(self, partitions: Sequence[Layers]) -> tuple[Int64Array, Int64Array]:
        """Return durations and finishes of the fastest iteration: a row per computation, a column each."""
        fastest_ps = np.array(
            [
                [
                    self._model.hull(self._key_of[profile], layers).times_ps[0]
                    if profile in self._key_of
                    else time_ps
                    for layers in partitions
                ]
                for profile, time_ps in enumerate(self._fastest_ps)
            ],
            dtype=np.int64,
        ).reshape(len(self._fastest_ps), len(partitions))
        durations_ps = fastest_ps[self._profile_of]
        return durations_ps, self._columns.earliest_finishes_ps(durations_ps)[:-1]

    def _energy_j(
        self, layers: Layers, durations_ps: Int64Array, finishes_ps: Int64Array, time_ps: int
    ) -> float:
        starts_ps = finishes_ps - durations_ps
        longer_ps = time_ps - int(finishes_ps.max())
        energy_j = self._blocking_power_w * time_ps / PS_PER_SCALED_S
        for rows, counts in zip(self._rows_of, self._counts, strict=True):
            busy_ps = int(finishes_ps[rows].max() - starts_ps[rows].min()) + longer_ps
            energy_j += _least_energy_j(
                [(self._model.hull(key, layers), count) for key, count in counts.items()], busy_ps
            )
        return energy_j


def _least_energy_j(hulls: Iterable[tuple[Hull, int]], busy_ps: int) -> float:
    """Return the least effective energy of as many computations of each hull, one after the other."""
    pieces_uw: list[tuple[int, int]] = []
    energy_j, longer_ps = 0.0, busy_ps
    for hull, count in hulls:
        energy_j += count * hull.slowest_effective_energy_j
        longer_ps -= count * hull.times_ps[0]
        spans_ps = (count * (slow_ps - fast_ps) for fast_ps, slow_ps in pairwise(hull.times_ps))
        pieces_uw += zip(hull.slopes_uw, spans_ps, strict=True)
    for slope_uw, span_ps in sorted(pieces_uw, reverse=True):
        used_ps = min(span_ps, max(0, longer_ps))
        longer_ps -= used_ps
        energy_j += slope_uw / UW_PER_W * (span_ps - used_ps) / PS_PER_SCALED_S
    return energy_j
