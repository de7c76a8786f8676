"""The page's requests: the services' calls as JSON, the page's own files, and answers to invalid requests."""

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import make_mocked_request
from google.protobuf import json_format

from perseus.service.domain.errors import InternalError
from perseus.service.shell.jobs import Jobs
from perseus.service.web import single_flight_cache
from perseus.service.web.page_files import PageFile
from perseus.service.web.scrape import Scrape
from perseus.v1 import job_pb2
from tests.service.grpc_fakes import ALL_PLACES, spec_message
from tests.service.web.page_server import Answer, ask, guarded, site

POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "


def registration(job_id: str = "job") -> dict[str, object]:
    spec = json_format.MessageToDict(spec_message(job_id), preserving_proto_field_name=True)
    return {"spec": spec, "request_id": f"first-{job_id}"}


def assert_refused(answer: Answer, status: int, code: str, reason: str) -> None:
    assert answer.headers["Content-Type"] == "application/json"
    reported = answer.json
    assert (answer.status, reported["code"], reported["reason"]) == (status, code, reason), reported
    assert set(reported) == {"code", "reason", "message", "metadata"}
    assert "Traceback" not in answer.text


async def test_answers_agree_with_grpc(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        await here.client.register()
        await here.train(job_pb2.JOB_STATE_PLANNED, 4)

        async def same(method: str, **fields: Any) -> Any:
            reported = await here.client.ask(method, **fields)
            answer = await here.call(method, fields)
            assert answer.status == 200, answer.text
            assert json_format.Parse(answer.text, type(reported)()) == reported
            assert answer.headers["Cache-Control"] == "no-store"
            return reported

        await same("GetJob", job_id="job")
        await same("ListJobs")
        await same("ListRanks", job_id="job")
        await same("ListJobEvents", job_id="job", page_size=5)
        periods = (await same("GetReport", job_id="job")).periods
        under = await same("GetTimeline", job_id="job", pipeline=1)
        before = await same("GetTimeline", job_id="job", pipeline=1, from_baseline=True)

        # The baseline's timeline is kept beside the latest one.
        stock = next(each for each in periods if each.state == job_pb2.JOB_STATE_BASELINE)
        assert before.iteration <= stock.last_iteration < under.iteration
        assert (before.pipeline, under.pipeline) == (0, 1)
        assert (len(before.entries), len(under.entries), len(under.blocking_power_w)) == (12, 12, 2)
        assert all(entry.power_w > 0 for entry in (*before.entries, *under.entries))

        # Default values are present, optional fields may be absent; numbers of 64 bits are texts.
        job = (await here.call("GetJob", {"job_id": "job"})).json["job"]
        assert job["straggler_count"] == 0
        assert "finish_time" not in job
        assert job["last_event_sequence"].isdecimal()
        assert job["figures"]["iteration_time_s"] == 0.8
        assert job["figures"]["power_w"] == pytest.approx(job["figures"]["energy_j"] / 0.8)
        assert job["figures"]["predicted_iteration_time_s"] > 0
        report = (await here.call("GetReport", {"job_id": "job"})).json
        assert job["figures"]["saving"] == report["periods"][-1]["saving"]

        frontier = await here.post("api/FrontierService/GetFrontier", {"job_id": "job"})
        assert frontier.json["frontier"]["t_min_s"] == job["t_min_s"]
        plan = {"job_id": "job", "iteration_time_s": job["t_slow_s"]}
        answer = await here.post("api/FrontierService/GetPlan", plan)
        assert len(answer.json["plan"]["stages"]) == 2

        # Controls work as over gRPC.
        straggler = {"job_id": "job", "pipeline": 0, "slowdown_factor": 1.2}
        refused = await here.call("ReportStraggler", straggler, {})
        assert_refused(refused, 403, "PERMISSION_DENIED", "ORIGIN_MISMATCH")
        answer = await here.call("ReportStraggler", straggler)
        assert answer.json["job"]["straggler_count"] == (await here.client.job()).straggler_count == 1


async def test_invalid_requests_are_answered_like_grpc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with site(tmp_path) as server:
        call = server.call
        assert (await call("RegisterJob", registration())).status == 200
        missing = await call("GetJob", {"job_id": "another"})
        assert missing.json["metadata"] == {"job_id": "another"}
        unsolved = await server.post("api/FrontierService/GetFrontier", {"job_id": "job"})
        assert int(unsolved.headers["Retry-After"]) >= 1
        no_number = {"job_id": "job", "slowdown_factor": "NaN"}
        beyond = {"job_id": "job", "pipeline": 7, "slowdown_factor": 2}
        form = await call("GetJob", {"job_id": "job"}, {"Content-Type": "text/plain"})
        for answer, status, code, reason in (
            (missing, 404, "NOT_FOUND", "JOB_NOT_FOUND"),
            (unsolved, 400, "FAILED_PRECONDITION", "JOB_NOT_SOLVED"),
            (await call("ReportStraggler", beyond), 400, "INVALID_ARGUMENT", "PIPELINE_OUT_OF_RANGE"),
            (await call("ReportStraggler", no_number), 400, "INVALID_ARGUMENT", "INVALID_FIELD"),
            (await call("GetJob", {"job_id": "a\x07"}), 400, "INVALID_ARGUMENT", "INVALID_FIELD"),
            (await call("GetJob", b" " * 70_000), 413, "RESOURCE_EXHAUSTED", "HTTP_413"),
            (form, 400, "INVALID_ARGUMENT", "INVALID_FIELD"),
            (await server.get("api"), 404, "NOT_FOUND", "HTTP_404"),
            (await server.get("api/JobService/GetJob"), 405, "UNIMPLEMENTED", "HTTP_405"),
            (await server.get("api/ranks/x"), 404, "NOT_FOUND", "JOB_NOT_FOUND"),
        ):
            assert_refused(answer, status, code, reason)
        bodies = b"", b"{", b"[]", b'"x"', b"null", b"\xff", b'{"job_id": 5}', b'{"job_id": "\\ud800"}'
        deep = b"[" * 60_000, b'{"spec":' * 7_000, b'{"job_id": ' + b"1" * 5_000 + b"}"
        for body in (*bodies, b'{"unknown": 1}', *deep):
            assert_refused(await call("GetJob", body), 400, "INVALID_ARGUMENT", "MALFORMED_MESSAGE")
        calls = "JobService/WatchJob", "JobService/Fly", "FrontierService/Solve", "TokenService/ListTokens"
        for path in calls:
            assert_refused(await server.post(f"api/{path}", {}), 501, "UNIMPLEMENTED", "UNKNOWN_CALL")

        async def failing(*_: object, **__: object) -> None:
            raise ArithmeticError("planted")

        monkeypatch.setattr(Jobs, "job", failing)
        fault = await call("GetJob", {"job_id": "job"})
        assert_refused(fault, 500, "INTERNAL", "INTERNAL")
        assert "planted" not in fault.text
        assert fault.json["message"] == str(InternalError(cause="ArithmeticError"))
        monkeypatch.setattr(Scrape, "answer", failing)
        fault = await server.get("metrics")
        assert_refused(fault, 500, "INTERNAL", "INTERNAL")
        assert "planted" not in fault.text


async def test_the_pages_files(tmp_path: Path) -> None:
    async with (
        guarded(tmp_path) as server,
        aiohttp.ClientSession(auto_decompress=False) as session,
    ):
        plain, nested = {"Accept-Encoding": "identity"}, "vendor/uplot/uPlot.esm.js"
        page = await ask(session, "GET", server.url, headers=plain)
        assert (page.status, page.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert page.text.startswith("<!doctype html>")
        script = await ask(session, "GET", f"{server.url}/static/{nested}", headers=plain)
        assert script.headers["Content-Type"] == "text/javascript; charset=utf-8"
        async with session.get(f"{server.url}/static/{nested}") as packed:
            assert packed.headers["Content-Encoding"] == "gzip"
            assert len(await packed.read()) < len(script.text) / 2
        request = make_mocked_request("GET", "/", headers={"Accept-Encoding": "gzip"})
        tiny = PageFile.of("tiny.css", b"p{}").answer(request)
        assert (tiny.body, "Content-Encoding" in tiny.headers) == (b"p{}", False)
        etag = {"If-None-Match": script.headers["ETag"]}
        same = await ask(session, "GET", f"{server.url}/static/{nested}", headers=etag)
        assert (same.status, same.text) == (304, "")
        for path in ("absent.js", "../app.py", "..%2fapp.py", "view", "%2e%2e/%2e%2e/server.py"):
            async with session.get(f"{server.url}/static/{path}") as absent:
                assert absent.status == 404, path


async def test_every_answer_restricts_the_page(tmp_path: Path) -> None:
    async with guarded(tmp_path) as server:
        statuses = set()
        for method, path in (
            ("GET", "/"),
            ("GET", "/session"),
            ("GET", "/static/absent"),
            ("GET", "/api/watch/jobs"),
            ("POST", "/api/JobService/GetJob"),
            ("DELETE", "/session"),
            ("PUT", "/"),
            ("GET", "/metrics"),
        ):
            answer = await ask(server.session, method, f"{server.url}{path}")
            statuses.add(answer.status)
            assert answer.headers["Content-Security-Policy"].startswith(POLICY), path
            assert answer.headers["Content-Security-Policy"].endswith(
                "frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
            )
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert statuses == {200, 401, 403, 404, 405}


async def test_the_grid_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_flight_cache, "MAX_FRESH_S", 0.0)  # each answer is made again
    async with site(tmp_path) as here:
        ranks = f"{here.url}/api/ranks/job"
        await here.client.register()
        grid = (await ask(here.session, "GET", ranks)).json
        assert (grid["shape"], grid["run_number"]) == ([2, 2, 1], 1)
        assert [grid["states"][number] for number in grid["state"]] == ["EXPECTED"] * 4
        for column in ("iteration", "clock_mhz", "slowness", "power_w"):
            assert grid[column] == [None] * 4

        agent = await here.train(job_pb2.JOB_STATE_PLANNED, 6)
        reported = await ask(here.session, "GET", ranks)
        plain = await ask(here.session, "GET", ranks, headers={"Accept-Encoding": "identity"})
        assert reported.text == plain.text
        assert reported.headers["Content-Encoding"] == "gzip"
        grid = json.loads(reported.text)
        assert [grid["states"][number] for number in grid["state"]] == ["CONNECTED"] * 4
        assert set(grid["iteration"]) == {agent.ranks[ALL_PLACES[0]].iteration}
        timeline = await here.client.ask("GetTimeline", job_id="job", pipeline=1)
        own = [entry for entry in timeline.entries if entry.stage == 1]
        own_s = sum(each.duration_s for each in own)
        mean_mhz = sum(each.clock_mhz * each.duration_s for each in own) / own_s
        assert grid["clock_mhz"][3] == pytest.approx(mean_mhz, abs=0.1)
        job = await here.client.job()
        planned = {"job_id": "job", "iteration_time_s": job.planned_iteration_time_s[1]}
        plan = (await here.post("api/FrontierService/GetPlan", planned)).json["plan"]
        planned_s = sum(each["duration_s"] for each in plan["stages"][1]["computations"])
        assert grid["slowness"][3] == pytest.approx(own_s / planned_s, rel=0.1)
        assert sum(grid["power_w"]) == pytest.approx(job.figures.power_w, abs=0.5)
