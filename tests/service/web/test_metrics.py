"""The coordinator's metrics agree with its answers over gRPC, under the documented names."""

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NoReturn

import pytest

from perseus.certificates import Authority
from perseus.demo.security import Security
from perseus.metrics import names
from perseus.service.domain.errors import AddressUnavailableError
from perseus.service.domain.power import Feed, FeedStatus
from perseus.service.job.ranks.rank_table import RankTable
from perseus.service.shell.power import Power
from perseus.v1 import agent_service_pb2, job_pb2, job_service_pb2, ledger_service_pb2
from perseus.v1.ledger_service_pb2_grpc import LedgerServiceStub
from tests.ports import free_port
from tests.service.grpc_fakes import (
    ALL_PLACES,
    TIMEOUT_S,
    FakeAgent,
    connected,
    make_secured_settings,
    make_settings,
    refusal,
    running_here,
    until,
)
from tests.service.web.scraping import Samples, get, scrape, value

# Metrics that exist only where there is something to report.
PROFILING = {names.JOB_PROFILING_TRIED, names.JOB_PROFILING_MAX, names.JOB_PROFILING_LEFT}
CONDITIONAL = {names.JOB_STALLED, names.JOB_STRAGGLER_TIME, names.JOB_BUDGET_TARGET_TIME, *PROFILING}
UNLIMITED = {names.FEED_LIMIT, names.FEED_POWER_CAP}
OF_POSTGRESQL = {names.STORE_STANDBYS, names.STANDBY_COORDINATORS}
CARBON = {"kind": "carbon", "csv": "/nonexistent/carbon.csv", "column": "g"}


def series_of(samples: Samples, metrics: tuple[names.Metric, ...]) -> dict[str, set[frozenset[str]]]:
    """Return the label names of our samples, by metric; for histograms without the bucket's bound."""
    found: dict[str, set[frozenset[str]]] = {}
    for sample, labels in samples:
        for metric in metrics:
            plain = metric.name if metric.kind is not names.Kind.HISTOGRAM else f"{metric.name}_count"
            if sample == plain:
                found.setdefault(metric.name, set()).add(frozenset(name for name, _ in labels))
    return found


async def test_a_jobs_metrics_agree_with_grpc(tmp_path: Path) -> None:
    http = f"127.0.0.1:{free_port()}"
    settings = make_settings(tmp_path, http=http, metrics_ranks=True, signals={"grid": CARBON})
    async with connected(settings) as client:
        await client.register()
        agent = FakeAgent(client, "agent", ALL_PLACES)
        await agent.join()
        await agent.send(heartbeat=agent_service_pb2.Heartbeat(clock_ahead_s=-7.0))
        await agent.iterate_until(client, job_pb2.JOB_STATE_PLANNED)
        await agent.iterate(4)
        _, reason, _ = await refusal(client.job("another"))
        job, samples = await client.job(), await scrape(f"http://{http}/metrics")

        def of_job(name: str, **labels: str) -> float:
            return value(samples, f"perseus_job_{name}", job_id="job", **labels)

        assert {state: of_job("state", state=state) for state in ("planned", "profiling", "stock")} == {
            "planned": 1,
            "profiling": 0,
            "stock": 0,
        }
        assert of_job("ranks", state="connected") == 4
        assert of_job("baseline_seconds") == job.baseline.iteration_time_s
        assert of_job("frontier_seconds", point="t_min") == job.t_min_s + job.iteration_overhead_s
        assert of_job("frontier_seconds", point="t_slow") == job.t_slow_s + job.iteration_overhead_s
        assert of_job("profiled_clocks") == job.profiled_clock_count
        assert of_job("iterations_total", regular="yes") == agent.ranks[ALL_PLACES[0]].iteration + 1
        assert of_job("iteration_seconds") == pytest.approx(0.8)
        assert of_job("power_watts") == pytest.approx(of_job("iteration_energy_joules") / 0.8)
        assert of_job("predicted_seconds") >= job.baseline.iteration_time_s
        request = job_service_pb2.GetReportRequest(job_id="job")
        period = (await client.jobs.GetReport(request, timeout=TIMEOUT_S)).periods[-1]
        assert of_job("measured_seconds") == pytest.approx(period.iteration_time_s)
        assert of_job("saving_ratio") == pytest.approx(period.saving.energy_percent / 100, abs=1e-12)
        assert of_job("plan_switches_total") >= 1
        assert of_job("prediction_violations_total") == of_job("quarantines_total") == 0

        assert value(samples, "perseus_jobs", state="planned") == 1
        assert value(samples, "perseus_telemetry_batches_total", outcome="taken") == agent.sequence
        assert value(samples, "perseus_agent_streams") == 1
        assert value(samples, "perseus_clock_skew_seconds", kind="agents") == 7
        assert value(samples, "perseus_refusals_total", reason=reason) >= 1
        assert value(samples, "perseus_solver_seconds_count", pool="jobs") >= 1
        assert value(samples, "perseus_store_commit_seconds_count") > 0
        assert value(samples, "perseus_store_size_bytes") > 10_000
        assert value(samples, "perseus_coordinator_serving") == 1
        assert value(samples, "perseus_rank_iteration", job_id="job", pipeline="1", stage="0", tensor="0") > 0

        ranks = names.RANK_CONNECTED, names.RANK_ITERATION
        wanted = (names.BUILD_INFO, *names.SERVER, *names.FEED, *names.SIGNAL, *names.JOB, *ranks)
        unreported = CONDITIONAL | UNLIMITED | OF_POSTGRESQL
        assert series_of(samples, wanted) == {
            metric.name: {frozenset(metric.labels)} for metric in wanted if metric not in unreported
        }

        assert value(samples, "perseus_signal_known", signal="grid") == 0
        assert value(samples, "perseus_signal_failures_total", signal="grid") >= 1
        straggling = job_service_pb2.ReportStragglerRequest(job_id="job", pipeline=0, slowdown_factor=1.2)
        job = (await client.jobs.ReportStraggler(straggling, timeout=TIMEOUT_S)).job

        async def is_reported() -> bool:
            nonlocal samples
            samples = await scrape(f"http://{http}/metrics")
            return of_job("stragglers", source="reported") == 1

        await until(is_reported)  # an answer is reused for a second
        assert of_job("straggler_seconds") == pytest.approx(1.2 * job.t_min_s + job.iteration_overhead_s)
        await client.finish()

        async def is_gone() -> bool:
            nonlocal samples
            samples = await scrape(f"http://{http}/metrics")
            return value(samples, "perseus_jobs", state="finished") == 1

        await until(is_gone)
        assert not any(("job_id", "job") in labels for _, labels in samples), "an ended job has no series"


async def test_the_ledgers_totals_outlast_jobs_and_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perseus.service.shell.ledger.TOTALS_S", 0.05)
    http = f"127.0.0.1:{free_port()}"
    settings = make_settings(tmp_path, http=http, price_per_kwh=0.25)
    samples: Samples = {}
    energy_j = 0.0

    async def are_reported() -> bool:
        nonlocal samples
        samples = await scrape(f"http://{http}/metrics")
        reported_j = samples.get(("perseus_ledger_energy_joules", frozenset()))
        return reported_j == pytest.approx(energy_j)

    async with connected(settings) as client:
        await client.register()
        agent = FakeAgent(client, "agent", ALL_PLACES)
        await agent.join()
        await agent.iterate_until(client, job_pb2.JOB_STATE_PLANNED)
        await agent.iterate(4)
        await client.finish()
        request = ledger_service_pb2.ListLedgerEntriesRequest()
        stub = LedgerServiceStub(client.channel)
        total = (await stub.ListLedgerEntries(request, timeout=TIMEOUT_S)).total
        energy_j = 3.6e6 * total.energy_kwh
        assert energy_j > 0
        await until(are_reported)
        await agent.end()
    async with connected(settings):
        await until(are_reported)
    saved_j = value(samples, "perseus_ledger_saved_energy_joules")
    assert saved_j == pytest.approx(3.6e6 * total.saved_energy_kwh)
    assert value(samples, "perseus_ledger_cost") == pytest.approx(total.cost)
    assert value(samples, "perseus_ledger_saved_cost") == pytest.approx(total.saved_cost)
    reported = {name for name, _ in samples if name.startswith("perseus_ledger_")}
    assert reported == {metric.name for metric in names.LEDGER if "carbon" not in metric.name}, (
        "no rate is known"
    )


async def test_series_do_not_grow_with_ranks_unless_asked_for(tmp_path: Path) -> None:
    http = f"127.0.0.1:{free_port()}"
    counts: dict[str, int] = {}
    async with connected(make_settings(tmp_path, http=http)) as client:
        for pipelines in (1, 64):
            job_id = f"job-{pipelines}"
            await client.register(job_id=job_id, pipelines=pipelines)

            async def has_job(job_id: str = job_id) -> bool:
                samples = await scrape(f"http://{http}/metrics")
                counts[job_id] = sum(("job_id", job_id) in labels for _, labels in samples)
                return counts[job_id] > 0

            await until(has_job)  # an answer is reused for a second
    assert counts["job-1"] == counts["job-64"]


@pytest.mark.parametrize("is_above", [False, True])
async def test_a_feeds_metrics_are_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_above: bool
) -> None:
    status = FeedStatus(
        "hall",
        limit_w=1000.0,
        in_transition=not is_above,
        is_compliant=not is_above,
        to_pause=(),
        beyond_tolerance=(),
        measured_w=1081.0,
        managed_w=990.0,
        unmanaged_w=60.0,
        power_cap_w=1050.0,
        held=("job",),
        judged_w=None,
        judged_mean_w=None,
        judged_s=0.0,
        is_above_power_cap=is_above,
    )
    monkeypatch.setattr(Power, "feeds", lambda *_, **__: [(Feed("hall"), status)])
    http = f"127.0.0.1:{free_port()}"
    async with running_here(make_settings(tmp_path, http=http)):
        samples = await scrape(f"http://{http}/metrics")
    assert {metric.name: value(samples, metric.name, feed="hall") for metric in names.FEED} == {
        "perseus_feed_limit_watts": 1000.0,
        "perseus_feed_power_cap_watts": 1050.0,
        "perseus_feed_power_watts": 1081.0,
        "perseus_feed_managed_watts": 990.0,
        "perseus_feed_unmanaged_watts": 60.0,
        "perseus_feed_compliant": not is_above,
        "perseus_feed_above_power_cap": is_above,
        "perseus_feed_in_transition": not is_above,
        "perseus_feed_held_jobs": 1.0,
    }


async def test_metrics_show_the_progress_of_profiling(tmp_path: Path) -> None:
    http = f"127.0.0.1:{free_port()}"
    async with connected(make_settings(tmp_path, http=http)) as client:
        await client.register()
        agent = FakeAgent(client, "agent", ALL_PLACES)
        await agent.join()
        await agent.iterate_until(client, job_pb2.JOB_STATE_PROFILING)
        await agent.iterate(6)
        job, samples = await client.job(), await scrape(f"http://{http}/metrics")
    assert value(samples, "perseus_job_state", job_id="job", state="profiling") == 1
    reported = {metric: value(samples, metric.name, job_id="job") for metric in PROFILING}
    assert reported[names.JOB_PROFILING_TRIED] == job.profiling_progress.tried_clock_count
    assert reported[names.JOB_PROFILING_MAX] == job.profiling_progress.max_clock_count > 0
    assert reported[names.JOB_PROFILING_LEFT] >= 0


async def test_no_work_over_ranks_is_done_unless_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def walk(_: RankTable) -> NoReturn:
        raise AssertionError("all ranks are looked at")

    http = f"127.0.0.1:{free_port()}"
    async with connected(make_settings(tmp_path, http=http)) as client:
        await client.register()
        agent = FakeAgent(client, "agent", ALL_PLACES)
        await agent.join()
        await agent.iterate_until(client, job_pb2.JOB_STATE_PLANNED)
        await agent.iterate(4)
        with monkeypatch.context() as patched:
            patched.setattr(RankTable, "__iter__", walk)
            samples = await scrape(f"http://{http}/metrics")
    assert value(samples, "perseus_job_quarantines_total", job_id="job") == 0
    assert value(samples, "perseus_job_measured_seconds", job_id="job") > 0


async def test_a_job_that_fails_a_scrape_is_quarantined_and_the_others_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from perseus.service.job.iterations.iteration_log import IterationLog

    http = f"127.0.0.1:{free_port()}"
    async with connected(make_settings(tmp_path, http=http)) as client:
        await client.register(job_id="bad")
        await client.register(job_id="good")
        before = IterationLog.latest_period
        failed: list[IterationLog] = []

        def latest_period(log: IterationLog) -> object:
            if not failed:
                failed.append(log)
            if log is failed[0]:
                raise ArithmeticError("planted")
            return before(log)

        monkeypatch.setattr(IterationLog, "latest_period", latest_period)
        samples = await scrape(f"http://{http}/metrics")
    assert value(samples, "perseus_job_state", job_id="bad", state="stock") == 1
    assert value(samples, "perseus_job_needs_resume", job_id="bad") == 1
    assert value(samples, "perseus_job_needs_resume", job_id="good") == 0
    assert value(samples, "perseus_job_quarantines_total", job_id="bad") == 1
    assert value(samples, "perseus_job_state", job_id="good", state="waiting") == 1


async def test_the_newest_of_too_many_jobs_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perseus.service.web.collector.MAX_JOBS", 2)
    http = f"127.0.0.1:{free_port()}"
    async with connected(make_settings(tmp_path, http=http)) as client:
        for number in range(3):
            await client.register(job_id=f"job-{number}")
        samples = await scrape(f"http://{http}/metrics")
    reported = {dict(labels)["job_id"] for name, labels in samples if name == "perseus_job_run_number"}
    assert reported == {"job-1", "job-2"}
    assert value(samples, "perseus_hidden_jobs") == 1
    assert value(samples, "perseus_jobs", state="waiting") == 3


def client_context(security: Security) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(security.ca))
    context.load_cert_chain(security.client_certificate, security.client_key)
    return context


async def test_tls_uses_grpcs_certificates_and_their_renewals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perseus.service.listening._POLL_S", 0.02)
    security = Security(tmp_path / "security")
    http = f"127.0.0.1:{free_port()}"
    settings = make_secured_settings(tmp_path, security, http=http)
    url = f"https://{http}/metrics"
    file = str(security.coordinator_certificate)
    async with running_here(settings):
        first = value(
            await scrape(url, client_context(security)),
            "perseus_certificate_expiry_timestamp_seconds",
            file=file,
        )
        with pytest.raises(Exception, match=r"(?i)certificate required|disconnected|reset"):
            await get(url, context=ssl.create_default_context(cafile=str(security.ca)))
        other = Authority.create(tmp_path / "other", "another", timedelta(days=2))
        renewed = other.folder / "ca.pem"
        # Another authority's: that shows that a different certificate is served.
        certificate, key = other.issue(
            tmp_path / "renewed",
            ["localhost", "127.0.0.1"],
            is_server=True,
            ends=datetime.now(UTC) + timedelta(days=1),
        )
        security.coordinator_key.write_bytes(key.read_bytes())
        security.coordinator_certificate.write_bytes(certificate.read_bytes())
        context = ssl.create_default_context(cafile=str(renewed))
        context.load_cert_chain(security.client_certificate, security.client_key)

        async def is_renewed() -> bool:
            try:
                samples = await scrape(url, context)
            except OSError:
                return False
            return value(samples, "perseus_certificate_expiry_timestamp_seconds", file=file) != first

        await until(is_renewed)


async def test_the_error_names_an_address_in_use(tmp_path: Path) -> None:
    http = f"127.0.0.1:{free_port()}"
    async with running_here(make_settings(tmp_path / "..", database=tmp_path / "a.db", http=http)):
        with pytest.raises(AddressUnavailableError, match=http):
            async with running_here(make_settings(tmp_path, database=tmp_path / "b.db", http=http)):
                pass
