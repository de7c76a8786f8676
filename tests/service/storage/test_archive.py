"""Whole databases exported from one engine and imported into another, and the check of a database."""

import asyncio
import io
import json
from itertools import count
from pathlib import Path

import pytest

from perseus.job_id import slot_of
from perseus.service.domain.members import Slot
from perseus.service.domain.principals import Grant, Scope, Token
from perseus.service.storage import archive
from perseus.service.storage.archive import ArchiveError, export_database, import_database
from perseus.service.storage.checking import check_database
from perseus.service.storage.membership import MemberRows
from perseus.service.storage.schema import HEAD
from perseus.service.storage.store import Entry, NewRun, TelemetrySequence, TokenEntry
from tests.service.service_fakes import make_spec
from tests.service.storage import postgresql
from tests.service.storage.stores import entries_of, execute, fill, opened, planned_cluster, stored_jobs

TOKEN = Token("operator", "digest", Grant(Scope.OPERATOR), 0.0)


def fill_planned(database: Path | str) -> str:
    entries = [*entries_of(planned_cluster()), TelemetrySequence("agent", 7)]
    return asyncio.run(fill(database, *entries))


def exported(database: Path | str) -> str:
    file = io.StringIO()
    count = export_database(database, file)
    text = file.getvalue()
    assert text.count("\n") == count + 2
    return text


def test_an_export_is_the_same_from_every_engine_and_imported_by_each(
    database: Path | str, tmp_path: Path
) -> None:
    source, other = tmp_path / "source.db", tmp_path / "other.db"
    marker = fill_planned(source)
    text = exported(source)
    assert json.loads(text.splitlines()[0]) == {"format": "perseus-store", "schema": HEAD, "slot_count": 1}
    for target, exporter in ((database, source), (other, database)):
        assert import_database(target, io.StringIO(exported(exporter))) == text.count("\n") - 2
        assert check_database(target) == []
        assert exported(target) == text, "and the check changes nothing"

    async def is_marker_known() -> bool:
        async with opened(other) as store:
            return not store.has_lost(marker)

    assert asyncio.run(is_marker_known())


def test_what_an_engine_stored_itself_is_exported_whole(database: Path | str, tmp_path: Path) -> None:
    fill_planned(database)
    text = exported(database)
    import_database(tmp_path / "other.db", io.StringIO(text))
    assert exported(tmp_path / "other.db") == text


def test_a_database_that_is_not_empty_is_not_filled(database: Path | str) -> None:
    asyncio.run(fill(database, NewRun(make_spec(), 1, 1.0)))
    text = exported(database)
    with pytest.raises(ArchiveError, match="expected an empty database, found rows in its table "):
        import_database(database, io.StringIO(text))
    assert exported(database) == text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines[:-1], "it was cut off"),
        (lambda lines: [*lines[:3], *lines[4:]], r"line \d+: expected \d+ rows, found \d+"),
        (lambda lines: lines[1:], "line 1: expected the first line of an exported store"),
        (lambda lines: [lines[0].replace(HEAD, "0099"), *lines[1:]], f"expected schema {HEAD}, found 0099"),
        (lambda lines: [lines[0], "{", *lines[1:]], "line 2: expected JSON"),
        (lambda lines: [lines[0], '{"table": "users", "row": {}}', *lines[1:]], "line 2: expected a row"),
        (lambda lines: [lines[0], '{"table": "runs", "row": {}}', *lines[1:]], "line 2: expected a row"),
        (lambda lines: [lines[0], "7", *lines[1:]], "line 2: expected an object, found int"),
        (
            lambda lines: [line.replace('"event": "', '"event": "?') for line in lines],
            "expected base64 in event",
        ),
        (lambda lines: [], "line 1: expected the first line"),
        (lambda lines: [lines[0], 4096 * "[", *lines[1:]], "line 2: expected JSON"),
        (lambda lines: [lines[0], '{"table": [], "row": {}}', *lines[1:]], "line 2: expected a row"),
        (
            lambda lines: [line.replace('"run_number": 1', '"run_number": null') for line in lines],
            r"up to line \d+: expected rows of table \w+, found: NOT NULL constraint failed",
        ),
        (
            lambda lines: [line.replace('"job_id": "job"', r'"job_id": "\ud800"') for line in lines],
            r"up to line \d+: expected rows of table \w+, found: .*surrogates not allowed",
        ),
        (
            lambda lines: [line.replace('"run_number": 1', f'"run_number": {2**64}') for line in lines],
            r"up to line \d+: expected rows of table \w+, found: .* too large",
        ),
    ],
)
def test_a_damaged_file_is_refused_and_nothing_of_it_stays(tmp_path: Path, change, message: str) -> None:  # type: ignore[no-untyped-def]
    source, target = tmp_path / "source.db", tmp_path / "target.db"
    fill_planned(source)
    lines = exported(source).splitlines()
    with pytest.raises(ArchiveError, match=message):
        import_database(target, io.StringIO("\n".join(change(lines))))
    assert import_database(target, io.StringIO("\n".join(lines))) == len(lines) - 2


def test_a_line_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(archive, "MAX_LINE_LENGTH", 1000)
    with open("/dev/zero") as endless, pytest.raises(ArchiveError, match="line 1: expected at most 1000 cha"):
        import_database(tmp_path / "target.db", endless)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("statement", "finding"),
    [
        ("UPDATE runs SET spec = '{}'", "job 'job', run 1: can't be read: "),
        ("UPDATE ranks SET rank = 'x' WHERE pipeline = 1", "job 'job', run 1: can't be read: "),
        ("DELETE FROM plans", "job 'job', run 1: can't be read: KeyError"),
        ("DELETE FROM runs", "ranks: 4 rows belong to no run"),
        ("DELETE FROM periods WHERE number = 0", "report: expected periods 0 to"),
        ("UPDATE events SET event = x'ff' WHERE sequence = 1", "run 1: event 1 can't be read"),
        (
            "UPDATE telemetry SET sequence = 0",
            "agent 'agent': expected a telemetry sequence of 1 or more, found 0",
        ),
        (
            "UPDATE boots SET first_commit = 99",
            "boot 1: expected its first commit from 0 to 1, found 99",
        ),
        ("DELETE FROM coordinator", "coordinator: expected one row, found 0"),
        ("UPDATE offers SET stage_versions = '[1, [9999, 9999]]'", "expected versions up to"),
        ("UPDATE offers SET stage_versions = '[1, [1]]'", "expected versions of 2 stages, found 1"),
        ("UPDATE ranks SET rank = json_set(rank, '$[1].offered_version', 9999)", "expected versions up to"),
    ],
)
def test_the_check_finds_faults(path: Path, statement: str, finding: str) -> None:
    fill_planned(path)
    assert check_database(path) == []
    execute(path, statement)
    findings = check_database(path)
    assert any(finding in line for line in findings), findings
    assert all("\n" not in line for line in findings)


async def test_jobs_of_one_slot_are_spread_over_several_and_go_on(
    tmp_path: Path, postgresql_server: postgresql.Server
) -> None:
    source, target = tmp_path / "source.db", postgresql_server.new_database()
    jobs = {slot: next(each for each in map(str, count()) if slot_of(each, 2) == slot) for slot in range(2)}
    entries: list[Entry] = [NewRun(make_spec(job_id), 1, 12.5) for job_id in jobs.values()]
    async with opened(source) as store:
        await store.write([*entries, TelemetrySequence("agent", 7), TokenEntry(TOKEN)])
        marker, epoch = store.commit_marker, await store.epoch()
    text = await asyncio.to_thread(exported, source)
    with pytest.raises(ArchiveError, match="expected an empty database"):
        await asyncio.to_thread(import_database, source, io.StringIO(text))
    await asyncio.to_thread(import_database, target, io.StringIO(text), 2)
    assert check_database(target) == []
    for slot, job_id in jobs.items():
        rows = await asyncio.to_thread(MemberRows, target, 30.0, 2)
        rows.join("", "")
        assert rows.take(slot, 0) == 1
        async with opened(target, fence=Slot(slot, rows.member_id, 1)) as own:
            assert [job.spec.job_id for job in await stored_jobs(own)] == [job_id]
            assert await own.telemetry_sequence("agent") == 7
            assert (await own.epoch(), own.has_lost(marker)) == (epoch, False)
            assert await own.load_tokens() == [TOKEN]
        rows.depart()
        rows.close()
    both = await asyncio.to_thread(exported, target)
    again = postgresql_server.new_database()
    with pytest.raises(ArchiveError, match="slots: expected 2, as in the file, found 1"):
        await asyncio.to_thread(import_database, again, io.StringIO(both))
    await asyncio.to_thread(import_database, again, io.StringIO(both), 2)
    assert await asyncio.to_thread(exported, again) == both


def test_new_slots_go_on_from_the_lease_epoch_that_agents_know(postgresql_server: postgresql.Server) -> None:
    source, target = postgresql_server.new_database(), postgresql_server.new_database()
    rows = MemberRows(source, 30.0)
    rows.join("", "")
    assert (rows.take(0, 0), rows.take(0, 1)) == (1, 2)
    rows.depart()
    rows.close()
    import_database(target, io.StringIO(exported(source)), 2)
    rows = MemberRows(target, 30.0, 2)
    rows.join("", "")
    found = rows.renew()
    rows.close()
    assert found is not None
    assert [slot.lease_epoch for slot in found[1]] == [2, 2]
