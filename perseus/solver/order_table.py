"""A schedule's computations as columns, their dependencies, and checks that it can run.

Schedules have up to 65,536 computations and come from untrusted clients, so every check is linear (except for
sorting), and none hashes or compares computations one by one. A computation is identified by its index: stage
by stage, in order.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from perseus.solver.computation import Computation, Kind
from perseus.solver.errors import ScheduleError

IndexArray = NDArray[np.int64]

Path = tuple[tuple[int, int], ...]
"""(stage, chunk) after (stage, chunk), as activations flow."""

_KINDS = tuple(Kind)
_CODE = {kind: code for code, kind in enumerate(_KINDS)}
_FIXED = _CODE[Kind.FIXED]
_COMPLETE = tuple(
    sum(1 << _CODE[kind] for kind in kinds)
    for kinds in (
        (Kind.FORWARD, Kind.BACKWARD),
        (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT),
    )
)
"""The kinds that a microbatch needs at every place of its path, except recomputation, as bit sets."""
_ALONE = tuple(1 << _CODE[kind] for kind in (Kind.FORWARD, Kind.BACKWARD))
"""Either is enough at the only place of a path: several forwards may have one backward, as in a GAN."""


class OrderTable:
    """The computations of all stages; misplaced and repeated ones are refused.

    A *place* is a stage's chunk. Places, microbatches and computations are numbered by their rank among those
    present, so that large gaps between their own numbers cost nothing.

    Raises:
        ScheduleError: there is no stage, or one without computations; a computation is in the wrong stage,
            appears twice, or has a negative number.
    """

    def __init__(self, orders: Sequence[Sequence[Computation]]) -> None:
        if not orders:
            raise ScheduleError("orders: expected at least one stage, found none")
        for stage, order in enumerate(orders):
            if not order:
                raise ScheduleError(
                    f"stage {stage}: expected at least one computation, found none", stage=stage
                )
        self.computations = [computation for order in orders for computation in order]
        self.lengths = np.array([len(order) for order in orders])
        self._kind = self._column(_CODE[c.kind] for c in self.computations)
        self._check_numbers()
        self._microbatches, self._microbatch = np.unique(
            self._column(c.microbatch for c in self.computations), return_inverse=True
        )
        chunks, chunk = np.unique(self._column(c.chunk for c in self.computations), return_inverse=True)
        places, self._place = np.unique(self._stage * len(chunks) + chunk, return_inverse=True)
        rank_of = {
            (int(place) // len(chunks), int(chunks[place % len(chunks)])): rank
            for rank, place in enumerate(places)
        }
        self._place_rank_of: dict[tuple[int, int], int] = rank_of
        codes = self._codes(self._place, self._microbatch, self._kind)
        self._by_code = np.argsort(codes, kind="stable")
        self._sorted_codes = codes[self._by_code]
        repeated = self._by_code[1:][self._sorted_codes[1:] == self._sorted_codes[:-1]]
        if len(repeated):
            self._refuse_order(int(repeated.min()), "{} stands there twice")

    def _column(self, values: Iterable[int]) -> IndexArray:
        try:
            return np.fromiter(values, np.int64, len(self.computations))
        except OverflowError:
            raise ScheduleError("orders: expected microbatches and chunks below 2^63") from None

    def _check_numbers(self) -> None:
        self._stage = np.repeat(np.arange(len(self.lengths)), self.lengths)
        own = self._column(c.stage for c in self.computations)
        if len(misplaced := np.flatnonzero(own != self._stage)):
            index = int(misplaced[0])
            self._refuse_order(index, f"expected computations of stage {self._stage[index]}, found {{}}")
        smaller = self._column(min(c.microbatch, c.chunk) for c in self.computations)
        if len(negative := np.flatnonzero(smaller < 0)):
            index = int(negative[0])
            found = f"{self.computations[index]!r}"
            self._refuse_order(index, f"microbatch and chunk must be 0 or more, found {found}")

    def _refuse_order(self, index: int, what: str) -> None:
        stage, computation = int(self._stage[index]), self.computations[index]
        raise ScheduleError(
            f"order of stage {stage}: {what.format(computation)}", stage=stage, computation=computation
        )

    def _codes(self, place: IndexArray, microbatch: IndexArray, kind: IndexArray | int) -> IndexArray:
        codes: IndexArray = (place * len(self._microbatches) + microbatch) * len(_KINDS) + kind
        return codes

    def _find(self, place: IndexArray, microbatch: IndexArray, kind: Kind) -> IndexArray:
        """Return the indices of computations; -1 where a computation does not exist or its place is -1."""
        codes = self._codes(place, microbatch, _CODE[kind])
        at = np.minimum(np.searchsorted(self._sorted_codes, codes), len(self._sorted_codes) - 1)
        return np.where((place >= 0) & (self._sorted_codes[at] == codes), self._by_code[at], -1)

    # ------------------------------------------------------------------ paths

    def path_chunk_by_chunk(self) -> tuple[Path, ...]:
        """Return the path through all stages of chunk 0, then of chunk 1, and so on."""
        moving = np.unique(self._place[self._kind != _FIXED])
        chunk_of = {rank: chunk for (_, chunk), rank in self._place_rank_of.items()}
        chunk_count = 1 + max((chunk_of[rank] for rank in moving.tolist()), default=-1)
        stage_count = len(self.lengths)
        if chunk_count * stage_count > len(self.computations):
            # Every place of the path needs a computation: name one that has none, however large the numbers
            # are.
            missing = next(
                (stage, chunk)
                for chunk in range(chunk_count)
                for stage in range(stage_count)
                if (stage, chunk) not in self._place_rank_of
            )
            raise ScheduleError(
                f"stage {missing[0]}, chunk {missing[1]}, microbatch {self._microbatches[0]}: expected "
                "forward with backward, or with backward-input and backward-weight, found nothing",
                stage=missing[0],
                chunk=missing[1],
                microbatch=int(self._microbatches[0]),
                found="nothing",
            )
        path = tuple((stage, chunk) for chunk in range(chunk_count) for stage in range(stage_count))
        return (path,) if path else ()

    def check_paths(self, paths: Sequence[Path]) -> None:
        """Refuse paths that leave the pipeline or cross, computations off every path, and incomplete ones.

        Raises:
            ScheduleError: names the place; a microbatch has to pass every place of its path, forward and
                backward. On a path of one place, where nothing depends on that, it may do either.
        """
        stage_count = len(self.lengths)
        path_of = np.full(len(self._place_rank_of), -1)
        seen: set[tuple[int, int]] = set()
        for number, path in enumerate(paths):
            for stage, chunk in path:
                if not (0 <= stage < stage_count and chunk >= 0):
                    raise ScheduleError(
                        f"paths: expected stages 0 to {stage_count - 1} and chunks of 0 or more, "
                        f"found stage {stage}, chunk {chunk}",
                        stage=stage,
                        chunk=chunk,
                    )
                if (stage, chunk) in seen:
                    raise ScheduleError(
                        f"paths: expected each stage's chunk once, found stage {stage}, chunk {chunk} again",
                        stage=stage,
                        chunk=chunk,
                    )
                seen.add((stage, chunk))
                if (rank := self._place_rank_of.get((stage, chunk))) is not None:
                    path_of[rank] = number
        moving = np.flatnonzero(self._kind != _FIXED)
        off = moving[path_of[self._place[moving]] < 0]
        if len(off):
            c = self.computations[int(off[0])]
            raise ScheduleError(f"{c} is on no path", computation=c, stage=c.stage, chunk=c.chunk)
        self._check_complete(paths, path_of, moving)

    def _check_complete(self, paths: Sequence[Path], path_of: IndexArray, moving: IndexArray) -> None:
        width = len(self._microbatches)
        visits, visit_of = np.unique(
            self._place[moving] * width + self._microbatch[moving], return_inverse=True
        )
        kinds = np.bincount(visit_of, 1 << self._kind[moving]).astype(np.int64)
        needed = kinds & ~(1 << _CODE[Kind.RECOMPUTATION])
        lengths = np.array([len(path) for path in paths], np.int64)
        is_alone = np.isin(needed, _ALONE) & (lengths[path_of[visits // width]] == 1)
        is_complete = np.isin(needed, _COMPLETE) | is_alone
        # A microbatch is complete on its path if it visits every place of the path completely.
        journeys, journey_of = np.unique(
            path_of[visits // width] * width + visits % width, return_inverse=True
        )
        complete_counts = np.bincount(journey_of, is_complete, len(journeys))
        bad = np.flatnonzero(complete_counts != lengths[journeys // width])
        if not len(bad):
            return
        number, microbatch = divmod(int(journeys[bad[0]]), width)
        found_at = dict(zip(visits.tolist(), needed.tolist(), strict=True))
        for place in paths[number]:
            rank = self._place_rank_of.get(place)
            bits = 0 if rank is None else found_at.get(rank * width + microbatch, 0)
            if bits not in _COMPLETE:
                names = sorted(kind.value for kind in Kind if bits >> _CODE[kind] & 1)
                found, (stage, chunk) = ", ".join(names) or "nothing", place
                value = int(self._microbatches[microbatch])
                raise ScheduleError(
                    f"stage {stage}, chunk {chunk}, microbatch {value}: expected forward with "
                    f"backward, or with backward-input and backward-weight, found {found}",
                    stage=stage,
                    chunk=chunk,
                    microbatch=value,
                    found=found,
                )

    # ------------------------------------------------------------------ dependencies

    def data_dependencies(self, paths: Iterable[Path]) -> IndexArray:
        """Return (earlier, later), shape (n, 2), for every activation, gradient and same-stage dependency.

        They are sorted by the later computation: by stage, kind, microbatch and chunk.
        """
        previous = np.full(len(self._place_rank_of), -1)
        following = previous.copy()
        for path in paths:
            ranks = [self._place_rank_of.get(place, -1) for place in path]
            previous[ranks[1:]], following[ranks[:-1]] = ranks[:-1], ranks[1:]
        gradient = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
        found: list[tuple[IndexArray, IndexArray]] = []
        for kinds, waits_for, places in (
            ((Kind.FORWARD,), (Kind.FORWARD,), previous),
            ((Kind.RECOMPUTATION,), (Kind.FORWARD,), None),
            ((Kind.BACKWARD_WEIGHT,), (Kind.BACKWARD_INPUT,), None),
            (gradient, (Kind.FORWARD, Kind.RECOMPUTATION), None),
            (gradient, gradient, following),
        ):
            later = np.flatnonzero(np.isin(self._kind, [_CODE[kind] for kind in kinds]))
            there = self._place[later] if places is None else places[self._place[later]]
            for kind in waits_for:
                earlier = self._find(there, self._microbatch[later], kind)
                found.append((earlier[earlier >= 0], later[earlier >= 0]))
        slot = np.repeat(np.arange(len(found)), [len(later) for _, later in found])
        earlier = np.concatenate([some for some, _ in found])
        later = np.concatenate([some for _, some in found])
        rank = np.lexsort((self._place, self._microbatch, self._kind, self._stage))
        order = np.lexsort((slot, np.argsort(rank)[later]))
        return np.stack((earlier[order], later[order]), axis=1)

    def levels(self, dependencies: IndexArray) -> IndexArray:
        """Return each computation's level: the length of the longest chain that it waits for.

        Raises:
            ScheduleError: the orders deadlock; the message names the cycle.
        """
        count = len(self.computations)
        is_first = np.zeros(count, np.bool_)
        is_first[np.cumsum(self.lengths)[:-1]] = is_first[0] = True
        in_order = np.flatnonzero(~is_first)
        earlier = np.concatenate((in_order - 1, dependencies[:, 0]))
        later = np.concatenate((in_order, dependencies[:, 1]))
        by_earlier = np.argsort(earlier, kind="stable")
        bounds = np.searchsorted(earlier[by_earlier], np.arange(count + 1)).tolist()
        followers: list[int] = later[by_earlier].tolist()
        awaited: list[int] = np.bincount(later, minlength=count).tolist()
        levels = [0] * count
        ready = [index for index, number in enumerate(awaited) if not number]
        for index in ready:  # grows during the loop
            level = levels[index] + 1
            for follower in followers[bounds[index] : bounds[index + 1]]:
                if levels[follower] < level:
                    levels[follower] = level
                awaited[follower] -= 1
                if not awaited[follower]:
                    ready.append(follower)
        if len(ready) < count:
            self._refuse_cycle(earlier, later, np.array(awaited) > 0)
        return np.array(levels)

    def _refuse_cycle(self, earlier: IndexArray, later: IndexArray, is_left: NDArray[np.bool_]) -> None:
        """Walk backward along waiting computations until one repeats; raise with that cycle."""
        rows = is_left[earlier] & is_left[later]
        waits_for = dict(zip(later[rows].tolist(), earlier[rows].tolist(), strict=True))
        walk = [next(iter(waits_for))]
        met = {walk[0]: 0}
        while (back := waits_for[walk[-1]]) not in met:
            met[back] = len(walk)
            walk.append(back)
        cycle = [back, *reversed(walk[met[back] :])]
        path = " → ".join(str(self.computations[index]) for index in cycle)
        raise ScheduleError(f"the orders deadlock: {path}", cycle=path)
