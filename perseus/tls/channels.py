"""Channels to the coordinator, for agents and commands: in plaintext, or with the newest certificates.

Every channel to a coordinator is opened here, so clients' credentials are added here, too. Where several
coordinators share a database, each serves some of the jobs, or none, and names the address of the one that
serves the others: clients try the given addresses in turn, and follow.
"""

import asyncio
import copy
import random
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import structlog
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_status import rpc_status

from perseus.tls.address import check_address, is_local, several
from perseus.tls.diagnosis import diagnose
from perseus.tls.files import Role, TlsFiles, TlsSource
from perseus.tls.token_channels import BlockingTokenChannel, TokenChannel
from perseus.tls.tokens import TokenSource

_log = structlog.get_logger(__name__)

_Options = Sequence[tuple[str, Any]]

_POLL_S = 10.0
_READY_TIMEOUT_S = 10.0
_TRY_AGAIN_S = 60.0
_MAX_HOPS = 2


class Channels:
    """Opens channels to the coordinator; without `files` in plaintext. `addresses` are separated by commas.

    Every call carries the `token`, which never leaves the machine in plaintext. Certificates are checked
    about every `poll_s`, and whenever a channel is opened.

    Raises:
        TlsError: a file can't be used.

    Attributes:
        address: the address of the next channel.
    """

    def __init__(
        self,
        addresses: str,
        files: TlsFiles | None = None,
        token: TokenSource | None = None,
        *,
        poll_s: float = _POLL_S,
    ) -> None:
        self._addresses = several(addresses)
        self._index = self._hop_count = 0
        self.address = self._addresses[0]
        self._source = TlsSource(files, Role.CLIENT) if files is not None else None
        self._token = None if self.is_exposed else token
        self._poll_s = poll_s

    @property
    def is_exposed(self) -> bool:
        """Whether traffic leaves the machine in plaintext."""
        return self._source is None and not all(map(is_local, self._addresses))

    @property
    def address_count(self) -> int:
        """How many addresses were given."""
        return len(self._addresses)

    @property
    def has_several(self) -> bool:
        """Whether there are several addresses."""
        return len(self._addresses) > 1

    def move_on(self, error: grpc.RpcError | None = None) -> bool:
        """Choose the address of the next attempt; return whether it should wait, as all were tried.

        It is the one that a coordinator that stands by has named in an error, within two hops and never in
        plaintext where the given ones are not; else the next of the given ones.
        """
        if self.follow(error):
            return False
        self._hop_count = 0
        self._index = (self._index + 1) % len(self._addresses)
        self.address = self._addresses[self._index]
        return self._index == 0

    def follow(self, error: grpc.RpcError | None) -> bool:
        """Choose the address that an error names, if it may be followed; return whether it is so."""
        named = served_at(error)
        if self._hop_count == _MAX_HOPS or not self._may_follow(named):
            return False
        self._hop_count += 1
        self.address = named
        return True

    def at(self, address: str) -> "Channels | None":
        """Return channels to a named address; None if that may not be followed."""
        if not self._may_follow(address):
            return None
        other = self.beside()
        other.address = address
        return other

    def beside(self) -> "Channels":
        """Return channels with the same credentials that begin at this address and go their own way."""
        other = copy.copy(self)
        other._hop_count = 0
        return other

    def _may_follow(self, address: str) -> bool:
        try:
            check_address(address)
        except ValueError:
            return False
        return self._source is not None or self.is_exposed or is_local(address)

    @property
    def token_origin(self) -> str:
        """The file or the variable that the token is from; empty without one."""
        return self._token.origin if self._token is not None else ""

    @property
    def generation(self) -> int:
        """A number that rises whenever renewed certificates are loaded."""
        return self._source.generation if self._source is not None else 0

    @property
    def expiries_s(self) -> Mapping[str, float]:
        """The Unix time, by file, when a certificate in use expires."""
        return self._source.material.expiries_s if self._source is not None else {}

    def open(self, options: _Options = ()) -> grpc.aio.Channel:
        """Open a channel for the running event loop; the caller closes it."""
        if self._source is None:
            plain = grpc.aio.insecure_channel(self.address, options=options)
        else:
            plain = grpc.aio.secure_channel(self.address, self._credentials(self._source), options=options)
        return TokenChannel(plain, self._token) if self._token is not None else plain

    def open_blocking(self, options: _Options = ()) -> grpc.Channel:
        """Open a channel for threads; the caller closes it."""
        if self._source is None:
            plain = grpc.insecure_channel(self.address, options=options)
        else:
            plain = grpc.secure_channel(self.address, self._credentials(self._source), options=options)
        return BlockingTokenChannel(plain, self._token) if self._token is not None else plain

    async def renewed(self, generation: int, options: _Options = ()) -> grpc.aio.Channel:
        """Wait for certificates newer than a generation; return a channel with them, for the caller to close.

        The channel is connected: while the coordinator does not accept the new certificates, the old channel
        is better.
        """
        wait_s = self._poll_s
        while True:
            await asyncio.sleep(wait_s * (0.5 + random.random()))  # not all agents at once
            wait_s = self._poll_s
            if self._source is not None:
                self._source.poll()
            if self.generation == generation:
                continue
            channel = self.open(options)
            try:
                async with asyncio.timeout(_READY_TIMEOUT_S):
                    await channel.channel_ready()
            except TimeoutError:
                await channel.close()
                reason = await self.diagnosis() or "it does not answer"
                _log.warning("renewed certificates not in use yet", coordinator=self.address, reason=reason)
                wait_s = max(_TRY_AGAIN_S, self._poll_s)
            except BaseException:
                await channel.close()
                raise
            else:
                return channel

    async def diagnosis(self) -> str | None:
        """Return why the coordinator can't be reached, if that can be determined."""
        return await asyncio.to_thread(self.diagnosis_blocking)

    def diagnosis_blocking(self) -> str | None:
        """Return the same, for threads; takes at most some seconds."""
        return diagnose(self.address, self._source.files if self._source is not None else None)

    def _credentials(self, source: TlsSource) -> grpc.ChannelCredentials:
        source.poll()
        material = source.material
        return grpc.ssl_channel_credentials(material.ca, material.key, material.certificate)


def served_at(error: grpc.RpcError | None) -> str:
    """Return where a coordinator says that the jobs are served; empty if it doesn't."""
    info = error_info(error) if error is not None else None
    return str(info.metadata.get("address", "")) if info and info.reason == "SERVED_ELSEWHERE" else ""


def error_info(error: grpc.RpcError) -> ErrorInfo | None:
    """Return what a coordinator says of its error; None if the error is not a coordinator's."""
    info = ErrorInfo()
    try:
        status = rpc_status.from_call(error)
    except ValueError:  # details that contradict the status
        status = None
    return info if status is not None and any(detail.Unpack(info) for detail in status.details) else None
