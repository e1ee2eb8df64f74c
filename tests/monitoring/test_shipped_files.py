"""Rules and dashboard name metrics and labels that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from statebackend.monitoring.metric_table import JOB_LABEL, METRICS, Metric
from statebackend.monitoring.shipped_files import DASHBOARD, RULES

ENDS = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}
EXPORTED: dict[str, Metric] = {
    one.full_name + end: one for one in METRICS.values() for end in ENDS[one.kind]
}
SELECTED = re.compile(r"(statebackend_\w+)(?:\{([^}]*)\})?")
DOCS = Path(__file__).parents[2] / "docs"


def expressions() -> list[tuple[str, str]]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    found = [(rule["alert"], rule["expr"]) for group in groups for rule in group["rules"]]
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        found += [(panel["title"], target["expr"]) for target in panel.get("targets", ())]
    return found


@pytest.mark.parametrize(("name", "expression"), expressions())
def test_an_expression_names_metrics_and_labels_that_there_are(name: str, expression: str) -> None:
    used = SELECTED.findall(expression)
    assert used
    labels = {JOB_LABEL, "le"}
    for metric, selector in used:
        labels |= {*EXPORTED[metric].labels}
        matched = re.findall(r"(\w+)\s*=~?", selector)
        assert set(matched) <= {JOB_LABEL, *EXPORTED[metric].labels}
    for grouped in re.findall(r"(?:by|on) \(([^)]*)\)", expression):
        assert {one.strip() for one in grouped.split(",")} <= labels


def test_the_page_says_what_to_do_about_every_alert() -> None:
    page = (DOCS / "howto" / "monitor.md").read_text(encoding="utf-8")
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    alerts = [rule["alert"] for group in groups for rule in group["rules"]]
    assert set(re.findall(r"`(Statebackend\w+)`", page)) == set(alerts)
