"""deploy/grafana/draftwell.json, and the names of metrics in it and in the rules."""

import json
import re
import subprocess
from pathlib import Path

import yaml

from draftwell.components.watch.report import METRICS
from tests.support.paths import REPO
from tests.support.promtool import PROMTOOL, RULES, needs_promtool

DASHBOARD = json.loads((REPO / "deploy" / "grafana" / "draftwell.json").read_text())
GROUPS = yaml.safe_load(RULES.read_text())["groups"]
RECORDED = {rule["record"] for group in GROUPS for rule in group["rules"] if "record" in rule}
OURS = {f"draftwell_monitor_{name}" for name in METRICS}
UNREAD = {
    # metrics of engines that no dialect reads: what vLLM's prefix cache was asked for; how many
    # prompts it counts; SGLang's length of drafts
    "vllm:prefix_cache_queries_total",
    "vllm:request_prompt_tokens_count",
    "sglang:spec_num_steps",
}
METRIC = re.compile(r"\b(?:vllm|sglang|llamacpp|draftwell|engine|engine_position):\w+(?::\w+)?")
MONITOR = re.compile(r"\bdraftwell_monitor_\w+")


def targets() -> list[str]:
    """Every query of the dashboard."""
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]


def names_in(expression: str) -> set[str]:
    """Metrics of an expression."""
    alerts = {"ALERTS"} if "ALERTS{" in expression else set()
    return {*METRIC.findall(expression), *MONITOR.findall(expression), *alerts}


def test_every_query_of_the_dashboard_is_recorded_by_the_rules_or_written_by_monitor() -> None:
    queries = [*targets(), *(v["definition"] for v in DASHBOARD["templating"]["list"][1:])]
    for query in queries:
        assert names_in(query), query
        assert names_in(query) - {"ALERTS"} <= RECORDED | OURS, query


def test_every_metric_of_the_rules_is_one_that_a_dialect_reads() -> None:
    folder = REPO / "components" / "engines" / "remote" / "dialects"
    read = set(METRIC.findall("".join(file.read_text() for file in folder.glob("*.py"))))
    known = read | RECORDED | OURS | UNREAD
    for rule in (rule for group in GROUPS for rule in group["rules"]):
        assert names_in(rule["expr"]) <= known, rule["expr"]
    assert not UNREAD & read, "what a dialect reads need not be named here"


def test_the_dashboard_is_sound() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"], panel["title"]
            assert panel["datasource"]["uid"] == "${datasource}"
            assert [t["refId"] for t in panel["targets"]] == list("ABC")[: len(panel["targets"])]
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD)))
    assert used - {"__all"} == variables == {"datasource", "job", "instance"}


@needs_promtool
def test_prometheus_reads_every_query_of_the_dashboard(tmp_path: Path) -> None:
    rules = [
        {"record": f"q{place}", "expr": re.sub(r"\$\w+", ".*", query)}
        for place, query in enumerate(targets())
    ]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    done = subprocess.run(
        [str(PROMTOOL), "check", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
