"""How commands reach a coordinator: the flags that they share, and answers made safe to print."""

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perseus.cli.escaping_channel import EscapingChannel, failure_of
from perseus.cli.flags import Command, in_place_of
from perseus.cli.fleet import Fleet
from perseus.cli.progress import working
from perseus.cli.terminal import BAD_INPUT, FAILURE, did_you_mean, fail, warn
from perseus.tls.address import check_address, is_local, several
from perseus.tls.files import TlsError, TlsFiles
from perseus.tls.rules import check_insecure, check_needs, check_plaintext, check_together
from perseus.tls.tokens import TokenFileError, TokenSource, find_token

if TYPE_CHECKING:
    import grpc

    from perseus.tls.channels import Channels

DEFAULT_COORDINATOR = "127.0.0.1:50051"

_FIND_TIMEOUT_S = 3.0

_UNKNOWN_JOB = re.compile(r"job '(?P<job_id>.*)' is not registered")

_ANOTHER_TOKEN = (
    "Give one of this coordinator's by --token-file or PERSEUS_TOKEN: its log names the file of the "
    "operator's token, with which `perseus tokens create` makes more"
)


@dataclass(frozen=True, slots=True)
class Connection:
    """A command's coordinator and credentials, from flags or their environment variables."""

    coordinator: Annotated[
        str,
        typer.Option(
            envvar="PERSEUS_COORDINATOR",
            help="The coordinator's HOST:PORT, or unix:PATH; of a fleet, several with commas.",
        ),
    ] = DEFAULT_COORDINATOR
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            envvar="PERSEUS_TLS_CA",
            help="PEM file with the CAs that may sign the coordinator's certificate; makes it TLS.",
        ),
    ] = None
    tls_certificate: Annotated[
        Path | None,
        typer.Option(envvar="PERSEUS_TLS_CERTIFICATE", help="PEM file with your own, for mutual TLS."),
    ] = None
    tls_key: Annotated[
        Path | None, typer.Option(envvar="PERSEUS_TLS_KEY", help="PEM file with that one's private key.")
    ] = None
    token_file: Annotated[
        Path | None,
        typer.Option(
            envvar="PERSEUS_TOKEN_FILE",
            help="File with your token; PERSEUS_TOKEN may hold the token itself. By default the file that a "
            "coordinator of yours on this machine has written.",
        ),
    ] = None
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            envvar="PERSEUS_INSECURE",
            help="Speak plaintext even to a coordinator on another machine.",
        ),
    ] = False

    def channels(self) -> "Channels":
        """Return the way to the coordinator. Exit if flags contradict each other, or a file can't be used."""
        try:
            return self.checked_channels()
        except (TlsError, TokenFileError) as error:
            fail(str(error))

    def checked_channels(self, *, has_token: bool = True) -> "Channels":
        """Return the way to the coordinator, with or without a token. Exit if flags contradict each other.

        Raises:
            TlsError, TokenFileError: a file can't be used.
        """
        from perseus import logs
        from perseus.tls.channels import Channels

        logs.configure("warning", "console")
        files = TlsFiles(self.tls_certificate, self.tls_key, self.tls_ca) if self.tls_ca is not None else None
        for name, check in self._checks().items():
            try:
                check()
            except ValueError as error:
                flag = f"--{name.replace('_', '-')}"
                fail(f"{flag}: {error}, found {getattr(self, name)}")
        channels = Channels(self.coordinator, files, self._token() if has_token else None)
        if channels.is_exposed:
            warn(f"--insecure: plaintext to {self.coordinator}, on another machine")
        return channels

    def _token(self) -> TokenSource | None:
        return find_token(
            path=self.token_file,
            token=os.environ.get("PERSEUS_TOKEN"),
            is_local=is_local(self.coordinator),
        )

    def _checks(self) -> dict[str, Callable[[], object]]:
        return {
            "tls_certificate": lambda: check_needs(self.tls_certificate, self.tls_ca, "tls_ca"),
            "tls_key": lambda: check_together(self.tls_key, self.tls_certificate, "tls_certificate"),
            "insecure": lambda: check_insecure(self.insecure, self.tls_ca, "tls_ca"),
            "coordinator": lambda: (
                all(map(check_address, several(self.coordinator)))
                and check_plaintext(
                    self.coordinator, has_tls=self.tls_ca is not None, insecure=self.insecure, wanted="tls_ca"
                )
            ),
        }


def connecting(command: Command) -> Command:
    """Give a command the flags that `Connection` has, in place of its parameter `connection`."""

    @functools.wraps(command)
    def check(connection: Connection, **given: Any) -> None:
        for name, value in (given | asdict(connection)).items():
            _check_text(name, value)
        command(connection=connection, **given)

    flags = list(inspect.signature(Connection).parameters.values())
    return in_place_of("connection", flags, Connection)(check)


def _check_text(name: str, value: object) -> None:
    """Exit if a text can't be sent: Python keeps an argument's bytes that are not UTF-8 as surrogates."""
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str):
            try:
                text.encode()
            except UnicodeEncodeError:
                fail(f"{name.upper()}: expected UTF-8, found {text}")


@contextmanager
def connected(connection: Connection) -> Iterator["grpc.Channel"]:
    """Open a channel to the coordinator; turn its refusals into one line and an exit code.

    What is about one job is asked of the coordinator that serves it.
    """
    with escaping(connection) as channel:
        yield channel.as_grpc


@contextmanager
def escaping(connection: Connection, *, is_quiet: bool = False) -> Iterator[EscapingChannel]:
    """Do the same with a channel that can be led elsewhere.

    `is_quiet`: show no sign of waiting for an answer, as the caller owns the screen.
    """
    import grpc

    from perseus.tls.channels import error_info

    their_fault = {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
    }
    channels = connection.channels()
    if channels.has_several:
        _find_holder(channels)
    description = None if is_quiet else f"Asking {connection.coordinator}"
    with EscapingChannel(channels, description) as channel:
        try:
            yield channel
        except grpc.RpcError as error:
            if (failure := failure_of(error)) is not None:
                channels = failure.channels
                if failure.takeover:
                    fail(failure.takeover, FAILURE)
            where, code = channels.address, error.code()
            if error_info(error) is None and code in (
                grpc.StatusCode.UNAVAILABLE,
                grpc.StatusCode.DEADLINE_EXCEEDED,
            ):
                with working("Looking for the reason"):
                    reason = channels.diagnosis_blocking()
                if code is grpc.StatusCode.UNAVAILABLE:
                    fail(f"no coordinator at {where}: {reason or error.details()}", FAILURE)
                fail(
                    f"no answer in time from the coordinator at {where}: {reason or 'reason unknown'}",
                    FAILURE,
                )
            details = error.details() or code.name
            if code is grpc.StatusCode.UNAUTHENTICATED:
                origin = f"; the token is from {channels.token_origin}" if channels.token_origin else ""
                details = f"{where}: {details}{origin}. {_ANOTHER_TOKEN}"
            if code is grpc.StatusCode.NOT_FOUND and (wrong := _UNKNOWN_JOB.fullmatch(details)):
                details += _similar_job(channel, wrong["job_id"])
            fail(details, BAD_INPUT if code in their_fault else FAILURE)


@contextmanager
def fleet(connection: Connection, *, is_quiet: bool = False) -> Iterator[Fleet]:
    """Connect to a fleet, as `connected`; at the end say what is missing in the answers, and exit with 1."""
    with escaping(connection, is_quiet=is_quiet) as channel, Fleet(channel) as found:
        yield found
    if found.missing:
        warn(f"this is not all: {'; '.join(found.missing)}")
        raise typer.Exit(FAILURE)


def _find_holder(channels: "Channels") -> None:
    """Choose the coordinator of a fleet that serves the jobs: the first that doesn't name another."""
    import grpc

    from perseus.v1.info_service_pb2 import GetInfoRequest
    from perseus.v1.info_service_pb2_grpc import InfoServiceStub

    is_over = False
    while not is_over:
        with channels.open_blocking() as channel:
            try:
                InfoServiceStub(channel).GetInfo(GetInfoRequest(), timeout=_FIND_TIMEOUT_S)
                return
            except grpc.RpcError as error:
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    return
                is_over = channels.move_on(error)


def _similar_job(channel: EscapingChannel, job_id: str) -> str:
    """Return a question after a job with a similar identifier; empty if there is none to be seen."""
    import grpc

    from perseus.cli.listing import PAGE_SIZE
    from perseus.v1.job_service_pb2 import ListJobsRequest

    try:
        with Fleet(channel) as found:
            known = found.jobs(ListJobsRequest(page_size=PAGE_SIZE))
        return did_you_mean(job_id, [job.job_id for job in known])
    except grpc.RpcError:  # the caller may have no right to see them
        return ""
