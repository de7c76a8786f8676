"""A run's inputs are kept within bounds, so that it can be replayed up to the same fault."""

import base64
import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.service.domain.commands import Refine, Solve
from perseus.service.domain.errors import PipelineOutOfRangeError, RecordingUnreadableError
from perseus.service.domain.inputs import FinishRequested, Input, StragglerReported, TelemetryArrived
from perseus.service.domain.model import JobState, Straggler
from perseus.service.job import recording as module
from perseus.service.job import views
from perseus.service.job.iterations.iteration_log import report
from perseus.service.job.machine import JobMachine, replay
from perseus.service.job.planning.offers import OfferBoard
from perseus.service.job.recording import Recording
from perseus.service.job.rules import Rules
from tests.service.job.clusters import planned
from tests.service.service_fakes import Cluster, make_spec, refined, solved


def solve(asked: Solve | Refine) -> Input:
    return solved(asked) if isinstance(asked, Solve) else refined(asked.refinement)


def recording_of(machine: JobMachine) -> Recording:
    assert machine.recording is not None
    return machine.recording


def copied(recording: Recording) -> Recording:
    copy, more = Recording.load(recording.dump(job_id="job"))
    assert more == {"job_id": "job"}
    return copy


def report_a_straggler_that_gets_slower(cluster: Cluster) -> None:
    for factor in (1.2, 1.4, 1.6, 1.8):
        cluster.send(StragglerReported(Straggler(0, slowdown_factor=factor)))


@pytest.mark.parametrize("is_restored", [False, True])
def test_a_run_is_replayed_with_the_same_commands(is_restored: bool) -> None:
    cluster = planned()
    if is_restored:
        cluster.restart()
        cluster.join_all()
    cluster.send(StragglerReported(Straggler(0, slowdown_factor=1.2)))
    cluster.iterate(4)
    with pytest.raises(PipelineOutOfRangeError):
        cluster.send(StragglerReported(Straggler(9, slowdown_factor=1.2)))
    replayed = list(replay(copied(recording_of(cluster.machine)), solve))
    commands = [command for _, _, given in replayed if isinstance(given, list) for command in given]
    assert [type(given) for *_, given in replayed if not isinstance(given, list)] == [PipelineOutOfRangeError]
    kinds = [type(command) for command in commands]
    assert kinds == [type(command) for command in cluster.history[-len(kinds) :]]
    _, machine, _ = replayed[-1]
    assert views.job(machine.run, is_full=True) == cluster.job(is_full=True)
    assert list(report(machine.run.log.periods, 0)) == list(report(cluster.machine.run.log.periods, 0))


def test_the_same_fault_recurs_at_the_same_input(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = planned()
    reconcile, last_version = OfferBoard.reconcile, cluster.machine.record.version + 2

    def failing(self: OfferBoard, *arguments: object, **named: object) -> None:
        reconcile(self, *arguments, **named)
        if max(self.versions) > last_version:
            raise ZeroDivisionError("a version too many")

    monkeypatch.setattr(OfferBoard, "reconcile", failing)
    with pytest.raises(ZeroDivisionError):
        report_a_straggler_that_gets_slower(cluster)
    recording = copied(recording_of(cluster.machine))
    replayed = replay(recording, solve)
    for _ in recording.inputs:  # and its beginning, but not the last input
        next(replayed)
    with pytest.raises(ZeroDivisionError, match="a version too many"):
        next(replayed)
    last, _, _ = recording.inputs[-1]
    assert isinstance(last, StragglerReported)


def test_a_recording_is_dropped_when_it_is_too_large_and_when_the_run_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(make_spec())
    cluster.join_all()
    recording = recording_of(cluster.machine)
    assert recording.size_bytes > 0
    monkeypatch.setattr(module, "MAX_SIZE_BYTES", recording.size_bytes + 50_000)
    cluster.iterate(40)
    assert (recording.beginning, recording.inputs, recording.size_bytes) == (None, [], 0)
    assert list(replay(recording, solve)) == []
    cluster.restart()
    recording = recording_of(cluster.machine)
    assert recording.beginning is not None, "it begins anew"
    cluster.send(FinishRequested())
    cluster.expect(JobState.FINISHED)
    assert recording.beginning is None


def test_only_the_rules_among_the_settings_are_kept() -> None:
    class Settings(Rules):
        database: str

    cluster = Cluster(make_spec(), Settings(lease_s=12.0, database="postgresql://a:secret@b/c"))
    beginning = copied(recording_of(cluster.machine)).beginning
    assert beginning is not None
    assert beginning.rules == Rules(lease_s=12.0)


def test_the_beginning_of_a_restored_run_counts_and_is_dropped_for_an_ended_one() -> None:
    cluster = planned()
    cluster.restart()
    assert recording_of(cluster.machine).size_bytes > 1000 * len(cluster.ranks)
    cluster.join_all()
    cluster.send(FinishRequested())
    cluster.restart()
    assert cluster.machine.record.has_finished
    assert recording_of(cluster.machine).beginning is None


def test_telemetry_rows_count_for_the_size() -> None:
    cluster = Cluster(make_spec())
    cluster.join_all()
    recording = recording_of(cluster.machine)
    before = recording.size_bytes
    rank = cluster.ranks[next(iter(cluster.ranks))]
    rank.begin()
    event = rank.end(0.8)
    assert isinstance(event, TelemetryArrived)
    cluster.send(event)
    assert recording.size_bytes - before > 100 * len(event.batch.computations.iteration)


def test_a_recording_that_unpacks_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    document = recording_of(planned().machine).dump()
    assert Recording.load(document)
    monkeypatch.setattr(module, "_MAX_TEXT_BYTES", 1000)
    with pytest.raises(RecordingUnreadableError):
        Recording.load(document)


def document_of(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content)).decode()


@given(
    st.text(max_size=64)
    | st.binary(max_size=64).map(document_of)
    | st.sampled_from([document_of(b"[1]"), document_of(100_000 * b"[")])
)
def test_an_invalid_recording_is_refused_in_one_line(document: str) -> None:
    with pytest.raises(RecordingUnreadableError) as caught:
        Recording.load(document)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": 3}, "expected format 2, found format 3"),
        ({"beginning": {"type": "Begun", "of": "a later version"}}, "Begun"),
        ({"inputs": [{"type": "NeverSeen"}]}, "NeverSeen"),
    ],
)
def test_a_recording_of_another_version_is_refused_by_name(change: dict[str, object], text: str) -> None:
    cluster = planned()
    document = json.loads(zlib.decompress(base64.b64decode(recording_of(cluster.machine).dump())))
    with pytest.raises(RecordingUnreadableError, match=text):
        Recording.load(document_of(json.dumps(document | change).encode()))
