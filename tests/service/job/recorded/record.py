"""Records the runs anew: `python -m tests.service.job.recorded.record [NAME…]`.

To be run when the inputs of state machines change, or when machines are meant to answer differently: the
commit's message then states the difference.
"""

import asyncio
import inspect
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from perseus.service.domain.inputs import Input, Refined, RefineFailed, Solved
from perseus.service.job import machine
from perseus.service.job.recording import Begun, Recording, Restored, SolverAnswered
from perseus.service.storage.sql_store import SqlStore
from perseus.v1 import job_pb2
from tests.service.job.recorded import scenarios
from tests.service.job.recorded.runs import FIELDS, RecordedRun, Restart, Step, fields_of, save


@contextmanager
def recording() -> Iterator[list[Step]]:
    """Record, during a block, everything that happens to the one run in it, in order."""
    steps: list[Step] = []

    class Recorded(Recording):
        def __init__(self, beginning: Begun | Restored) -> None:
            super().__init__(beginning)
            if isinstance(beginning, Begun):
                steps.append(Step(beginning, beginning.created_s, beginning.create_time_s))
            else:
                steps.append(Step(Restart(), beginning.now_s, beginning.wall_time_s))

        def add(self, event: Input, now_s: float, wall_time_s: float) -> None:
            if isinstance(event, RefineFailed):
                raise NotImplementedError("a plan that failed")
            is_answer = isinstance(event, Solved | Refined)
            steps.append(Step(SolverAnswered() if is_answer else event, now_s, wall_time_s))

    with mock.patch.object(machine, "Recording", Recorded):
        yield steps


async def recorded(steps: list[Step]) -> list[list[object]]:
    """Return the output after each step, and the final state."""
    with tempfile.TemporaryDirectory() as folder:
        store = await SqlStore.open(Path(folder) / "store.db")
        try:
            recorded_run = RecordedRun(store)
            return [*[await recorded_run.take(step) for step in steps], await recorded_run.end()]
        finally:
            await store.close()


def main(names: list[str]) -> None:
    """Record the scenarios of these names, or all, and with all the current fields of a job."""
    if not names:
        FIELDS.write_text(json.dumps(sorted(fields_of(job_pb2.Job.DESCRIPTOR)), indent=1) + "\n")
    for name, scenario in inspect.getmembers(scenarios, inspect.isfunction):
        if (
            scenario.__module__ == scenarios.__name__
            and not name.startswith("_")
            and (not names or name in names)
        ):
            with recording() as steps:
                scenario(steps)
            save(name, steps, asyncio.run(recorded(steps)))
            print(f"{name}: {len(steps)} steps")


if __name__ == "__main__":
    main(sys.argv[1:])
