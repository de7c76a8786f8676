"""What is told at one scrape: values by metric. Pure."""

from collections.abc import Iterator

from perseus.metrics.distribution import Distribution
from perseus.metrics.names import Kind, Metric

Value = float | Distribution
Samples = list[tuple[tuple[str, ...], Value]]


class Readings:
    """Samples, each metric's together, in the order in which the metrics came first."""

    def __init__(self) -> None:
        self._samples: dict[Metric, Samples] = {}

    def put(self, metric: Metric, value: Value | None, *labels: str) -> None:
        """Tell a value, with a value for each of the metric's labels; None is not known, and left out."""
        assert len(labels) == len(metric.labels), f"{metric.name}: expected {metric.labels}, found {labels}"
        assert isinstance(value, Distribution) is (metric.kind is Kind.HISTOGRAM) or value is None
        if value is not None:
            self._samples.setdefault(metric, []).append((labels, value))

    def __iter__(self) -> Iterator[tuple[Metric, Samples]]:
        return iter(self._samples.items())
