"""The values of one scrape, by metric. Pure."""

from collections.abc import Iterator

from perseus.metrics.distribution import Distribution
from perseus.metrics.names import Kind, Metric

Value = float | Distribution
Samples = list[tuple[tuple[str, ...], Value]]


class Readings:
    """Samples, grouped by metric, in the order in which the metrics were first put."""

    def __init__(self) -> None:
        self._samples: dict[Metric, Samples] = {}

    def put(self, metric: Metric, value: Value | None, *labels: str) -> None:
        """Add a value, with a value for each of the metric's labels; None is unknown, and left out."""
        assert len(labels) == len(metric.labels), f"{metric.name}: expected {metric.labels}, found {labels}"
        assert isinstance(value, Distribution) is (metric.kind is Kind.HISTOGRAM) or value is None
        if value is not None:
            self._samples.setdefault(metric, []).append((labels, value))

    def __iter__(self) -> Iterator[tuple[Metric, Samples]]:
        return iter(self._samples.items())
