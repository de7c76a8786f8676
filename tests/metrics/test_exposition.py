"""A scraper reads exactly the values that were put, whatever a label contains."""

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from perseus.metrics.distribution import Distribution
from perseus.metrics.exposition import render
from perseus.metrics.names import Kind, Metric
from perseus.metrics.readings import Readings

GAUGE = Metric("perseus_some_seconds", Kind.GAUGE, 'Some "help" with a \\ in it.', ("file", "state"))
COUNTER = Metric("perseus_some_total", Kind.COUNTER, "Some.", ("state",))
HISTOGRAM = Metric("perseus_took_seconds", Kind.HISTOGRAM, "Some.")

finite = st.floats(allow_nan=False, allow_infinity=False)


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


@given(st.lists(st.tuples(st.text(), st.text(), finite), max_size=8, unique_by=lambda each: each[:2]))
def test_labels_and_values_are_exposed_unchanged(reported: list[tuple[str, str, float]]) -> None:
    readings = Readings()
    for file, state, value in reported:
        readings.put(GAUGE, value, file, state)
    body, content_type = render(readings, "text/plain")
    assert content_type.startswith("text/plain")
    found = samples(body.decode()).get(GAUGE.name, [])
    assert [(labels["file"], labels["state"], value) for labels, value in found] == reported


def test_a_label_that_is_not_text_spoils_nothing() -> None:
    readings = Readings()
    readings.put(GAUGE, 1.0, "caf\udce9.pem", "a")
    assert samples(render(readings, "")[0].decode())[GAUGE.name][0][0]["file"] == "caf?.pem"


@given(st.lists(st.floats(min_value=0, max_value=100), max_size=50))
def test_a_distribution_counts_durations_up_to_its_bounds(durations_s: list[float]) -> None:
    bounds_s = (0.1, 1.0, 10.0)
    distribution = Distribution(bounds_s)
    for duration_s in durations_s:
        distribution.add(duration_s)
    expected = [(bound, sum(each <= bound for each in durations_s)) for bound in (*bounds_s, math.inf)]
    assert distribution.cumulative() == expected
    assert distribution.count == len(durations_s)
    readings = Readings()
    readings.put(HISTOGRAM, distribution)
    readings.put(COUNTER, 3, "a")
    reported = render(readings, "application/openmetrics-text; version=1.0.0")[0].decode()
    families = openmetrics.text_string_to_metric_families(reported)  # type: ignore[no-untyped-call]
    by_name = {family.name: family for family in families}
    buckets = [each for each in by_name["perseus_took_seconds"].samples if each.name.endswith("_bucket")]
    assert [(float(each.labels["le"]), each.value) for each in buckets] == expected
    assert by_name["perseus_some"].type == "counter"


def test_unknown_values_are_left_out_and_mistakes_are_noticed() -> None:
    readings = Readings()
    readings.put(GAUGE, None, "file", "state")
    assert list(readings) == []
    with pytest.raises(AssertionError, match="perseus_some_seconds"):
        readings.put(GAUGE, 1.0, "file")


def test_names_and_the_page_need_no_extra() -> None:
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "import perseus.metrics.document, perseus.metrics.readings, perseus.metrics.exposition\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
