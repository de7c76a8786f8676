"""`perseus power` against a real coordinator process."""

import csv
import io
import json

import pytest
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner, Result

from perseus.cli import terminal
from perseus.cli.main import app
from perseus.cli.power_tables import budget_table, feed_line, feed_table
from perseus.v1.power_service_pb2 import BUDGET_STATE_IN_FORCE, Budget, FeedState


def perseus(environment: dict[str, str], *arguments: str) -> Result:
    return CliRunner().invoke(
        app, list(arguments), env={"COLUMNS": "200", **environment}, catch_exceptions=False
    )


def shown(table: Table, width: int = 120) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def test_a_budget_is_set_listed_seen_on_its_feed_and_cancelled(environment: dict[str, str]) -> None:
    arguments = ("--limit-w", "900", "--end", "2h", "--ramp-w-per-s", "10", "--correlation-id", "evt-1")
    made = perseus(environment, "power", "set", "peak", *arguments, "--format", "json")
    assert made.exit_code == 0, made.output
    budget = json.loads(made.stdout)
    assert (budget["limit_w"], budget["state"], budget["percent"]) == (900.0, "in_force", None)
    assert budget["correlation_id"] == "evt-1"
    assert budget["end_time"].endswith("Z")

    listed = perseus(environment, "power", "list", "--format", "csv")
    (row,) = csv.DictReader(listed.stdout.splitlines())
    assert (row["budget_id"], row["limit_w"], row["ramp_w_per_s"]) == ("peak", "900.0", "10.0")
    assert "evt-1" in perseus(environment, "power", "list").stdout

    reported = ""
    while '"limit_w": 900.0' not in reported:  # at the coordinator's next tick
        reported = perseus(environment, "power", "feeds", "--format", "json").stdout
    (feed,) = json.loads(reported)
    assert (feed["feed"], feed["is_compliant"]) == ("default", True)
    assert "900" in perseus(environment, "power", "feeds").stdout

    cancelled = perseus(environment, "power", "cancel", "peak")
    assert cancelled.exit_code == 0
    assert "cancelled" in cancelled.stdout


def test_a_replaced_budget_is_shown(environment: dict[str, str]) -> None:
    made = perseus(environment, "power", "set", "night", "--limit-w", "900", "--end", "2h")
    assert made.stderr == ""
    again = perseus(environment, "power", "set", "night", "--limit-w", "800", "--format", "json")
    assert again.stderr.startswith("replaced: night, feed default, 900 W, ")
    assert json.loads(again.stdout)["limit_w"] == 800.0
    perseus(environment, "power", "cancel", "night")
    assert perseus(environment, "power", "set", "night", "--limit-w", "700").stderr == "", "it was over"
    perseus(environment, "power", "cancel", "night")


@pytest.mark.parametrize("limit", ["--limit-w", "--percent"])
def test_a_limit_of_nothing_is_set_only_after_a_question(
    environment: dict[str, str], limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "expected --yes" in perseus(environment, "power", "set", f"no{limit}", limit, "0").stderr
    monkeypatch.setattr(terminal, "can_ask", lambda: True)
    asked = CliRunner().invoke(app, ["power", "set", f"no{limit}", limit, "0"], env=environment, input="n\n")
    assert asked.exit_code == 1
    assert "0 W slows every job on feed 'default'" in asked.stderr
    assert f"no{limit}" not in perseus(environment, "power", "list").stdout
    assert perseus(environment, "power", "set", f"no{limit}", "--limit-w", "0", "--yes").exit_code == 0
    perseus(environment, "power", "cancel", f"no{limit}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("set", "b"), "expected one of --limit-w and --percent"),
        (("set", "b", "--limit-w", "1", "--percent", "2"), "expected one of --limit-w and --percent"),
        (("set", "b", "--limit-w", "1", "--end", "soon"), "--end: expected a time such as"),
        (("set", "b", "--percent", "50"), "expected a reference of feed 'default'"),
        (("set", "b", "--limit-w", "1", "--feed", "cellar"), "there is no feed 'cellar'"),
        (("cancel", "no"), "there is no power budget 'no'"),
    ],
)
def test_a_wrong_budget_gives_one_line(
    environment: dict[str, str], arguments: tuple[str, ...], message: str
) -> None:
    done = perseus(environment, "power", *arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())
    assert done.stderr.count("error:") == 1


def test_a_feed_s_line_has_its_compliance_and_the_slowed_jobs() -> None:
    feed = FeedState(feed="hall", measured_w=812.4, is_compliant=True)
    assert feed_line(feed) == "hall: 812 W drawn, no limit"
    feed.limit_w, feed.power_cap_w = 800.0, 800.0
    feed.is_compliant = False
    feed.job_ids_to_pause.append("gpt3")
    feed.slowed_job_ids.extend(["gpt3", "bert"])
    assert feed_line(feed) == ("hall: 812 W drawn, limit 800 W, NOT KEPT, pause gpt3; slowed: gpt3 bert")


def test_a_feed_is_shown_with_the_mean_that_decides_whether_its_limit_is_kept() -> None:
    """The last minute's draw, which is above the limit, began before the limit had to be kept."""
    feed = FeedState(feed="hall", limit_w=1000.0, power_cap_w=1000.0, measured_w=1081.0, is_compliant=True)
    assert feed_line(feed) == "hall: 1081 W drawn, limit 1000 W, not judged yet"
    feed.judged_mean_w, feed.judged_s = 1012.0, 20.0
    assert feed_line(feed).endswith("limit 1000 W, judged mean 1012 W in 20 s, not judged yet")
    feed.judged_mean_w, feed.judged_s = 994.0, 41.0
    assert feed_line(feed) == "hall: 1081 W drawn, limit 1000 W, judged mean 994 W in 41 s, kept"
    assert "994 in 41 s" in shown(feed_table([feed]))
    feed.is_in_transition = True
    feed.slowed_job_ids.append("demo")
    assert "in transition; slowed:" in " ".join(shown(feed_table([feed]), 80).split())


def test_a_feed_on_its_way_to_a_limit_is_shown_with_its_power_cap_and_with_power_above_it() -> None:
    feed = FeedState(feed="hall", limit_w=1000.0, power_cap_w=1050.0, measured_w=1081.0, is_compliant=True)
    feed.is_in_transition = True
    assert feed_line(feed) == "hall: 1081 W drawn, limit 1000 W, power cap 1050 W, in transition"
    feed.is_above_power_cap = True
    assert feed_line(feed).endswith("power cap 1050 W, ABOVE POWER CAP")


def test_a_budget_is_shown_with_its_ramp_and_until_when_it_lasts() -> None:
    budget = Budget(budget_id="now", limit_w=750.0, percent=75.0, state=BUDGET_STATE_IN_FORCE)
    budget.ramp_w_per_s = 50.0
    for width in (80, 120):
        table = shown(budget_table([budget]), width)
        assert "until cancelled" in table
        assert "W/s" in table
        assert "…" not in table
    budget.cancel_time.FromJsonString("2026-11-01T18:00:00Z")
    assert "2026-11-01 18:00:00" in shown(budget_table([budget]))
