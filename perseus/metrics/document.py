"""The page about the metrics, made from their names: `python -m perseus.metrics.document`. Pure."""

from perseus.metrics.names import SECTIONS, Metric

_INTRODUCTION = """\
# Metrics

Made from `perseus/metrics/names.py` by `make metrics`. How to have them scraped is in
[operations.md](operations.md#watching-it); [alerts](../deploy/prometheus/perseus-rules.yml) and a
[board](../deploy/grafana/board.json) are made for them.

Base units, each in the name; ratios are from 0 to 1. What is not known is left out, rather than told as 0.
Counters count since their process was started, unless they say otherwise: `rate` and `increase` see to that.
Both processes also tell `process_cpu_seconds_total`, `process_resident_memory_bytes` and the like of
themselves.
"""


def page() -> str:
    """Return the page, as Markdown."""
    parts = [_INTRODUCTION]
    for section in SECTIONS:
        rows = [f"| `{each.name}` | {each.kind.value} | {_labels(each)} | {each.help} |" for each in section]
        table = "\n".join(["| name | type | labels | |", "|---|---|---|---|", *rows])
        parts.append("\n\n".join(filter(None, (f"## {section.title}", section.text, table))) + "\n")
    return "\n".join(parts)


def _labels(metric: Metric) -> str:
    return ", ".join(f"`{label}`" for label in metric.labels)


if __name__ == "__main__":
    print(page(), end="")
