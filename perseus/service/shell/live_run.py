"""The latest run of a job, with what is known of it outside its state machine."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from perseus.service.domain.model import Rank
from perseus.service.domain.records import JobRecord
from perseus.service.domain.snapshot import RunSnapshot
from perseus.service.domain.specification import Coordinates
from perseus.service.job.machine import JobMachine
from perseus.service.shell.watching import Watcher
from perseus.solver import Frontier
from perseus.v1 import event_pb2, frontier_pb2

Machine = JobMachine | RunSnapshot


@dataclass(slots=True, eq=False)
class LiveRun:
    """The latest run of a job; earlier ones have ended, and are in the store.

    Attributes:
        machine: its state machine, or a snapshot once it has none.
        record, ranks, last_sequence: the machine's latest output; a quarantine starts from it if the machine
            fails.
        stored_record: the last record that is stored.
        incarnation: counts its machines and snapshots; commands of an earlier one are dropped.
        watchers: who watches it.
        rebalancing: a frontier, layers, and what moving these would bring or the work on it.
        thinned_count: its thinned batches of telemetry, since the coordinator loaded or began it.
        event_counts: its events since the coordinator loaded or began it, by type.
    """

    machine: Machine
    record: JobRecord | None = None
    stored_record: JobRecord | None = None
    ranks: dict[Coordinates, Rank] = field(default_factory=dict)
    last_sequence: int = 0
    incarnation: int = 0
    watchers: set[Watcher] = field(default_factory=set)
    solving: asyncio.Task[Any] | None = None
    rebalancing: tuple[Frontier, tuple[int, ...], asyncio.Task[frontier_pb2.Rebalancing]] | None = None
    thinned_count: int = 0
    event_counts: Counter[event_pb2.JobEventType.ValueType] = field(default_factory=Counter)

    @property
    def job_id(self) -> str:
        """The job's identifier."""
        return self.machine.spec.job_id

    @property
    def number(self) -> int:
        """Which run of the job it is, from 1."""
        return self.machine.run_number
