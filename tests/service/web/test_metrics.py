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
from perseus.service.job.iterations.iteration_log import IterationLog
from perseus.service.job.ranks.rank_table import RankTable
from perseus.service.shell.power import Power
from perseus.v1 import job_pb2
from tests.ports import free_port
from tests.service.grpc_fakes import (
    ALL_PLACES,
    make_secured_settings,
    make_settings,
    refusal,
    running_here,
    until,
)
from tests.service.web.page_server import site
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


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer each scrape anew."""
    monkeypatch.setattr("perseus.service.web.scrape.FRESH_S", 0.0)


async def test_a_jobs_metrics_agree_with_grpc(tmp_path: Path) -> None:
    async with site(tmp_path, metrics_ranks=True, signals={"grid": CARBON}) as here:
        client = here.client
        samples: Samples = {}

        def of_job(name: str, **labels: str) -> float:
            return value(samples, f"perseus_job_{name}", job_id="job", **labels)

        await client.register()
        agent = await here.train(job_pb2.JOB_STATE_PROFILING, 6)
        job, samples = await client.job(), await scrape(here.metrics)
        assert of_job("state", state="profiling") == 1
        assert of_job("profiling_tried_clocks") == job.profiling_progress.tried_clock_count
        assert of_job("profiling_max_clocks") == job.profiling_progress.max_clock_count > 0
        assert of_job("profiling_remaining_seconds") >= 0

        await agent.send(heartbeat={"clock_ahead_s": -7.0})
        await agent.iterate_until(client, job_pb2.JOB_STATE_PLANNED)
        await agent.iterate(4)
        _, reason, _ = await refusal(client.job("another"))
        job, samples = await client.job(), await scrape(here.metrics)
        states = {state: of_job("state", state=state) for state in ("planned", "profiling", "stock")}
        assert states == {"planned": 1, "profiling": 0, "stock": 0}
        period = (await client.ask("GetReport", job_id="job")).periods[-1]
        assert {
            "connected": of_job("ranks", state="connected"),
            "baseline": of_job("baseline_seconds"),
            "t_min": of_job("frontier_seconds", point="t_min"),
            "t_slow": of_job("frontier_seconds", point="t_slow"),
            "profiled": of_job("profiled_clocks"),
            "iterations": of_job("iterations_total", regular="yes"),
            "measured": of_job("measured_seconds"),
            "violations": of_job("prediction_violations_total"),
            "quarantines": of_job("quarantines_total"),
        } == {
            "connected": 4,
            "baseline": job.baseline.iteration_time_s,
            "t_min": job.t_min_s + job.iteration_overhead_s,
            "t_slow": job.t_slow_s + job.iteration_overhead_s,
            "profiled": job.profiled_clock_count,
            "iterations": agent.ranks[ALL_PLACES[0]].iteration + 1,
            "measured": period.iteration_time_s,
            "violations": 0,
            "quarantines": 0,
        }
        assert of_job("iteration_seconds") == pytest.approx(0.8)
        assert of_job("power_watts") == pytest.approx(of_job("iteration_energy_joules") / 0.8)
        assert of_job("predicted_seconds") >= job.baseline.iteration_time_s
        assert of_job("saving_ratio") == pytest.approx(period.saving.energy_percent / 100, abs=1e-12)
        assert of_job("plan_switches_total") >= 1

        assert value(samples, "perseus_jobs", state="planned") == 1
        assert value(samples, "perseus_telemetry_batches_total", outcome="taken") == agent.sequence
        assert value(samples, "perseus_agent_streams") == 1
        assert value(samples, "perseus_clock_skew_seconds", kind="agents") == 7
        assert value(samples, "perseus_refusals_total", reason=reason) >= 1
        assert value(samples, "perseus_solver_seconds_count", pool="jobs") >= 1
        assert value(samples, "perseus_store_commit_seconds_count") > 0
        assert value(samples, "perseus_store_size_bytes") > 10_000
        assert value(samples, "perseus_coordinator_serving") == 1
        assert value(samples, "process_cpu_seconds_total") > 0
        assert value(samples, "perseus_rank_iteration", job_id="job", pipeline="1", stage="0", tensor="0") > 0

        ranks = names.RANK_CONNECTED, names.RANK_ITERATION
        wanted = (names.BUILD_INFO, *names.SERVER, *names.FEED, *names.SIGNAL, *names.JOB, *ranks)
        unreported = CONDITIONAL | UNLIMITED | OF_POSTGRESQL
        assert series_of(samples, wanted) == {
            metric.name: {frozenset(metric.labels)} for metric in wanted if metric not in unreported
        }

        assert value(samples, "perseus_signal_known", signal="grid") == 0
        assert value(samples, "perseus_signal_failures_total", signal="grid") >= 1
        job = (await client.ask("ReportStraggler", job_id="job", pipeline=0, slowdown_factor=1.2)).job
        samples = await scrape(here.metrics)
        assert of_job("stragglers", source="reported") == 1
        assert of_job("straggler_seconds") == pytest.approx(1.2 * job.t_min_s + job.iteration_overhead_s)
        await client.finish()
        samples = await scrape(here.metrics)
        assert value(samples, "perseus_jobs", state="finished") == 1
        assert not any(("job_id", "job") in labels for _, labels in samples), "an ended job has no series"


async def test_the_ledgers_totals_outlast_jobs_and_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perseus.service.shell.ledger.TOTALS_S", 0.05)
    samples: Samples = {}

    async def are_reported() -> bool:
        samples.clear()
        samples.update(await scrape(here.metrics))
        reported_j = samples.get(("perseus_ledger_energy_joules", frozenset()))
        return reported_j == pytest.approx(3.6e6 * total.energy_kwh)

    async with site(tmp_path, price_per_kwh=0.25) as here:
        await here.client.register()
        agent = await here.train(job_pb2.JOB_STATE_PLANNED, 4)
        await here.client.finish()
        total = (await here.client.ask("ListLedgerEntries")).total
        assert total.energy_kwh > 0
        await until(are_reported)
        await agent.end()
    async with site(tmp_path, price_per_kwh=0.25) as here:
        await until(are_reported)
    saved_j = value(samples, "perseus_ledger_saved_energy_joules")
    assert saved_j == pytest.approx(3.6e6 * total.saved_energy_kwh)
    assert value(samples, "perseus_ledger_cost") == pytest.approx(total.cost)
    assert value(samples, "perseus_ledger_saved_cost") == pytest.approx(total.saved_cost)
    reported = {name for name, _ in samples if name.startswith("perseus_ledger_")}
    rated = {metric.name for metric in names.LEDGER if "carbon" not in metric.name}
    assert reported == rated, "no rate of carbon is known"


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
    async with site(tmp_path) as here:
        samples = await scrape(here.metrics)
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


async def test_no_work_over_ranks_is_done_unless_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def walk(_: RankTable) -> NoReturn:
        raise AssertionError("all ranks are looked at")

    async with site(tmp_path) as here:
        await here.client.register()
        await here.train(job_pb2.JOB_STATE_PLANNED, 4)
        with monkeypatch.context() as patched:
            patched.setattr(RankTable, "__iter__", walk)
            samples = await scrape(here.metrics)
    assert value(samples, "perseus_job_quarantines_total", job_id="job") == 0
    assert value(samples, "perseus_job_measured_seconds", job_id="job") > 0


async def test_a_job_that_fails_a_scrape_is_quarantined_and_the_others_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, failed = IterationLog.latest_period, list[IterationLog]()

    def latest_period(log: IterationLog) -> object:
        if not failed:
            failed.append(log)
        if log is failed[0]:
            raise ArithmeticError("planted")
        return before(log)

    async with site(tmp_path) as here:
        await here.client.register(job_id="bad")
        await here.client.register(job_id="good")
        monkeypatch.setattr(IterationLog, "latest_period", latest_period)
        samples = await scrape(here.metrics)
    for job_id, state, needs_resume in (("bad", "stock", 1), ("good", "waiting", 0)):
        assert value(samples, "perseus_job_state", job_id=job_id, state=state) == 1
        assert value(samples, "perseus_job_needs_resume", job_id=job_id) == needs_resume
    assert value(samples, "perseus_job_quarantines_total", job_id="bad") == 1


async def test_the_newest_of_too_many_jobs_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perseus.service.web.collector.MAX_JOBS", 2)
    async with site(tmp_path) as here:
        for number in range(3):
            await here.client.register(job_id=f"job-{number}")
        samples = await scrape(here.metrics)
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
    monkeypatch.setattr("perseus.service.listening.POLL_S", 0.02)
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
