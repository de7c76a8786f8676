"""Keys of stage profiles: two stages with the same key take the same time and energy. Pure.

A fingerprint identifies the work, wherever it runs in whatever schedule. Without one, the same order of
computations at the same position among as many stages counts as the same work; an adopted profile is compared
with the first measurements anyway. The key also contains the GPUs' models, power limits and workload power
profiles, and how many of them share the stage.
"""

import hashlib
import json
from collections.abc import Collection, Sequence

from perseus.service.domain.model import GpuKind
from perseus.service.domain.specification import JobSpec
from perseus.solver import Schedule


class WorkKeys:
    """The keys of a run's stages. A stage's is made anew only when its kinds of GPUs change."""

    def __init__(self, spec: JobSpec, schedule: Schedule) -> None:
        self._spec = spec
        self._schedule = schedule
        # By stage: the digest of its work, which the kinds of GPUs only complete.
        self._works: dict[int, hashlib._Hash] = {}
        self._kinds: Sequence[Collection[GpuKind] | None] = [None] * spec.parallelism.stage_count
        self._keys = ("",) * spec.parallelism.stage_count

    def of(self, kinds: Sequence[Collection[GpuKind]]) -> tuple[str, ...]:
        """Return each stage's key; `kinds[s]` are those of the GPUs of stage `s` in all pipelines."""
        if kinds is not self._kinds:
            of_stages = enumerate(zip(self._kinds, kinds, self._keys, strict=True))
            self._keys = tuple(
                key if own == before else self._key(stage, own) for stage, (before, own, key) in of_stages
            )
            self._kinds = kinds
        return self._keys

    def _key(self, stage: int, kinds: Collection[GpuKind]) -> str:
        work = self._works.get(stage)
        if work is None:
            work = self._works[stage] = hashlib.sha256(self._text(stage).encode())
        whole = work.copy()
        whole.update(f", {json.dumps(sorted(kinds))}]".encode())
        return whole.hexdigest()

    def _text(self, stage: int) -> str:
        work: object = self._spec.stage_work[stage] if self._spec.stage_work else ""
        if not work:
            order = [(c.kind.name, c.microbatch, c.chunk) for c in self._schedule.orders[stage]]
            work = [self._spec.parallelism.stage_count, stage, order]
        return json.dumps([work, self._spec.parallelism.tensor_count]).removesuffix("]")
