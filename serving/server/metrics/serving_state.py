"""Metrics that are read from what serves whenever Prometheus asks, rather than counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from draftwell.serving.server.deployment.deployments import Deployments

if TYPE_CHECKING:
    from draftwell.serving.server.feedback.feedback import Feedback

KINDS = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
FEEDBACK = (
    "recorded",
    "written",
    "dropped_queue_full",
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


Values = dict[str, list[tuple[tuple[str, ...], float]]]
"""Metric → the values of its further labels, and its own."""


class ServingState(Collector):
    """Metrics that are read from what serves when they are asked for.

    Args:
        families: name → kind, help and further labels.
    """

    def __init__(
        self,
        model_name: str,
        families: Mapping[str, Mapping[str, Any]],
        deployments: Deployments,
        feedback: Feedback | None = None,
    ):
        self.model_name, self.families = model_name, families
        self.deployments, self.feedback = deployments, feedback

    def collect(self) -> Iterator[Metric]:
        """The metric families with their current values."""
        values = self._state()
        for name, about in self.families.items():
            family = KINDS[about["kind"]](
                name, about["help"], labels=["model_name", *about.get("labels", ())]
            )
            for labels, value in values.get(name, ()):
                family.add_metric([self.model_name, *labels], value)
            yield family

    def _state(self) -> Values:
        """What is served, and how busy it is."""
        now = self.deployments.current
        served, running, slots = now.served, now.scheduler.running, now.scheduler.slots
        bundle = (
            served.version or "none",
            served.pair.fingerprint[:12],
            served.strategy.name,
            served.tuned["sampled"],
            served.pair.dtype,
            served.pair.device,
        )
        counts = self.feedback.counts if self.feedback else {}
        return {
            "vllm:num_requests_running": [((), running)],
            "vllm:num_requests_waiting": [((), now.scheduler.waiting)],
            "vllm:kv_cache_usage_perc": [((), running / slots)],
            "draftwell:slots": [((), slots)],
            "draftwell:threads": [((), now.scheduler.threads)],
            "draftwell:bundle_refused": [((), self.deployments.last_switch_error is not None)],
            "draftwell:bundle_switches": [((), self.deployments.switches)],
            # reported as 0 before the first
            "draftwell:feedback": [((outcome,), counts.get(outcome, 0)) for outcome in FEEDBACK],
            "draftwell:bundle_info": [(bundle, 1)],
        }
