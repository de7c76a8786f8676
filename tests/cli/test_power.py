"""`perseus power` against a real coordinator process."""

import csv
import json

import pytest
from typer.testing import CliRunner, Result

from perseus.cli.main import app
from perseus.cli.power_tables import feed_line
from perseus.v1.power_service_pb2 import FeedState


def perseus(environment: dict[str, str], *arguments: str) -> Result:
    return CliRunner().invoke(
        app, list(arguments), env={"COLUMNS": "200", **environment}, catch_exceptions=False
    )


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
    assert feed_line(feed) == ("hall: 812 W drawn, limit 800 W, NOT KEPT, pause gpt3; held back: gpt3 bert")
