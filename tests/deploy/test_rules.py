"""Prometheus rules parse, their metrics exist, and both copies are the same."""

import re

import promql_parser
import yaml

from tests.deploy.commands import ROOT

GROUPS = yaml.safe_load((ROOT / "deploy/prometheus/rules.yaml").read_text())["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
METRICS = re.findall(
    r"^\| `(draftbridge_\w+)` \| (\w+) \| (.*?) \|", (ROOT / "docs/reference/metrics.md").read_text(), re.M
)


def series() -> set[str]:
    """Returns the names of all series, recorded ones included."""
    names = {rule["record"] for rule in RULES if "record" in rule}
    for name, kind, _ in METRICS:
        names |= {f"{name}{end}" for end in ("_bucket", "_sum", "_count")} if kind == "histogram" else {name}
    return names


def used_by(text: str) -> set[str]:
    """Returns the names of the series that an expression uses."""
    used: set[str] = set()

    def visit(expression: promql_parser.Expr) -> None:
        if isinstance(expression, promql_parser.VectorSelector):
            used.add(expression.name)
        elif isinstance(expression, promql_parser.MatrixSelector):
            used.add(expression.vector_selector.name)

    promql_parser.walk(promql_parser.parse(text), visit)
    return used


def test_expressions_use_series_that_exist() -> None:
    used = set[str]().union(*(used_by(rule["expr"]) for rule in RULES))
    assert used and used <= series(), used - series()


def test_slots_of_requests_and_of_guests_do_not_count_as_leaked() -> None:
    (leak,) = [rule["expr"] for rule in RULES if rule.get("alert") == "DraftBridgeSlotsLeak"]
    assert {"draftbridge_active_requests", "draftbridge_guest_sequences"} <= used_by(leak)


def test_a_replica_that_has_left_its_host_name_is_missed_though_no_series_has_its_address() -> None:
    (fewer,) = [rule for rule in RULES if rule.get("alert") == "DraftBridgeFewerServices"]
    (record,) = used_by(fewer["expr"])
    (connected,) = [rule["expr"] for rule in RULES if rule.get("record") == record]
    assert connected == "sum by (instance, role) (draftbridge_endpoint_connected)"
    comparison = promql_parser.parse(fewer["expr"])
    assert isinstance(comparison, promql_parser.BinaryExpr) and str(comparison.op) == "<"
    assert "on purpose" in fewer["annotations"]["description"]


def test_internal_errors_over_http_alert_too() -> None:
    (internal,) = [rule["expr"] for rule in RULES if rule.get("alert") == "DraftBridgeInternalErrors"]
    calls = {"draftbridge_rpc_server_call_duration_seconds_count"}
    assert used_by(internal) == calls | {"draftbridge_http_server_request_duration_seconds_count"}


def test_labels_are_those_of_the_metrics() -> None:
    labels = {name: set(re.findall(r"`(\w+)`", given)) for name, _, given in METRICS}
    for rule in RULES:
        if "record" in rule and (by := re.match(r"sum by \(([\w, ]+)\)", rule["expr"])):
            labels[rule["record"]] = set(by[1].split(", "))
    for rule in RULES:
        for name, given in re.findall(r"(draftbridge_\w+?)(?:_count)?\{\s*([^}]*)\}", rule["expr"]):
            assert set(re.findall(r"(\w+)=", given)) <= labels[name]
        known = set().union(*(labels[one] for one in labels if one in rule["expr"])) | {"instance"}
        text = str(rule.get("annotations", ""))
        assert set(re.findall(r"\$labels\.(\w+)", text)) <= known


def test_alerts_say_what_to_do() -> None:
    alerts = [rule for rule in RULES if "alert" in rule]
    assert len({rule["alert"] for rule in alerts}) == len(alerts) > 5
    for rule in alerts:
        assert rule["alert"].startswith("DraftBridge")
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"].keys() == {"summary", "description"}
    guide = (ROOT / "docs/guides/operations.md").read_text()
    assert [rule["alert"] for rule in alerts if f"`{rule['alert']}`" not in guide] == []


def test_the_operators_copy_is_the_same() -> None:
    copy = yaml.safe_load((ROOT / "deploy/kubernetes/components/monitoring/rules.yaml").read_text())
    assert copy["spec"]["groups"] == GROUPS
