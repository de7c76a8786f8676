"""Neither kills nor malformed messages lose anything. `make torture-coordinator` does more of both."""

from functools import partial
from pathlib import Path
from typing import cast

import pytest
from google.protobuf.descriptor import Descriptor

from tests.torture import malformed_messages as messages
from tests.torture.coordinator import torture
from tests.torture.malformed import SHARES, torture_malformed

KILLS = 2
MESSAGES = 3000
"""So many that the coordinator collects all its garbage while they come: its memory is compared."""


@pytest.mark.slow("a coordinator is killed and started again while dozens of agents train")
@pytest.mark.timeout(300)
def test_nothing_acknowledged_is_lost_and_no_version_is_reused(tmp_path: Path) -> None:
    outcome = torture(tmp_path, str(tmp_path / "jobs.db"), KILLS, 0)
    assert outcome.problems == []
    assert outcome.kill_count == KILLS
    assert outcome.states == ["JOB_STATE_PLANNED"]
    assert outcome.batch_count > 0
    assert outcome.version_count > 0


@pytest.mark.slow("a coordinator's process, and hundreds of messages that end its streams")
@pytest.mark.nightly("minutes; each parser of untrusted input has its own tests, and is fuzzed")
@pytest.mark.timeout(1200)
def test_malformed_messages_change_nothing(tmp_path: Path) -> None:
    outcome = torture_malformed(tmp_path, MESSAGES, 0)
    assert outcome.problems == []
    assert outcome.sent == {kind: round(MESSAGES * share) for kind, share in SHARES.items()}
    assert outcome.iteration_count > 0
    assert {"INVALID_FIELD", "MALFORMED_MESSAGE"} <= set(outcome.ends)


def test_every_field_of_every_request_is_set_to_its_bounds() -> None:
    def value(message: object, path: messages.Path) -> object:
        for field in path:
            message = getattr(message, field.name)
        return message

    for kind in messages.unary_methods().values():
        made = list(messages.at_bounds(partial(messages.valid, kind)))
        for path in messages.paths(cast(Descriptor, kind.DESCRIPTOR)):
            field = path[-1]
            if field.message_type is None and not any(each.is_repeated for each in path):
                values = {repr(value(message, path)) for message in made}
                assert values >= {repr(extreme) for extreme in messages.extremes(field)}, field.full_name
