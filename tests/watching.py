"""What dashboard and alerts ask Prometheus for: their expressions, and the metrics and labels named in them."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
DASHBOARD = ROOT / "deploy" / "grafana" / "inference-worker.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yaml"
ALERT_TESTS = ROOT / "deploy" / "prometheus" / "alerts.test.yaml"
RUNBOOK = ROOT / "docs" / "runbook"

_SELECTOR = re.compile(r"\b(inference_worker_\w+|up)\b\s*(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One rule."""

    name: str
    expression: str
    severity: str
    annotations: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """A metric as it is asked for; of a matcher by pattern, each alternative is a value."""

    metric: str
    matchers: tuple[tuple[str, str], ...]


def alerts() -> list[Alert]:
    """All rules, in order."""
    return [
        Alert(
            name=rule["alert"],
            expression=rule["expr"],
            severity=rule["labels"]["severity"],
            annotations=rule["annotations"],
        )
        for group in yaml.safe_load(ALERTS.read_text())["groups"]
        for rule in group["rules"]
    ]


def dashboard() -> dict[str, list[dict[str, object]]]:
    """The dashboard as Grafana takes it."""
    content: dict[str, list[dict[str, object]]] = json.loads(DASHBOARD.read_text())
    return content


def panel_expressions() -> list[tuple[str, str]]:
    """Each query of the dashboard, with its panel's title."""
    found = []
    for panel in dashboard()["panels"]:
        targets = panel.get("targets", [])
        assert isinstance(targets, list)
        found += [(str(panel["title"]), str(target["expr"])) for target in targets]
    return found


def selectors(expression: str) -> Iterator[Selector]:
    """The metrics of an expression."""
    for metric, matchers in _SELECTOR.findall(expression):
        yield Selector(
            metric=metric,
            matchers=tuple(
                (label, alternative)
                for label, operator, value in _MATCHER.findall(matchers)
                for alternative in (value.split("|") if "~" in operator else [value])
            ),
        )
