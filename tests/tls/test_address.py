"""Which addresses stay on this machine, and that plaintext to others has to be meant."""

import pytest

from perseus.tls.address import host_and_port, is_local
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
def test_these_stay_here(address: str) -> None:
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
def test_these_may_not(address: str) -> None:
    assert not is_local(address)
    with pytest.raises(ValueError, match="expected tls_ca, or insecure, for what other machines can reach"):
        check_plaintext(address, has_tls=False, insecure=False, wanted="tls_ca")
    assert check_plaintext(address, has_tls=True, insecure=False, wanted="") == address
    assert check_plaintext(address, has_tls=False, insecure=True, wanted="") == address


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
