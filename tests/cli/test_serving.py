"""`perseus serving`: what an agent answers, as tables and for scripts, and where there is none."""

import json
from typing import Any

import pytest

from perseus.agent.sidecar import health_client
from tests.cli.commands import perseus

SAVINGS: dict[str, Any] = {
    "controlled_h": 12.5,
    "energy_j": 1e6,
    "stock_h": 0.3,
    "window_count": 30,
    "generation_tokens": 2e6,
    "joules_per_token": 0.5,
    "stock_joules_per_token": 0.75,
    "saving": 0.333,
    "uncertainty": 0.02,
    "useful_after_h": 12.5,
    "attainment_ttft": 0.996,
    "attainment_itl": 0.981,
    "is_useful": True,
}
CHAT: dict[str, Any] = {
    "name": "chat",
    "state": "controlled",
    "reason": "",
    "clock_mhz": 1005,
    "running_count": 12,
    "waiting_count": 0,
    "tokens_per_s": 480.0,
    "power_w": 210.4,
    "time_scale": 1.04,
    "gpus": ["0", "1"],
    "user": "inference",
    "ttft": "p99 <= 2 s",
    "itl": "p95 <= 100 ms",
    "source": "vLLM's plug-in",
    "clocks": [{"clock_mhz": 1005, "power_w": 205.0, "late_ttft_share": 0.001, "late_itl_share": 0.02}],
    "savings": SAVINGS,
}
NOTHING = dict.fromkeys(
    ("clock_mhz", "running_count", "waiting_count", "tokens_per_s", "power_w", "time_scale")
)
NEW = CHAT | NOTHING | {
    "name": "new",
    "state": "not controlled",
    "reason": "GPU 2: expected a process\x1b of user inference on it, found none",
    "clocks": [],
    "savings": SAVINGS
    | dict.fromkeys(
        ("joules_per_token", "stock_joules_per_token", "saving", "uncertainty", "attainment_ttft",
         "attainment_itl")
    )
    | {"useful_after_h": 3.1, "is_useful": False},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_client, "ask_instances", lambda path, timeout_s: [CHAT, NEW])


def test_the_list_shows_state_clock_and_load() -> None:
    text = perseus("serving list").stdout
    assert "chat" in text
    assert "1005 MHz" in text
    assert "210 W" in text
    assert "not controlled: GPU 2: expected a process" in text
    assert "\x1b" not in text
    listed = json.loads(perseus("serving list --format json").stdout)
    assert [each["name"] for each in listed] == ["chat", "new"]
    _, chat, _ = perseus("serving list --format csv").stdout.splitlines()
    assert chat.startswith("chat,controlled,,1005,12,0,210.4,480.0")


def test_one_instance_with_its_settings_and_predictions() -> None:
    text = perseus("serving show chat").stdout
    assert "0, 1 of user inference" in text
    assert "12 running, 0 waiting, 480 tokens/s, 210 W" in text
    assert "2.00 %" in text
    assert "None" not in perseus("serving show new").stdout


def test_a_report_says_what_is_saved_and_how_sure_that_is() -> None:
    text = perseus("serving report chat").stdout
    assert "33.3 ± 2.0 % of stock's energy" in text
    assert "0.500 J/token; stock would use 0.750" in text
    assert "TTFT 99.60%" in text
    text = perseus("serving report new").stdout
    assert "not known before 3.1 h of control" in text
    assert "None" not in text
    assert json.loads(perseus("serving report chat --format json").stdout)["saving"] == 0.333


def test_an_unknown_instance_is_one_clear_error() -> None:
    result = perseus("serving show chta")
    expected = "expected one of the agent's instances (chat, new), found 'chta': did you mean chat?"
    assert (result.exit_code, result.stderr) == (2, f"error: NAME: {expected}\n")
