"""A coordinator that stands by leads browsers to a page that shows jobs, and names it to programs."""

from pathlib import Path

import aiohttp
import pytest

from perseus.service.domain.members import Fleet, Member, Slot
from perseus.service.web.app import make_standby_app
from perseus.service.web.listening import bind, listening
from perseus.service.web.origin import Hosts
from tests.service.web.page_server import ask

MEMBERS = [Member("me", "me:1", "http://me:2"), Member("a", "a:1"), Member("b", "b:1", "http://b:2")]
SLOTS = [Slot(0, "a", 1), Slot(1, "b", 1)]


async def test_browsers_are_led_on_and_programs_refused(tmp_path: Path) -> None:
    fleet = Fleet("me", None, MEMBERS, SLOTS)
    async with (
        listening(make_standby_app(fleet, Hosts()), bind("127.0.0.1:0"), None, 0.0) as url,
        aiohttp.ClientSession() as session,
    ):
        for path in ("/", "/jobs/llama-2"):
            async with session.get(f"{url}{path}", allow_redirects=False) as answer:
                assert (answer.status, answer.headers["Location"]) == (302, f"http://b:2{path}")
        for method, path in (("GET", "/metrics"), ("POST", "/"), ("GET", "/api/watch/jobs"), ("GET", "//c")):
            refused = await ask(session, method, f"{url}{path}")
            assert (refused.status, refused.json["reason"]) == (503, "SERVED_ELSEWHERE")
            assert refused.json["metadata"] == {"address": "b:1", "page_url": "http://b:2"}
        fleet.members = MEMBERS[:2]
        refused = await ask(session, "GET", f"{url}/")
        assert (refused.status, refused.json["metadata"]) == (503, {"address": "a:1"})
        assert (await ask(session, "GET", f"{url}/", headers={"Host": "evil.example"})).status == 403


@pytest.mark.parametrize(("job_id", "url"), [("llama-4", ""), ("llama-2", "http://b:2")])
def test_the_page_of_a_job_is_that_of_another_that_serves_it(job_id: str, url: str) -> None:
    assert Fleet("a", 0, MEMBERS, SLOTS).page_url(job_id) == url
    assert Fleet("b", 1, MEMBERS, SLOTS).page_url(job_id) == "", "it has no page, or it is this one"
