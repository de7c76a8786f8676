"""`perseus jobs`: refusals of the coordinator, questions before an end, and what lists say of the rest."""

import grpc
import pytest

from perseus.cli import terminal
from perseus.service.api.statuses import to_status
from perseus.service.domain.errors import JobNotFoundError
from perseus.v1 import job_pb2, job_service_pb2
from tests.cli.prepared import PreparedCoordinator
from tests.cli.test_requests import ANSWERS


@pytest.mark.parametrize(
    ("job_id", "hint"), [(name, ": did you mean gpt3?") for name in ("gtp3", "gpt-3", "GPT3")] + [("x", "")]
)
def test_a_similar_job_is_asked_for(prepared: PreparedCoordinator, job_id: str, hint: str) -> None:
    status = to_status(JobNotFoundError(job_id=job_id))
    prepared.answers = {**ANSWERS, "GetJob": (status.code, status.details)}
    done = prepared.perseus(f"jobs show {job_id}")
    assert (done.exit_code, done.stderr) == (2, f"error: job {job_id!r} is not registered{hint}\n")


WRONG = ("INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "FAILED_PRECONDITION", "OUT_OF_RANGE")
FAILED = ("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "INTERNAL")


@pytest.mark.parametrize("code", WRONG + FAILED)
def test_a_refusal_is_one_line_and_an_exit_code_by_whose_fault_it_is(
    prepared: PreparedCoordinator, code: str
) -> None:
    reason = "job 'gpt3' has not finished: it is waiting"
    prepared.answers = {"DeleteJob": (grpc.StatusCode[code], reason)}
    done = prepared.perseus("jobs delete gpt3")
    assert (done.exit_code, done.output) == (2 if code in WRONG else 1, f"error: {reason}\n")


@pytest.mark.parametrize(
    ("flags", "numbers", "note"),
    [
        ("--limit 2", [8, 9], "these are the latest 2; there are earlier ones\n"),
        ("--limit 2 --first", [9, 8], "these are the first 2; there are later ones\n"),
        ("--limit 3", [7, 8, 9], ""),
    ],
)
def test_events_are_in_order_of_time_with_a_note_on_omitted_ones(
    prepared: PreparedCoordinator, flags: str, numbers: list[int], note: str
) -> None:
    prepared.answers = ANSWERS
    listed = prepared.perseus(f"jobs events gpt3 {flags}")
    assert [int(line.split()[-2]) for line in listed.stdout.splitlines() if "event " in line] == numbers
    assert (listed.exit_code, listed.stderr) == (0, note)


def test_a_job_is_shown_with_its_latest_events_in_order_of_time(prepared: PreparedCoordinator) -> None:
    prepared.answers = ANSWERS
    *_, first, second, third, border = prepared.perseus("jobs show gpt3").stdout.splitlines()
    assert [line.split()[-2] for line in (first, second, third)] == ["7", "8", "9"]
    assert border.startswith("└")


def test_a_report_ends_with_facts_of_the_whole_run(prepared: PreparedCoordinator) -> None:
    prepared.answers = ANSWERS
    facts = prepared.perseus("jobs report gpt3").stdout.partition("profiling took ")[2]
    cost, no_slowdown, signal, title, used, *_ = facts.splitlines()
    assert cost == "0 iterations, 0.0 s, 0 J; against stock +0.0 s, 0 J; budget: unlimited"
    assert no_slowdown == "no slowdown: up to 1.000 s: "
    assert signal.startswith("signal: no slowdown now; 7 of 0 iterations since ")
    assert (title, used) == ("ledger of the run:", "  used 18.000 kWh; saving unknown")


@pytest.mark.parametrize(
    ("state", "flags", "answer", "exit_code", "is_ended"),
    [
        (job_pb2.JOB_STATE_PLANNED, "", None, 2, False),
        (job_pb2.JOB_STATE_PLANNED, "", "n\n", 1, False),
        (job_pb2.JOB_STATE_PLANNED, "", "y\n", 0, True),
        (job_pb2.JOB_STATE_PLANNED, "--yes", None, 0, True),
        (job_pb2.JOB_STATE_FINISHED, "", None, 0, True),
    ],
    ids=["no terminal", "no", "yes", "--yes", "finished"],
)
def test_a_job_with_connected_ranks_is_ended_only_if_that_is_confirmed(
    prepared: PreparedCoordinator,
    monkeypatch: pytest.MonkeyPatch,
    state: job_pb2.JobState.ValueType,
    flags: str,
    answer: str | None,
    exit_code: int,
    is_ended: bool,
) -> None:
    monkeypatch.setattr(terminal, "can_ask", lambda: answer is not None)
    job = job_pb2.Job(job_id="gpt3", state=state, rank_counts=job_pb2.RankCounts(connected_count=4))
    prepared.answers = {**ANSWERS, "GetJob": job_service_pb2.GetJobResponse(job=job)}
    done = prepared.perseus(f"jobs finish gpt3 {flags}", answer=answer)
    assert done.exit_code == exit_code
    warning = "4 connected ranks of job gpt3 would train on at stock"
    if answer is not None:
        assert done.stderr.startswith(f"{warning}. End it? [y/N]")
    elif exit_code == 2:
        assert done.stderr == f"error: {warning}: expected --yes, as there is no terminal to ask\n"
    finish = job_service_pb2.FinishJobRequest(job_id="gpt3")
    assert (finish in prepared.requests) is is_ended
