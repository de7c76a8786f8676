"""Rules and board, held against a real Prometheus that scrapes a coordinator and the agents of a job."""

import json
import re
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest

from perseus.demo.cluster import Cluster
from perseus.demo.processes import ENVIRONMENT, ClusterError, Process, logged
from tests.metrics.test_names import board_queries
from tests.ports import free_port
from tests.small_jobs import planned_soon
from tests.workloads import SMALL

DEPLOY = Path(__file__).parents[2] / "deploy" / "prometheus"
RULES = DEPLOY / "perseus-rules.yml"

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="needs prometheus and promtool; `make test-prometheus` installs them, as root on Debian",
)

WORKLOAD = replace(SMALL, job_id="scraped")
SCRAPES_S = 1

ELSEWHERE = re.compile("perseus_ledger_|perseus_store_standbys|perseus_standby_coordinators")
"""Metrics of other tests: the ledger publishes totals once a minute, and only PostgreSQL has standbys, of
itself and of coordinators."""

JUDGED = re.compile(r"(.+?) [<>]=? [\d.]+(?: unless .+)?|absent\((.+)\)")


class Prometheus(Process):
    """Runs with a configuration for the length of a `with` block."""

    def __init__(self, folder: Path, configuration: Mapping[str, Any]) -> None:
        self._url = f"http://127.0.0.1:{free_port()}"
        # YAML has room for JSON.
        file = folder / "prometheus.yml"
        file.write_text(json.dumps(configuration))
        super().__init__(
            folder / "prometheus.log",
            f"--config.file={file}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={self._url.removeprefix('http://')}",
            "--log.level=warn",
            program=["prometheus"],
        )

    def __enter__(self) -> Self:
        self.launch()
        self.until(self._is_ready, "Prometheus is ready")
        return self

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples that there are now, each with its labels (`metric`) and `value`."""
        found: list[dict[str, Any]] = self._get("query", query=expression)["result"]
        return found

    def firing(self, alert: str) -> list[dict[str, str]]:
        """The labels of an alert's instances that fire."""
        return [
            each["labels"]
            for each in self._get("alerts")["alerts"]
            if each["labels"]["alertname"] == alert and each["state"] == "firing"
        ]

    def await_alert(self, alert: str, *, fires: bool) -> None:
        """Wait until an alert fires, or no instance of it does."""
        self.until(lambda: bool(self.firing(alert)) is fires, f"{alert} firing: {fires}")

    def rules(self) -> list[dict[str, Any]]:
        """All rules, with what became of their last evaluation."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def _get(self, path: str, **parameters: str) -> dict[str, Any]:
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None
        assert answer["status"] == "success", answer
        data: dict[str, Any] = answer["data"]
        return data


def promtool(*arguments: str) -> str:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_rules_are_rules_and_fire_when_they_should() -> None:
    assert re.search(r"SUCCESS: \d+ rules found", promtool("check", "rules", str(RULES)))
    tests = (DEPLOY / "perseus-rules-test.yml").read_text()
    alerts = set(re.findall(r"alert: (\w+)", RULES.read_text()))
    assert {alert for alert in alerts if f"alertname: {alert}" not in tests} == set()
    assert "SUCCESS" in promtool("test", "rules", str(DEPLOY / "perseus-rules-test.yml"))


def test_the_example_is_a_configuration(tmp_path: Path) -> None:
    text = (DEPLOY / "prometheus.yml").read_text()
    for path in set(re.findall(r"/etc/[\w./-]+", text)):  # promtool wants them to be there
        (tmp_path / Path(path).name).write_text("[]")
        text = text.replace(path, str(tmp_path / Path(path).name))
    (tmp_path / "prometheus.yml").write_text(text)
    shutil.copy(RULES, tmp_path)
    assert "SUCCESS" in promtool("check", "config", str(tmp_path / "prometheus.yml"))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Cluster]:
    monkeypatch.setitem(ENVIRONMENT, "PERSEUS_COORDINATOR_HTTP", "127.0.0.1:0")
    monkeypatch.setitem(ENVIRONMENT, "PERSEUS_AGENT_METRICS_LISTEN", "0")
    with (
        planned_soon(guard_tolerance_percent=5),
        tempfile.TemporaryDirectory(prefix="perseus-") as run_dir,
        Cluster(WORKLOAD, Path(run_dir), tmp_path / "logs") as cluster,
    ):
        yield cluster


def configuration(cluster: Cluster, logs: Path, rules: Path) -> dict[str, Any]:
    coordinator = logged(logs / "coordinator.log", "listening for HTTP")["url"].removeprefix("https://")
    agents = [
        f"127.0.0.1:{logged(logs / f'agent-{pipeline}.log', 'metrics served')['port']}"
        for pipeline in range(WORKLOAD.pipeline_count)
    ]
    security = cluster.security
    return {
        "global": {"scrape_interval": f"{SCRAPES_S}s", "evaluation_interval": f"{SCRAPES_S}s"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {
                "job_name": "perseus-coordinator",
                "scheme": "https",
                "authorization": {"credentials_file": str(security.token_file)},
                "tls_config": {
                    "ca_file": str(security.ca),
                    "cert_file": str(security.client_certificate),
                    "key_file": str(security.client_key),
                },
                "static_configs": [{"targets": [coordinator]}],
            },
            {"job_name": "perseus-agent", "static_configs": [{"targets": agents}]},
        ],
    }


@pytest.mark.slow("real processes train and are scraped, and alerts need some seconds of each state")
@pytest.mark.timeout(600)
def test_everything_returns_data_and_alerts_fire_and_resolve(cluster: Cluster, tmp_path: Path) -> None:
    # Sooner than an operator wants an alert; promtool has tested the real delay.
    rules = tmp_path / "rules.yml"
    rules.write_text(re.sub(r"for: \w+", "for: 1s", RULES.read_text()))
    cluster.start_agents(cluster.start_coordinator())
    cluster.start_trainers()
    with Prometheus(tmp_path, configuration(cluster, tmp_path / "logs", rules)) as prometheus:

        def is_planned() -> bool:
            cluster.check()
            return bool(prometheus.query('perseus_job_state{state="planned"} == 1'))

        prometheus.until(is_planned, "the job is planned")
        assert prometheus.query("count(up == 1)")[0]["value"][1] == "3"
        prometheus.await_alert("PerseusStraggler", fires=False)

        cluster.degrade(1, 1.3)
        prometheus.await_alert("PerseusStraggler", fires=True)
        (labels,) = prometheus.firing("PerseusStraggler")
        assert (labels["job_id"], labels["severity"]) == ("scraped", "info")

        left = {
            query.replace("$__rate_interval", "10s").replace("$job_id", ".*") for query in board_queries()
        }
        left |= {_judged(rule["query"]) for rule in prometheus.rules()}

        def is_all_reported() -> bool:
            left.difference_update([q for q in left if prometheus.query(q) or ELSEWHERE.search(q)])
            return not left

        try:
            prometheus.until(is_all_reported, "every query returns data")
        except ClusterError as error:
            raise AssertionError(f"{error}: {sorted(left)}") from None
        assert [rule["lastError"] for rule in prometheus.rules() if rule["health"] != "ok"] == []

        cluster.degrade(1, 1.0)
        prometheus.await_alert("PerseusStraggler", fires=False)
        cluster.stop_training()
    cluster.stop_services()


def _judged(query: str) -> str:
    """What a rule holds against a figure: it is there whether the alert fires or not."""
    matched = JUDGED.fullmatch(query)
    assert matched is not None, query
    return matched[1] or matched[2]
