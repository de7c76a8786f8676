"""Power budgets are stored as they were accepted, for as long as retention keeps them, on every engine."""

from dataclasses import replace
from pathlib import Path

from perseus.service.domain.power import Budget, BudgetRecord, UnreadableBudget
from perseus.service.domain.retention import DAY_S, Retention
from perseus.service.storage.checking import check_database
from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import BudgetEntry
from tests.service.storage.stores import execute, fill, opened

NOW_S = 1_700_000_000.0
OPEN = BudgetRecord(Budget("open", "hall-a", 1e5 / 3, NOW_S), "first", "token grid", NOW_S - 1 / 3)
ENDING = BudgetRecord(
    Budget("ending", "default", 0.0, NOW_S, NOW_S + 0.1, "evt-7 \N{GREEK SMALL LETTER PI}", 12.5),
    "second",
    "token operator",
    NOW_S,
    percent=75.0,
)


async def test_budgets_survive_a_restart_as_last_written(database: Path | str) -> None:
    cancelled = replace(OPEN, cancel_time_s=NOW_S + 7.5)
    async with opened(database) as store:
        assert await store.load_budgets() == []
        await store.write([BudgetEntry(OPEN), BudgetEntry(ENDING)])
        await store.write([BudgetEntry(cancelled)])
    async with opened(database) as store:
        assert await store.load_budgets() == [ENDING, cancelled]


async def pruned(store: SqlStore, retention: Retention, now_s: float) -> list[str]:
    while not (await store.prune(retention, now_s)).is_done:
        pass
    found = await store.load_budgets()
    return [record.budget.budget_id for record in found if isinstance(record, BudgetRecord)]


async def test_only_ended_budgets_are_pruned_by_age_and_count(store: SqlStore) -> None:
    ended = [
        BudgetRecord(Budget(f"b{n}", "default", 1.0, NOW_S, NOW_S + n), "r", "", NOW_S) for n in range(1, 6)
    ]
    await store.write([BudgetEntry(record) for record in [OPEN, *ended]])
    later_s = NOW_S + 4.5 + DAY_S
    for retention, now_s, left in (
        (Retention(keep_budget_count=1), NOW_S, ["b1", "b2", "b3", "b4", "b5", "open"]),
        (Retention(keep_budget_count=3), NOW_S + 5, ["b3", "b4", "b5", "open"]),
        (Retention(keep_budgets_days=1), later_s, ["b5", "open"]),
        (Retention(keep_budgets_days=1), later_s + 1000 * DAY_S, ["open"]),
    ):
        assert await pruned(store, retention, now_s) == left


async def test_the_readable_part_of_an_unreadable_budget_is_kept_and_the_check_reports_it(path: Path) -> None:
    await fill(path, BudgetEntry(OPEN), BudgetEntry(ENDING))
    execute(
        path,
        """UPDATE budgets SET over_time_s = 1.0 WHERE budget_id = 'open';
        INSERT INTO budgets SELECT 'worse', replace(budget, '"limit_w":', '"limit_w":-'), NULL
        FROM budgets WHERE budget_id = 'open'""",
    )
    reported = "can't be read, and is enforced conservatively: "
    first, second = check_database(path)
    assert first.startswith(f"power budget 'open': {reported}expected 'open', over")
    assert second.startswith(f"power budget 'worse': {reported}limit_w: expected 0 to")
    async with opened(path) as store:
        ending, first_lost, second_lost = await store.load_budgets()
    assert ending == ENDING
    known = "open", OPEN.budget.feed, OPEN.budget.limit_w, None  # one of two times is wrong
    assert isinstance(first_lost, UnreadableBudget)
    assert (first_lost.budget_id, first_lost.feed, first_lost.limit_w, first_lost.over_time_s) == known
    assert isinstance(second_lost, UnreadableBudget)
    (stands_in,) = second_lost.in_its_place({OPEN.budget.feed})
    assert (stands_in.budget_id, stands_in.limit_w) == ("worse", 0.0)
    (nameless,) = UnreadableBudget("\n", None, "hall-a", 5.0, "").in_its_place({"hall-a"})
    assert nameless.budget_id.startswith("unreadable-")
    cancelled = BudgetRecord(OPEN.budget, "r", "", NOW_S, cancel_time_s=NOW_S + 86400)
    assert cancelled.is_over(NOW_S), "the clock at its cancellation had jumped ahead"


async def test_budgets_that_are_over_can_be_left_out(store: SqlStore) -> None:
    cancelled = replace(OPEN, budget=replace(OPEN.budget, budget_id="cancelled"), cancel_time_s=NOW_S)
    await store.write([BudgetEntry(record) for record in (OPEN, ENDING, cancelled)])
    assert await store.load_budgets(NOW_S) == [ENDING, OPEN]
    assert await store.load_budgets(NOW_S + 1) == [OPEN]
