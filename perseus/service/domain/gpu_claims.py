"""GPUs that the ranks of slots have claimed from each other."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from perseus.service.domain.specification import Coordinates

Place = tuple[str, Coordinates]
"""A job's identifier, and one of its ranks."""

Gpu = tuple[str, str]
"""The name of a principal, and the UUID by which its agent calls a GPU."""


@dataclass(frozen=True, slots=True)
class ClaimChanges:
    """What a slot wants to be written: GPUs to be claimed, or whose rank has changed, and those to be
    released."""

    claimed: Mapping[Gpu, Place]
    released: Collection[Gpu]
