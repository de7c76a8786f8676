"""What a coordinator tells the others of its fleet about itself."""

import pytest

from perseus.service.server import _place, _reachable


@pytest.mark.parametrize(
    ("listen", "reachable"),
    [
        ("10.0.0.1:50051", "10.0.0.1:50051"),
        ("c1.example.org:50051", "c1.example.org:50051"),
        ("0.0.0.0:50051", ""),
        ("[::]:50051", ""),
        ("*:50051", ""),
        ("127.0.0.1:0", ""),
        ("unix:/run/perseus.sock", ""),
    ],
)
def test_an_address_where_nobody_can_connect_is_not_advertised(listen: str, reachable: str) -> None:
    assert _reachable(listen) == reachable


def test_a_place_is_one_only_if_nobody_else_can_listen_there() -> None:
    assert _place("127.0.0.1:50051") == _place("127.0.0.1:50051") != _place("127.0.0.1:50052")
    assert _place("127.0.0.1:0") == _place("unix:/run/perseus.sock") == ""
