"""The page's requests: the services' calls as JSON, the page's own files, and answers to invalid requests."""

import json
from pathlib import Path

import aiohttp
import pytest
from google.protobuf import json_format

from perseus.service.domain.errors import InternalError
from perseus.service.shell.jobs import Jobs
from perseus.service.web import single_flight_cache
from perseus.v1 import job_pb2, job_service_pb2
from tests.ports import free_port
from tests.service.grpc_fakes import ALL_PLACES, FakeAgent, connected, make_settings, spec_message
from tests.service.web.page_server import Answer, ask, serving

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
    url = f"http://127.0.0.1:{free_port()}"
    async with (
        connected(make_settings(tmp_path, http=url.removeprefix("http://"))) as client,
        aiohttp.ClientSession() as session,
    ):
        await client.register()
        agent = FakeAgent(client, "agent", ALL_PLACES)
        await agent.join()
        await agent.iterate_until(client, job_pb2.JOB_STATE_PLANNED)
        await agent.iterate(4)

        async def same(method: str, **fields: object) -> None:
            asked = getattr(job_service_pb2, f"{method}Request")(**fields)
            reported = await getattr(client.jobs, method)(asked, timeout=20)
            answer = await ask(session, "POST", f"{url}/api/JobService/{method}", fields)
            assert answer.status == 200, answer.text
            assert json_format.Parse(answer.text, type(reported)()) == reported
            assert answer.headers["Cache-Control"] == "no-store"

        await same("GetJob", job_id="job")
        await same("ListJobs")
        await same("ListRanks", job_id="job")
        await same("ListJobEvents", job_id="job", page_size=5)
        await same("GetReport", job_id="job")
        await same("GetTimeline", job_id="job", pipeline=1)
        await same("GetTimeline", job_id="job", pipeline=1, from_baseline=True)

        # Default values are present, optional fields may be absent; numbers of 64 bits are texts.
        job = (await ask(session, "POST", f"{url}/api/JobService/GetJob", {"job_id": "job"})).json["job"]
        assert job["straggler_count"] == 0
        assert "finish_time" not in job
        assert job["last_event_sequence"].isdecimal()
        assert job["figures"]["iteration_time_s"] == 0.8
        assert job["figures"]["power_w"] == pytest.approx(job["figures"]["energy_j"] / 0.8)
        assert job["figures"]["predicted_iteration_time_s"] > 0
        report = (await ask(session, "POST", f"{url}/api/JobService/GetReport", {"job_id": "job"})).json
        assert job["figures"]["saving"] == report["periods"][-1]["saving"]

        frontier = await ask(session, "POST", f"{url}/api/FrontierService/GetFrontier", {"job_id": "job"})
        assert frontier.json["frontier"]["t_min_s"] == job["t_min_s"]
        plan = {"job_id": "job", "iteration_time_s": job["t_slow_s"]}
        answer = await ask(session, "POST", f"{url}/api/FrontierService/GetPlan", plan)
        assert len(answer.json["plan"]["stages"]) == 2

        # Controls work as over gRPC.
        straggler = {"job_id": "job", "pipeline": 0, "slowdown_factor": 1.2}
        path = f"{url}/api/JobService/ReportStraggler"
        assert_refused(
            await ask(session, "POST", path, straggler), 403, "PERMISSION_DENIED", "ORIGIN_MISMATCH"
        )
        answer = await ask(session, "POST", path, straggler, {"Origin": url})
        assert answer.json["job"]["straggler_count"] == (await client.job()).straggler_count == 1


async def test_the_baselines_timeline_is_kept_beside_the_latest_one(tmp_path: Path) -> None:
    async with connected(make_settings(tmp_path)) as client:
        await client.register()
        agent = FakeAgent(client, "agent", ALL_PLACES)
        await agent.join()
        await agent.iterate_until(client, job_pb2.JOB_STATE_PLANNED)
        await agent.iterate(6)

        def asked(**fields: object) -> job_service_pb2.GetTimelineRequest:
            return job_service_pb2.GetTimelineRequest(job_id="job", **fields)  # type: ignore[arg-type]

        before = await client.jobs.GetTimeline(asked(pipeline=1, from_baseline=True), timeout=20)
        under = await client.jobs.GetTimeline(asked(pipeline=1), timeout=20)
        frontier = await client.jobs.GetReport(job_service_pb2.GetReportRequest(job_id="job"), timeout=20)
        stock = next(each for each in frontier.periods if each.state == job_pb2.JOB_STATE_BASELINE)
        assert before.iteration <= stock.last_iteration < under.iteration
        assert (before.pipeline, under.pipeline) == (0, 1)
        assert len(before.entries) == len(under.entries) == 12
        assert all(entry.power_w > 0 for entry in (*before.entries, *under.entries))
        assert len(under.blocking_power_w) == 2


async def test_invalid_requests_are_answered_like_grpc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as server, aiohttp.ClientSession() as session:
        api = f"{server.url}/api/JobService"

        async def call(method: str, body: object) -> Answer:
            return await ask(session, "POST", f"{api}/{method}", body, server.origin)

        assert (await call("RegisterJob", registration())).status == 200
        missing = await call("GetJob", {"job_id": "another"})
        assert_refused(missing, 404, "NOT_FOUND", "JOB_NOT_FOUND")
        assert missing.json["metadata"] == {"job_id": "another"}
        unsolved = await ask(
            session, "POST", f"{server.url}/api/FrontierService/GetFrontier", {"job_id": "job"}
        )
        assert_refused(unsolved, 400, "FAILED_PRECONDITION", "JOB_NOT_SOLVED")
        assert int(unsolved.headers["Retry-After"]) >= 1
        range_ = await call("ReportStraggler", {"job_id": "job", "pipeline": 7, "slowdown_factor": 2})
        assert_refused(range_, 400, "INVALID_ARGUMENT", "PIPELINE_OUT_OF_RANGE")
        number = await call("ReportStraggler", {"job_id": "job", "slowdown_factor": "NaN"})
        assert_refused(number, 400, "INVALID_ARGUMENT", "INVALID_FIELD")
        control = await call("GetJob", {"job_id": "a\x07"})
        assert_refused(control, 400, "INVALID_ARGUMENT", "INVALID_FIELD")

        for body in (b"", b"{", b"[]", b'"x"', b"null", b"\xff"):
            assert_refused(await call("GetJob", body), 400, "INVALID_ARGUMENT", "MALFORMED_MESSAGE")
        for body in (b'{"job_id": 5}', b'{"job_id": "\\ud800"}', b'{"unknown": 1}'):
            assert_refused(await call("GetJob", body), 400, "INVALID_ARGUMENT", "MALFORMED_MESSAGE")
        for body in (b"[" * 60_000, b'{"spec":' * 7_000, b'{"job_id": ' + b"1" * 5_000 + b"}"):
            assert_refused(await call("GetJob", body), 400, "INVALID_ARGUMENT", "MALFORMED_MESSAGE")
        assert_refused(await call("GetJob", b" " * 70_000), 413, "RESOURCE_EXHAUSTED", "HTTP_413")
        form = await ask(session, "POST", f"{api}/GetJob", {"job_id": "job"}, {"Content-Type": "text/plain"})
        assert_refused(form, 400, "INVALID_ARGUMENT", "INVALID_FIELD")

        for path in (
            "JobService/WatchJob",
            "JobService/Fly",
            "FrontierService/Solve",
            "TokenService/ListTokens",
        ):
            unknown = await ask(session, "POST", f"{server.url}/api/{path}", {})
            assert_refused(unknown, 501, "UNIMPLEMENTED", "UNKNOWN_CALL")
        assert_refused(await ask(session, "GET", f"{server.url}/api"), 404, "NOT_FOUND", "HTTP_404")
        assert_refused(await ask(session, "GET", f"{api}/GetJob"), 405, "UNIMPLEMENTED", "HTTP_405")
        assert_refused(
            await ask(session, "GET", f"{server.url}/api/ranks/another"), 404, "NOT_FOUND", "JOB_NOT_FOUND"
        )

        async def failing(*_: object, **__: object) -> None:
            raise ArithmeticError("planted")

        monkeypatch.setattr(Jobs, "job", failing)
        fault = await call("GetJob", {"job_id": "job"})
        assert_refused(fault, 500, "INTERNAL", "INTERNAL")
        assert "planted" not in fault.text
        assert fault.json["message"] == str(InternalError(cause="ArithmeticError"))


async def test_the_pages_files(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, is_open=False) as server,
        aiohttp.ClientSession(auto_decompress=False) as session,
    ):
        plain = {"Accept-Encoding": "identity"}
        page = await ask(session, "GET", server.url, headers=plain)
        assert (page.status, page.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert page.text.startswith("<!doctype html>")
        script = await ask(session, "GET", f"{server.url}/static/view/main.js", headers=plain)
        assert script.headers["Content-Type"] == "text/javascript; charset=utf-8"
        async with session.get(f"{server.url}/static/view/main.js") as packed:
            assert packed.headers["Content-Encoding"] == "gzip"
            assert len(await packed.read()) < 100
        async with session.get(f"{server.url}/static/tiny.css") as tiny:
            assert "Content-Encoding" not in tiny.headers
            assert await tiny.read() == b"p{}"
        etag = {"If-None-Match": script.headers["ETag"]}
        same = await ask(session, "GET", f"{server.url}/static/view/main.js", headers=etag)
        assert (same.status, same.text) == (304, "")
        for path in ("absent.js", "../app.py", "..%2fapp.py", "view", "%2e%2e/%2e%2e/server.py"):
            async with session.get(f"{server.url}/static/{path}") as absent:
                assert absent.status == 404, path


async def test_every_answer_restricts_the_page(tmp_path: Path) -> None:
    async with serving(tmp_path, is_open=False) as server, aiohttp.ClientSession() as session:
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
            answer = await ask(session, method, f"{server.url}{path}")
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
    url = f"http://127.0.0.1:{free_port()}"
    async with (
        connected(make_settings(tmp_path, http=url.removeprefix("http://"))) as client,
        aiohttp.ClientSession() as session,
    ):
        await client.register()
        grid = (await ask(session, "GET", f"{url}/api/ranks/job")).json
        assert (grid["shape"], grid["run_number"]) == ([2, 2, 1], 1)
        assert [grid["states"][number] for number in grid["state"]] == ["EXPECTED"] * 4
        for column in ("iteration", "clock_mhz", "slowness", "power_w"):
            assert grid[column] == [None] * 4

        agent = FakeAgent(client, "agent", ALL_PLACES)
        await agent.join()
        await agent.iterate_until(client, job_pb2.JOB_STATE_PLANNED)
        await agent.iterate(6)
        async with aiohttp.ClientSession(headers={"Accept-Encoding": "gzip"}) as packed:
            reported = await ask(packed, "GET", f"{url}/api/ranks/job")
            again = await ask(session, "GET", f"{url}/api/ranks/job")
        assert reported.headers["Content-Encoding"] == "gzip"
        grid = json.loads(reported.text)
        assert reported.text == again.text
        assert [grid["states"][number] for number in grid["state"]] == ["CONNECTED"] * 4
        assert set(grid["iteration"]) == {agent.ranks[ALL_PLACES[0]].iteration}
        ranks = await client.ranks()
        assert len(ranks) == 4
        timeline = await client.jobs.GetTimeline(
            job_service_pb2.GetTimelineRequest(job_id="job", pipeline=1), timeout=20
        )
        own = [entry for entry in timeline.entries if entry.stage == 1]
        mean_mhz = sum(each.clock_mhz * each.duration_s for each in own) / sum(
            each.duration_s for each in own
        )
        assert grid["clock_mhz"][3] == pytest.approx(mean_mhz, abs=0.1)
        job = await client.job()
        planned = {"job_id": "job", "iteration_time_s": job.planned_iteration_time_s[1]}
        plan = (await ask(session, "POST", f"{url}/api/FrontierService/GetPlan", planned)).json["plan"]
        planned_s = sum(each["duration_s"] for each in plan["stages"][1]["computations"])
        assert grid["slowness"][3] == pytest.approx(sum(each.duration_s for each in own) / planned_s, rel=0.1)
        assert sum(grid["power_w"]) == pytest.approx(job.figures.power_w, abs=0.5)
