"""What every command asks of a coordinator, and that it shows the answer, to people and to scripts."""

import csv
import json
from typing import Any

import pytest
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from perseus.cli.jobs import app
from perseus.v1 import event_pb2, frontier_pb2, frontier_service_pb2, job_pb2, rank_pb2
from perseus.v1 import job_service_pb2 as jobs
from perseus.v1 import ledger_service_pb2 as ledger
from perseus.v1 import power_service_pb2 as power
from perseus.v1 import token_service_pb2 as tokens
from tests.cli.prepared import Answer, PreparedCoordinator

SUMMARY = job_pb2.JOB_VIEW_SUMMARY
NOON = Timestamp(seconds=1_580_472_000)
"""2020-01-31T12:00Z."""

JOB = job_pb2.Job(
    job_id="gpt3",
    run_number=3,
    state=job_pb2.JOB_STATE_WAITING,
    state_reason="some ranks have not joined yet",
    last_event_sequence=25,
    no_slowdown_time=job_pb2.NoSlowdownTime(iteration_time_s=1.0),
    signal_target=job_pb2.SignalTarget(done_count=7),
)
EVENTS = [event_pb2.JobEvent(sequence=number, message=f"event {number}") for number in (9, 8, 7)]
BUDGET = power.Budget(budget_id="peak", feed="hall", limit_w=900, state=power.BUDGET_STATE_IN_FORCE)
FEED = power.FeedState(feed="hall", limit_w=900, measured_w=812)
TOKEN = tokens.Token(name="dash", scope=tokens.SCOPE_READER)
ANSWERS: dict[str, Answer] = {
    "ListJobs": jobs.ListJobsResponse(jobs=[JOB]),
    "ListRuns": jobs.ListRunsResponse(runs=[JOB]),
    "GetJob": jobs.GetJobResponse(job=JOB),
    "ListRanks": jobs.ListRanksResponse(ranks=[rank_pb2.Rank(hostname="node-7")]),
    "ListJobEvents": jobs.ListJobEventsResponse(events=EVENTS),
    "WatchJob": [jobs.WatchJobResponse(event=event) for event in EVENTS[::-1]],
    "GetReport": jobs.GetReportResponse(periods=[job_pb2.ReportPeriod(number=4)]),
    **{
        f"{change}": getattr(jobs, f"{change}Response")(job=JOB)
        for change in ("FinishJob", "ResumeJob", "ReportStraggler", "ClearStraggler", "SetPolicy")
    },
    "DeleteJob": jobs.DeleteJobResponse(),
    "MeasureBaseline": jobs.MeasureBaselineResponse(job=JOB),
    "GetRebalancing": frontier_service_pb2.GetRebalancingResponse(
        rebalancing=frontier_pb2.Rebalancing(
            stock=frontier_pb2.IterationCost(iteration_time_s=1, energy_j=2),
            present=frontier_pb2.Partition(layer_counts=[4, 6]),
        )
    ),
    "ListLedgerEntries": ledger.ListLedgerEntriesResponse(
        entries=[
            ledger.LedgerEntry(job_id="gpt3", run_number=3, account=ledger.LedgerAccount(energy_kwh=18))
        ],
        total=ledger.LedgerAccount(energy_kwh=18),
    ),
    "SetBudget": power.SetBudgetResponse(budget=BUDGET),
    "CancelBudget": power.CancelBudgetResponse(budget=BUDGET),
    "ListBudgets": power.ListBudgetsResponse(budgets=[BUDGET]),
    "ListFeeds": power.ListFeedsResponse(feeds=[FEED]),
    "WatchFeeds": [power.WatchFeedsResponse(feed=FEED)],
    "CreateToken": tokens.CreateTokenResponse(token=TOKEN, secret="perseus_s3cret"),
    "ListTokens": tokens.ListTokensResponse(tokens=[TOKEN]),
    "RevokeToken": tokens.RevokeTokenResponse(token=TOKEN),
}


def policy(**rule: Any) -> list[Message]:
    return [jobs.SetPolicyRequest(job_id="gpt3", policy=job_pb2.OperatingPolicy(**rule))]


DAY = job_pb2.LeastSignal(extra_time=job_pb2.ExtraTime(percent=5, horizon_s=86_400))
WORK = job_pb2.LeastSignal(
    work_until=job_pb2.WorkUntil(iteration_count=40, end_time=Timestamp(seconds=4_102_444_800))
)
STATES = [job_pb2.JOB_STATE_WAITING, job_pb2.JOB_STATE_STOCK]
LABELS = [job_pb2.Label(key="team", value="vision"), job_pb2.Label(key="stage", value="pre=1")]
TYPES = [event_pb2.JOB_EVENT_TYPE_REGISTERED, event_pb2.JOB_EVENT_TYPE_POLICY_SET]
ENTRIES = ledger.ListLedgerEntriesRequest(job_id="gpt3", page_size=1000)

REQUESTS: dict[str, tuple[list[Message], str]] = {
    "jobs list": ([jobs.ListJobsRequest(page_size=1000)], "gpt3"),
    "jobs list --state waiting --state stock --label team=vision --label stage=pre=1": (
        [jobs.ListJobsRequest(states=STATES, labels=LABELS, page_size=1000)],
        "gpt3",
    ),
    "jobs runs gpt3": ([jobs.ListRunsRequest(job_id="gpt3", page_size=1000)], "waiting: some ranks"),
    "jobs show gpt3 --run 1": (
        [
            jobs.GetJobRequest(job_id="gpt3", run_number=1),
            jobs.ListJobEventsRequest(job_id="gpt3", run_number=3, page_size=5, latest_first=True),
        ],
        "waiting: some ranks have not joined yet",
    ),
    "jobs ranks gpt3 --pipeline 0 --stage 2 --state expected --state lost": (
        [
            jobs.ListRanksRequest(
                job_id="gpt3",
                pipeline=0,
                stage=2,
                states=[rank_pb2.RANK_STATE_EXPECTED, rank_pb2.RANK_STATE_LOST],
                page_size=1000,
            )
        ],
        "node-7",
    ),
    "jobs rebalancing gpt3 --layers 4,6": (
        [frontier_service_pb2.GetRebalancingRequest(job_id="gpt3", layer_counts=[4, 6])],
        "4,6",
    ),
    "jobs watch gpt3 --run 2": (
        [
            jobs.GetJobRequest(job_id="gpt3", run_number=2, view=SUMMARY),
            jobs.WatchJobRequest(job_id="gpt3", run_number=3, after_sequence=15),
        ],
        "event 7\n00:00:00  event 8\n00:00:00  event 9",
    ),
    "jobs events gpt3 --type registered --type policy_set --since 2020-01-31T13:00:00+01:00": (
        [
            jobs.ListJobEventsRequest(
                job_id="gpt3", types=TYPES, start_time=NOON, page_size=101, latest_first=True
            )
        ],
        "event 7",
    ),
    "jobs events gpt3 --run 1 --limit 5000 --first": (
        [jobs.ListJobEventsRequest(job_id="gpt3", run_number=1, page_size=1000)],
        "event 9",
    ),
    "jobs report gpt3 --run 1": (
        [
            jobs.GetJobRequest(job_id="gpt3", run_number=1, view=SUMMARY),
            jobs.GetReportRequest(job_id="gpt3", run_number=3, page_size=1000),
            ENTRIES,
        ],
        "used 18.000 kWh; saving unknown",
    ),
    "jobs straggler gpt3 1 --factor 1.2": (
        [jobs.ReportStragglerRequest(job_id="gpt3", pipeline=1, slowdown_factor=1.2)],
        "gpt3",
    ),
    "jobs straggler gpt3 1 --iteration-time-s 3": (
        [jobs.ReportStragglerRequest(job_id="gpt3", pipeline=1, iteration_time_s=3)],
        "gpt3",
    ),
    "jobs straggler gpt3 1 --clear": ([jobs.ClearStragglerRequest(job_id="gpt3", pipeline=1)], "gpt3"),
    "jobs rebaseline gpt3": ([jobs.MeasureBaselineRequest(job_id="gpt3")], "gpt3"),
    "jobs policy gpt3 --no-slowdown": (policy(no_slowdown=job_pb2.NoSlowdown()), "gpt3"),
    "jobs policy gpt3 --max-slowdown-percent 5 --tolerance-percent 2 --weight 3": (
        policy(max_slowdown_percent=5, budget_terms=job_pb2.BudgetTerms(tolerance_percent=2, weight=3)),
        "gpt3",
    ),
    "jobs policy gpt3 --deadline-s 60 --iterations 30": (
        policy(deadline=job_pb2.Deadline(iteration_count=30, time_s=60)),
        "gpt3",
    ),
    "jobs policy gpt3 --max-average-power-w 900": (policy(max_average_power_w=900), "gpt3"),
    "jobs policy gpt3 --carbon --extra-time-percent 5 --horizon 1d": (policy(least_carbon=DAY), "gpt3"),
    "jobs policy gpt3 --cost --iterations 40 --until 2100-01-01T00:00": (policy(least_cost=WORK), "gpt3"),
    "jobs finish gpt3 --yes": ([jobs.FinishJobRequest(job_id="gpt3")], "gpt3"),
    "jobs resume gpt3": ([jobs.ResumeJobRequest(job_id="gpt3")], "gpt3"),
    "jobs delete gpt3": ([jobs.DeleteJobRequest(job_id="gpt3")], ""),
    "ledger": ([ledger.ListLedgerEntriesRequest(page_size=1000)], "18.000"),
    "ledger --job gpt3 --since 2020-01-31T12:00 --until 2020-01-31T13:00:00+01:00": (
        [ledger.ListLedgerEntriesRequest(job_id="gpt3", page_size=1000, start_time=NOON, end_time=NOON)],
        "18.000",
    ),
    "power set peak --limit-w 900 --feed hall --end 2020-01-31 --ramp-w-per-s 10 --correlation-id evt": (
        [
            power.SetBudgetRequest(
                budget_id="peak",
                limit_w=900,
                feed="hall",
                end_time=Timestamp(seconds=NOON.seconds - 43_200),
                ramp_w_per_s=10,
                correlation_id="evt",
            )
        ],
        "in force",
    ),
    "power set peak --percent 60 --start 2020-01-31T12:00": (
        [power.SetBudgetRequest(budget_id="peak", percent=60, feed="default", start_time=NOON)],
        "in force",
    ),
    "power list --feed hall": ([power.ListBudgetsRequest(feed="hall", page_size=1000)], "peak"),
    "power cancel peak": ([power.CancelBudgetRequest(budget_id="peak")], "peak"),
    "power feeds": ([power.ListFeedsRequest()], "812"),
    "power watch --feed hall": (
        [power.WatchFeedsRequest(feed="hall")],
        "hall: 812 W drawn, limit 900 W, NOT KEPT\n",
    ),
    "tokens create dash --scope reader": (
        [tokens.CreateTokenRequest(name="dash", scope=tokens.SCOPE_READER)],
        "perseus_s3cret\n",
    ),
    "tokens create ci --scope agent --jobs 'llama-*' --jobs gpt3 --hosts 'node-1*'": (
        [
            tokens.CreateTokenRequest(
                name="ci",
                scope=tokens.SCOPE_AGENT,
                job_patterns=["llama-*", "gpt3"],
                host_patterns=["node-1*"],
            )
        ],
        "perseus_s3cret\n",
    ),
    "tokens list": ([tokens.ListTokensRequest()], "dash"),
    "tokens revoke dash": ([tokens.RevokeTokenRequest(name="dash")], "dash was revoked at"),
    "top --job gpt3 --label team=vision --label stage=pre=1": (
        [
            power.ListFeedsRequest(),
            jobs.ListJobsRequest(page_size=1000, labels=LABELS),
            jobs.ListRanksRequest(job_id="gpt3", page_size=1000),
        ],
        "hall: 812 W drawn",
    ),
}
"""The requests of each command line, without identifiers drawn at random, and a part of what it prints."""


def test_every_command_about_jobs_is_in_the_table() -> None:
    commands = {each.name or each.callback.__name__ for each in app.registered_commands if each.callback}
    assert {line.split()[1] for line in REQUESTS if line.startswith("jobs ")} == commands


@pytest.mark.parametrize("command", REQUESTS)
def test_a_command_makes_its_requests_and_shows_the_answer(
    prepared: PreparedCoordinator, command: str
) -> None:
    prepared.answers = ANSWERS
    expected, shown = REQUESTS[command]
    done = prepared.perseus(command)
    assert (done.exit_code, done.stderr) == (0, "")
    for request in prepared.requests:
        if "request_id" in request.DESCRIPTOR.fields_by_name:
            assert len(request.request_id) == 32  # type: ignore[attr-defined]
            request.ClearField("request_id")
    assert prepared.requests == expected
    assert shown in done.stdout


ONCE = {line.partition(" --")[0]: line for line in REQUESTS}
WATCHES = {"jobs watch gpt3", "power watch"}


@pytest.mark.parametrize("command", [each for each in ONCE if each != "jobs delete gpt3"])
def test_an_answer_is_a_list_or_an_object_for_scripts(prepared: PreparedCoordinator, command: str) -> None:
    prepared.answers = ANSWERS
    as_json = prepared.perseus(f"{ONCE[command]} --format json")
    assert (as_json.exit_code, as_json.stderr) == (0, "")
    if command in WATCHES:
        assert all(json.loads(line) for line in as_json.stdout.splitlines())
        return
    found = json.loads(as_json.stdout)
    assert command != "jobs report gpt3" or found["ledger"]["energy_kwh"] == 18
    if command == "top":
        assert [*found] == ["jobs", "feeds", "ranks"]
        return
    lists = ("list", "runs", "ranks", "events", "feeds")
    assert isinstance(found, list) == (command.split()[1:2] != [] and command.split()[1] in lists)
    as_csv = prepared.perseus(f"{ONCE[command]} --format csv")
    assert (as_csv.exit_code, as_csv.stderr) == (0, "")
    header, *rows = csv.reader(as_csv.stdout.splitlines())
    assert rows
    assert all(len(row) == len(header) for row in rows)
