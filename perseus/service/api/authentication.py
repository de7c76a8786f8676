"""Authentication of every call that is not open to everybody, and the end of streams whose token ends.

A token goes before a certificate: a caller with a wrong token is refused, whatever its certificate.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import structlog

from perseus.service.api.interceptors import (
    Behaviour,
    Context,
    Interceptor,
    RpcHandler,
    serve_stream,
    wrapped,
)
from perseus.service.api.refusal_log import RefusalLog
from perseus.service.api.rpc_scopes import NOBODY, RPC_SCOPES, check_scope
from perseus.service.api.statuses import to_status
from perseus.service.domain.errors import (
    CoordinatorError,
    CredentialMissingError,
    ScopeTooNarrowError,
    TokenUnknownError,
)
from perseus.service.domain.principals import ANYBODY, Grant, Principal
from perseus.service.shell.tokens import Tokens

log = structlog.get_logger(__name__)

_caller: ContextVar[Principal] = ContextVar("caller")


def caller() -> Principal:
    """Return the principal of the call that is being served.

    Raises:
        LookupError: the caller was not authenticated, so the call must not be served.
    """
    return _caller.get()


@contextmanager
def calling(principal: Principal) -> Iterator[None]:
    """Set the caller, for the length of a block, of a call that gRPC does not carry."""
    before = _caller.set(principal)
    try:
        yield
    finally:
        _caller.reset(before)


class NoAuthentication(Interceptor):
    """Lets everybody make every call, for a coordinator without authentication."""

    def wrap(self, rpc: str, handler: RpcHandler) -> RpcHandler:
        """Set the caller of every call to ANYBODY."""
        return wrapped(handler, unary=self._unary, unary_stream=self._stream, stream_stream=self._stream)

    @staticmethod
    def _unary(behaviour: Behaviour) -> Behaviour:
        async def serve(request: Any, context: Context) -> Any:
            _caller.set(ANYBODY)
            return await behaviour(request, context)

        return serve

    @staticmethod
    def _stream(behaviour: Behaviour) -> Behaviour:
        async def serve(requests: Any, context: Context) -> None:
            _caller.set(ANYBODY)
            await serve_stream(behaviour, requests, context)

        return serve


class Authentication(Interceptor):
    """Admits calls whose caller is known and may make them.

    `certificates`: the grants of certificates' identities (common names, or alternative names).
    """

    def __init__(self, tokens: Tokens, certificates: Mapping[str, Grant]) -> None:
        self._tokens = tokens
        self._certificates = certificates
        self._refusal_log = RefusalLog()

    def wrap(self, rpc: str, handler: RpcHandler) -> RpcHandler:
        """Authenticate the caller of every call that needs a scope."""
        if RPC_SCOPES.get(rpc) == NOBODY:
            return handler
        unary, stream = partial(self._unary, rpc), partial(self._stream, rpc)
        return wrapped(handler, unary=unary, unary_stream=stream, stream_stream=stream)

    def _unary(self, rpc: str, behaviour: Behaviour) -> Behaviour:
        async def serve(request: Any, context: Context) -> Any:
            await self._admit(rpc, context)
            return await behaviour(request, context)

        return serve

    def _stream(self, rpc: str, behaviour: Behaviour) -> Behaviour:
        async def serve(requests: Any, context: Context) -> None:
            principal = await self._admit(rpc, context)
            with self._tokens.watched(principal) as ended:
                work = asyncio.create_task(serve_stream(behaviour, requests, context))
                try:
                    either: tuple[asyncio.Future[Any], ...] = (work, ended)
                    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                    if work.done():
                        return work.result()
                finally:
                    work.cancel()
                    await asyncio.gather(work, return_exceptions=True)
                error = ended.result()
            return await self._refuse(rpc, context, error)

        return serve

    async def _admit(self, rpc: str, context: Context) -> Principal:
        """Authenticate the caller, or end the call."""
        try:
            try:
                principal = self._principal(context)
            except TokenUnknownError:
                await self._tokens.refresh()
                principal = self._principal(context)
            check_scope(rpc, principal)
        except CoordinatorError as error:
            await self._refuse(rpc, context, error)
            raise
        _caller.set(principal)
        return principal

    async def _refuse(self, rpc: str, context: Context, error: CoordinatorError) -> None:
        event = "call refused" if isinstance(error, ScopeTooNarrowError) else "caller refused"
        self._refusal_log.record(context.peer(), event, error.reason, rpc=rpc, error=str(error))
        await context.abort_with_status(to_status(error))

    def _principal(self, context: Context) -> Principal:
        shown = [value for name, value in context.invocation_metadata() or () if name == "authorization"]
        if shown:
            scheme, _, secret = str(shown[-1]).partition(" ")
            if scheme.lower() != "bearer":
                raise CredentialMissingError
            return self._tokens.authenticate(secret.strip())
        identities = context.auth_context()
        for kind in ("x509_common_name", "x509_subject_alternative_name"):
            for identity in identities.get(kind, ()):
                name = identity.decode(errors="replace")
                if (grant := self._certificates.get(name)) is not None:
                    return Principal(f"certificate {name}", grant, certificate_name=name)
        raise CredentialMissingError
