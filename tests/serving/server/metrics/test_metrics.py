"""What /metrics says, against what happened: the engine's own counters, vLLM's names, every query
of the dashboard."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Response
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from draftwell.serving.runtime.engine.thread_governor import ThreadGovernor
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.session.stats import Stats
from draftwell.serving.runtime.strategies import build_strategy
from draftwell.serving.server.app import create_app
from draftwell.serving.server.feedback.feedback import Feedback
from draftwell.serving.server.metrics import metrics as metrics_module
from draftwell.serving.server.metrics.dashboards import GRAFANA
from draftwell.serving.server.metrics.endpoint import CountAnswers, metrics_router
from draftwell.serving.server.metrics.metrics import FAMILIES, Metrics
from draftwell.serving.server.metrics.serving_state import FEEDBACK
from draftwell.serving.server.scheduling.admission import QueueFull
from draftwell.serving.server.scheduling.detokenize import TextStream
from draftwell.serving.server.scheduling.observer import Observer
from draftwell.serving.server.scheduling.scheduler import Scheduler
from draftwell.serving.server.scheduling.ticket import (
    Cancelled,
    DeadlineExceeded,
    End,
    Event,
    Failure,
    Ticket,
)
from tests.support.paths import REPO
from tests.support.server.scheduler_rounds import turn_until_idle
from tests.support.server.served_pair import running, served_pair, serving
from tests.support.server.server_process import wait_until

# What dashboards made for vLLM ask for (V1; https://docs.vllm.ai/en/latest/usage/metrics), as
# Prometheus names it.
VLLM_NAMES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    *(
        f"vllm:{name}_{part}"
        for part in ("bucket", "sum", "count")
        for name in (
            "time_to_first_token_seconds",
            "inter_token_latency_seconds",
            "time_per_output_token_seconds",
            "request_time_per_output_token_seconds",
            "e2e_request_latency_seconds",
            "request_queue_time_seconds",
            "request_inference_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
            "request_prompt_tokens",
            "request_generation_tokens",
            "request_params_max_tokens",
        )
    ),
}
WORDS = {
    "by",
    "without",
    "on",
    "ignoring",
    "group_left",
    "group_right",
    "and",
    "or",
    "unless",
    "bool",
    "offset",
}


class Samples:
    """The text of /metrics, parsed: `of(name, label=value …)` is a value; absent series are
    None."""

    def __init__(self, text: str):
        self.labels: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self.labels.setdefault(sample.name, []).append((sample.labels, sample.value))

    @classmethod
    def read(cls, metrics: Metrics) -> Samples:
        return cls(metrics.render().decode())

    def of(self, name: str, **wanted: str) -> float | None:
        found = [
            value for labels, value in self.labels.get(name, []) if wanted.items() <= labels.items()
        ]
        return found[0] if found else None

    def sum(self, name: str) -> float:
        return sum(value for _, value in self.labels[name])


def ticket(
    stats: Stats | None = None,
    *,
    tokens: int = 0,
    admitted: float | None = 12.0,
    first: float | None = 14.0,
) -> Ticket:
    """A ticket that arrived at 10 and ended at 20."""
    made = Ticket(
        [1, 2, 3],
        Sampling(max_tokens=9),
        TextStream(lambda ids: "x" * len(ids)),
        lambda event: None,
        strategy=None if admitted is None else SimpleNamespace(name="vanilla_sd"),
    )  # type: ignore[arg-type]
    made.text.tokens = tokens
    made.arrived, made.admitted_at, made.first_token_at, made.ended_at = 10.0, admitted, first, 20.0
    if admitted is not None:
        made.job = SimpleNamespace(session=SimpleNamespace(stats=stats or Stats(), owner=""))  # type: ignore[assignment]
    return made


def drafted() -> Stats:
    """Three rounds with drafts of 4, 4 and 2 tokens, of which 3, 0 and 2 were kept, one of them
    rescued."""
    stats = Stats(rounds=3, drafted=10, judged=7, accepted=5, rescued=1, target_calls=3)
    stats.accepted_at.update({0: 2, 1: 2, 2: 1, 3: 0})
    return stats


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("tiny")


@pytest.mark.parametrize(
    "end",
    [End("stop", 6, drafted()), Cancelled(), Failure(RuntimeError("x"))],
    ids=["end", "cancelled", "failed"],
)
def test_drafts_count_however_a_request_ended(metrics: Metrics, end: Event) -> None:
    metrics.finished(ticket(drafted(), tokens=6), end)
    samples = Samples.read(metrics)
    assert samples.of("vllm:spec_decode_num_drafts_total", model_name="tiny") == 3
    assert samples.of("vllm:spec_decode_num_draft_tokens_total") == 10
    assert samples.of("vllm:spec_decode_num_accepted_tokens_total") == 5
    at = [
        samples.of("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(i))
        for i in range(5)
    ]
    assert at == [2, 2, 1, 0, None]
    assert samples.of("draftwell:judged_tokens_total", strategy="vanilla_sd") == 7
    assert samples.of("draftwell:rescued_tokens_total", strategy="vanilla_sd") == 1
    assert samples.of("draftwell:generated_tokens_total", strategy="vanilla_sd") == 6


@pytest.mark.parametrize(
    ("event", "reason", "detail"),
    [
        (End("stop", 6, Stats()), "stop", "stop"),
        (End("length", 6, Stats()), "length", "length"),
        (Cancelled(), "abort", "abort"),
        (Failure(RuntimeError("x")), "error", "error"),
        (Failure(DeadlineExceeded("late")), "error", "deadline"),
        (Failure(QueueFull(3)), "error", "displaced"),
    ],
)
def test_ends_are_told_apart(metrics: Metrics, event: Event, reason: str, detail: str) -> None:
    metrics.finished(ticket(tokens=6), event)
    samples = Samples.read(metrics)
    assert (
        samples.of("vllm:request_success_total", finished_reason=reason)
        == samples.sum("vllm:request_success_total")
        == 1
    )
    assert samples.of("draftwell:requests_total", strategy="vanilla_sd", outcome=detail) == 1


def test_times_are_of_their_own_stretches(metrics: Metrics) -> None:
    metrics.finished(ticket(tokens=4), End("stop", 4, Stats()))
    samples = Samples.read(metrics)
    sums = {
        name: samples.of(f"vllm:{name}_seconds_sum")
        for name in (
            "e2e_request_latency",
            "request_queue_time",
            "request_inference_time",
            "request_prefill_time",
            "request_decode_time",
            "request_time_per_output_token",
        )
    }
    assert sums == {
        "e2e_request_latency": 10,
        "request_queue_time": 2,
        "request_inference_time": 8,
        "request_prefill_time": 2,
        # six seconds for the three behind the first
        "request_decode_time": 6,
        "request_time_per_output_token": 2,
    }


def test_a_request_that_never_got_a_slot_waited_and_did_nothing_else(metrics: Metrics) -> None:
    metrics.finished(ticket(admitted=None, first=None), Cancelled())
    samples = Samples.read(metrics)
    assert samples.of("vllm:request_queue_time_seconds_sum") == 10
    assert samples.of("vllm:request_inference_time_seconds_count") == 0
    assert samples.of("vllm:request_prefill_time_seconds_count") == 0
    assert samples.of("draftwell:requests_total", strategy="none", outcome="abort") == 1


def test_one_token_has_no_time_per_further_token(metrics: Metrics) -> None:
    metrics.finished(ticket(tokens=1), End("length", 1, Stats()))
    assert Samples.read(metrics).of("vllm:request_time_per_output_token_seconds_count") == 0


def test_first_tokens_and_gaps_are_told_as_they_come(metrics: Metrics) -> None:
    mine, other = ticket(), ticket()
    for one, tokens in [(mine, 1), (other, 1), (mine, 3), (mine, 2), (other, 1)]:
        metrics.progressed(one, tokens)
    samples = Samples.read(metrics)
    assert samples.of("vllm:generation_tokens_total") == 8
    assert samples.of("vllm:time_to_first_token_seconds_count") == 2
    # from 10, when they arrived, to 14
    assert samples.of("vllm:time_to_first_token_seconds_sum") == 8
    assert samples.of("vllm:inter_token_latency_seconds_count") == 3
    for one in (mine, other):
        metrics.finished(one, Cancelled())
    assert not metrics._last_progress, "what has left must not be remembered"


def test_a_metric_is_of_the_kind_that_its_family_names(metrics: Metrics) -> None:
    kinds = {name: about["kind"] for name, about in FAMILIES["counted"].items()}
    assert {family.name: family.type for family in metrics.registry.collect()} == kinds
    for wrong in ({"kind": "summary"}, {"kind": "counter", "buckets": "latency"}):
        with pytest.raises((KeyError, TypeError), match=r"summary|buckets"):
            metrics._family("draftwell:new", help="", **wrong)


def test_two_servers_in_one_process_do_not_mix() -> None:
    one, other = Metrics("one"), Metrics("other")
    one.finished(ticket(drafted()), Cancelled())
    assert Samples.read(other).of("vllm:spec_decode_num_drafts_total", model_name="other") == 0


@pytest.mark.parametrize(
    "accept",
    [
        "*/*",
        "text/plain;version=0.0.4",
        "application/openmetrics-text;version=1.0.0,text/plain;q=0.5",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8",
    ],
)
def test_names_keep_their_colons_whatever_form_is_asked_for(metrics: Metrics, accept: str) -> None:
    app = FastAPI()
    app.include_router(metrics_router(metrics))
    answer = TestClient(app).get("/metrics", headers={"Accept": accept})
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "\nvllm:spec_decode_num_drafts_total{" in answer.text


def serving_now(
    metrics: Metrics, version: str, strategy: str = "spide", **scheduler: Any
) -> SimpleNamespace:
    """Deployments that the metrics watch, of which one serves."""
    served = SimpleNamespace(
        version=version,
        pair=SimpleNamespace(fingerprint="f" * 64, dtype="float32", device="cpu"),
        strategy=SimpleNamespace(name=strategy),
        tuned={"greedy": strategy, "sampled": "svip"},
    )
    known = {"running": 1, "waiting": 7, "slots": 4, "threads": 1, "load": None, **scheduler}
    current = SimpleNamespace(served=served, scheduler=SimpleNamespace(**known))
    deployments = SimpleNamespace(switches=0, last_switch_error=None, current=current)
    metrics.watch(deployments)  # type: ignore[arg-type]
    return deployments


def test_what_is_served_is_read_when_it_is_asked_for(metrics: Metrics) -> None:
    deployments = serving_now(metrics, "1")
    found = Samples.read(metrics).of(
        "draftwell:bundle_info",
        version="1",
        fingerprint="f" * 12,
        strategy="spide",
        sampled_strategy="svip",
    )
    assert found == 1
    deployments.current.served.version, deployments.current.scheduler.running = "2", 2
    deployments.switches, deployments.last_switch_error = 1, "the bundle 3 is damaged"
    samples = Samples.read(metrics)
    assert [labels["version"] for labels, _ in samples.labels["draftwell:bundle_info"]] == ["2"]
    assert (
        samples.of("draftwell:bundle_switches_total") == samples.of("draftwell:bundle_refused") == 1
    )
    assert samples.of("vllm:num_requests_running", model_name="tiny") == 2
    assert samples.of("vllm:num_requests_waiting") == 7
    assert samples.of("vllm:kv_cache_usage_perc") == 0.5
    assert samples.of("draftwell:threads") == 1


def test_what_became_of_requests_drawn_for_feedback_is_told(tmp_path: Path) -> None:
    feedback = Feedback(tmp_path, 1.0, per_minute=1e6)
    counts = feedback.spool.counts
    with (
        serving(served_pair("vanilla_sd", slots=2), observers=[feedback]) as (url, _),
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        before = Samples(http.get("/metrics").text)
        assert {
            labels["outcome"]: value for labels, value in before.labels["draftwell:feedback_total"]
        } == dict.fromkeys(FEEDBACK, 0)
        counts.update(recorded=5, written=2, dropped_too_many=3, bytes=999, removed_files=1)
        samples = Samples(http.get("/metrics").text)
    told = {
        labels["outcome"]: value for labels, value in samples.labels["draftwell:feedback_total"]
    }
    assert told == dict.fromkeys(FEEDBACK, 0) | {"recorded": 5, "written": 2, "dropped_too_many": 3}
    assert samples.of("draftwell:feedback_total", model_name="tiny", outcome="written") == 2


def test_every_outcome_of_feedback_has_a_series() -> None:
    """Names that the code counts requests under, read from the code itself."""
    folder = Path(metrics_module.__file__).parents[1] / "feedback"
    code = "".join(
        (folder / name).read_text(encoding="utf-8") for name in ("feedback.py", "spool.py")
    )
    named = set(re.findall(r'"((?:dropped|skipped)_\w+|recorded|written|failed)"', code))
    assert named == set(FEEDBACK)


def test_the_servers_own_request_is_nobodys(metrics: Metrics) -> None:
    own = ticket(drafted(), tokens=6)
    own.own = True
    metrics.admitted(own)
    metrics.progressed(own, 3)
    metrics.finished(own, Cancelled())
    samples = Samples.read(metrics)
    assert not any(
        value
        for name, rows in samples.labels.items()
        if not name.endswith("_created")
        for _, value in rows
    )


def test_refusals_are_counted_whoever_gives_them(metrics: Metrics) -> None:
    app = FastAPI()
    app.add_middleware(CountAnswers, metrics=metrics)

    @app.get("/busy/{name}")
    def busy(name: str) -> Response:
        return Response(status_code=429)

    client = TestClient(app)
    for path in ("/busy/a", "/busy/b", "/nowhere/1", "/nowhere/2"):
        client.get(path)
    samples = Samples.read(metrics)
    assert samples.of("draftwell:rejected_requests_total") == 2
    assert samples.of("draftwell:http_responses_total", path="/busy/{name}", code="429") == 2
    assert samples.of("draftwell:http_responses_total", path="other", code="404") == 2
    assert len(samples.labels["draftwell:http_responses_total"]) == 2, (
        "a path of a client's making must not become a series"
    )


class Sum(Observer):
    """What the engine itself counted for all requests that left."""

    def __init__(self) -> None:
        self.stats: list[Stats] = []

    def finished(self, ticket: Ticket, event: Event) -> None:
        if ticket.job:
            self.stats.append(ticket.job.session.stats)


def test_a_scheduler_feeds_it_and_cancelled_requests_are_in_the_sums() -> None:
    served, metrics, truth = (
        served_pair("vanilla_sd", slots=2, num_speculative_tokens=4),
        Metrics("tiny"),
        Sum(),
    )
    scheduler = Scheduler(
        served.pair.engine(), served.strategy, served.slots, observers=[metrics, truth]
    )
    tickets = [
        Ticket(
            served.encode(prompt),
            served.pair.sampling(max_tokens=24),
            TextStream(served.decode),
            lambda event: None,
        )
        for prompt in ("hello", "on and on", "1 2 3")
    ]
    for one in tickets:
        scheduler.submit(one)
    for _ in range(14):
        scheduler.turn()
    tickets[0].cancel()
    turn_until_idle(scheduler)
    samples, total = Samples.read(metrics), Stats.total(truth.stats)
    assert samples.of("vllm:request_success_total", finished_reason="abort") == 1
    assert 0 < truth.stats[0].drafted < total.drafted
    assert samples.of("vllm:spec_decode_num_draft_tokens_total") == total.drafted
    assert samples.of("vllm:spec_decode_num_accepted_tokens_total") == total.accepted
    assert samples.sum("vllm:spec_decode_num_accepted_tokens_per_pos_total") == total.accepted
    assert samples.of("vllm:generation_tokens_total") == sum(one.text.tokens for one in tickets)
    assert samples.of("vllm:prompt_tokens_total") == sum(len(one.prompt) for one in tickets)
    assert samples.of("draftwell:batch_size_bucket", le="2.0") == samples.of(
        "draftwell:batch_size_count"
    )


@pytest.fixture(scope="module")
def live() -> Iterator[Callable[..., Any]]:
    """A running server that has answered one request; asks it for a path."""
    with (
        serving(served_pair("vanilla_sd", slots=2, num_speculative_tokens=4)) as (url, _),
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        body = {"model": "tiny", "prompt": "hello there", "max_tokens": 24, "temperature": 0}
        speculation = (
            http.post("/v1/completions", json=body).raise_for_status().json()["speculation"]
        )

        def counted() -> bool:
            samples = Samples(http.get("/metrics").text)
            done = samples.of("vllm:request_success_total", finished_reason="length")
            return (done, samples.of("vllm:num_requests_running")) == (1, 0)

        # a client has its answer a moment before the observers are notified
        wait_until(counted, "the request is counted")
        yield lambda path: (http.get(path).raise_for_status(), speculation)


def test_a_live_server_has_vllms_names_and_the_requests_figures(live: Callable[..., Any]) -> None:
    answer, speculation = live("/metrics")
    samples = Samples(answer.text)
    assert samples.labels.keys() >= VLLM_NAMES
    assert all(
        labels["model_name"] == "tiny" for name in VLLM_NAMES for labels, _ in samples.labels[name]
    )
    assert samples.of("vllm:spec_decode_num_draft_tokens_total") == speculation["drafted"]
    assert samples.of("vllm:spec_decode_num_accepted_tokens_total") == speculation["accepted"]
    assert samples.of("vllm:generation_tokens_total") == 24
    assert samples.of("vllm:num_requests_running") == 0
    assert samples.of("draftwell:slots") == 2
    assert samples.of("draftwell:http_responses_total", path="/v1/completions", code="200") == 1
    assert (
        samples.of("draftwell:bundle_info", strategy="vanilla_sd", dtype="float32", device="cpu")
        == 1
    )


def test_a_switch_of_bundles_shows_and_its_own_request_does_not() -> None:
    app = create_app(served_pair("vanilla_sd", slots=2), drain_seconds=10)
    with running(app) as url:
        plain = {"strategy": build_strategy("autoregressive"), "strategies": None, "version": "2"}
        assert app.state.deployments.switch(lambda old: replace(old, **plain))
        samples = Samples(httpx.get(f"{url}/metrics").text)
    assert [
        (labels["version"], labels["strategy"])
        for labels, _ in samples.labels["draftwell:bundle_info"]
    ] == [("2", "autoregressive")]
    assert samples.of("draftwell:bundle_switches_total") == 1
    assert samples.of("draftwell:bundle_refused") == 0
    assert samples.of("draftwell:batch_size_count") > 0, (
        "the request that tried the new bundle did run"
    )
    assert (
        samples.sum("vllm:request_success_total") == samples.of("vllm:generation_tokens_total") == 0
    )


def test_the_threads_in_force_are_those_of_the_governor_or_the_number_that_was_named() -> None:
    with running(create_app(replace(served_pair(), threads=3), drain_seconds=10)) as url:
        assert Samples(httpx.get(f"{url}/metrics").text).of("draftwell:threads") == 3
    governor = ThreadGovernor(1)
    governor.threads = 7
    with running(create_app(replace(served_pair(), governor=governor), drain_seconds=10)) as url:
        assert Samples(httpx.get(f"{url}/metrics").text).of("draftwell:threads") == 7


def queries() -> list[str]:
    dashboard = json.loads(GRAFANA.read_text(encoding="utf-8"))
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


def metrics_in(query: str) -> set[str]:
    """Names of the metrics that a PromQL expression reads.

    >>> sorted(metrics_in('sum by (a) (rate(x:y_total{b="c"}[5m])) / ignoring (a) z'))
    ['x:y_total', 'z']
    """
    query = re.sub(r'"[^"]*"', "", query)
    query = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", query)
    query = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", query)
    names = re.findall(r"[a-zA-Z_:][\w:]*(?!\s*\()\b", query)
    return set(names) - WORDS


def labels_in(query: str) -> set[str]:
    """Labels that a PromQL expression names."""
    groups = re.findall(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)", query)
    return set(re.findall(r"[{,]\s*(\w+)\s*[=!]", query)) | {
        word.strip() for group in groups for word in group.split(",") if word.strip()
    }


def test_names_are_found_in_expressions() -> None:
    query = (
        'f(0.95, sum by (le) (rate(a:b_bucket{x=~"vllm:no"}[$__rate_interval]))) / ignoring '
        "(p) group_left () plain and c:d"
    )
    assert metrics_in(query) == {"a:b_bucket", "plain", "c:d"}
    assert labels_in(query) == {"le", "x", "p"}


def test_the_documentation_names_every_series_and_no_other(live: Callable[..., Any]) -> None:
    page = (REPO / "docs" / "metrics.md").read_text(encoding="utf-8")
    table = page[page.index("## All series") : page.index("Counters of drafts")]
    text = live("/metrics")[0].text
    names = [name for name in Samples(text).labels if not name.endswith("_created")]
    without_values = {
        family.name for family in text_string_to_metric_families(text) if not family.samples
    }
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in names} | without_values
    assert set(re.findall(r"`((?:vllm|draftwell):\w+)`", table)) == shown


def test_every_query_of_the_dashboard_exists_on_a_live_server(live: Callable[..., Any]) -> None:
    samples = Samples(live("/metrics")[0].text)
    assert len(queries()) > 20
    for query in queries():
        names = metrics_in(query)
        assert names, f"no metric in {query}"
        assert names <= samples.labels.keys(), query
        known = {label for name in names for labels, _ in samples.labels[name] for label in labels}
        assert labels_in(query) <= known, query
        assert "model_name" in labels_in(query), f"not bound to the chosen model: {query}"


def test_the_dashboard_is_sound_and_served(live: Callable[..., Any]) -> None:
    dashboard = live("/metrics/grafana.json")[0].json()
    assert dashboard == json.loads(GRAFANA.read_text(encoding="utf-8"))
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert all(0 <= x < 24 for x, _ in cells)
    assert all(
        panel["description"] and panel["fieldConfig"]["defaults"]["unit"]
        for panel in panels
        if panel["type"] != "row"
    )
    assert {variable["name"] for variable in dashboard["templating"]["list"]} == {
        "datasource",
        "model_name",
    }
