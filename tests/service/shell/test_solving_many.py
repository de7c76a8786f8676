"""Many jobs want to be solved, and the solver's processes are killed: all jobs have their plans in the end.

A sample; `tests.torture.solving` has the whole.
"""

from pathlib import Path

from tests.torture.solving import KillOnce, fill, restarted


async def test_all_jobs_of_a_restarted_coordinator_are_planned(tmp_path: Path) -> None:
    await fill(tmp_path / "jobs.db", 72, 3)
    outcome = await restarted(tmp_path / "jobs.db")
    assert (outcome.planned_count, outcome.stock_count) == (72, 0)


async def test_jobs_whose_solver_is_killed_are_planned(tmp_path: Path) -> None:
    await fill(tmp_path / "jobs.db", 3, 16)
    kill = KillOnce()
    outcome = await restarted(tmp_path / "jobs.db", kill)
    assert len(kill.killed) == 3
    assert (outcome.planned_count, outcome.retried_count) == (3, 3)
