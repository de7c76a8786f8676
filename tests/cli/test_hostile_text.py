"""Text from others never moves a cursor, colours a line or ends a command, in any view."""

import io
import itertools
import re
from collections.abc import Iterator
from unittest.mock import Mock

import grpc
import pytest
import structlog
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import Result

from perseus import logs
from perseus.demo.display import LiveDisplay
from perseus.printable import printable
from perseus.v1 import event_pb2, job_service_pb2
from tests.cli.prepared import METHODS, Answer, PreparedCoordinator
from tests.cli.test_requests import ONCE

HOSTILE = [
    "\x1b[2J\x1b[31mred",
    "\x1b]0;title\x07",
    "\x9b31m",
    "[/x]",
    "[bold]loud[/bold]",
    "[link=http://example]here[/link]",
    ":smile:",
    "\u202eback",
    "zero\u200bwidth",
    "two\nlines",
    "back\b\b\r",
    "\x00",
    "plain",
]
SHORT = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=12))

# Rich itself writes only styles to a terminal, and no cursor movement.
STYLE = re.compile(r"\x1b\[[0-9;]*m")


def filled(descriptor: Descriptor, texts: Iterator[str], depth: int = 0) -> Message:
    """Return a message with the next text in every text field, and small numbers."""
    message = message_factory.GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if field.message_type is not None:
            if depth < 3 and field.message_type.full_name != "google.protobuf.Timestamp":
                part = filled(field.message_type, texts, depth + 1)
                if field.is_repeated:
                    getattr(message, field.name).append(part)
                elif field.containing_oneof is None:
                    getattr(message, field.name).CopyFrom(part)
        elif field.type == FieldDescriptor.TYPE_STRING and field.name != "next_page_token":
            if field.is_repeated:
                getattr(message, field.name).append(next(texts))
            else:
                setattr(message, field.name, next(texts))
        elif field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE and not field.is_repeated:
            setattr(message, field.name, 1.5)
    return message


def answers(texts: list[str]) -> dict[str, Answer]:
    """Return an answer to every call, with those texts."""
    again = itertools.cycle(texts)
    found: dict[str, Answer] = {name: filled(method.output_type, again) for name, method in METHODS.items()}
    updates = []
    for name in ("job", "event", "iteration", "gap"):
        update = job_service_pb2.WatchJobResponse()
        part = getattr(update, name)
        part.CopyFrom(filled(part.DESCRIPTOR, again))
        updates.append(update)
    found["WatchJob"] = updates
    return found | {"WatchFeeds": [filled(METHODS["WatchFeeds"].output_type, again)]}


def check_screen(text: str) -> None:
    """Check that there are only printable lines, apart from styles."""
    for line in STYLE.sub("", text).split("\n"):
        assert line.isprintable(), repr(line)


def run(coordinator: PreparedCoordinator, view: str) -> Result:
    return coordinator.perseus(view, FORCE_COLOR="1")


@pytest.mark.parametrize("view", ONCE)
@settings(suppress_health_check=list(HealthCheck))
@given(texts=st.lists(SHORT, min_size=1, max_size=20))
def test_every_view_is_readable_for_any_text(
    prepared: PreparedCoordinator, view: str, texts: list[str]
) -> None:
    prepared.answers = answers(texts)
    result = run(prepared, ONCE[view])
    assert result.exit_code == 0, result.output
    check_screen(result.output)


@pytest.mark.parametrize("text", HOSTILE)
def test_refusals_and_the_doctor_show_text_as_text(prepared: PreparedCoordinator, text: str) -> None:
    prepared.answers = answers([text])
    result = run(prepared, "doctor")
    assert result.exit_code == 1, "such a coordinator is not healthy"
    check_screen(result.output)
    for view in ("jobs show job", "jobs watch job"):
        assert printable(text) in run(prepared, view).output
    prepared.answers = dict.fromkeys(METHODS, (grpc.StatusCode.NOT_FOUND, f"no {text} here"))
    for view, exit_code in (("doctor", 1), ("jobs show job", 2)):
        result = run(prepared, view)
        assert result.exit_code == exit_code
        check_screen(result.output)


@given(st.text())
def test_printable_text_is_unchanged_and_the_rest_is_escaped(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    if text.isprintable():
        assert shown == text
    if "\\" not in text:
        assert shown.encode("raw_unicode_escape").decode("unicode_escape") == text


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("text", HOSTILE)
def test_the_demos_display_shows_text_as_text(text: str, is_terminal: bool) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=is_terminal, width=160, markup=False, emoji=False)
    event = event_pb2.JobEvent(sequence=1, message=text)
    seen = Mock(job=None, events=(event,), measurements=Mock(phases=()))
    display = LiveDisplay(console)
    display._live = None
    display.begin("stock")
    display.refresh(seen)
    check_screen(output.getvalue())
    assert printable(text) in output.getvalue()


@pytest.mark.parametrize("text", HOSTILE)
def test_a_log_line_is_a_line(text: str) -> None:
    event = logs.escape(None, "", {"event": "x", "reason": text, "exception": f"a\n{text}", "number": 3})
    line = structlog.dev.ConsoleRenderer(colors=False)(None, "", event)
    check_screen(line)
    assert printable(text).split("\\x0a")[0] in line


def test_log_lines_of_a_process_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "console")
    structlog.get_logger().info("said", text="\x1b[31mred\nnext")
    logged = capsys.readouterr().err
    assert "\\x1b[31mred\\x0anext" in logged
    assert logged.count("\n") == 1
