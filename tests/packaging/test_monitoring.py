"""The alert rules and the dashboard are PromQL over metrics that there are, and select by values that labels have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import promql_parser
import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from services.agent.cluster.heartbeats import Heartbeats
from services.agent.cluster.signals import SignalQueue
from services.agent.machine.device_watch import DeviceWatch
from services.agent.machine.hardware import NodeHardware
from services.agent.metrics import AgentMetrics
from services.agent.node.slots import ENDS, Node
from services.api import present
from services.detector.metrics import ReadingLag, detector_metrics
from services.detector.state.cluster import DetectorState
from services.planner.lookahead.table import LookAhead
from services.planner.metrics import PlannerMetrics
from services.transition.metrics import TransitionMetrics
from services.transition.state import State
from shared.bus.connection import Bus
from shared.clock import PROCESS_CLOCK
from shared.events.codes import FailureCode
from shared.events.severities import Severity
from shared.log.journal import Journal
from shared.model import utc_now
from shared.service.metrics import StateMetrics
from shared.settings.model import Settings
from shared.tasks.specification import TaskState
from shared.views.documents import NodeState
from tests.api.kit import serving
from tests.detector.kit import LIMITS

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "monitoring"
RULES = [rule for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [rule["expr"] for rule in RULES] + [one["expr"] for panel in PANELS for one in panel["targets"]]

OF_PROMETHEUS = {"up"}
"""Metrics that Prometheus makes itself."""

VALUES = {
    "severity": {one.value for one in Severity},
    "state": {*(one.value for one in NodeState), *(one.value for one in TaskState), present.UNREACHABLE},
    "how": set(ENDS),
    "code": {one.value for one in FailureCode},
    "job": {"unicron"},
}
"""Values of the labels that expressions select by, where not any value will do."""


def families(settings: Settings, bus: Bus) -> Iterable[Metric]:
    """Return the metrics of all processes but the api's."""
    registry, missing = CollectorRegistry(), cast(Any, None)
    PlannerMetrics(registry, LookAhead())
    TransitionMetrics(registry, State)
    registry.register(StateMetrics(lambda: detector_metrics(DetectorState(), LIMITS, {}, ReadingLag(), utc_now())))
    node = Node.create("n0", "one", 2)
    heartbeats = Heartbeats(bus, node, missing, settings, 1, missing, {}, "")
    heartbeats.published_at_s = 0.0
    watch = DeviceWatch("n0", "one", NodeHardware("cpu", tuple(node.slots)), missing, PROCESS_CLOCK)
    AgentMetrics(node, heartbeats, SignalQueue(bus), PROCESS_CLOCK, {}, watch).register(registry)
    return registry.collect()


def names(found: Iterable[Metric]) -> Iterator[str]:
    """Yield the names under which a metric's values are stored."""
    for metric in found:
        endings = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}.get(metric.type, ("",))
        yield from (metric.name + ending for ending in endings)


def selectors(expression: str) -> list[promql_parser.VectorSelector]:
    """Return what an expression reads.

    Raises:
        ValueError: it is no PromQL.
    """
    found: list[promql_parser.VectorSelector] = []

    def visit(node: object) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        return True

    promql_parser.walk(promql_parser.parse(expression), visit)
    return found


async def test_every_metric_exists(settings: Settings, bus: Bus, journal: Journal) -> None:
    async with serving(settings, bus, journal) as api:
        answer = await api.http.get("/metrics")
    assert answer.status_code == 200
    known = {*names(text_string_to_metric_families(answer.text)), *names(families(settings, bus)), *OF_PROMETHEUS}
    used = {selector.name for expression in EXPRESSIONS for selector in selectors(expression)}
    assert used - known == set()
    assert {name for name in known if name.startswith("unicron_")}, "they are all the project's"


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_selects_by_values_that_there_are(expression: str) -> None:
    for selector in selectors(expression):
        for matcher in selector.matchers.matchers:
            if matcher.name in VALUES:
                assert set(matcher.value.split("|")) <= VALUES[matcher.name], matcher


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_a_rule_has_what_prometheus_and_its_reader_need(rule: dict[str, Any]) -> None:
    assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"Unicron[A-Za-z]+", rule["alert"])
    assert rule["labels"]["severity"] in {"page", "ticket"}
    assert rule["annotations"]["summary"]
    for text in rule["annotations"].values():
        for template in re.findall(r"{{(.*?)}}", text):
            assert re.fullmatch(r" \$(value|labels\.\w+)( \| humanize(Duration|Percentage)?)? ", template), template
    if "for" in rule:
        assert promql_parser.parse_duration(rule["for"])


def test_alerts_have_names_of_their_own() -> None:
    alerts = [rule["alert"] for rule in RULES]
    assert len(set(alerts)) == len(alerts)


def test_the_dashboard_takes_its_data_source_from_its_variable() -> None:
    (variable,) = DASHBOARD["templating"]["list"]
    assert (variable["name"], variable["type"], variable["query"]) == ("datasource", "datasource", "prometheus")
    source = {"type": "prometheus", "uid": "${datasource}"}
    assert all(one["datasource"] == source for panel in PANELS for one in [panel, *panel["targets"]])


def test_panels_have_ids_and_places_of_their_own() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    cells: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in DASHBOARD["panels"]):
        assert place["x"] + place["w"] <= 24  # the columns of a dashboard
        own = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert not own & cells, place
        cells |= own


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_has_a_unit_and_expressions(panel: dict[str, Any]) -> None:
    assert panel["type"] in {"stat", "timeseries"}
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert [one["refId"] for one in panel["targets"]] == [chr(ord("A") + i) for i in range(len(panel["targets"]))]


@pytest.mark.parametrize("expression", ["sum(", "rate(x)[5m]", "a +", "histogram_quantile(0.5)"])
def test_what_is_no_promql_is_noticed(expression: str) -> None:
    with pytest.raises(ValueError, match=r"expected|unclosed|unexpected|invalid|parse"):
        selectors(expression)
