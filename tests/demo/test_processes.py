"""Entries are found whenever they come, and only complete ones are read."""

import threading
from pathlib import Path

import pytest

from tests import event_log


def test_a_later_entry_is_awaited(tmp_path: Path) -> None:
    log = tmp_path / "agent.log"
    log.write_text('not JSON\n{"event": "started"}\n{"event": "serv')
    found = []
    waiting = threading.Thread(target=lambda: found.append(event_log.logged(log, "served")))
    waiting.start()
    with log.open("a") as more:
        more.write('ed", "port": 7}\n')
    waiting.join(timeout=event_log.TIMEOUT_S)
    assert found == [{"event": "served", "port": 7}]


def test_a_missing_entry_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "agent.log"
    log.write_text('{"event": "started"}\n')
    monkeypatch.setattr(event_log, "TIMEOUT_S", 0.0)
    with pytest.raises(AssertionError, match=r"agent\.log: expected 'served', found .*started"):
        event_log.logged(log, "served")
