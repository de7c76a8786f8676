"""Channels to one coordinator, for agents and commands: in plaintext, or with the newest certificates.

Every channel to a coordinator is opened here, so clients' credentials are added here, too.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import structlog

from perseus.tls.address import is_local
from perseus.tls.diagnosis import diagnose
from perseus.tls.files import Role, TlsFiles, TlsSource
from perseus.tls.token_channels import BlockingTokenChannel, TokenChannel
from perseus.tls.tokens import TokenSource

_log = structlog.get_logger(__name__)

_Options = Sequence[tuple[str, Any]]

_POLL_S = 10.0
_READY_TIMEOUT_S = 10.0
_TRY_AGAIN_S = 60.0


class Channels:
    """Opens channels to the coordinator at `address`; without `files` in plaintext.

    Every call carries the `token`, which never leaves the machine in plaintext. Certificates are checked
    about every `poll_s`, and whenever a channel is opened.

    Raises:
        TlsError: a file can't be used.
    """

    def __init__(
        self,
        address: str,
        files: TlsFiles | None = None,
        token: TokenSource | None = None,
        *,
        poll_s: float = _POLL_S,
    ) -> None:
        self.address = address
        self._source = TlsSource(files, Role.CLIENT) if files is not None else None
        self._token = None if self.is_exposed else token
        self._poll_s = poll_s

    @property
    def is_exposed(self) -> bool:
        """Whether traffic leaves the machine in plaintext."""
        return self._source is None and not is_local(self.address)

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
