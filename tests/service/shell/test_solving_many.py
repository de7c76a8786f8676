"""Many jobs want to be solved while the solver's workers die: in the end all jobs have their plans."""

from collections.abc import Callable
from pathlib import Path

import pytest

from perseus.service.shell import run_tasks
from perseus.service.solving import worker_pool
from perseus.service.solving.worker import Answer, WorkerDiedError
from tests.service.grpc_fakes import ThreadWorker
from tests.torture.solving import fill, restarted


@pytest.fixture(autouse=True)
def few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_tasks, "POINT_COUNT", 10)


class MortalWorker(ThreadWorker):
    """It dies at every other problem."""

    def __init__(self) -> None:
        super().__init__()
        self.death_count = 0
        self._is_dying = False

    async def run(self, work: Callable[..., Answer], *arguments: object) -> Answer:
        self._is_dying = not self._is_dying
        if self._is_dying:
            self.death_count += 1
            raise WorkerDiedError("ended by signal 9 (SIGKILL)", is_of_its_work=True)
        return await super().run(work, *arguments)


async def test_all_jobs_of_a_restarted_coordinator_are_planned(tmp_path: Path) -> None:
    await fill(tmp_path / "jobs.db", 4, 2)
    outcome = await restarted(tmp_path / "jobs.db", new_worker=ThreadWorker)
    assert (outcome.planned_count, outcome.stock_count, outcome.retried_count) == (4, 0, 0)


async def test_jobs_whose_solver_dies_are_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "MIN_BACKOFF_S", 0.01)
    await fill(tmp_path / "jobs.db", 3, 2)
    worker = MortalWorker()
    outcome = await restarted(tmp_path / "jobs.db", new_worker=lambda: worker)
    assert worker.death_count >= 3
    assert (outcome.planned_count, outcome.stock_count) == (3, 0)
    assert outcome.retried_count >= 1
