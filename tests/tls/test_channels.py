"""Which of several coordinators is tried next."""

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from perseus.service.api.statuses import to_status
from perseus.service.domain.errors import CoordinatorError, DrainingError, ServedElsewhereError
from perseus.tls.channels import Channels


def error(cause: CoordinatorError) -> AioRpcError:
    status = to_status(cause)
    metadata = Metadata(*status.trailing_metadata)
    return AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), metadata, status.details)


def elsewhere(address: str) -> AioRpcError:
    return error(ServedElsewhereError(address=address))


def test_addresses_are_tried_in_turn() -> None:
    channels = Channels("127.0.0.1:1, 127.0.0.1:2")
    assert channels.has_several
    assert channels.address == "127.0.0.1:1"
    assert not channels.move_on()
    assert channels.address == "127.0.0.1:2"
    assert channels.move_on(error(DrainingError())), "all were tried"
    assert channels.address == "127.0.0.1:1"


def test_a_named_address_is_followed_at_once_for_two_hops() -> None:
    channels = Channels("127.0.0.1:1")
    for port in (7, 8):
        assert not channels.move_on(elsewhere(f"127.0.0.1:{port}"))
        assert channels.address == f"127.0.0.1:{port}"
    assert channels.move_on(elsewhere("127.0.0.1:9"))
    assert channels.address == "127.0.0.1:1"


@pytest.mark.parametrize("address", ["", "10.0.0.1:50051", "unix:", "nonsense", "127.0.0.1:0"])
def test_an_address_that_is_none_or_in_plaintext_elsewhere_is_not_followed(address: str) -> None:
    channels = Channels("127.0.0.1:1")
    assert channels.move_on(elsewhere(address))
    assert channels.address == "127.0.0.1:1"


def test_who_speaks_plaintext_to_other_machines_may_follow_to_others() -> None:
    channels = Channels("10.0.0.1:50051")
    assert not channels.move_on(elsewhere("10.0.0.2:50051"))
    assert channels.address == "10.0.0.2:50051"
