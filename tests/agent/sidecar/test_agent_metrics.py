"""The agent's metrics describe its work; and the files that map its jobs for dcgm-exporter."""

import asyncio
import contextlib
import os
import socket
import ssl
import sys
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from perseus import configuration
from perseus.agent.rank.messages import GpuErrorReason
from perseus.agent.sidecar import gpus
from perseus.agent.sidecar.gpus import NOT_SERVED, AgentCounters, JobMapping
from perseus.agent.sidecar.metrics_server import serving_metrics
from perseus.agent.sidecar.optional import OptionalParts
from perseus.agent.sidecar.settings import AgentSettings
from perseus.certificates import Authority
from perseus.cli.main import app
from perseus.metrics import names
from perseus.metrics.readings import Readings
from tests.agent.coordinator_stub import until
from tests.agent.sidecar.training import HELD_MHZ, UUID, Node
from tests.ports import free_port
from tests.service.web.scraping import Samples, parsed, value


def get(url: str, token: str = "", context: ssl.SSLContext | None = None) -> tuple[int, str]:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=10, context=context) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def test_the_metrics_of_an_agent_at_work(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_READING_S", 0.1)
    port, mapping = free_port(), node.folder / "jobs"
    authority = Authority.create(node.folder / "ca", "test", timedelta(days=2))
    certificate, key = authority.issue(
        node.folder / "node", ["127.0.0.1"], is_server=True, ends=datetime.now(UTC) + timedelta(days=1)
    )
    context = ssl.create_default_context(cafile=str(node.folder / "ca" / "ca.pem"))
    (node.folder / "token").write_text("perseus_token")
    of_gpu = {"gpu_uuid": UUID}
    samples: Samples = {}

    def until_in_force() -> None:
        """Scrape until the plan's clock is in force."""
        while True:
            status, text = get(f"https://127.0.0.1:{port}/metrics", "perseus_token", context)
            assert status == 200, text
            samples.update(parsed(text))
            both = ("perseus_gpu_clock_wanted_hertz", "perseus_gpu_clock_in_force_hertz")
            keys = [(name, frozenset(of_gpu.items())) for name in both]
            if [samples.get(key) for key in keys] == [HELD_MHZ * 1e6] * 2:
                return
            time.sleep(0.1)

    async with node.serving(
        metrics_listen=f"127.0.0.1:{port}",
        metrics_tls_certificate=certificate,
        metrics_tls_key=key,
        metrics_token_file=node.folder / "token",
        job_mapping_folder=mapping,
    ):
        trainer = await node.train()
        node.offer_hold(trainer)
        await asyncio.to_thread(until_in_force)
        assert value(samples, "perseus_gpu_clock_set_hertz", **of_gpu) == HELD_MHZ * 1e6
        assert value(samples, "perseus_gpu_planned", **of_gpu) == 1
        assert 0 < value(samples, "perseus_gpu_power_watts", **of_gpu) < 1000
        assert value(samples, "perseus_gpu_energy_joules_total", **of_gpu) > 0
        assert value(samples, "perseus_gpu_clock_set_seconds_count", **of_gpu) >= 1
        assert value(samples, "perseus_gpu_marks_dropped_total", **of_gpu) == 0
        assert value(samples, "perseus_agent_connected") == 1
        ends_s = value(samples, "perseus_certificate_expiry_timestamp_seconds", file=str(certificate))
        assert 0 < ends_s - time.time() <= 86400
        lease_s = value(samples, "perseus_agent_lease_seconds")
        assert 0 < value(samples, "perseus_agent_lease_left_seconds") <= lease_s
        rank = {"job_id": "job", "pipeline": "0", "stage": "0", "tensor": "0"}
        assert value(samples, "perseus_gpu_rank_info", **of_gpu, **rank)
        assert {path.name: path.read_text() for path in mapping.glob("[!.]*")} == {"0": "job\n"}
        reported = {name for name, _ in samples}
        expected = {
            f"{metric.name}_count" if metric.kind is names.Kind.HISTOGRAM else metric.name
            for metric in (names.BUILD_INFO, *names.AGENT)
        }
        assert expected - reported == {names.AGENT_TRAINERS_REFUSED.name, names.AGENT_PART_FAILURES.name}
        await trainer.stop()
        await until(lambda: not list(mapping.iterdir()), "no job on the GPU")


def test_beyond_loopback_it_requires_tls_and_a_token() -> None:
    assert (
        configuration.load(AgentSettings, None, {"metrics_listen": "9464"}).metrics_listen == "127.0.0.1:9464"
    )
    for given in ("0.0.0.0:9464", "node:9464"):
        with pytest.raises(configuration.ConfigurationError, match="metrics_token_file"):
            configuration.load(AgentSettings, None, {"metrics_listen": given})
    for given in ("70000", "-1", "127.0.0.1:", "nonsense", "::1:9464"):
        with pytest.raises(configuration.ConfigurationError, match=r"--metrics-listen: .*PORT"):
            configuration.load(AgentSettings, None, {"metrics_listen": given})


def test_a_scraper_needs_the_token_that_the_file_has_now(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("perseus_first\n")
    with serving_metrics("127.0.0.1", 0, Readings, OptionalParts(), token_file=token_file) as (host, port):
        url = f"http://{host}:{port}"
        statuses = [get(f"{url}/metrics", token)[0] for token in ("", "perseus_wrong", "perseus_first")]
        assert statuses == [401, 401, 200]
        token_file.write_text("perseus_second\n")
        assert get(f"{url}/metrics", "perseus_first")[0] == 401
        assert get(f"{url}/metrics", "perseus_second")[0] == 200
        assert get(f"{url}/other", "perseus_second")[0] == 404


def test_an_error_fails_only_one_scrape() -> None:
    failures = [True]

    def collect() -> Readings:
        if failures:
            failures.pop()
            raise ArithmeticError("planted")
        return Readings()

    with serving_metrics("127.0.0.1", 0, collect, OptionalParts()) as (host, port):
        assert get(f"http://{host}:{port}/metrics")[0] == 500
        assert get(f"http://{host}:{port}/metrics")[0] == 200


def test_silent_connections_do_not_delay_scrapers() -> None:
    with (
        serving_metrics("127.0.0.1", 0, Readings, OptionalParts()) as (host, port),
        contextlib.ExitStack() as stack,
    ):
        for _ in range(20):
            stack.enter_context(contextlib.closing(socket.create_connection((host, port))))
        assert get(f"http://{host}:{port}/metrics")[0] == 200


def test_without_the_extra_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    reading, writing = os.pipe()
    monkeypatch.setenv("PERSEUS_LIFELINE", str(reading))  # as under a supervisor
    agent = ["agent", "--observe", "--metrics-listen=0", "--gpu-backend=emulated"]
    places = {"emulated-gpus": "", "socket": "agent.sock", "restore-folder": "restore"}
    done = CliRunner().invoke(
        app, [*agent, *(f"--{key}={tmp_path / place}" for key, place in places.items())]
    )
    for each in (reading, writing):
        os.close(each)
    assert done.exit_code == 1
    assert "pip install 'perseus-energy[metrics]'" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_names_from_trainers_create_no_series() -> None:
    counters = AgentCounters()
    for number in range(1000):
        counters.note_error(f"GPU-made-up-{number}", GpuErrorReason.NOT_FOUND)
        counters.note_dropped(f"GPU-made-up-{number}", 7)
    assert counters.gpus.keys() == {NOT_SERVED}
    assert counters.gpus[NOT_SERVED].error_counts == {GpuErrorReason.NOT_FOUND: 1000}
    own = counters.opened("GPU-0")
    counters.note_error("GPU-0", GpuErrorReason.LOST)
    counters.note_dropped("GPU-0", 7)
    assert (own.error_counts, own.dropped_mark_count) == ({GpuErrorReason.LOST: 1}, 7)


# --- Files that map jobs for dcgm-exporter ------------------------------------------------------------------


def test_files_of_a_dead_agent_are_removed_and_those_of_other_programs_stay(tmp_path: Path) -> None:
    mapping = JobMapping(tmp_path)
    for gpu_index in (3, 4):
        mapping.enter(gpu_index, "job")
    (tmp_path / "4").write_text("4711\n")  # now the batch system's
    mapping.enter(4, "job")
    mapping.leave(4)
    JobMapping(tmp_path).clear()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"4": "4711\n"}


@pytest.mark.parametrize("job_id", ['a"b', "a\nb", "a\\b", "../a", "", "a" * 64, "ä", "A B"])
def test_invalid_identifiers_are_not_written(tmp_path: Path, job_id: str) -> None:
    JobMapping(tmp_path).enter(0, job_id)
    assert list(tmp_path.iterdir()) == []


def test_the_exporter_can_read_it_despite_the_umask(tmp_path: Path) -> None:
    folder, before = tmp_path / "jobs", os.umask(0o077)
    try:
        mapping = JobMapping(folder)
        mapping.clear()
        mapping.enter(0, "job")
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o755
    assert (folder / "0").stat().st_mode & 0o777 == 0o644


def test_a_folder_that_can_not_be_created_is_only_logged(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    mapping = JobMapping(tmp_path / "file" / "folder")
    with capture_logs() as logs:
        mapping.clear()
        mapping.enter(0, "job")
        mapping.leave(0)
    assert {line["log_level"] for line in logs} == {"warning"}
