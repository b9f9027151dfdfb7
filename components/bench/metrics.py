"""Metrics of measurements that were taken together: speed, counts, time, identity, quality (defined
in docs/methods.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from statistics import median
from typing import Any

import numpy as np

from draftwell.components.bench.answers.accuracy import Checked, checked, task_accuracy
from draftwell.components.bench.answers.rouge import mean_rouge_l, rouge_l, rouge_n
from draftwell.components.bench.categories import (
    CategoryFigure,
    Drafts,
    category_figures,
    category_of,
)
from draftwell.components.bench.interleaved import REFERENCE
from draftwell.components.bench.origins import origins
from draftwell.components.bench.runner import Measurement
from draftwell.components.bench.schema import BenchEntry, Difference, PromptRow
from draftwell.components.bench.settings import DEFAULTS, BenchSettings, QualityFloor
from draftwell.components.bench.target_agreement import TargetAgreement, agreements, differences
from draftwell.components.prompts.prompt import Prompt, ids_of
from draftwell.components.report.intervals import ratio_of
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.session.stats import Stats
from draftwell.serving.runtime.strategies.lossless.draft_lengths import VanillaSD

NOTHING = TargetAgreement(0, 0, 0.0)


class BenchMetrics:
    """Metrics of contenders, each compared with the autoregressive one.

    Args:
        settings: with the temperature at which all of them decoded (at 0 outputs can be compared
            token by token).
        floor: what a lossy strategy must keep; None judges none.
    """

    def __init__(
        self,
        pair: LoadedPair,
        prompts: Sequence[Prompt],
        measured: dict[str, Measurement],
        settings: BenchSettings = DEFAULTS,
        floor: QualityFloor | None = None,
    ):
        self.pair, self.prompts, self.measured, self.settings = pair, prompts, measured, settings
        self.floor = floor
        self.greedy = settings.temperature == 0
        self.encoded = [ids_of(pair, prompt) for prompt in prompts]
        self.categories = [
            category_of(prompt.task, len(ids))
            for prompt, ids in zip(prompts, self.encoded, strict=True)
        ]
        self.reference = measured[REFERENCE]
        vanillas = [m for m in measured.values() if is_vanilla(m)]
        self.vanilla_split = fastest(m for m in vanillas if m.split_cores)
        self.vanilla_unsplit = fastest(m for m in vanillas if not m.split_cores)
        self.vanilla = self.vanilla_unsplit or self.vanilla_split
        self._agreements: dict[str, list[TargetAgreement]] = {}

    def entry(self, label: str, peak_memory_mb: float | None = None) -> BenchEntry:
        """All metrics of one contender; a peer lacks those of strategies."""
        m = self.measured[label]
        ours = m.ours
        differing = self.differences(m) if self.greedy else []
        wrong = {d.prompt_id for d in differing}
        # before the prompts' rows, which have a part of it
        quality = self.quality(m)
        if ours and not self.greedy:
            # of lossless ones too: what lossy samples are compared with, and how far that is noise
            self.agreement(m)
        return BenchEntry(
            strategy=ours.strategy if ours else None,
            parameters=ours.parameters if ours else {},
            split_cores=m.split_cores,
            lossless=m.lossless,
            greedy=self.greedy,
            dtype=self.pair.dtype,
            exact=self.pair.exact and ours is not None,
            **self.speed(m),
            **latencies(m),
            **(self.counts(m) if ours else {}),
            **(origins(ours.strategy, ours.parameters, ours.resources) if ours else {}),
            **quality,
            categories=self.by_category(m),
            differences=tuple(differing),
            per_prompt=self.per_prompt(m, wrong),
            peak_memory_mb=peak_memory_mb,
            identical_outputs=len(m.prompt_ids) - len(wrong) if self.greedy else None,
            near_ties=sum(d.near_tie for d in differing) if self.greedy else None,
        )

    def per_prompt(self, m: Measurement, wrong: set[str]) -> tuple[PromptRow, ...]:
        """The run that counts of every prompt, and the seconds of all of them."""
        counted: Sequence[TargetAgreement | None] = self._agreements.get(m.label) or [None] * len(
            m.runs
        )
        return tuple(
            PromptRow(
                prompt_id=prompt.id,
                category=category,
                seconds=run.seconds,
                tokens=len(run.tokens),
                target_calls=run.stats.target_calls,
                rounds=run.stats.rounds,
                accepted=run.stats.accepted,
                judged=run.stats.judged,
                ttft_ms=run.stats.first_token_seconds * 1e3,
                identical=prompt.id not in wrong if self.greedy else None,
                run_seconds=tuple(one.seconds for one in runs),
                target_argmax=None if kept is None else kept.matches,
                divergence=None if kept is None else kept.divergence,
                sequences=sequences_of(run.stats),
                **overlap(self.pair.decode(run.tokens), prompt.reference),
            )
            for prompt, category, run, runs, kept in zip(
                self.prompts, self.categories, m.typical, m.runs, counted, strict=True
            )
        )

    def by_category(self, m: Measurement) -> tuple[CategoryFigure, ...]:
        """Speed and acceptance length of each category of prompts, and their macro average."""
        stats = [run.stats for run in m.typical]
        drafts = Drafts([one.rounds for one in stats], [one.accepted for one in stats])
        return category_figures(self.categories, self.reference, m, drafts)

    def speed(self, m: Measurement) -> dict[str, Any]:
        """Tokens per second, with and without prefill, and the speed over autoregressive and over
        vanilla SD."""
        ratio, low, high = ratio_of(self.reference, m)
        longer = [run for run in m.typical if len(run.tokens) > 1]
        prefill = [run.stats.prefill_seconds for run in m.typical]
        return {
            "tokens_per_second": 1 / m.pace,
            "decode_tokens_per_second": share(
                sum(len(run.tokens) - 1 for run in longer),
                sum(run.seconds - run.stats.first_token_seconds for run in longer),
            ),
            "prefill_ms": median(prefill) * 1e3 if any(prefill) else None,
            "speedup": ratio,
            "speedup_low": low,
            "speedup_high": high,
            "over_vanilla": self.over_vanilla(m),
        }

    def over_vanilla(self, m: Measurement) -> dict[str, Any] | None:
        """Speed and target calls against the fastest vanilla SD on the same plan of cores, where
        that was measured."""
        rival = (self.vanilla_split if m.split_cores else None) or self.vanilla
        if rival is None or m.ours is None:
            return None
        ratio, low, high = ratio_of(rival, m)
        return {
            "against": rival.label,
            "ratio": ratio,
            "low": low,
            "high": high,
            "cost_ratio": share(m.stats.calls_per_token, rival.stats.calls_per_token),
        }

    def counts(self, m: Measurement) -> dict[str, Any]:
        """Counters of a strategy; shares of nothing are None."""
        s = m.stats
        base = self.vanilla.stats.calls_per_token if self.vanilla else 0.0
        return {
            **{name: getattr(s, name) for name in COUNTERS},
            "cost_ratio": share(s.calls_per_token, base),
            "mat": s.mat if s.drafted else None,
            "mean_acceptance_length": s.mean_acceptance_length if s.rounds else None,
            "acceptance_by_position": [
                share(s.accepted_at[i], s.judged_at[i]) for i in sorted(s.judged_at)
            ],
            "accepted_at": [s.accepted_at[i] for i in sorted(s.judged_at)],
            "rescued_share": share(s.rescued, s.emitted),
            "time_share": time_share(s),
        }

    def quality(self, m: Measurement) -> dict[str, Any]:
        """ROUGE-L against the prompts' references (points, 0 to 100); of a lossy strategy also how
        far it differs from the target, its accuracy where answers can be checked, and whether it
        holds the floor."""
        kept = NOTHING if m.lossless else self.agreement(m)
        points, base = self.rouge_l(m), self.base_rouge_l
        gained = None if points is None or base is None else points - base
        held, floor = None, self.floor
        if floor and kept.share is not None and gained is not None:
            held = floor.held(kept.share, gained)
        return {
            "target_argmax_share": kept.share,
            "kl": kept.kl,
            "rouge_l": points,
            "rouge_l_difference": gained,
            "holds_floor": held,
            "tasks": {}
            if m.lossless
            else task_accuracy(self.prompts, self.checked(m), self.reference_checked),
        }

    def checked(self, m: Measurement) -> list[Checked]:
        """For each answer whether it is right (`accuracy.checked`)."""
        return checked(self.prompts, self.texts(m))

    @cached_property
    def reference_checked(self) -> list[Checked]:
        """The same of the autoregressive answers."""
        return self.checked(self.reference)

    @cached_property
    def base_rouge_l(self) -> float | None:
        """ROUGE-L of vanilla SD, or of autoregressive decoding where that was not measured."""
        return self.rouge_l(self.vanilla or self.reference)

    def rouge_l(self, m: Measurement) -> float | None:
        """Mean over the prompts that have a reference, in points."""
        mean = mean_rouge_l(self.texts(m), [prompt.reference for prompt in self.prompts])
        return None if mean is None else 100 * mean

    def texts(self, m: Measurement) -> list[str]:
        """The answers."""
        return [self.pair.decode(run.tokens) for run in m.typical]

    def differences(self, m: Measurement) -> list[Difference]:
        """For each prompt the first difference from the autoregressive tokens, in the first run
        that has one."""
        references = [runs[0].tokens for runs in self.reference.runs]
        outputs = [
            next((run.tokens for run in runs if run.tokens != reference), reference)
            for runs, reference in zip(m.runs, references, strict=True)
        ]
        exact = self.pair.exact and m.ours is not None
        return differences(self.pair, m.prompt_ids, self.encoded, outputs, references, exact=exact)

    def agreement(self, m: Measurement) -> TargetAgreement:
        """How the emitted tokens compare with the target after the same prefixes; every prompt's
        are kept for its row."""
        if m.label not in self._agreements:
            self._agreements[m.label] = agreements(
                self.pair,
                self.encoded,
                [run.tokens for run in m.typical],
                self.settings.temperature,
            )
        return sum(self._agreements[m.label], NOTHING)


COUNTERS = (
    "emitted",
    "target_calls",
    "draft_calls",
    "qualifier_calls",
    "rounds",
    "inner_acceptance_rate",
    "acceptance_rate",
    "draft_efficiency",
)
"""Of `Stats`, as they are."""


def sequences_of(stats: Stats) -> dict[int, tuple[int, int]] | None:
    """Drafted sequences → rounds whose first sequence's first token was kept, and rounds in which
    it was not; None without any."""
    counted = stats.sequences
    return {
        count: (counted[count, True], counted[count, False])
        for count in sorted({count for count, _ in counted})
    } or None


def overlap(answer: str, reference: str | None) -> dict[str, float]:
    """ROUGE-1, -2 and -L in points, 0 to 100; empty without a reference.

    >>> overlap("a b", "b a"), overlap("a", None)
    ({'rouge_1': 100.0, 'rouge_2': 0.0, 'rouge_l': 50.0}, {})
    """
    if not reference:
        return {}
    return {
        "rouge_1": 100 * rouge_n(answer, reference, 1),
        "rouge_2": 100 * rouge_n(answer, reference, 2),
        "rouge_l": 100 * rouge_l(answer, reference),
    }


def time_share(s: Stats) -> dict[str, float | None]:
    """Where the wall time went; the parts add up to 1. `overlap` is time in which two models ran at
    once."""
    passes = s.target_seconds + s.draft_seconds + s.qualifier_seconds + s.prefill_seconds
    overlap = max(0.0, passes - s.busy_seconds)
    draft = max(0.0, s.draft_seconds - overlap)  # alone
    parts = {
        "draft": draft,
        "target": max(
            0.0, s.busy_seconds - overlap - draft - s.qualifier_seconds - s.prefill_seconds
        ),
        "qualifier": s.qualifier_seconds,
        "overlap": overlap,
        "prefill": s.prefill_seconds,
        "rest": s.overhead_seconds,
    }
    return {name: share(seconds, s.wall_seconds) for name, seconds in parts.items()}


def latencies(m: Measurement) -> dict[str, float | None]:
    """Over prompts, in milliseconds: medians of the time to the first token and per further token,
    and the 95th percentile of the latter."""
    per_token = [
        (run.seconds - run.stats.first_token_seconds) / (len(run.tokens) - 1) * 1e3
        for run in m.typical
        if len(run.tokens) > 1
    ]
    middle, slow = np.quantile(per_token, [0.5, 0.95]).tolist() if per_token else (None, None)
    return {
        "ttft_ms": median(run.stats.first_token_seconds for run in m.typical) * 1e3,
        "tpot_ms": middle,
        "tpot_p95_ms": slow,
    }


def fastest(measured: Iterable[Measurement]) -> Measurement | None:
    """The one with the least seconds per token; None of none."""
    return min(measured, key=lambda m: m.pace, default=None)


def is_vanilla(m: Measurement) -> bool:
    """Whether a measurement is of the vanilla SD that others are compared with."""
    return m.ours is not None and is_baseline(m.ours.strategy, m.ours.parameters)


def is_baseline(strategy: str, parameters: Mapping[str, Any]) -> bool:
    """Whether this is the vanilla SD that others are compared with: the draft model drafts, behind
    the prompt's reading."""
    if strategy != "vanilla_sd":
        return False
    config = VanillaSD.Config.model_validate(dict(parameters))
    return config.drafter == "draft" and not config.draft_first


def gamma_of_parameters(parameters: Mapping[str, Any]) -> int:
    """Draft length of a vanilla SD with these parameters."""
    return int(VanillaSD.Config.model_validate(dict(parameters)).num_speculative_tokens)


def share(part: float, whole: float) -> float | None:
    """part / whole; None where there is no whole."""
    return part / whole if whole else None
