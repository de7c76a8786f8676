"""A coordinator that stands by leads browsers to a page that shows jobs, answers scrapes, and names the page
to other programs."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import aiohttp
import pytest

from perseus.service.domain.members import ALONE, Fleet, Member, Slot
from perseus.service.server import standing_by
from perseus.service.shell.membership import FleetMember
from perseus.service.web.app import make_standby_app
from perseus.service.web.collector import collect_standing_by
from perseus.service.web.listening import bind, listening
from perseus.service.web.origin import Hosts
from perseus.service.web.scrape import Scrape
from tests.ports import free_port
from tests.service.grpc_fakes import make_settings
from tests.service.web.page_server import ask
from tests.service.web.scraping import scrape

MEMBERS = [Member("me", "me:1", "http://me:2"), Member("a", "a:1"), Member("b", "b:1", "http://b:2")]
SLOTS = [Slot(0, "a", 1), Slot(1, "b", 1)]
SCRAPE = Scrape(partial(collect_standing_by, ALONE, dict[str, float]))


async def test_browsers_are_led_on_and_programs_refused(tmp_path: Path) -> None:
    fleet = Fleet("me", None, MEMBERS, SLOTS)
    async with (
        listening(make_standby_app(fleet, Hosts(), SCRAPE), bind("127.0.0.1:0"), None, 0.0) as url,
        aiohttp.ClientSession() as session,
    ):
        for path in ("/", "/jobs/llama-2"):
            async with session.get(f"{url}{path}", allow_redirects=False) as answer:
                assert (answer.status, answer.headers["Location"]) == (302, f"http://b:2{path}")
        for method, path in (("POST", "/metrics"), ("POST", "/"), ("GET", "/api/watch/jobs"), ("GET", "//c")):
            refused = await ask(session, method, f"{url}{path}")
            assert (refused.status, refused.json["reason"]) == (503, "SERVED_ELSEWHERE")
            assert refused.json["metadata"] == {"address": "b:1", "page_url": "http://b:2"}
        fleet.members = MEMBERS[:2]
        refused = await ask(session, "GET", f"{url}/")
        assert (refused.status, refused.json["metadata"]) == (503, {"address": "a:1"})
        assert (await ask(session, "GET", f"{url}/", headers={"Host": "evil.example"})).status == 403


async def test_scrapes_are_answered_with_what_is_of_the_fleet(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, http=f"127.0.0.1:{free_port()}")
    fleet = Fleet("me", None, MEMBERS, SLOTS, late_renewal_count=2)
    async with standing_by(settings, cast(FleetMember, SimpleNamespace(fleet=fleet))):
        samples = await scrape(f"http://{settings.http}/metrics")
    assert {name: value for (name, _), value in samples.items() if name.startswith("perseus_")} == {
        "perseus_build_info": 1,
        "perseus_coordinator_standing_by": 1,
        "perseus_standby_coordinators": 1,
        "perseus_idle_slots": 0,
        "perseus_late_lease_renewals_total": 2,
    }


def test_those_that_stand_by_are_counted_only_where_they_can() -> None:
    assert Fleet("a", 0, MEMBERS[1:], SLOTS).standby_count() == 0
    assert Fleet(members=[Member("", "a:1")]).standby_count() is None, "on SQLite"


@pytest.mark.parametrize(("job_id", "url"), [("llama-4", ""), ("llama-2", "http://b:2")])
def test_the_page_of_a_job_is_that_of_another_that_serves_it(job_id: str, url: str) -> None:
    assert Fleet("a", 0, MEMBERS, SLOTS).page_url(job_id) == url
    assert Fleet("b", 1, MEMBERS, SLOTS).page_url(job_id) == "", "it has no page, or it is this one"
