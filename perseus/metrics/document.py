"""The page about the metrics, made from their names: `python -m perseus.metrics.document`. Pure."""

from collections.abc import Sequence

from perseus.metrics.names import AGENT, BOTH, FEED, JOB, LEDGER, RANK, SERVER, SIGNAL, Metric

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

_SECTIONS: Sequence[tuple[str, str, Sequence[Metric]]] = (
    ("Both processes", "", BOTH),
    (
        "The coordinator",
        "A fixed number of series, and one for each reason of refusals that came about.",
        SERVER,
    ),
    (
        "The ledger",
        "All jobs together, at most a minute old; what one run has used is a question for "
        "[the ledger](ledger.md) itself. Cost and carbon are told where their rates are known. Hours that "
        "were forgotten (`keep_ledger_days`) leave with the coordinator's next start.",
        LEDGER,
    ),
    ("Each feed", "Of the feeds in the coordinator's settings, and `default`.", FEED),
    ("Each signal", "Of the signals of carbon and price in the coordinator's settings.", SIGNAL),
    (
        "Each job",
        "Of jobs that have not finished, the 1,000 newest at most: some 46 series for each, however many "
        "ranks it has. A new run of a job begins its counters anew.",
        JOB,
    ),
    ("Each rank", "Only with `--metrics-ranks`: four series for each rank.", RANK),
    ("The agent", "What has `gpu_uuid` is told of the GPUs that were served since the agent started.", AGENT),
)


def page() -> str:
    """Return the page, as Markdown."""
    parts = [_INTRODUCTION]
    for title, text, metrics in _SECTIONS:
        rows = [f"| `{each.name}` | {each.kind.value} | {_labels(each)} | {each.help} |" for each in metrics]
        table = "\n".join(["| name | type | labels | |", "|---|---|---|---|", *rows])
        parts.append("\n\n".join(part for part in (f"## {title}", text, table) if part) + "\n")
    return "\n".join(parts)


def _labels(metric: Metric) -> str:
    return ", ".join(f"`{label}`" for label in metric.labels)


if __name__ == "__main__":
    print(page(), end="")
