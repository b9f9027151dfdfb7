"""`/metrics` for Prometheus: vLLM's names, so that dashboards made for vLLM work, and `draftwell:`
for what vLLM lacks.

A `Metrics` observes a scheduler: its hooks run on the scheduler's thread, at every round, and only
add numbers. What a request drafted is added once, when it ends, from the engine's own counters,
also if it was cancelled or failed. Each object has its own registry, so that several applications
in one process do not mix.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

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

# vLLM's own buckets: quantiles of both engines are then comparable.
FIRST_TOKEN = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
PER_TOKEN = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
LATENCY = (
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
    960,
    1920,
    7680,
)
LENGTH = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
BATCH = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)
STEP = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12)

OUTCOMES = ("stop", "length", "abort", "error")
"""vLLM's names for how a request ended; abort: the client disconnected, or the server shut down."""


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
        self._make_vllm_counters()
        self._make_vllm_histograms()
        self._make_own_families()

    def _make_vllm_counters(self) -> None:
        counter = partial(self._family, Counter)
        self.prompt_tokens = counter(
            "vllm:prompt_tokens", "Prompt tokens of requests that got a slot."
        )
        self.cache_queries = counter(
            "vllm:prefix_cache_queries",
            "Prompt tokens of requests that have ended on a slot and share it.",
        )
        self.cache_hits = counter(
            "vllm:prefix_cache_hits",
            "Of these, tokens that were not read again, because a slot held them.",
        )
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens generated.")
        self.success = counter(
            "vllm:request_success", "Requests that ended, by how.", ["finished_reason"]
        )
        self.drafts = counter(
            "vllm:spec_decode_num_drafts", "Rounds in which the target verified a draft."
        )
        self.draft_tokens = counter("vllm:spec_decode_num_draft_tokens", "Tokens drafted.")
        self.accepted_tokens = counter(
            "vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted, rescued ones included."
        )
        self.accepted_at = counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in the draft.",
            ["position"],
        )
        for outcome in OUTCOMES:
            self.success(outcome)  # reported as 0 before the first

    def _make_vllm_histograms(self) -> None:
        histogram = partial(self._family, Histogram)
        self.first_token = histogram(
            "vllm:time_to_first_token_seconds",
            "From arrival to the first token.",
            buckets=FIRST_TOKEN,
        )
        self.gaps = [
            histogram(
                name,
                "Between two deliveries of one request; a delivery may hold several tokens.",
                buckets=PER_TOKEN,
            )
            for name in ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
        ]
        self.per_token = histogram(
            "vllm:request_time_per_output_token_seconds",
            "Per request: from the first to the last token, per token after the first.",
            buckets=PER_TOKEN,
        )
        self.whole = histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the end.", buckets=LATENCY
        )
        self.queued = histogram(
            "vllm:request_queue_time_seconds", "From arrival to a slot.", buckets=LATENCY
        )
        self.inference = histogram(
            "vllm:request_inference_time_seconds", "From a slot to the end.", buckets=LATENCY
        )
        self.prefill = histogram(
            "vllm:request_prefill_time_seconds", "From a slot to the first token.", buckets=LATENCY
        )
        self.decode = histogram(
            "vllm:request_decode_time_seconds", "From the first token to the end.", buckets=LATENCY
        )
        self.prompt_length = histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request.", buckets=LENGTH
        )
        self.answer_length = histogram(
            "vllm:request_generation_tokens", "Tokens generated for a request.", buckets=LENGTH
        )
        self.budget = histogram(
            "vllm:request_params_max_tokens",
            "Most tokens that a request may generate.",
            buckets=LENGTH,
        )

    def _make_own_families(self) -> None:
        counter, histogram = partial(self._family, Counter), partial(self._family, Histogram)
        self.batch = histogram(
            "draftwell:batch_size", "Requests in a step of the engine.", buckets=BATCH
        )
        self.step = histogram(
            "draftwell:step_seconds", "Time of a step of the engine.", buckets=STEP
        )
        self.requests = counter(
            "draftwell:requests",
            "Requests that ended, by strategy and how.",
            ["strategy", "outcome"],
        )
        tokens = {
            "generated": "Tokens generated.",
            "drafted": "Tokens drafted.",
            "judged": "Draft tokens that the target verified.",
            "accepted": "Draft tokens accepted, rescued ones included.",
            "rescued": "Draft tokens accepted that the exact rule rejects.",
            "predicted": (
                "Tokens of clients' predictions drafted; the other counters leave them out."
            ),
            "predicted_accepted": "Tokens of clients' predictions accepted.",
        }
        self.by_strategy = {
            kind: counter(f"draftwell:{kind}_tokens", text, ["strategy"])
            for kind, text in tokens.items()
        }
        self.target_calls = counter(
            "draftwell:target_calls",
            "Forward passes of the target after the prompt's.",
            ["strategy"],
        )
        self.rejected = counter(
            "draftwell:rejected_requests", "Requests answered 429 because the queue was full."
        )
        self.answers = counter(
            "draftwell:http_responses", "Answers by route and status.", ["path", "code"]
        )

    def _family(
        self,
        kind: Callable[..., Any],
        name: str,
        text: str,
        labels: list[str] | None = None,
        **options: Any,
    ) -> Any:
        """A metric with the model's name as a label; with further labels, a function of their
        values that returns a metric."""
        family = kind(
            name, text, ["model_name", *(labels or [])], registry=self.registry, **options
        )
        return partial(family.labels, self.model_name) if labels else family.labels(self.model_name)

    # Called by the application.

    def watch(self, deployments: Deployments, feedback: Feedback | None = None) -> None:
        """Add the current state of what serves, and of feedback if it is recorded, whenever
        `/metrics` is read."""
        self.registry.register(ServingState(self.model_name, deployments, feedback))

    def answered(self, path: str, status: int) -> None:
        """An HTTP answer began."""
        self.answers(path, str(status)).inc()
        if status == 429:
            self.rejected.inc()

    # Called by the scheduler, on its thread.

    def admitted(self, ticket: Ticket) -> None:
        """A ticket got a slot."""
        if ticket.own:  # the server's own request, before it switches to another bundle
            return
        self.prompt_tokens.inc(len(ticket.prompt))

    def stepped(self, running: int, waiting: int, seconds: float) -> None:
        """The engine made a step for `running` requests."""
        self.batch.observe(running)
        self.step.observe(seconds)

    def progressed(self, ticket: Ticket, tokens: int) -> None:
        """A ticket got `tokens` more final tokens."""
        if ticket.own:
            return
        now = time.monotonic()
        self.generation_tokens.inc(tokens)
        if ticket in self._last_progress:
            for gap in self.gaps:
                gap.observe(now - self._last_progress[ticket])
        elif ticket.arrived is not None and ticket.first_token_at is not None:
            self.first_token.observe(ticket.first_token_at - ticket.arrived)
        self._last_progress[ticket] = now

    def finished(self, ticket: Ticket, event: Event) -> None:
        """A ticket ended, for whatever reason."""
        if ticket.own:
            return
        self._last_progress.pop(ticket, None)
        outcome = outcome_of(event)
        # none: it ended before it was admitted
        strategy = ticket.strategy.name if ticket.strategy else "none"
        self.success(outcome).inc()
        self.requests(strategy, outcome_in_detail(event)).inc()
        self._note_times(ticket)
        self.prompt_length.observe(len(ticket.prompt))
        self.answer_length.observe(ticket.text.tokens)
        self.budget.observe(ticket.sampling.max_tokens)
        if ticket.job is not None:
            if ticket.job.session.owner is not None:
                self.cache_queries.inc(len(ticket.prompt))
                self.cache_hits.inc(ticket.job.session.stats.cached_tokens)
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
        self.whole.observe(ended - arrived)
        self.queued.observe((ended if admitted is None else admitted) - arrived)
        if admitted is not None:
            self.inference.observe(ended - admitted)
            if first is not None:
                self.prefill.observe(first - admitted)
                self.decode.observe(ended - first)
                if ticket.text.tokens > 1:
                    self.per_token.observe((ended - first) / (ticket.text.tokens - 1))

    def _note_drafts(self, stats: Stats, strategy: str, generated: int) -> None:
        self.drafts.inc(stats.rounds)
        self.draft_tokens.inc(stats.drafted)
        self.accepted_tokens.inc(stats.accepted)
        for position, accepted in stats.accepted_at.items():
            self.accepted_at(str(position)).inc(accepted)
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
            self.by_strategy[kind](strategy).inc(count)
        self.target_calls(strategy).inc(stats.target_calls)

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
