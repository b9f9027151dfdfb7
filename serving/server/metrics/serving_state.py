"""Metrics that are read from what serves whenever Prometheus asks, rather than counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from draftwell.serving.server.deployment.deployments import Deployments
from draftwell.serving.server.model.served_model import ServedModel

if TYPE_CHECKING:
    from draftwell.serving.server.feedback.feedback import Feedback

FEEDBACK = (
    "recorded",
    "written",
    "dropped_queue_full",
    "dropped_too_fast",
    "dropped_too_many",
    "failed",
    "skipped_altered",
    "skipped_no_draft",
    "skipped_repeated",
    "skipped_too_long",
    "skipped_too_short",
    "skipped_unfinished",
)
"""What became of requests selected for feedback: the names in `Feedback.counts` that count
requests."""


class ServingState(Collector):
    """Metrics that are read from what serves when they are asked for."""

    def __init__(self, model_name: str, deployments: Deployments, feedback: Feedback | None = None):
        self.model_name, self.deployments, self.feedback = model_name, deployments, feedback

    def collect(self) -> Iterator[Metric]:
        """The metric families with their current values."""
        now = self.deployments.current
        running, slots = now.scheduler.running, now.scheduler.slots
        gauges = {
            "vllm:num_requests_running": (running, "Requests that hold a slot."),
            "vllm:num_requests_waiting": (now.scheduler.waiting, "Requests that wait for a slot."),
            "vllm:kv_cache_usage_perc": (running / slots, "Share of the slots in use; 1: all."),
            "draftwell:slots": (slots, "Requests that can run at once."),
            "draftwell:threads": (
                now.scheduler.threads,
                "Compute threads; fewer than usual while other processes use the cores.",
            ),
            "draftwell:bundle_refused": (
                self.deployments.last_switch_error is not None,
                "1 while the newest bundle is refused.",
            ),
        }
        for name, (value, text) in gauges.items():
            family = GaugeMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self.model_name], float(value))
            yield family
        yield from self._load()
        switches = CounterMetricFamily(
            "draftwell:bundle_switches", "Switches to another bundle.", labels=["model_name"]
        )
        switches.add_metric([self.model_name], self.deployments.switches)
        yield switches
        outcomes = CounterMetricFamily(
            "draftwell:feedback",
            "Requests selected for feedback, by outcome.",
            labels=["model_name", "outcome"],
        )
        counts = self.feedback.counts if self.feedback else {}
        for outcome in FEEDBACK:  # reported as 0 before the first
            outcomes.add_metric([self.model_name, outcome], counts.get(outcome, 0))
        yield outcomes
        yield self._bundle(now.served)

    def _bundle(self, served: ServedModel) -> Metric:
        """What is served, as labels."""
        bundle = GaugeMetricFamily(
            "draftwell:bundle_info",
            "What is served; always 1.",
            labels=[
                "model_name",
                "version",
                "fingerprint",
                "strategy",
                "sampled_strategy",
                "dtype",
                "device",
            ],
        )
        bundle.add_metric(
            [
                self.model_name,
                served.version or "none",
                served.pair.fingerprint[:12],
                served.strategy.name,
                served.tuned["sampled"],
                served.pair.dtype,
                served.pair.device,
            ],
            1,
        )
        return bundle

    def _load(self) -> Iterator[Metric]:
        """What is known of draft lengths under load; without values where drafts are not
        limited."""
        load = self.deployments.current.scheduler.load
        length = GaugeMetricFamily(
            "draftwell:draft_length",
            "Draft tokens in force for each request, on average; absent: not limited.",
            labels=["model_name"],
        )
        speed = GaugeMetricFamily(
            "draftwell:draft_length_tokens_per_second",
            "Tokens per second of all requests together by draft length, "
            "under the present load; 0: plain decoding.",
            labels=["model_name", "draft_tokens"],
        )
        share = GaugeMetricFamily(
            "draftwell:control_rounds_share",
            "Share of the rounds so far that compared another draft length.",
            labels=["model_name"],
        )
        acceptance = GaugeMetricFamily(
            "draftwell:draft_acceptance",
            "Share of recent draft tokens that were kept, by strategy, as drafts "
            "under load are priced; before there are any it is .7.",
            labels=["model_name", "strategy"],
        )
        given = GaugeMetricFamily(
            "draftwell:draft_tokens_given",
            "Draft tokens that the last round gave out to all requests with a limit.",
            labels=["model_name"],
        )
        switches = CounterMetricFamily(
            "draftwell:draft_length_switches",
            "Changes of the draft length in force, by what was measured.",
            labels=["model_name"],
        )
        switches.add_metric([self.model_name], load.switches if load else 0)
        if load is not None:
            for name, counted in dict(load.acceptance).items():
                acceptance.add_metric([self.model_name, name], counted.rate)
            given.add_metric([self.model_name], load.given)
            share.add_metric([self.model_name], load.control_share)
            if (in_force := load.draft_length) is not None:
                length.add_metric([self.model_name], in_force)
            for tokens, found in load.tokens_per_second().items():
                speed.add_metric([self.model_name, str(tokens)], found)
        yield from (length, speed, share, acceptance, given, switches)
