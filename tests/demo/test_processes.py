"""Entries are found whenever they come, and only complete ones are read."""

import threading
from pathlib import Path

import pytest

from perseus.demo.processes import TIMEOUT_S, ClusterError, logged, until


def test_a_later_entry_is_awaited(tmp_path: Path) -> None:
    log = tmp_path / "agent.log"
    log.write_text('not JSON\n{"event": "started"}\n{"event": "serv')
    found = []
    waiting = threading.Thread(target=lambda: found.append(logged(log, "served")))
    waiting.start()
    with log.open("a") as more:
        more.write('ed", "port": 7}\n')
    waiting.join(timeout=TIMEOUT_S)
    assert found == [{"event": "served", "port": 7}]


def test_what_does_not_come_is_an_error_with_the_state() -> None:
    with pytest.raises(ClusterError, match=r"expected a plan within 0 s\nno rank"):
        until(lambda: False, "a plan", 0.0, state=lambda: "no rank")
