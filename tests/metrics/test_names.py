"""The rules of names, and the page, the alerts and the board that are made from them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from perseus.metrics import names
from perseus.metrics.document import page
from perseus.metrics.names import Kind, Metric

ROOT = Path(__file__).parents[2]
UNITS = ("_seconds", "_joules", "_watts", "_hertz", "_bytes", "_ratio", "_grams")
# Names without a unit: states, and counts of things.
SUFFIXES = {Kind.COUNTER: ("_total",), Kind.HISTOGRAM: ("_seconds",)}
# Labels, with the reason why they have few values.
BOUNDED = {
    "version": "one",
    "file": "certificate, CAs",
    "state": "enumeration",
    "part": "enumeration",
    "outcome": "three",
    "reason": "enumeration",
    "pool": "two",
    "slot": "the one that is served",
    "kind": "two",
    "job_id": "the newest 1,000",
    "feed": "those that are configured",
    "signal": "those that are configured",
    "engine": "those that are configured",
    "objective": "two",
    "regular": "two",
    "point": "three",
    "source": "two",
    "pipeline": "of a rank, where asked for, or of a GPU of the node",
    "stage": "likewise",
    "tensor": "likewise",
    "gpu_uuid": "GPUs of the node",
}


@pytest.mark.parametrize("metric", names.ALL, ids=lambda metric: metric.name)
def test_a_name_keeps_the_rules(metric: Metric) -> None:
    assert re.fullmatch(r"perseus_[a-z]+(_[a-z]+)*", metric.name)
    assert metric.name.endswith(SUFFIXES.get(metric.kind, ""))
    assert metric.name.endswith("_total") is (metric.kind is Kind.COUNTER)
    assert not re.search(r"(_mhz|_ms|_percent|_kwh|_minutes|_kb)(_|$)", metric.name)
    plain = metric.name.removesuffix("_total")
    in_the_middle = [unit for unit in UNITS if unit in plain and not plain.endswith(unit)]
    assert in_the_middle == []
    assert metric.help.endswith(".")
    assert set(metric.labels) <= BOUNDED.keys()


def test_names_are_unique_and_complete() -> None:
    every = [value for value in vars(names).values() if isinstance(value, Metric)]
    assert len({metric.name for metric in every}) == len(every)
    assert sorted(metric.name for metric in names.ALL) == sorted(metric.name for metric in every)


def test_the_page_matches_the_names() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == page(), "make metrics"


def board_queries() -> Iterator[str]:
    board = json.loads((ROOT / "deploy/grafana/board.json").read_text())
    for panel in board["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))


def test_the_board_is_laid_out() -> None:
    board = json.loads((ROOT / "deploy/grafana/board.json").read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert taken.isdisjoint(cells), panel["title"]
        assert all(x < 24 for x, _ in cells), panel["title"]
        taken |= cells
        references = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(references)) == len(references)
        assert panel["type"] == "row" or (references and panel["title"] and panel["datasource"]), panel
    variables = {each["name"] for each in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(panels))) - {"__rate_interval"}
    assert used == variables


def rule_queries() -> Iterator[str]:
    text = (ROOT / "deploy/prometheus/perseus-rules.yml").read_text()
    yield from re.findall(r"^ +expr: (.+)$", text, re.MULTILINE)


KNOWN = {
    f"{metric.name}{suffix}"
    for metric in names.ALL
    for suffix in (("_bucket", "_sum", "_count") if metric.kind is Kind.HISTOGRAM else ("",))
}


@pytest.mark.parametrize("query", [*board_queries(), *rule_queries()])
def test_queries_use_existing_metrics(query: str) -> None:
    asked = set(re.findall(r"\bperseus_\w+", query))
    assert asked <= KNOWN
    assert asked or "process_" in query or "up{" in query
    for metric, matchers in re.findall(r"\b(perseus_\w+)\{([^}]*)\}", query):
        labels = next(each.labels for each in names.ALL if metric.startswith(each.name))
        assert set(re.findall(r"(\w+)=", matchers)) <= set(labels)
