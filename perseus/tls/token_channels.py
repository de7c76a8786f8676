"""Channels that send a token with every call.

gRPC's own call credentials work only over TLS, which loopback may lack; its interceptors would wrap the
callers' streams. So these channels only add the token to the metadata.
"""

from types import TracebackType
from typing import Any

import grpc

from perseus.tls.tokens import TokenSource


class _TokenCall:
    """A method of a channel; `with_call` and `future` exist on blocking channels."""

    def __init__(self, method: Any, token: TokenSource) -> None:
        self._method = method
        self._token = token

    def __call__(self, *request: Any, metadata: Any = None, **options: Any) -> Any:
        return self._method(*request, metadata=self._with_token(metadata), **options)

    def with_call(self, *request: Any, metadata: Any = None, **options: Any) -> Any:
        return self._method.with_call(*request, metadata=self._with_token(metadata), **options)

    def future(self, *request: Any, metadata: Any = None, **options: Any) -> Any:
        return self._method.future(*request, metadata=self._with_token(metadata), **options)

    def _with_token(self, metadata: Any) -> tuple[tuple[str, str | bytes], ...]:
        return (*(metadata or ()), *self._token.metadata)


class _TokenMethods:
    """The call methods of either kind of channel."""

    _channel: Any
    _token: TokenSource

    def unary_unary(self, *given: Any, **options: Any) -> Any:
        return _TokenCall(self._channel.unary_unary(*given, **options), self._token)

    def unary_stream(self, *given: Any, **options: Any) -> Any:
        return _TokenCall(self._channel.unary_stream(*given, **options), self._token)

    def stream_unary(self, *given: Any, **options: Any) -> Any:
        return _TokenCall(self._channel.stream_unary(*given, **options), self._token)

    def stream_stream(self, *given: Any, **options: Any) -> Any:
        return _TokenCall(self._channel.stream_stream(*given, **options), self._token)


class TokenChannel(_TokenMethods, grpc.aio.Channel):
    """A channel for the event loop."""

    _channel: grpc.aio.Channel

    def __init__(self, channel: grpc.aio.Channel, token: TokenSource) -> None:
        self._channel = channel
        self._token = token

    async def __aenter__(self) -> "TokenChannel":
        await self._channel.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._channel.__aexit__(kind, error, traceback)

    async def close(self, grace: float | None = None) -> None:
        """Close the channel, as `grpc.aio.Channel.close`."""
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return the state of the channel."""
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait until the channel leaves a state."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Wait until the channel is ready."""
        await self._channel.channel_ready()


class BlockingTokenChannel(_TokenMethods, grpc.Channel):
    """A channel for threads."""

    _channel: grpc.Channel

    def __init__(self, channel: grpc.Channel, token: TokenSource) -> None:
        self._channel = channel
        self._token = token

    def __enter__(self) -> "BlockingTokenChannel":
        self._channel.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._channel.__exit__(kind, error, traceback)

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def subscribe(self, *given: Any, **options: Any) -> None:
        """Subscribe to the channel's state."""
        self._channel.subscribe(*given, **options)

    def unsubscribe(self, *given: Any) -> None:
        """End a subscription."""
        self._channel.unsubscribe(*given)
