"""What dashboard and alerts ask Prometheus for, and what there is: of the worker, of the gateway and of the scaler."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import Metric

from inference_worker.gateway.metrics import GatewayMetrics
from inference_worker.metrics import WorkerMetrics
from inference_worker.ports import Backlog
from inference_worker.results.fleet import MemoryFleet
from inference_worker.scale_metrics import ScaleCollector
from inference_worker.scaler import ScaleView, Sources
from inference_worker.scaling import Policy

ROOT = Path(__file__).resolve().parents[1]
DASHBOARD = ROOT / "deploy" / "grafana" / "inference-worker.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yaml"
ALERT_TESTS = ROOT / "deploy" / "prometheus" / "alerts.test.yaml"
RUNBOOK = ROOT / "docs" / "runbook"
DOCS = ROOT / "docs"

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


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana takes it."""
    content: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return content


def panel_expressions() -> list[tuple[str, str]]:
    """Each query of the dashboard, with its panel's title."""
    found = []
    for panel in dashboard()["panels"]:
        found += [(str(panel["title"]), str(target["expr"])) for target in panel.get("targets", [])]
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


def exported() -> dict[str, dict[str, set[str]]]:
    """Every sample's name, with its labels and the values that they can have."""
    found: dict[str, dict[str, set[str]]] = {}
    for family in _families():
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found


def documented() -> dict[str, str]:
    """Every metric that the docs have a row for, with the cell of its labels."""
    found = {}
    for file in ("metrics.md", "scaling.md"):
        prefix = ""
        for line in (DOCS / file).read_text().splitlines():
            if line.startswith("## "):
                prefix = "inference_worker_gateway_" if line == "## Of a gateway" else ""
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            name = prefix + cells[0].strip("`")
            if line.startswith("| `") and name.startswith("inference_worker_"):
                found[name] = cells[-2]
    return found


def _families() -> Iterable[Metric]:
    yield from WorkerMetrics().registry.collect()
    yield from GatewayMetrics().registry.collect()
    yield from ScaleCollector(_blind()).collect()


def _blind() -> ScaleView:
    """One that has not looked: every series is there all the same."""

    async def backlog() -> Backlog:
        raise AssertionError("nobody looks")

    sources = Sources(backlog=backlog, fleet=MemoryFleet(now=lambda: 0.0))
    return ScaleView("q", sources, Policy(least=0, most=1), now=lambda: 0.0, interval_s=1.0, slots=1, writes=False)
