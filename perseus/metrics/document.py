"""The page of all metrics, generated from their names: `python -m perseus.metrics.document`. Pure."""

from perseus.metrics.names import SECTIONS, Metric

_INTRODUCTION = """\
# Metrics

Made from `perseus/metrics/names.py` by `make metrics`. [Operations](operations.md#monitoring) describes how
to scrape them; there are [alerts](../deploy/prometheus/perseus-rules.yml) and a
[board](../deploy/grafana/board.json) for them.

All are in base units, named in the suffix; ratios are from 0 to 1. Unknown values are left out, not reported
as 0. Counters start with their process unless noted otherwise; `rate` and `increase` allow for that. Both
processes also publish `process_cpu_seconds_total`, `process_resident_memory_bytes` and the like.
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
