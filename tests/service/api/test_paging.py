"""Pages: their items, and the requests that their tokens belong to."""

import base64
from collections.abc import Iterator

import pytest

from perseus.service.api.paging import PAGE_BYTES, Page
from perseus.service.domain.errors import InvalidFieldError
from perseus.v1 import job_pb2, rank_pb2
from perseus.v1.job_service_pb2 import GetReportRequest, ListJobsRequest, ListRanksRequest

REQUEST = ListRanksRequest(job_id="job", states=[rank_pb2.RANK_STATE_LOST], page_size=3)


def ranks(first: int, count: int, name: str = "host") -> Iterator[tuple[int, rank_pb2.Rank]]:
    return ((index, rank_pb2.Rank(iteration=index, hostname=name)) for index in range(first, count))


def token_of(request: ListRanksRequest, count: int = 10) -> str:
    _, token = Page.asked(request).fill(ranks(0, count))
    assert token
    return token


@pytest.mark.parametrize(("count", "pages"), [(0, [[]]), (3, [[0, 1, 2]]), (4, [[0, 1, 2], [3]])])
def test_pages_follow_each_other_until_the_last_has_no_token(count: int, pages: list[list[int]]) -> None:
    found, request = [], ListRanksRequest(page_size=3)
    while True:
        page = Page.asked(request)
        items, request.page_token = page.fill(ranks(page.first_number, count))
        found.append([rank.iteration for rank in items])
        if not request.page_token:
            break
    assert found == pages


def test_at_most_one_item_beyond_the_page_is_made() -> None:
    endless = ranks(0, 10**12)
    page, _ = Page.asked(REQUEST).fill(endless)
    assert len(page) == 3
    assert next(endless)[0] == 4


def test_a_page_ends_before_it_is_too_large_for_a_message() -> None:
    page, token = Page.asked(ListRanksRequest(page_size=1000)).fill(ranks(0, 1000, "h" * 10_000))
    assert 2 * PAGE_BYTES <= 4 * 1024 * 1024, "the default limit of a gRPC client"
    assert PAGE_BYTES - 20_000 < sum(rank.ByteSize() for rank in page) <= PAGE_BYTES
    assert Page.asked(ListRanksRequest(page_token=token)).first_number == len(page)


def test_an_item_that_is_too_large_is_a_page_by_itself() -> None:
    page, token = Page.asked(ListRanksRequest()).fill(ranks(0, 2, "h" * (PAGE_BYTES + 1)))
    assert (len(page), Page.asked(ListRanksRequest(page_token=token)).first_number) == (1, 1)


def test_a_token_fits_the_same_request_with_any_page_size() -> None:
    again = ListRanksRequest(job_id="job", states=REQUEST.states, page_size=7, page_token=token_of(REQUEST))
    assert Page.asked(again).first_number == 3


@pytest.mark.parametrize(
    "other",
    [
        ListRanksRequest(job_id="another", states=REQUEST.states),
        ListRanksRequest(job_id="job"),
        ListRanksRequest(job_id="job", states=[rank_pb2.RANK_STATE_CONNECTED]),
        ListRanksRequest(job_id="job", states=REQUEST.states, pipeline=0),
        ListRanksRequest(job_id="job", states=REQUEST.states, stage=0),
        GetReportRequest(job_id="job"),
        ListJobsRequest(states=[job_pb2.JOB_STATE_STOCK]),
    ],
)
def test_another_requests_token_is_refused(
    other: ListRanksRequest | GetReportRequest | ListJobsRequest,
) -> None:
    other.page_token = token_of(REQUEST)
    with pytest.raises(InvalidFieldError, match="page_token: expected a next_page_token of the same request"):
        Page.asked(other)


DIGEST = base64.urlsafe_b64decode(token_of(REQUEST))[:8]
INVENTED = [DIGEST + place.encode() for place in ("", "-1", "x", "١", "1e3", "9" * 19)]


@pytest.mark.parametrize(
    "token",
    ["%%%", "é", "AAAA", *(base64.urlsafe_b64encode(each).decode() for each in (b"12345678\xff", *INVENTED))],
)
def test_an_invented_token_is_refused(token: str) -> None:
    request = ListRanksRequest(job_id="job", states=REQUEST.states, page_token=token)
    with pytest.raises(InvalidFieldError, match="page_token"):
        _ = Page.asked(request).first_number
