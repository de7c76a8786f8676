"""A real Prometheus of one's own on loopback, asked over its HTTP interface."""

import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.ports import free_port

_START_LIMIT_S = 30.0


class Prometheus:
    """Runs with a configuration for the length of a `with` block."""

    def __init__(self, folder: Path, configuration: Mapping[str, Any]) -> None:
        self._folder = folder
        self._url = f"http://127.0.0.1:{free_port()}"
        self._process: subprocess.Popen[bytes] | None = None
        # YAML has room for JSON.
        (folder / "prometheus.yml").write_text(json.dumps(configuration))

    def __enter__(self) -> "Prometheus":
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={self._folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address={self._url.removeprefix('http://')}",
                    "--log.level=warn",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.until(lambda: self._is_ready(), "Prometheus is ready", _START_LIMIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(30)

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

    def rules(self) -> list[dict[str, Any]]:
        """All rules, with what became of their last evaluation."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def until(self, condition: Callable[[], object], what: str, limit_s: float) -> None:
        deadline_s = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > deadline_s:
                log = (self._folder / "prometheus.log").read_text()[-2000:]
                raise AssertionError(f"expected within {limit_s:g} s: {what}; {log}")
            time.sleep(0.2)

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
