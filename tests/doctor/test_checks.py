"""Rules that need only figures."""

from hypothesis import given
from hypothesis import strategies as st

from perseus.cli.certificates import app
from perseus.clock_skew import MAX_SKEW_S
from perseus.doctor.checks import BAD_SKEW_S, Verdict, clock_check, expiry_checks, version_check

DAY_S = 86400.0
ROUNDING_S = 1e-6
"""Times since 1970 have a resolution of a quarter of a microsecond, and three of them are added."""


@given(
    st.floats(-1e6, 1e6),
    st.floats(0, 30, allow_nan=False),
    st.floats(0, 1, allow_nan=False),
)
def test_transit_time_is_not_clock_skew(skew_s: float, way_s: float, share: float) -> None:
    asked_s = 1.7e9
    check = clock_check(asked_s, asked_s + share * way_s + skew_s, asked_s + way_s)
    if abs(skew_s) <= MAX_SKEW_S - ROUNDING_S:
        assert check.verdict is Verdict.GOOD
    if abs(skew_s) > BAD_SKEW_S + way_s + ROUNDING_S:
        assert check.verdict is Verdict.BAD
        assert ("ahead" if skew_s > 0 else "behind") in check.found
        assert check.advice


def test_a_small_clock_skew_is_a_warning() -> None:
    check = clock_check(100.0, 90.1, 100.2)
    assert (check.verdict, check.found) == (Verdict.WARNING, "the coordinator's clock is behind by 9.9 s")


def test_different_releases_are_a_warning() -> None:
    assert version_check("1.2.0", "1.2.0").verdict is Verdict.GOOD
    assert version_check("1.2.0+gab", "1.2.0+gcd").verdict is Verdict.GOOD
    check = version_check("1.2.0", "1.3.0")
    assert check.verdict is Verdict.WARNING
    assert "1.2.0" in check.found
    assert "1.3.0" in check.found


def test_certificates_are_judged_by_their_remaining_time() -> None:
    now_s = 1.7e9
    checks = expiry_checks(
        {"c.pem": now_s - 1, "a.pem": now_s + 90 * DAY_S, "b.pem": now_s + 3 * DAY_S}, now_s
    )
    assert [(check.subject, check.verdict) for check in checks] == [
        ("certificate a.pem", Verdict.GOOD),
        ("certificate b.pem", Verdict.WARNING),
        ("certificate c.pem", Verdict.BAD),
    ]
    assert [bool(check.advice) for check in checks] == [False, True, True]


def test_the_advised_commands_exist() -> None:
    (check,) = expiry_checks({"a.pem": 0.0}, 1.0)
    _, command = check.advice.rstrip(")").split("(perseus certificates ")
    assert set(command.split(" or ")) <= {
        each.callback.__name__ for each in app.registered_commands if each.callback
    }
