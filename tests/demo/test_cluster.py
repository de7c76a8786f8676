"""The demo's live page: found and read with what the demo prints."""

import json
import ssl
import urllib.request
from pathlib import Path

import pytest

from perseus.demo.cluster import Cluster
from tests.workloads import SMALL


@pytest.mark.slow("starts a coordinator")
@pytest.mark.smoke
@pytest.mark.timeout(60)
def test_the_page_is_where_its_lines_say_for_who_has_the_token(tmp_path: Path) -> None:
    with Cluster(SMALL, tmp_path, tmp_path / "logs", serves_page=True) as cluster:
        where, log_in = cluster.page_lines(cluster.start_coordinator())
        assert cluster.page_url in where
        request = urllib.request.Request(
            f"{cluster.page_url}/session",
            json.dumps({"token": log_in.rpartition(" ")[2]}).encode(),
            {"Content-Type": "application/json", "Origin": cluster.page_url},
        )
        trusted = ssl.create_default_context(cafile=cluster.security.ca)
        with urllib.request.urlopen(request, context=trusted) as answer:
            assert json.load(answer)["scope"] == "reader"
        cluster.stop_services()
