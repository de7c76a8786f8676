"""A large job is registered while the loop runs on; concurrent registrations of it lead to one run."""

import asyncio
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from perseus.schedule_name import ScheduleName
from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.inputs import FinishRequested
from perseus.service.domain.specification import (
    JobSpec,
    NamedSchedule,
    Parallelism,
    Registration,
)
from perseus.service.job.machine import JobMachine
from perseus.service.job.run import Run
from perseus.service.shell.live_runs import _LARGE_SIZE
from tests.service.api.test_mutated_requests import RULES
from tests.service.grpc_fakes import coordinator_without_api


def spec(microbatches: int, stages: int = 16) -> JobSpec:
    schedule = NamedSchedule(ScheduleName.ONE_FORWARD_ONE_BACKWARD, microbatches)
    return JobSpec("job", Parallelism(1, stages, 1), schedule)


LARGE = spec(_LARGE_SIZE // 32)


async def test_a_large_job_is_made_once_and_beside_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_in: list[threading.Thread] = []
    make = JobMachine.__init__

    def noting(self: JobMachine, *arguments: object) -> None:
        made_in.append(threading.current_thread())
        make(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(JobMachine, "__init__", noting)
    async with coordinator_without_api(tmp_path / "jobs.db", RULES) as coordinator:
        calls = [coordinator.jobs.register(LARGE, Registration(f"request-{number}")) for number in (1, 2)]
        assert [view.run_number for view in await asyncio.gather(*calls)] == [1, 1]
        assert threading.main_thread() not in made_in
        await coordinator.jobs.change("job", FinishRequested())
        views = await asyncio.gather(
            coordinator.jobs.register(LARGE, Registration("request-3")),
            coordinator.jobs.register(spec(8), Registration("request-4")),
        )
        # The small one is registered first; the large one then has another specification, with no live rank.
        assert {view.run_number for view in views} == {2, 3}


def test_a_larger_job_is_refused_before_anything_is_laid_out() -> None:
    with pytest.raises(InvalidFieldError, match="microbatch_count: expected at most 65536 computations"):
        JobMachine(Run(spec(4096, stages=61), 1, RULES, "epoch", 0.0, 0.0))


def calls_of(work: Callable[[], object]) -> int:
    """Return how many Python and C functions are called."""
    count = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_the_cost_of_a_machine_grows_with_the_job() -> None:
    small = calls_of(lambda: JobMachine(Run(spec(64), 1, RULES, "epoch", 0.0, 0.0)))
    large = calls_of(lambda: JobMachine(Run(spec(256), 1, RULES, "epoch", 0.0, 0.0)))
    assert large < 4.4 * small
