"""The coordinator's information about itself and about the caller."""

import time
from pathlib import Path

from perseus.release import release
from perseus.service.api.agent_service import PROTOCOL_VERSION
from perseus.v1 import info_service_pb2 as pb
from perseus.v1 import token_service_pb2
from perseus.v1.info_service_pb2_grpc import InfoServiceStub
from tests.service.grpc_fakes import TIMEOUT_S, connected, make_settings


async def test_without_authentication_every_caller_is_anybody(tmp_path: Path) -> None:
    before_s = time.time()
    async with connected(make_settings(tmp_path)) as client:
        answer = await InfoServiceStub(client.channel).GetInfo(pb.GetInfoRequest(), timeout=TIMEOUT_S)
    assert answer.version == release()
    assert answer.protocol_version == PROTOCOL_VERSION
    assert before_s - 1e-6 <= answer.current_time.ToNanoseconds() / 1e9 <= time.time()
    assert (answer.principal, answer.scope) == ("anybody", token_service_pb2.SCOPE_OPERATOR)
