"""Text from others never moves a cursor, colours a line or ends a command, in any view."""

import io
import itertools
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
import structlog
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from perseus import logs
from perseus.cli.escaping_channel import escape
from perseus.cli.main import app
from perseus.demo.display import LiveDisplay
from perseus.printable import printable
from perseus.v1 import (
    event_pb2,
    frontier_service_pb2,
    info_service_pb2,
    job_pb2,
    job_service_pb2,
    ledger_service_pb2,
    power_service_pb2,
    rank_pb2,
)

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

METHODS = {
    method.name: method
    for service in (
        frontier_service_pb2.DESCRIPTOR.services_by_name["FrontierService"],
        job_service_pb2.DESCRIPTOR.services_by_name["JobService"],
        ledger_service_pb2.DESCRIPTOR.services_by_name["LedgerService"],
        power_service_pb2.DESCRIPTOR.services_by_name["PowerService"],
        info_service_pb2.DESCRIPTOR.services_by_name["InfoService"],
    )
    for method in service.methods
}

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


class HostileCoordinator(grpc.GenericRpcHandler):
    """Answers every call of the tested services with `texts`, or fails with one of them."""

    def __init__(self) -> None:
        self.texts = [""]
        self.fails_with: str | None = None

    def service(self, details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any]":
        """Return a handler for any method."""
        method = METHODS[details.method.rpartition("/")[2]]

        def answers(_: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            if self.fails_with is not None:
                context.abort(grpc.StatusCode.NOT_FOUND, self.fails_with)
            texts = itertools.cycle(self.texts)
            if method.server_streaming:
                for update in ("job", "event", "iteration", "gap"):
                    answer: Any = job_service_pb2.WatchJobResponse()
                    part = getattr(answer, update)
                    part.CopyFrom(filled(part.DESCRIPTOR, texts))
                    yield answer.SerializeToString()
            else:
                yield filled(method.output_type, texts).SerializeToString()

        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(answers)
        return grpc.unary_unary_rpc_method_handler(lambda request, context: next(answers(request, context)))


# Every command that shows a coordinator's answers.
VIEWS = {
    "list": ["jobs", "list"],
    "runs": ["jobs", "runs", "job"],
    "show": ["jobs", "show", "job"],
    "ranks": ["jobs", "ranks", "job"],
    "rebalancing": ["jobs", "rebalancing", "job"],
    "watch": ["jobs", "watch", "job"],
    "events": ["jobs", "events", "job"],
    "report": ["jobs", "report", "job"],
    "straggler": ["jobs", "straggler", "job", "0", "--clear"],
    "rebaseline": ["jobs", "rebaseline", "job"],
    "policy": ["jobs", "policy", "job", "--no-slowdown"],
    "finish": ["jobs", "finish", "job"],
    "resume": ["jobs", "resume", "job"],
    "delete": ["jobs", "delete", "job"],
    "ledger": ["ledger"],
    "top": ["top", "--job", "job"],
    "power list": ["power", "list"],
    "power feeds": ["power", "feeds"],
    "power cancel": ["power", "cancel", "budget"],
}


def test_every_view_is_tested() -> None:
    from perseus.cli import jobs

    commands = {
        command.name or command.callback.__name__  # type: ignore[union-attr]
        for command in jobs.app.registered_commands
    }
    assert commands == {view for view, words in VIEWS.items() if words[0] == "jobs"}


@contextmanager
def serving() -> Iterator[tuple[HostileCoordinator, str]]:
    hostile = HostileCoordinator()
    pool = futures.ThreadPoolExecutor(2)
    both = threading.Barrier(2)
    for waiting in [pool.submit(both.wait) for _ in range(2)]:  # start all threads now, outside of any test
        waiting.result()
    server = grpc.server(pool)
    server.add_generic_rpc_handlers((hostile,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield hostile, f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
        pool.shutdown()


@pytest.fixture(scope="module")
def coordinator() -> Iterator[tuple[HostileCoordinator, str]]:
    with serving() as served:
        yield served


def check_screen(text: str) -> None:
    """Check that there are only printable lines, apart from styles."""
    for line in STYLE.sub("", text).split("\n"):
        assert line.isprintable(), repr(line)


def run(address: str, view: list[str]) -> Any:
    return CliRunner().invoke(
        app,
        [*view, "--coordinator", address],
        env={"COLUMNS": "200", "FORCE_COLOR": "1"},
        catch_exceptions=False,
    )


@pytest.mark.parametrize("view", VIEWS)
@settings(suppress_health_check=list(HealthCheck))
@given(texts=st.lists(SHORT, min_size=1, max_size=20))
def test_every_view_is_readable_for_any_text(
    coordinator: tuple[HostileCoordinator, str], view: str, texts: list[str]
) -> None:
    hostile, address = coordinator
    hostile.texts, hostile.fails_with = texts, None
    result = run(address, VIEWS[view])
    assert result.exit_code == 0, result.output
    check_screen(result.output)


@pytest.mark.parametrize("text", HOSTILE)
def test_the_doctor_shows_text_as_text(coordinator: tuple[HostileCoordinator, str], text: str) -> None:
    hostile, address = coordinator
    for hostile.texts, hostile.fails_with in (([text], None), ([""], f"no {text} here")):
        result = run(address, ["doctor"])
        assert result.exit_code == 1, "such a coordinator is not healthy"
        check_screen(result.output)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_refusal_is_shown_as_text(coordinator: tuple[HostileCoordinator, str], text: str) -> None:
    hostile, address = coordinator
    hostile.fails_with = f"no {text} here"
    result = run(address, ["jobs", "show", "job"])
    assert result.exit_code == 2
    check_screen(result.output)


@pytest.mark.parametrize("text", HOSTILE)
def test_escaped_text_is_still_readable(coordinator: tuple[HostileCoordinator, str], text: str) -> None:
    hostile, address = coordinator
    hostile.texts, hostile.fails_with = [text], None
    assert printable(text) in run(address, ["jobs", "show", "job"]).output
    assert printable(text) in run(address, ["jobs", "watch", "job"]).output


@given(st.text())
def test_printable_text_is_unchanged_and_the_rest_is_escaped(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    if text.isprintable():
        assert shown == text
    if "\\" not in text:
        assert shown.encode("raw_unicode_escape").decode("unicode_escape") == text


def test_escapes_reach_every_part_of_a_message() -> None:
    job = job_pb2.Job(job_id="\x1b", spec=job_pb2.JobSpec(stage_work=[job_pb2.StageWork(fingerprint="\n")]))
    listed = job_service_pb2.ListJobsResponse(jobs=[job, job_pb2.Job(state_reason="\u202e")])
    escape(listed)
    assert listed.jobs[0].job_id == "\\x1b"
    assert listed.jobs[0].spec.stage_work[0].fingerprint == "\\x0a"
    assert listed.jobs[1].state_reason == "\\u202e"
    rank = rank_pb2.Rank(hostname="[/x]")
    escape(rank)
    assert rank.hostname == "[/x]"


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("text", HOSTILE)
def test_the_demos_display_shows_text_as_text(text: str, is_terminal: bool) -> None:
    class Seen:
        job = None
        events = (event_pb2.JobEvent(sequence=1, message=text),)

        class measurements:  # noqa: N801
            phases = ()

    output = io.StringIO()
    console = Console(file=output, force_terminal=is_terminal, width=160, markup=False, emoji=False)
    display = LiveDisplay(console)
    display._live = None
    display.begin("stock")
    display.refresh(Seen())  # type: ignore[arg-type]
    check_screen(output.getvalue())
    assert printable(text) in output.getvalue()


@pytest.mark.parametrize("text", HOSTILE)
def test_a_log_line_is_a_line(text: str) -> None:
    event = logs.escape(None, "", {"event": "x", "reason": text, "exception": f"a\n{text}", "number": 3})
    line = structlog.dev.ConsoleRenderer(colors=False)(None, "", event)
    check_screen(line)
    assert printable(text).split("\\x0a")[0] in line


def test_log_lines_of_a_process_are_escaped() -> None:
    script = (
        "import structlog; from perseus import logs; logs.configure('info', 'console'); "
        "structlog.get_logger().info('said', text='\\x1b[31mred\\nnext')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "\\x1b[31mred\\x0anext" in done.stderr
    assert done.stderr.count("\n") == 1
