"""The common retry policy: increasing delays with optional jitter, reset after success, and a time limit."""

from perseus.retry import Retry


def test_retries_become_rarer_until_the_limit() -> None:
    retry = Retry(0.01, 0.5, give_up_after_s=2.0)
    now_s, delays_s = 100.0, []
    while not retry.is_over(now_s):
        delays_s.append(round(retry.failed(now_s), 6))
        now_s += delays_s[-1]
    assert delays_s == [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5, 0.5]
    assert now_s > 102.0


def test_a_success_resets_the_delays() -> None:
    retry = Retry(0.1, 10.0, give_up_after_s=1.0)
    assert [retry.failed(0.0), retry.failed(0.1)] == [0.1, 0.2]
    retry.succeeded()
    assert retry.failure_count == 0
    assert not retry.is_over(50.0)
    assert retry.failed(50.0) == 0.1
    assert not retry.is_over(50.9)
    assert retry.is_over(51.0)


def test_a_failure_long_ago_does_not_count() -> None:
    retry = Retry(1.0, 60.0, forget_after_s=120.0, give_up_after_s=200.0)
    assert [retry.failed(0.0), retry.failed(30.0), retry.failed(150.0)] == [1.0, 2.0, 4.0]
    assert retry.failed(271.0) == 1.0
    assert not retry.is_over(470.0), "the row began anew"


def test_without_a_limit_retries_never_end() -> None:
    retry = Retry(1.0, 60.0, forget_after_s=120.0)
    now_s, delays_s = 0.0, []
    for _ in range(9):
        delays_s.append(retry.failed(now_s))
        now_s += delays_s[-1]
    assert delays_s == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_a_share_of_the_delay_is_random() -> None:
    drawn = iter([0.0, 0.5, 0.75, 0.75])
    full = Retry(1.0, 3.0, jitter=1.0, random=lambda: next(drawn))
    assert [full.failed() for _ in range(4)] == [0.0, 1.0, 2.25, 2.25]
    assert Retry(4.0, 8.0, jitter=0.5, random=lambda: 0.5).failed() == 3.0
