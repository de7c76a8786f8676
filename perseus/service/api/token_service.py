"""`perseus.v1.TokenService`: a thin adapter over the tokens."""

# ruff: noqa: N802 (the contract names the methods)

from collections.abc import Mapping
from typing import Any

import grpc

from perseus.service.api.statuses import mapped
from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.messages import time_from_proto, time_to_proto
from perseus.service.domain.principals import Grant, Scope, Token
from perseus.service.shell.tokens import Tokens
from perseus.v1 import token_service_pb2 as pb
from perseus.v1 import token_service_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

_SCOPES: Mapping[int, Scope] = {
    pb.SCOPE_AGENT: Scope.AGENT,
    pb.SCOPE_OPERATOR: Scope.OPERATOR,
    pb.SCOPE_READER: Scope.READER,
    pb.SCOPE_GRID: Scope.GRID,
}
SCOPE_TO_PROTO: Mapping[Scope, pb.Scope.ValueType] = {
    scope: pb.Scope.ValueType(number) for number, scope in _SCOPES.items()
}


class TokenService(token_service_pb2_grpc.TokenServiceServicer):
    """Creates, lists and revokes tokens."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    @mapped
    async def CreateToken(self, request: pb.CreateTokenRequest, context: Context) -> pb.CreateTokenResponse:
        """Create a token."""
        scope = _SCOPES.get(request.scope)
        if scope is None:
            raise InvalidFieldError(field="scope", expected="a known scope", found=request.scope)
        expire_time_s = (
            time_from_proto("expire_time", request.expire_time) if request.HasField("expire_time") else None
        )
        grant = Grant(scope, tuple(request.job_patterns), tuple(request.host_patterns))
        token, secret = await self._tokens.create(request.name, grant, expire_time_s)
        return pb.CreateTokenResponse(token=_token_to_proto(token), secret=secret)

    @mapped
    async def ListTokens(self, request: pb.ListTokensRequest, context: Context) -> pb.ListTokensResponse:
        """Return all tokens."""
        return pb.ListTokensResponse(tokens=[_token_to_proto(token) for token in self._tokens.tokens])

    @mapped
    async def RevokeToken(self, request: pb.RevokeTokenRequest, context: Context) -> pb.RevokeTokenResponse:
        """Revoke a token."""
        return pb.RevokeTokenResponse(token=_token_to_proto(await self._tokens.revoke(request.name)))


def _token_to_proto(token: Token) -> pb.Token:
    def time(time_s: float | None) -> Any:
        return None if time_s is None else time_to_proto(time_s)

    return pb.Token(
        name=token.name,
        scope=SCOPE_TO_PROTO[token.grant.scope],
        job_patterns=token.grant.job_patterns,
        host_patterns=token.grant.host_patterns,
        create_time=time(token.create_time_s),
        expire_time=time(token.expire_time_s),
        revoke_time=time(token.revoke_time_s),
    )
