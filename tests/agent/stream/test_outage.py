"""What is said of a coordinator that is not there, and how often."""

import structlog
from structlog.testing import capture_logs

from perseus.agent.stream.outage import AGAIN_S, Outage


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_a_reason_is_told_once_and_again_after_a_while_with_how_often_it_was_left_out() -> None:
    clock = Clock()
    with capture_logs() as logs:
        outage = Outage(structlog.get_logger(), clock)
        for _ in range(3):
            outage.warn("no coordinator", "nobody there", retry_in_s=1.0)
            clock.now_s += AGAIN_S / 3
        outage.warn("no coordinator", "nobody there", retry_in_s=2.0)
        outage.warn("no coordinator", "nobody there", retry_in_s=3.0)
    alike = {"event": "no coordinator", "log_level": "warning", "reason": "nobody there"}
    assert logs == [alike | {"retry_in_s": 1.0}, alike | {"retry_in_s": 2.0, "left_out": 2}]


def test_another_reason_is_news_and_so_is_the_same_one_after_a_connection() -> None:
    with capture_logs() as logs:
        outage = Outage(structlog.get_logger(), Clock())
        for reason in ("nobody there", "token revoked", "nobody there", "token revoked"):
            outage.warn("no coordinator", reason)
        outage.end()
        outage.warn("no coordinator", "nobody there")
    assert [line["reason"] for line in logs] == ["nobody there", "token revoked", "nobody there"]


def test_events_are_told_apart_and_errors_have_their_level() -> None:
    with capture_logs() as logs:
        outage = Outage(structlog.get_logger(), Clock())
        for _ in range(2):
            outage.error("coordinator refuses the stream", "token revoked")
            outage.warn("no coordinator", "token revoked")
    assert [(line["log_level"], line["event"]) for line in logs] == [
        ("error", "coordinator refuses the stream"),
        ("warning", "no coordinator"),
    ]
