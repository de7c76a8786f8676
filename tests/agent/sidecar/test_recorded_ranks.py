"""Every recorded run of ranks replays the same messages, clocks and notices at every step."""

from itertools import islice

import pytest

from tests.agent.recorded.runs import FILES, RecordedRun, load
from tests.differences import differences

NAMES = sorted(path.name.removesuffix(".jsonl.gz") for path in FILES.glob("*.jsonl.gz"))


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_run_of_ranks_replays_identically(name: str) -> None:
    recorded_run = RecordedRun()
    for number, (step, expected) in enumerate(load(name)):
        found = list(islice(differences(expected, recorded_run.take(step)), 5))
        assert not found, f"step {number}, {step}: " + "\n".join(found)


def test_there_are_fifteen_runs_of_all_kinds() -> None:
    went = [each for name in NAMES for _, out in load(name) for each in out]
    message = {kind for each in went for kind in each.get("say", {})}
    assert len(NAMES) >= 15
    assert message >= {
        "rank_joined",
        "rank_left",
        "plan_answer",
        "plan_in_force",
        "telemetry",
        "message_refused",
    }
    assert any("set_mhz" in each for each in went)
    assert any("schedule_mhz" in each for each in went)
    assert any("notice" in each for each in went)
