"""The dashboard and the alert rules name only metrics and labels that the service has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import fields
from importlib.resources import as_file, files
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from reclaim.features.groups import TIER_LABELS
from reclaim.features.targets import HORIZONS_S
from reclaim.serving.feed.metrics import NamedMetrics, text_of
from reclaim.serving.http.guard import PROBES
from reclaim.serving.models.keeper import ModelStatus
from reclaim.serving.monitoring.metrics import OUTCOMES, PHASES, PROMOTIONS, RECORDINGS, ROLES, SHOWN, Metrics
from reclaim.serving.settings import ENV_PREFIX, ServingSettings
from reclaim.training.margins.margin import MARGIN_NAMES
from reclaim.training.settings import QUANTILE_LEVELS

DEPLOY = files("reclaim.serving") / "deploy"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
ALERTS_TEXT = (DEPLOY / "alerts.yaml").read_text()
RULES: list[dict[str, Any]] = [rule for group in yaml.safe_load(ALERTS_TEXT)["groups"] for rule in group["rules"]]
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [
    *(rule["expr"] for rule in RULES),
    *(target["expr"] for panel in PANELS for target in panel["targets"]),
    *(annotation["expr"] for annotation in DASHBOARD["annotations"]["list"]),
]
SCRAPED = {"instance", "job"}
"""Labels that Prometheus adds to whatever it scrapes."""
VALUES = {
    "role": ROLES, "outcome": (*OUTCOMES, *PROMOTIONS, *RECORDINGS), "phase": PHASES, "margin": MARGIN_NAMES,
    "tier": TIER_LABELS, "level": [f"{level:g}" for level in QUANTILE_LEVELS], "part": ("memory", "log", "snapshot"),
    "horizon_s": tuple(map(str, HORIZONS_S)), "code": ("401", "429"),
    "status": ("2xx", "5xx"), "job": ("reclaim",), "endpoint": PROBES,
}  # fmt: skip


@pytest.fixture(scope="module")
def labels() -> dict[str, set[str]]:
    """Return the labels of every sample of metrics that show everything, of the service and of a feed."""
    metrics = Metrics()
    metrics.request("/v1/usage", "POST", 429, 0.001)
    metrics.show(lambda: {name: {family.labels: 1.0} for name, family in SHOWN.items()})
    out: dict[str, set[str]] = {"up": set()}
    of_feed = text_of(NamedMetrics(until_us=1)).decode()
    for text in (metrics.text(), of_feed):
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                out[sample.name] = set(sample.labels)
    return out


def test_every_metric_and_label_of_an_expression_exists(labels: dict[str, set[str]]) -> None:
    for expression in EXPRESSIONS:
        names = set(re.findall(r"\b(?:reclaim|process)_\w+|\bup\b", expression))
        assert names, expression
        assert names <= set(labels), expression
        having = Counter(label for name in names for label in labels[name] - SCRAPED)
        for word, grouped in re.findall(r"\b(by|on)\s*\(([^)]*)\)", expression):
            grouped_by = {label.strip() for label in grouped.split(",") if label.strip()} - SCRAPED
            fewest = min((having[label] for label in grouped_by), default=2)
            assert fewest >= (2 if word == "on" else 1), expression  # both sides of a match have its labels
        for name, matchers in re.findall(r"(\w+)\{([^}]*)\}", expression):
            for label, _, wanted in re.findall(r'(\w+)\s*(=~|!=|=|!~)\s*"([^"]*)"', matchers):
                assert label in labels[name] | SCRAPED, expression
                if "$" not in wanted:
                    assert set(wanted.split("|")) <= set(VALUES[label]), expression


def test_a_service_shows_every_metric_of_an_expression(make_app: Any, tmp_path: Path) -> None:
    of_its_time = {
        "reclaim_clock_lag_seconds", "reclaim_snapshot_age_seconds", "reclaim_snapshot_duration_seconds",
        "reclaim_price_budget_spent_ratio", "reclaim_machines_budget_spent_ratio", "reclaim_machines_at_once_ratio",
        "reclaim_machines_most_at_once_ratio", "reclaim_mean_limit_ratio",
    }  # fmt: skip
    """Metrics only with the machine's clock, after a snapshot, after windows or outcomes; drift only of a network.
    How far a feed is, a feed shows."""
    with make_app(state=tmp_path) as (_, runtime):
        runtime.metrics.request("/v1/usage", "POST", 429, 0.001)
        shown = {family.name for family in text_string_to_metric_families(runtime.metrics.text())}
    for expression in EXPRESSIONS:
        for name in set(re.findall(r"\breclaim_(?!drift|feed)\w+", expression)) - of_its_time:
            assert re.sub("_(total|bucket|sum|count)$", "", name) in shown, name


def test_every_expression_is_promql() -> None:
    promql = pytest.importorskip("promql_parser")
    variables = {"$__rate_interval": "5m", "$range": "6h", "$instance": ".*", "$margin": "medium"}
    for expression in EXPRESSIONS:
        for name, value in variables.items():
            expression = expression.replace(name, value)
        assert "$" not in expression
        promql.parse(expression)


def test_every_label_in_a_legend_is_one_of_its_expression(labels: dict[str, set[str]]) -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            names = re.findall(r"\breclaim_\w+", target["expr"])
            there = set().union(*(labels[name] for name in names)) | SCRAPED
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= there, panel["title"]


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names)
    for rule in RULES:
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}, rule["alert"]
        assert re.fullmatch(r"Reclaim[A-Z]\w+", rule["alert"])
        assert re.fullmatch(r"\d+[mh]", rule["for"]), rule["alert"]
        assert rule["labels"]["severity"] in ("info", "warning", "critical"), rule["alert"]
        assert set(rule["annotations"]) == {"summary", "description"}, rule["alert"]
        assert len(rule["annotations"]["description"].split()) > 20, rule["alert"]


@pytest.mark.slow
def test_alerts_fire_when_they_should_and_only_then() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool, which comes with Prometheus, is not here")
    with as_file(DEPLOY) as folder:
        for what in (["check", "rules", "alerts.yaml"], ["test", "rules", "alerts_test.yaml"]):
            done = subprocess.run([promtool, *what], cwd=folder, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr


def test_every_panel_of_lines_has_one_unit() -> None:
    for panel in PANELS:  # a count and a rate on one axis: the smaller is a line at zero
        if panel["type"] == "timeseries":
            counted = {"increase(" in target["expr"] and "/" not in target["expr"] for target in panel["targets"]}
            assert len(counted) == 1, panel["title"]


def test_the_alert_of_another_model_names_all_fields_of_readyz_that_say_why() -> None:
    (rule,) = [rule for rule in RULES if rule["alert"] == "ReclaimFallbackModel"]
    named = set(re.findall("`([a-z_]+)`", rule["annotations"]["description"]))
    assert named == {"fallback", "registry", "from_disk", "refused"}
    assert named <= {field.name for field in fields(ModelStatus)}


def test_every_setting_that_a_remedy_names_exists() -> None:
    named = set(re.findall(rf"{ENV_PREFIX}[A-Z_]+", ALERTS_TEXT))
    assert named <= {ENV_PREFIX + name.upper() for name in ServingSettings.model_fields}
    assert len(named) > 5


@pytest.mark.parametrize(
    "about",
    [
        "up", "ready", "store_ok", "windows_total", "duration_seconds", "violations", "covered", "drift", "registry",
        "promotions", "clock_lag",
    ],
)  # fmt: skip
def test_what_an_operator_must_not_miss_has_an_alert(about: str) -> None:
    assert any(about in rule["expr"] for rule in RULES)


def test_windows_that_are_lost_have_an_alert() -> None:
    kept_or_meant = {"taken", "repeated", "ended"}
    named = {
        name
        for rule in RULES
        for names in re.findall(r'outcome=~?"([^"]*)"', rule["expr"])
        for name in names.split("|")
    }
    assert set(OUTCOMES) - kept_or_meant <= named


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    assert DASHBOARD["schemaVersion"] == 39  # Grafana 10 and 11
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == ["Serving", "Ingest", "State", "Model", "Quality", "Drift", "Shadow"]
    for panel in PANELS:
        assert panel["description"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_the_variables_of_the_dashboard_are_declared() -> None:
    declared = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD)))
    assert {name for name in used if not name.startswith("__")} == declared


def test_no_panel_lies_on_another() -> None:
    boxes = [(panel["title"], panel["gridPos"]) for panel in DASHBOARD["panels"]]
    for (one, a), (other, b) in combinations(boxes, 2):
        apart = (
            a["x"] + a["w"] <= b["x"]
            or b["x"] + b["w"] <= a["x"]
            or a["y"] + a["h"] <= b["y"]
            or b["y"] + b["h"] <= a["y"]
        )
        assert apart, (one, other)
    assert all(box["x"] + box["w"] <= 24 for _, box in boxes)
