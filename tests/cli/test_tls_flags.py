"""TLS: plaintext to other machines must be explicit, and gives a warning."""

import os
import stat
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from perseus import configuration
from perseus.agent.sidecar.settings import AgentSettings
from perseus.agent.sidecar.shell import serving
from perseus.service.server import running
from perseus.service.settings import CoordinatorSettings
from perseus.tls.files import Role, TlsFiles, check
from tests.cli.commands import perseus


async def test_insecure_gives_a_warning_at_every_start(tmp_path: Path) -> None:
    (tmp_path / "gpus").mkdir()
    coordinator = CoordinatorSettings(listen="0.0.0.0:0", database=tmp_path / "x.db", insecure=True)
    flags = {
        "coordinator": "192.0.2.1:1",
        "socket": tmp_path / "agent.sock",
        "gpu_backend": "emulated",
        "emulated_gpus": tmp_path / "gpus",
        "insecure": True,
        "observe": True,
    }
    agent = configuration.load(AgentSettings, None, flags)
    with capture_logs() as logs:
        async with running(coordinator), serving(agent):
            pass
    warnings = [line["event"] for line in logs if line["log_level"] == "warning"]
    assert "insecure: plaintext, and anybody who reaches this address may do anything" in warnings
    assert "insecure: plaintext to another machine" in warnings


def test_a_command_warns_as_well() -> None:
    result = perseus("jobs", "list", "--insecure", "--coordinator", "192.0.2.1:1")
    assert "warning: --insecure: plaintext to 192.0.2.1:1, on another machine" in result.output


def test_health_reports_whether_a_coordinator_serves_and_the_reason(environment: dict[str, str]) -> None:
    shown = {
        "table": "SERVING\n",
        "csv": "who,is_serving,status\ncoordinator,true,SERVING\n",
        "json": '{\n  "who": "coordinator",\n  "is_serving": true,\n  "status": "SERVING"\n}\n',
    }
    for form, text in shown.items():
        healthy = perseus(f"health --format {form}", **environment)
        assert (healthy.exit_code, healthy.output) == (0, text)
    unknown = perseus("health", "--service", "nothing", **environment)
    assert unknown.exit_code == 2
    address = {"PERSEUS_COORDINATOR": environment["PERSEUS_COORDINATOR"]}
    bare = {**address, "PERSEUS_TLS_CA": environment["PERSEUS_TLS_CA"]}
    for given, reason in (
        (address, "speaks TLS, but the connection was plaintext: expected tls_ca"),
        (bare, "the coordinator requires a client certificate"),
    ):
        failed = perseus("health", **given)
        assert failed.exit_code == 1
        assert reason in failed.output


def test_a_small_authority(tmp_path: Path) -> None:
    folder = tmp_path / "ca"
    assert perseus("certificates", "authority", "--folder", folder).exit_code == 0
    server, agent = tmp_path / "coordinator", tmp_path / "agent"
    names = ["coordinator.example", "10.0.0.7", "::1"]
    assert perseus("certificates", "server", *names, "--folder", folder, "--output", server).exit_code == 0
    output = ("--folder", folder, "--output", agent, "--days", 3)
    made = perseus("certificates client gpu-node-17", *output)
    assert made.exit_code == 0
    assert f"certificate {agent}.pem, key {agent}.key" in made.output

    now_s = time.time()
    for stem, role, days in ((server, Role.SERVER, 90), (agent, Role.CLIENT, 3)):
        certificate, key = stem.with_suffix(".pem"), stem.with_suffix(".key")
        material = check(TlsFiles(certificate, key, folder / "ca.pem"), role, now_s)
        assert material.expiries_s[str(certificate)] == pytest.approx(now_s + days * 86400, abs=60)
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE((folder / "ca.key").stat().st_mode) == 0o600


def test_a_renewed_key_keeps_its_readers_and_a_link_its_end(tmp_path: Path) -> None:
    folder, stem = tmp_path / "ca", tmp_path / "coordinator"
    stem.with_suffix(".pem").symlink_to("elsewhere.pem")
    key = stem.with_suffix(".key")
    assert perseus("certificates", "authority", "--folder", folder).exit_code == 0
    renew = ("certificates", "server", "localhost", "--folder", folder, "--output", stem)
    assert perseus(*renew).exit_code == 0
    before = key.read_bytes()
    key.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(key, 0, 65534)  # like a service's group
    place = key.stat()
    assert perseus(*renew).exit_code == 0
    assert key.read_bytes() != before
    after = key.stat()
    assert (stat.S_IMODE(after.st_mode), after.st_uid, after.st_gid) == (0o640, place.st_uid, place.st_gid)
    assert stat.S_IMODE((tmp_path / "elsewhere.pem").stat().st_mode) == 0o644
