"""Dashboard, alerts, runbook and docs fit what worker, gateway and scaler export, and each other."""

import re

import pytest
import yaml

from tests.watching import (
    ALERT_TESTS,
    RUNBOOK,
    Alert,
    alerts,
    dashboard,
    documented,
    exported,
    panel_expressions,
    selectors,
)

ALERTS = alerts()
TARGET_LABELS = {"deployment", "instance", "job"}
"""What the scrape adds to every series: docs/deploy.md."""
GROUPED = re.compile(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)")

EXPORTED = exported()
EXPORTED["up"] = {}
"""Prometheus' own: whether the scrape succeeded."""

EXPRESSIONS = [
    *(pytest.param(alert.expression, id=alert.name) for alert in ALERTS),
    *(pytest.param(expression, id=title) for title, expression in panel_expressions()),
]


def by_name(alert: Alert) -> str:
    return alert.name


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_metric_that_is_asked_for_is_exported(expression: str) -> None:
    asked = {selector.metric for selector in selectors(expression)}

    assert asked
    assert asked - EXPORTED.keys() == set()


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_label_value_that_is_asked_for_can_occur(expression: str) -> None:
    impossible = [
        (selector.metric, label, value)
        for selector in selectors(expression)
        for label, value in selector.matchers
        if label not in TARGET_LABELS and value not in EXPORTED[selector.metric].get(label, set())
    ]

    assert impossible == []


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_label_that_is_grouped_by_is_there(expression: str) -> None:
    grouped = {label.strip() for labels in GROUPED.findall(expression) for label in labels.split(",")}
    there = TARGET_LABELS.union(*(EXPORTED[selector.metric] for selector in selectors(expression)))

    assert grouped - there == set()


def test_the_selectors_of_an_expression_are_found() -> None:
    """The tests above are worth what this finds."""
    expression = 'sum(rate(inference_worker_a_total{x=~"1|2", y!="3"}[5m])) / up == 0'

    found = [(selector.metric, selector.matchers) for selector in selectors(expression)]

    assert found == [("inference_worker_a_total", (("x", "1"), ("x", "2"), ("y", "3"))), ("up", ())]


def test_everything_that_is_exported_is_on_the_dashboard() -> None:
    shown = {selector.metric for _, expression in panel_expressions() for selector in selectors(expression)}
    there = {re.sub(r"_(bucket|sum|count)$", "_bucket", name) for name in EXPORTED} - {"up"}

    assert there - shown == set()


def test_everything_that_is_exported_has_its_row_in_the_docs_and_nothing_else_has() -> None:
    """Types and label values are held by each part's own tests; those of the scaler, here."""
    there = {re.sub(r"_(bucket|sum|count)$", "", name) for name in EXPORTED} - {"up"}

    assert documented().keys() == there
    for name, cell in documented().items():
        if name.startswith("inference_worker_scale_"):
            labels = {word for label, values in EXPORTED[name].items() for word in (label, *values)}
            assert set(re.findall(r"`(\w+)`", cell)) == labels


def test_the_dashboard_can_be_turned_to_each_of_the_processes() -> None:
    """Also where a deployment has no worker at the moment."""
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            asked = re.findall(r'__name__=~"([^"]*)"', str(variable["query"]))
            (names,) = [set(found.split("|")) for found in asked]
            assert names <= EXPORTED.keys()
            assert {re.sub(r"_(build_info|up)$", "", name) for name in names} == {
                "inference_worker",
                "inference_worker_gateway",
                "inference_worker_scale",
            }


def test_no_panel_has_the_number_or_the_title_of_another() -> None:
    panels = dashboard()["panels"]
    rows = [index for index, panel in enumerate(panels) if panel["type"] == "row"]

    assert len({panel["id"] for panel in panels}) == len(panels)
    for begin, end in zip(rows, [*rows[1:], len(panels)], strict=True):
        titles = [panel["title"] for panel in panels[begin:end]]
        assert len(set(titles)) == len(titles)
    assert all(panel["description"] for panel in panels if panel["type"] != "row")


def test_every_query_of_the_dashboard_follows_its_variables() -> None:
    loose = [
        title
        for title, expression in panel_expressions()
        for _ in selectors(expression)
        if expression.count('{deployment=~"$deployment", instance=~"$instance"') != len(list(selectors(expression)))
    ]

    assert loose == []


def test_the_panels_of_the_dashboard_do_not_overlap() -> None:
    taken: dict[tuple[int, int], object] = {}

    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        assert isinstance(place, dict)
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies over {taken[x, y]}"
                taken[x, y] = panel["title"]


def test_every_reason_to_be_suspended_for_long_has_an_alert() -> None:
    told = {
        value
        for alert in ALERTS
        for selector in selectors(alert.expression)
        if selector.metric == "inference_worker_suspended"
        for _, value in selector.matchers
    }

    assert told == EXPORTED["inference_worker_suspended"]["reason"]


@pytest.mark.parametrize("alert", ALERTS, ids=by_name)
def test_every_alert_says_what_is_wrong_and_where_to_read_on(alert: Alert) -> None:
    assert alert.severity in {"critical", "warning", "info"}
    assert alert.annotations.keys() == {"summary", "description", "runbook_url"}
    assert alert.annotations["runbook_url"] == f"docs/runbook/{alert.name}.md"


@pytest.mark.parametrize("alert", ALERTS, ids=by_name)
def test_every_alert_has_a_page_that_answers_the_same_questions(alert: Alert) -> None:
    page = (RUNBOOK / f"{alert.name}.md").read_text()

    assert page.startswith(f"# {alert.name}\n")
    assert f"Severity: {alert.severity}." in page
    headings = re.findall(r"^## (.*)$", page, re.MULTILINE)
    assert headings == ["What it means", "What users feel", "Look at", "Do", "When not to worry"]


def test_no_page_is_left_without_its_alert() -> None:
    pages = {page.stem for page in RUNBOOK.glob("*.md")} - {"README"}

    assert pages == {alert.name for alert in ALERTS}


def test_the_list_of_pages_is_that_of_the_alerts() -> None:
    listed = re.findall(r"^\| \[(\w+)\]\(\w+\.md\) \| (\w+) \|", (RUNBOOK / "README.md").read_text(), re.MULTILINE)

    assert listed == [(alert.name, alert.severity) for alert in ALERTS]


def test_every_alert_is_tested_to_fire_and_to_be_quiet_before() -> None:
    """The tests themselves are promtool's: tests/integration/test_alert_rules.py."""
    cases = [
        (case["alertname"], bool(case["exp_alerts"]))
        for test in yaml.safe_load(ALERT_TESTS.read_text())["tests"]
        for case in test.get("alert_rule_test", [])
    ]

    assert sorted(cases) == sorted((alert.name, fires) for alert in ALERTS for fires in (True, False))


def test_the_runbook_asks_for_metrics_that_are_exported() -> None:
    unknown = {
        (page.stem, name)
        for page in RUNBOOK.glob("*.md")
        for name in re.findall(r"\binference_worker_\w+", page.read_text())
        if name not in EXPORTED and f"{name}_bucket" not in EXPORTED
    }

    assert unknown == set()
