"""`/metrics` for Prometheus: vLLM's names, so that dashboards made for vLLM work, and `draftwell:`
for what vLLM lacks.

A `Metrics` observes a scheduler: its hooks run on the scheduler's thread, at every round, and only
add numbers. What a request drafted is added once, when it ends, from the engine's own counters,
also if it was cancelled or failed. Each object has its own registry, so that several applications
in one process do not mix.
"""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from draftwell.serving.runtime.session.stats import Stats
from draftwell.serving.server.deployment.deployments import Deployments
from draftwell.serving.server.metrics.serving_state import ServingState
from draftwell.serving.server.scheduling.admission import QueueFull
from draftwell.serving.server.scheduling.observer import Observer
from draftwell.serving.server.scheduling.ticket import (
    Cancelled,
    DeadlineExceeded,
    End,
    Event,
    Ticket,
)

if TYPE_CHECKING:
    from draftwell.serving.server.feedback.feedback import Feedback

FAMILIES = json.loads((Path(__file__).parent / "families.json").read_text(encoding="utf-8"))
"""All metrics: `counted` here, `read` by `ServingState`, and the `buckets` of histograms, which are
vLLM's own where vLLM has them, so that quantiles of both engines are comparable."""
KINDS = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
OUTCOMES = ("stop", "length", "abort", "error")
"""vLLM's names for how a request ended; abort: the client disconnected, or the server shut down."""
GAPS = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")


class Metrics(Observer):
    """The metrics of one served model.

    Args:
        model_name: what clients write as `model`; the label `model_name` of every series, as in
            vLLM.
    """

    def __init__(self, model_name: str):
        self.model_name = model_name
        self.registry = CollectorRegistry()
        self._last_progress: dict[Ticket, float] = {}
        # name → metric; of one with further labels, a function of their values
        self._of = {
            name: self._family(name, **about) for name, about in FAMILIES["counted"].items()
        }
        for outcome in OUTCOMES:
            self._of["vllm:request_success"](outcome)  # reported as 0 before the first

    def _family(
        self, name: str, kind: str, help: str, labels: list[str] | None = None, buckets: str = ""
    ) -> Any:
        more = {"buckets": FAMILIES["buckets"][buckets]} if buckets else {}
        family = KINDS[kind](
            name, help, ["model_name", *(labels or [])], registry=self.registry, **more
        )
        return partial(family.labels, self.model_name) if labels else family.labels(self.model_name)

    # Called by the application.

    def watch(self, deployments: Deployments, feedback: Feedback | None = None) -> None:
        """Add the current state of what serves, and of feedback if it is recorded, whenever
        `/metrics` is read."""
        read = ServingState(self.model_name, FAMILIES["read"], deployments, feedback)
        self.registry.register(read)

    def answered(self, path: str, status: int) -> None:
        """An HTTP answer began."""
        self._of["draftwell:http_responses"](path, str(status)).inc()
        if status == 429:
            self._of["draftwell:rejected_requests"].inc()

    # Called by the scheduler, on its thread.

    def admitted(self, ticket: Ticket) -> None:
        """A ticket got a slot."""
        if ticket.own:  # the server's own request, before it switches to another bundle
            return
        self._of["vllm:prompt_tokens"].inc(len(ticket.prompt))

    def stepped(self, running: int, waiting: int, seconds: float) -> None:
        """The engine made a step for `running` requests."""
        self._of["draftwell:batch_size"].observe(running)
        self._of["draftwell:step_seconds"].observe(seconds)

    def progressed(self, ticket: Ticket, tokens: int) -> None:
        """A ticket got `tokens` more final tokens."""
        if ticket.own:
            return
        now = time.monotonic()
        self._of["vllm:generation_tokens"].inc(tokens)
        if ticket in self._last_progress:
            for name in GAPS:
                self._of[name].observe(now - self._last_progress[ticket])
        elif ticket.arrived is not None and ticket.first_token_at is not None:
            self._of["vllm:time_to_first_token_seconds"].observe(
                ticket.first_token_at - ticket.arrived
            )
        self._last_progress[ticket] = now

    def finished(self, ticket: Ticket, event: Event) -> None:
        """A ticket ended, for whatever reason."""
        if ticket.own:
            return
        self._last_progress.pop(ticket, None)
        outcome = outcome_of(event)
        # none: it ended before it was admitted
        strategy = ticket.strategy.name if ticket.strategy else "none"
        self._of["vllm:request_success"](outcome).inc()
        self._of["draftwell:requests"](strategy, outcome_in_detail(event)).inc()
        self._note_times(ticket)
        self._of["vllm:request_prompt_tokens"].observe(len(ticket.prompt))
        self._of["vllm:request_generation_tokens"].observe(ticket.text.tokens)
        self._of["vllm:request_params_max_tokens"].observe(ticket.sampling.max_tokens)
        if ticket.job is not None:
            if ticket.job.session.owner is not None:
                self._of["vllm:prefix_cache_queries"].inc(len(ticket.prompt))
                self._of["vllm:prefix_cache_hits"].inc(ticket.job.session.stats.cached_tokens)
            self._note_drafts(ticket.job.session.stats, strategy, ticket.text.tokens)

    def _note_times(self, ticket: Ticket) -> None:
        arrived, admitted, first, ended = (
            ticket.arrived,
            ticket.admitted_at,
            ticket.first_token_at,
            ticket.ended_at,
        )
        if arrived is None or ended is None:
            return
        self._of["vllm:e2e_request_latency_seconds"].observe(ended - arrived)
        queued = (ended if admitted is None else admitted) - arrived
        self._of["vllm:request_queue_time_seconds"].observe(queued)
        if admitted is not None:
            self._of["vllm:request_inference_time_seconds"].observe(ended - admitted)
            if first is not None:
                self._of["vllm:request_prefill_time_seconds"].observe(first - admitted)
                self._of["vllm:request_decode_time_seconds"].observe(ended - first)
                if ticket.text.tokens > 1:
                    per_token = (ended - first) / (ticket.text.tokens - 1)
                    self._of["vllm:request_time_per_output_token_seconds"].observe(per_token)

    def _note_drafts(self, stats: Stats, strategy: str, generated: int) -> None:
        self._of["vllm:spec_decode_num_drafts"].inc(stats.rounds)
        self._of["vllm:spec_decode_num_draft_tokens"].inc(stats.drafted)
        self._of["vllm:spec_decode_num_accepted_tokens"].inc(stats.accepted)
        for position, accepted in stats.accepted_at.items():
            self._of["vllm:spec_decode_num_accepted_tokens_per_pos"](str(position)).inc(accepted)
        own = stats.own
        counts = {
            "generated": generated,
            "drafted": own.drafted,
            "judged": own.judged,
            "accepted": own.accepted,
            "rescued": own.rescued,
            "predicted": stats.predicted,
            "predicted_accepted": stats.predicted_accepted,
        }
        for kind, count in counts.items():
            self._of[f"draftwell:{kind}_tokens"](strategy).inc(count)
        self._of["draftwell:target_calls"](strategy).inc(stats.target_calls)

    def render(self) -> bytes:
        """The text of `/metrics` in Prometheus' own format: for OpenMetrics the library would write
        `vllm_` instead of `vllm:`."""
        return generate_latest(self.registry)


def outcome_of(event: Event) -> str:
    """One of `OUTCOMES`."""
    if isinstance(event, End):
        return event.finish_reason
    return "abort" if isinstance(event, Cancelled) else "error"


def outcome_in_detail(event: Event) -> str:
    """As `outcome_of`, but errors caused by load have names of their own: "deadline", and
    "displaced" from a full queue."""
    error = getattr(event, "error", None)
    if isinstance(error, DeadlineExceeded):
        return "deadline"
    return "displaced" if isinstance(error, QueueFull) else outcome_of(event)
