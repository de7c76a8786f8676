"""Rows for scripts are complete, with the contract's names; tables for people don't cut words."""

import csv
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from perseus.cli import terminal
from perseus.cli.rows import UNKNOWN_WHILE_ZERO, Format, row_of, show_messages, show_rows
from perseus.v1 import event_pb2, job_pb2

JOB = job_pb2.Job(
    job_id="a" * 63,
    run_number=3,
    state=job_pb2.JOB_STATE_PLANNED,
    state_reason='as, "quoted"\\x0a',
    rank_counts=job_pb2.RankCounts(connected_count=2),
    baseline=job_pb2.Baseline(iteration_time_s=1.25, energy_j=math.inf, has_timeline=True),
    policy=job_pb2.OperatingPolicy(max_slowdown_percent=2.5),
    planned_iteration_time_s=[1.5, 1.25],
    stragglers=[job_pb2.Straggler(pipeline=1)],
)
JOB.create_time.FromJsonString("2026-01-31T12:00:00.5Z")


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_json_has_the_contracts_names_and_plain_values() -> None:
    row = row_of(JOB)
    assert row["job_id"] == "a" * 63
    assert (row["state"], row["run_number"], row["last_event_sequence"]) == ("planned", 3, 0)
    assert row["create_time"] == "2026-01-31T12:00:00.500000Z"
    assert row["finish_time"] is None
    assert row["baseline"] == {"iteration_time_s": 1.25, "energy_j": None, "has_timeline": True}
    assert row["planned_iteration_time_s"] == [1.5, 1.25]
    assert row["stragglers"] == [{"pipeline": 1, "iteration_time_s": None, "is_detected": False}]
    assert row["policy"] == {"max_slowdown_percent": 2.5, "budget_terms": None}
    assert set(row) == {field.name for field in job_pb2.Job.DESCRIPTOR.fields}


def test_times_of_a_job_without_a_frontier_are_null_and_a_cost_of_nothing_is_not() -> None:
    names = ("t_min_s", "t_star_s", "t_slow_s", "latency_cost_percent", "set_latency_s")
    assert [row_of(JOB)[name] for name in names] == [None] * 5
    solved = job_pb2.Job(t_min_s=1.0, t_star_s=1.5, t_slow_s=2.0)
    assert [row_of(solved)[name] for name in names] == [1.0, 1.5, 2.0, 0.0, None]


def test_every_field_whose_zero_is_unknown_by_the_contract_is_null_then() -> None:
    expected = set()
    for file in ("job", "rank", "event"):
        text = (Path(__file__).parents[2] / "protos" / "perseus" / "v1" / f"{file}.proto").read_text()
        message = comment = ""
        for line in map(str.strip, text.splitlines()):
            if line.startswith("//"):
                comment += f" {line.removeprefix('//').strip()}"
                continue
            if begin := re.match(r"message (\w+)", line):
                message = begin[1]
            elif re.search(r"[;.] 0 (while|if|if it was) unknown|; 0 before the job is", comment):
                expected.add(f"perseus.v1.{message}.{line.split()[1]}")
            comment = ""
    assert set(UNKNOWN_WHILE_ZERO) == expected


def test_an_unset_optional_is_null_and_a_oneof_has_only_its_set_field() -> None:
    saving = row_of(job_pb2.Saving(energy_percent=12.5))
    assert (saving["energy_percent"], saving["energy_se_percent"]) == (12.5, None)
    event = event_pb2.JobEvent(sequence=1, state_changed=event_pb2.StateChanged())
    assert "state_changed" in row_of(event)
    assert "registered" not in row_of(event)


def test_an_unknown_enum_value_is_a_number() -> None:
    assert row_of(job_pb2.Job(state=99))["state"] == "99"  # type: ignore[arg-type]


def test_csv_has_the_same_columns_for_any_set_fields(capsys: pytest.CaptureFixture[str]) -> None:
    show_messages(Format.CSV, [JOB, job_pb2.Job()], job_pb2.Job.DESCRIPTOR, Table)
    text = shown(capsys)
    full, empty = csv.DictReader(io.StringIO(text))
    assert full["job_id"] == "a" * 63
    assert full["state_reason"] == JOB.state_reason
    assert (full["baseline.iteration_time_s"], full["baseline.energy_j"]) == ("1.25", "")
    assert full["planned_iteration_time_s"] == "1.5 1.25"
    assert json.loads(full["stragglers"])[0]["pipeline"] == 1
    assert json.loads(full["policy"]) == {"max_slowdown_percent": 2.5, "budget_terms": None}
    assert empty["baseline.energy_j"] == empty["finish_time"] == empty["policy"] == ""
    show_messages(Format.CSV, [], job_pb2.Job.DESCRIPTOR, Table)
    assert shown(capsys).splitlines() == text.splitlines()[:1]


def test_an_events_details_are_one_cell(capsys: pytest.CaptureFixture[str]) -> None:
    event = event_pb2.JobEvent(sequence=1, state_changed=event_pb2.StateChanged())
    show_messages(Format.CSV, [event], event_pb2.JobEvent.DESCRIPTOR, Table)
    (row,) = csv.DictReader(io.StringIO(shown(capsys)))
    assert list(row) == ["sequence", "create_time", "type", "message", "details"]
    assert list(json.loads(row["details"])) == ["state_changed"]


@given(st.text())
def test_json_is_ascii_and_csv_comes_back(text: str) -> None:
    capture = io.StringIO()
    rows: list[dict[str, Any]] = [{"name": text, "count": 1}]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", capture)
        show_rows(Format.JSON, rows, ["name", "count"], Table)
    assert capture.getvalue().isascii()
    assert json.loads(capture.getvalue()) == rows


@pytest.mark.parametrize("width", [20, 80])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_no_word_is_cut_or_broken(width: int, is_terminal: bool) -> None:
    output = io.StringIO()
    console = Console(
        file=output, width=width, force_terminal=is_terminal, color_system=None, markup=False, emoji=False
    )
    table = Table("job", "GPU", caption="a caption of several words that is longer than the table")
    names = ["llama-3-405b-pretraining-run-0042", "GPU-8b1a9953-0000-1111-2222-f0e0d0c0b0a0", "[/x] :smile:"]
    table.add_row(*names[:2])
    table.add_row(names[2])
    terminal.print_whole(table, to=console)
    text = output.getvalue()
    assert all(word in text for name in names for word in name.split())
    if not is_terminal:
        assert any(names[0] in line and names[1] in line for line in text.splitlines())
        assert names[2] in text
