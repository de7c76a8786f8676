"""The coordinator's information about itself and about the caller."""

import time

from perseus.release import release
from perseus.service.api.agent_service import PROTOCOL_VERSION
from perseus.v1 import token_service_pb2
from tests.service.grpc_fakes import Client


async def test_without_authentication_every_caller_is_anybody(client: Client) -> None:
    before_s = time.time()
    answer = await client.ask("GetInfo")
    assert (answer.version, answer.protocol_version) == (release(), PROTOCOL_VERSION)
    assert before_s - 1e-6 <= answer.current_time.ToNanoseconds() / 1e9 <= time.time()
    assert (answer.principal, answer.scope) == ("anybody", token_service_pb2.SCOPE_OPERATOR)
