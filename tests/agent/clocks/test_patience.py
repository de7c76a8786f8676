from perseus.agent.clocks.patience import Comeback, Patience


def test_what_fails_is_tried_again_ever_more_rarely_and_for_so_long() -> None:
    patience = Patience(borne_s=2.0, first_pause_s=0.01, longest_pause_s=0.5)
    now_s, pauses_s = 100.0, []
    while not patience.is_over(now_s):
        retry_at_s = patience.failed(now_s)
        pauses_s.append(round(retry_at_s - now_s, 6))
        now_s = retry_at_s
    assert pauses_s == [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5, 0.5]
    assert now_s > 102.0


def test_one_success_and_all_is_forgotten() -> None:
    patience = Patience(borne_s=1.0, first_pause_s=0.1)
    patience.failed(0.0)
    patience.failed(0.1)
    patience.succeeded()
    assert not patience.is_over(50.0)
    assert patience.failed(50.0) == 50.1
    assert not patience.is_over(50.9)
    assert patience.is_over(51.0)


def test_what_failed_long_ago_is_another_failure() -> None:
    patience = Patience(borne_s=1.0, first_pause_s=0.1)
    patience.failed(0.0)
    assert patience.failed(1.5) == 1.6
    assert not patience.is_over(2.0)


def test_a_rank_that_was_given_up_is_taken_up_again_however_often() -> None:
    comeback = Comeback(first_pause_s=1.0, longest_pause_s=60.0)
    now_s, pauses_s = 0.0, []
    for _ in range(9):
        retry_at_s = comeback.failed(now_s)
        pauses_s.append(retry_at_s - now_s)
        now_s = retry_at_s
    assert pauses_s == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_a_gpu_that_fails_soon_after_it_came_back_has_not_come_back() -> None:
    comeback = Comeback(first_pause_s=1.0, longest_pause_s=60.0)
    assert comeback.failed(0.0) == 1.0
    comeback.served(1.0)
    assert comeback.failed(30.0) == 32.0
    comeback.served(32.0)
    assert comeback.failed(100.0) == 101.0
