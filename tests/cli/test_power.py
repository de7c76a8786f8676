"""`perseus power`: questions, a replaced budget, and the tables of feeds and budgets."""

from typing import Any

import pytest

from perseus.cli import terminal
from perseus.cli.power_tables import budget_table, feed_line, feed_table
from perseus.v1.power_service_pb2 import BUDGET_STATE_IN_FORCE, Budget, FeedState, SetBudgetResponse
from tests.cli.commands import lines, rendered
from tests.cli.prepared import PreparedCoordinator
from tests.cli.test_requests import ANSWERS

PEAK = Budget(budget_id="peak", feed="hall", limit_w=750.0, percent=75.0, ramp_w_per_s=50.0)


def test_a_replaced_budget_is_shown(prepared: PreparedCoordinator) -> None:
    prepared.answers = {"SetBudget": SetBudgetResponse(budget=PEAK, replaced=PEAK)}
    done = prepared.perseus("power set peak --limit-w 800")
    limit = "750 (75 %), ramp 50 W/s W"
    assert done.stderr == f"replaced: peak, feed hall, {limit}, 1970-01-01 00:00:00 – until cancelled\n"


@pytest.mark.parametrize("limit", ["--limit-w", "--percent"])
@pytest.mark.parametrize(("answer", "exit_code"), [(None, 2), ("n\n", 1), ("y\n", 0)])
def test_a_limit_of_nothing_is_set_only_after_a_question(
    prepared: PreparedCoordinator,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    answer: str | None,
    exit_code: int,
) -> None:
    monkeypatch.setattr(terminal, "can_ask", lambda: answer is not None)
    prepared.answers = ANSWERS
    done = prepared.perseus(f"power set none {limit} 0", answer=answer)
    assert (done.exit_code, len(prepared.requests)) == (exit_code, exit_code == 0)
    assert "0 W slows every job on feed 'default'" in done.stderr
    at_once = prepared.perseus(f"power set none {limit} 0 --yes")
    assert (at_once.exit_code, at_once.stderr, len(prepared.requests)) == (0, "", 1 + (exit_code == 0))


LIMITED: dict[str, Any] = {"limit_w": 1000.0, "power_cap_w": 1000.0, "is_compliant": True}
ON_ITS_WAY = LIMITED | {"power_cap_w": 1050.0, "is_in_transition": True}


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"is_compliant": True}, "no limit"),
        ({"power_cap_w": 5.0, "is_compliant": True}, "limit none yet, no limit"),
        (
            LIMITED
            | {"is_compliant": False, "job_ids_to_pause": ["gpt3"], "slowed_job_ids": ["gpt3", "bert"]},
            "limit 1000 W, NOT KEPT, pause gpt3; slowed: gpt3 bert",
        ),
        # The last minute's draw, which is above the limit, began before the limit had to be kept.
        (LIMITED, "limit 1000 W, not judged yet"),
        (
            LIMITED | {"judged_mean_w": 1012.0, "judged_s": 20.0},
            "limit 1000 W, judged mean 1012 W in 20 s, not judged yet",
        ),
        (
            LIMITED | {"judged_mean_w": 994.0, "judged_s": 41.0},
            "limit 1000 W, judged mean 994 W in 41 s, kept",
        ),
        (
            LIMITED | {"conflicting_gpu_count": 2},
            "limit 1000 W, not judged yet, 2 GPUs with conflicting readings",
        ),
        (ON_ITS_WAY, "limit 1000 W, power cap 1050 W, in transition"),
        (ON_ITS_WAY | {"is_above_power_cap": True}, "limit 1000 W, power cap 1050 W, ABOVE POWER CAP"),
    ],
)
def test_a_feed_s_line_has_its_limits_and_whether_it_keeps_them(fields: dict[str, Any], line: str) -> None:
    assert feed_line(FeedState(feed="hall", measured_w=1081.0, **fields)) == f"hall: 1081 W drawn, {line}"


def test_a_table_of_feeds_has_the_mean_that_decides() -> None:
    feed = FeedState(
        feed="hall", measured_w=1081.0, judged_mean_w=994, judged_s=41, managed_w=900, **ON_ITS_WAY
    )
    feed.slowed_job_ids.append("demo")
    free = FeedState(feed="free", is_compliant=True)
    assert lines(feed_table([feed, free]))[1:] == [
        "hall 1000 1050 994 in 41 s 1081 900 + 0 in transition; slowed: demo",
        "free none none 0 0 + 0 no limit",
    ]
    assert "in transition; slowed:" in " ".join(rendered(feed_table([feed]), 80).split())


@pytest.mark.parametrize("width", [80, 120])
def test_a_budget_is_shown_with_its_ramp_and_until_when_it_lasts(width: int) -> None:
    budget = Budget(state=BUDGET_STATE_IN_FORCE, correlation_id="evt", principal="alice")
    budget.MergeFrom(PEAK)
    table = " ".join(rendered(budget_table([budget]), width).split())
    for part in ("750 (75 %)", "W/s", "until cancelled", "in force", "alice, evt"):
        assert all(word in table for word in part.split())
    assert "…" not in table
    budget.cancel_time.FromJsonString("2026-11-01T18:00:00Z")
    assert "2026-11-01 18:00:00" in rendered(budget_table([budget]), width)
