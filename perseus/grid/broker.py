"""The MQTT session, which outlasts connections: the broker delivers messages sent in between later.

A message is handled before its receipt is acknowledged. aiomqtt puts each one in a queue before it sends the
acknowledgement, and the queue here handles it at once: if that fails, or the process dies, the broker sends
the message again.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable

import aiomqtt

from perseus.grid.settings import DsxFlexSettings
from perseus.tls.address import host_and_port
from perseus.tls.files import Role, TlsError, TlsSource
from perseus.tls.tokens import TokenFileError, read_token

_OAUTH_USER = "oauthtoken"
_TIMEOUT_S = 10.0
_KEEPALIVE_S = 15
_REFUSED = 0x80

TARGET_TOPICS = "grid/v1/isv/+/loadtarget/set"
ENFORCEMENT_TOPICS = "grid/v1/infra/+/powerbreach/enforcement"
SUBSCRIPTIONS = ((TARGET_TOPICS, 1), (ENFORCEMENT_TOPICS, 2))

Take = Callable[[str, bytes], None]
"""Handles a message: its topic and its payload."""

# The library must not log to standard error: callers log its errors.
_quiet = logging.getLogger("perseus.grid.mqtt")
_quiet.addHandler(logging.NullHandler())
_quiet.propagate = False


class BrokerUnavailableError(Exception):
    """There is no connection to the broker; the text says why, as far as known."""


class Session:
    """The session of one gateway. It calls `take` for every message, on the event loop."""

    def __init__(self, settings: DsxFlexSettings, take: Take) -> None:
        self._settings = settings
        self._take = take
        files = settings.broker_tls_files
        self._tls = None if files is None else TlsSource(files, Role.CLIENT)
        if settings.broker_token_file is not None:
            read_token(settings.broker_token_file)

    def client(self) -> aiomqtt.Client:
        """Return a client that isn't connected yet, with the newest certificates and token.

        Raises:
            BrokerUnavailableError: they can't be used.
        """
        place = host_and_port(self._settings.broker)
        assert place is not None, "the settings have checked it"
        token_file = self._settings.broker_token_file
        try:
            password = None if token_file is None else read_token(token_file)
            tls = self._context()
        except (TlsError, TokenFileError, OSError) as error:
            raise BrokerUnavailableError(str(error)) from None
        return aiomqtt.Client(
            place[0],
            place[1],
            username=None if password is None else _OAUTH_USER,
            password=password,
            identifier=f"perseus-dsx-flex-{self._settings.identifier}",
            clean_session=False,
            queue_type=self._queue(),
            tls_context=tls,
            timeout=_TIMEOUT_S,
            keepalive=_KEEPALIVE_S,
            logger=_quiet,
        )

    def _queue(self) -> type[asyncio.Queue[aiomqtt.Message]]:
        take = self._take

        class Taken(asyncio.Queue[aiomqtt.Message]):
            """A queue that keeps nothing: it handles each message at once."""

            def put_nowait(self, item: aiomqtt.Message) -> None:
                payload = item.payload if isinstance(item.payload, bytes) else b""
                take(str(item.topic), payload)

        return Taken

    def _context(self) -> ssl.SSLContext | None:
        if self._tls is None:
            return None
        self._tls.poll()
        files = self._tls.files
        context = ssl.create_default_context(cafile=files.ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if files.certificate is not None:
            context.load_cert_chain(files.certificate, files.key)
        return context


async def subscribe(client: aiomqtt.Client) -> None:
    """Subscribe to the gateway's topics.

    Raises:
        BrokerUnavailableError: the broker refuses a subscription.
        aiomqtt.MqttError: the connection has ended.
    """
    granted = await client.subscribe(list(SUBSCRIPTIONS))
    refused = [topic for (topic, _), code in zip(SUBSCRIPTIONS, granted, strict=True) if code == _REFUSED]
    if refused:
        raise BrokerUnavailableError(f"the broker refuses the subscription to {refused[0]}")


async def until_disconnected(client: aiomqtt.Client) -> None:
    """Wait for the end of a connection.

    Raises:
        aiomqtt.MqttError: the connection has ended.
    """
    async for _ in client.messages:
        pass
