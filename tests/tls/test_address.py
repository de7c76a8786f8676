"""Local addresses, explicit permission for plaintext to others, and which of several is tried."""

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from perseus.service.api.statuses import to_status
from perseus.service.domain.errors import CoordinatorError, DrainingError, ServedElsewhereError
from perseus.tls.address import check_address, host_and_port, is_local
from perseus.tls.channels import Channels
from perseus.tls.rules import check_insecure, check_needs, check_plaintext, check_together


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:50051",
        "127.9.9.9:1",
        "[::1]:50051",
        "[::ffff:127.0.0.1]:50051",
        "localhost:50051",
        "LOCALHOST:50051",
        "dns:///localhost:50051",
        "dns:localhost:1",
        "ipv4:127.0.0.1:1",
        "ipv6:[::1]:1",
        "unix:/run/perseus/coordinator.sock",
        "unix:///run/perseus/coordinator.sock",
        "unix-abstract:perseus",
    ],
)
def test_local_addresses(address: str) -> None:
    assert is_local(address)
    assert check_plaintext(address, has_tls=False, insecure=False, wanted="tls_ca") == address


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0:50051",
        "[::]:50051",
        ":50051",
        "*:50051",
        "10.0.0.1:50051",
        "coordinator.example:50051",
        "localhost.example:50051",
        "127.0.0.1.example:50051",
        "dns:///coordinator.example:50051",
        "dns://127.0.0.1/coordinator.example:50051",
        "ipv4:127.0.0.1:1,10.0.0.1:1",
        "xds:///coordinator",
        "127.0.0.1",
        "nonsense",
        "",
    ],
)
def test_other_addresses(address: str) -> None:
    assert not is_local(address)
    expected = "expected tls_ca, or insecure, for an address that other machines can reach"
    with pytest.raises(ValueError, match=expected):
        check_plaintext(address, has_tls=False, insecure=False, wanted="tls_ca")
    assert check_plaintext(address, has_tls=True, insecure=False, wanted="") == address
    assert check_plaintext(address, has_tls=False, insecure=True, wanted="") == address


@pytest.mark.parametrize(
    "address",
    [
        *("host:1", "a.b-c_d.example.:65535", "10.0.0.1:7", "[::1]:7", "*:7", "höst:7", "unix:/a"),
        *("unix:///a b", "unix-abstract:a", "dns:///host:7", "ipv4:10.0.0.1:7,10.0.0.2:7"),
    ],
)
def test_a_valid_address_is_returned_unchanged(address: str) -> None:
    assert check_address(address) == address


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("host", "HOST:PORT with a port from 1 to 65535"),
        (":7", "HOST:PORT"),
        ("host:", "HOST:PORT"),
        ("host:65536", "65535"),
        ("host:-1", "65535"),
        ("host:+1", "65535"),
        (f"host:{'9' * 5000}", "65535"),
        ("host:0", "a port from 1 to 65535"),
        ("::1:7", "expected [HOST]:PORT"),
        ("[host]:7", "a host name"),
        ("host]:7", "a host name"),
        ("[/x]:7", "a host name"),
        ("..:7", "a host name"),
        (f"{'a' * 64}:7", "a host name"),
        ("ho st:7", "a host name"),
        ("http://host:7", "a host name"),
        ("unix:", "a path of 1 to 107 bytes"),
        (f"unix:/{'a' * 107}", "a path of 1 to 107 bytes"),
    ],
)
def test_invalid_addresses_are_refused(address: str, expected: str) -> None:
    with pytest.raises(ValueError, match=r"^expected") as refused:
        check_address(address)
    assert expected in str(refused.value)


def test_a_server_may_leave_its_port_open() -> None:
    assert check_address("127.0.0.1:0", min_port=0) == "127.0.0.1:0"


def test_host_and_port() -> None:
    assert host_and_port("[::1]:7") == ("::1", 7)
    assert host_and_port("dns://8.8.8.8/host:7") == ("host", 7)
    assert host_and_port("unix:/a:7") is None
    assert host_and_port("host:99999") is None


def test_settings_that_need_each_other() -> None:
    check_together(None, None, "a")
    check_together(1, 2, "a")
    for value, other in ((1, None), (None, 1)):
        with pytest.raises(ValueError, match="a"):
            check_together(value, other, "a")
    check_needs(None, None, "a")
    with pytest.raises(ValueError, match="expected a beside it"):
        check_needs(1, None, "a")
    check_insecure(True, None, "a")
    with pytest.raises(ValueError, match="expected no a beside it"):
        check_insecure(True, 1, "a")


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
