"""Readings in the format that a scraper asks for. Needs the extra `metrics`, and reports if it is missing."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from perseus.metrics.distribution import Distribution
from perseus.metrics.names import Kind, Metric
from perseus.metrics.readings import Readings, Samples

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family


class MetricsUnavailableError(Exception):
    """The package that writes metrics is not installed."""


def check_installed() -> None:
    """Check that metrics can be written.

    Raises:
        MetricsUnavailableError: names the package to install.
    """
    try:
        import prometheus_client  # noqa: F401 - only to see that it is installed
    except ModuleNotFoundError:
        raise MetricsUnavailableError(
            "metrics: expected the package prometheus-client, found none: "
            "install it with pip install 'perseus-energy[metrics]'"
        ) from None


def render(readings: Readings, accept: str) -> tuple[bytes, str]:
    """Return the response of a scrape, and its content type; `accept` is the request's header.

    The resources of the process itself (CPU, memory, files) are added to the readings.
    """
    from prometheus_client import CollectorRegistry, ProcessCollector
    from prometheus_client.exposition import choose_encoder

    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(_ReadingsCollector(readings))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class _ReadingsCollector:
    """A collector for the library; its registration reads nothing."""

    def __init__(self, readings: Readings) -> None:
        self._readings = readings

    def describe(self) -> Iterator["Family"]:
        return iter(())

    def collect(self) -> Iterator["Family"]:
        return (_family(metric, samples) for metric, samples in self._readings)


def _family(metric: Metric, samples: Samples) -> "Family":
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    if metric.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        for labels, value in samples:
            assert isinstance(value, Distribution)
            buckets = [(_bound(bound_s), count) for bound_s, count in value.cumulative()]
            histogram.add_metric(_texts(labels), buckets, value.total_s)
        return histogram
    make = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    family = make(metric.name, metric.help, labels=metric.labels)
    for labels, value in samples:
        assert not isinstance(value, Distribution)
        family.add_metric(_texts(labels), value)
    return family


def _texts(labels: Sequence[str]) -> Sequence[str]:
    """Return labels as valid UTF-8: the name of a file need not be."""
    if all(label.isascii() for label in labels):
        return labels
    return [label.encode(errors="replace").decode() for label in labels]


def _bound(bound_s: float) -> str:
    return "+Inf" if bound_s == float("inf") else str(bound_s)
