"""What a coordinator tells the others of its fleet about itself."""

import pytest

from perseus.service.server import _page_url, _place, _reachable
from perseus.service.settings import CoordinatorSettings


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


@pytest.mark.parametrize(
    ("http", "advertise", "url"),
    [
        (None, "c1.example.org:50051", ""),
        ("0.0.0.0:8080", "c1.example.org:50051", "http://c1.example.org:8080"),
        ("[::]:8080", "[2001:db8::1]:50051", "http://[2001:db8::1]:8080"),
        ("page.example.org:80", "c1.example.org:50051", "http://page.example.org:80"),
        ("0.0.0.0:8080", None, ""),
        ("0.0.0.0:0", "c1.example.org:50051", ""),
        ("127.0.0.1:8080", "c1.example.org:50051", ""),  # for its own machine alone
        ("127.0.0.1:8080", "127.0.0.1:50051", "http://127.0.0.1:8080"),
    ],
)
def test_a_page_is_where_browsers_elsewhere_reach_it(
    http: str | None, advertise: str | None, url: str
) -> None:
    settings = CoordinatorSettings(insecure=True, listen="0.0.0.0:50051", http=http, advertise=advertise)
    assert _page_url(settings) == url


def test_a_place_is_one_only_if_nobody_else_can_listen_there() -> None:
    assert _place("127.0.0.1:50051") == _place("127.0.0.1:50051") != _place("127.0.0.1:50052")
    assert _place("127.0.0.1:0") == _place("unix:/run/perseus.sock") == ""
