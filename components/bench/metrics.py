"""Metrics of measurements that were taken together: speed, counts, time, identity, quality (defined
in docs/methods.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from statistics import median
from typing import Any

from draftwell.components.bench.answers.accuracy import Checked, checked, task_accuracy
from draftwell.components.bench.answers.rouge import mean_rouge_l, rouge_l, rouge_n
from draftwell.components.bench.origins import origins
from draftwell.components.bench.runner import Measurement, StrategyContender
from draftwell.components.bench.schema import BenchEntry, CostReference, Difference, PromptRow
from draftwell.components.bench.settings import QualityFloor
from draftwell.components.bench.target_agreement import TargetAgreement, agreements, difference
from draftwell.components.prompts.prompt import Prompt, ids_of
from draftwell.components.report.intervals import paired_bootstrap_ratio
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.session.stats import Stats

REFERENCE = "autoregressive"


class BenchMetrics:
    """Metrics of contenders, each compared with the autoregressive one.

    Args:
        temperature: at which all of them decoded; at 0 outputs can be compared token by token.
        floor: of the quality of lossy strategies; None judges none.
    """

    def __init__(
        self,
        pair: LoadedPair,
        prompts: Sequence[Prompt],
        measured: dict[str, Measurement],
        *,
        temperature: float = 0.0,
        floor: QualityFloor | None = None,
    ):
        self.pair, self.prompts, self.measured = pair, prompts, measured
        self.temperature, self.greedy, self.floor = temperature, temperature == 0, floor
        self.encoded = [ids_of(pair, prompt) for prompt in prompts]
        self.answers = [prompt.reference for prompt in prompts]
        self.reference = measured[REFERENCE]
        vanillas = [
            m
            for m in measured.values()
            if isinstance(m.contender, StrategyContender)
            and is_baseline(m.contender.strategy, m.contender.parameters)
        ]
        self.vanilla_split = fastest([m for m in vanillas if splits_cores(m)])
        self.vanilla = fastest([m for m in vanillas if not splits_cores(m)]) or self.vanilla_split
        lossy = any(
            isinstance(m.contender, StrategyContender) and not m.contender.lossless
            for m in measured.values()
        )
        self._agreements: dict[str, list[TargetAgreement]] = {}
        self.reference_share = self.agreement(self.reference).share if lossy else None
        self.reference_p95 = latencies(self.reference)["tpot_p95_ms"]

    def entry(self, label: str, peak_memory_mb: float | None = None) -> BenchEntry:
        """All metrics of one contender."""
        m = self.measured[label]
        ours = m.contender if isinstance(m.contender, StrategyContender) else None
        differences = self.differences(m) if self.greedy else []
        known: dict[str, Any] = {
            "strategy": ours.strategy if ours else None,
            "parameters": ours.parameters if ours else {},
            "split_cores": splits_cores(m),
            "lossless": ours.lossless if ours else True,
            "greedy": self.greedy,
            "dtype": self.pair.dtype,
            **self.speed(m),
            **(self.counts(m) if ours else {}),
            **latencies(m),
        }
        if ours:
            known |= origins(ours.strategy, ours.parameters, ours.resources)
        wrong = {d.prompt_id for d in differences}
        known |= self.quality(m)  # before the prompts' rows, which have a part of it
        if ours and not self.greedy:
            # of lossless ones too: what lossy samples are compared with, and how far that is noise
            self.agreement(m)
        return BenchEntry(
            **known,
            differences=tuple(differences),
            per_prompt=self.per_prompt(m, wrong),
            peak_memory_mb=peak_memory_mb,
            identical_outputs=len(m.prompt_ids) - len(wrong) if self.greedy else None,
            near_ties=sum(d.near_tie for d in differences) if self.greedy else None,
            tpot_p95_ratio=share(known["tpot_p95_ms"] or 0.0, self.reference_p95 or 0.0),
        )

    def per_prompt(self, m: Measurement, wrong: set[str]) -> tuple[PromptRow, ...]:
        """The run that counts of every prompt, and the seconds of all of them."""
        counted: Sequence[TargetAgreement | None] = self._agreements.get(m.contender.label) or [
            None
        ] * len(m.runs)
        return tuple(
            PromptRow(
                prompt_id=name,
                seconds=run.seconds,
                tokens=len(run.tokens),
                target_calls=run.stats.target_calls,
                accepted=run.stats.accepted,
                judged=run.stats.judged,
                ttft_ms=run.stats.first_token_seconds * 1e3,
                identical=name not in wrong if self.greedy else None,
                run_seconds=tuple(one.seconds for one in runs),
                memory_rate=run.memory_rate,
                target_argmax=None if kept is None else kept.matches,
                divergence=None if kept is None else kept.divergence,
                sequences=sequences_of(run.stats),
                **overlap(self.pair.decode(run.tokens), answer),
            )
            for name, run, runs, kept, answer in zip(
                m.prompt_ids, m.typical, m.runs, counted, self.answers, strict=True
            )
        )

    def cost_reference(self) -> CostReference | None:
        """The vanilla SD that cost ratios refer to."""
        if self.vanilla is None:
            return None
        label = self.vanilla.contender.label
        entry = self.entry(label)
        known = {name: getattr(entry, name) for name in entry.model_fields_set - {"peak_memory_mb"}}
        return CostReference(
            label=label, num_speculative_tokens=gamma_of_parameters(entry.parameters), **known
        )

    def ratio(self, m: Measurement, base: Measurement) -> tuple[float, float, float]:
        """How many times as fast m is as base, with its interval (5 % at each end)."""
        return paired_bootstrap_ratio(base.seconds, base.tokens, m.seconds, m.tokens)

    def speed(self, m: Measurement) -> dict[str, Any]:
        """Tokens per second, with and without prefill, and the speed over autoregressive and over
        vanilla SD."""
        ratio, low, high = self.ratio(m, self.reference)
        decoding = [
            (len(run.tokens) - 1, run.seconds - run.stats.first_token_seconds)
            for run in m.typical
            if len(run.tokens) > 1
        ]
        prefill = [run.stats.prefill_seconds for run in m.typical]
        return {
            "tokens_per_second": sum(m.tokens) / sum(m.seconds),
            "decode_tokens_per_second": share(
                sum(n for n, _ in decoding), sum(s for _, s in decoding)
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
        rival = self.vanilla_split if splits_cores(m) and self.vanilla_split else self.vanilla
        if rival is None or not isinstance(m.contender, StrategyContender):
            return None
        ratio, low, high = self.ratio(m, rival)
        return {
            "against": rival.contender.label,
            "ratio": ratio,
            "low": low,
            "high": high,
            "cost_ratio": share(m.stats.calls_per_token, rival.stats.calls_per_token),
        }

    def counts(self, m: Measurement) -> dict[str, Any]:
        """Counters of a strategy; shares of nothing are None. `timeline`: forward passes of the
        first prompt, where cores are split."""
        s = m.stats
        base = self.vanilla.stats.calls_per_token if self.vanilla else 0.0
        return {
            "emitted": s.emitted,
            "target_calls": s.target_calls,
            "draft_calls": s.draft_calls,
            "rounds": s.rounds,
            "qualifier_calls": s.qualifier_calls,
            "inner_acceptance_rate": s.inner_acceptance_rate,
            "cost_ratio": s.calls_per_token / base if base else None,
            "acceptance_rate": s.acceptance_rate,
            "draft_efficiency": s.draft_efficiency,
            "mat": s.mat if s.drafted else None,
            "accepted_per_call": share(s.accepted, s.target_calls) if s.drafted else None,
            "mean_acceptance_length": s.mean_acceptance_length if s.rounds else None,
            "acceptance_by_position": [
                share(s.accepted_at[i], s.judged_at[i]) for i in sorted(s.judged_at)
            ],
            "rescued_share": share(s.rescued, s.emitted),
            "overhead_fraction": share(s.overhead_seconds, s.wall_seconds),
            "time_share": time_share(s),
            "overlap_stretch": s.overlap_stretch,
            "timeline": [
                [role, round(start, 6), round(end, 6)]
                for role, start, end in m.typical[0].stats.timeline
            ]
            if splits_cores(m)
            else None,
        }

    def quality(self, m: Measurement) -> dict[str, Any]:
        """ROUGE-L against the prompts' references (points, 0 to 100); of a lossy strategy also how
        far it differs from the target, its accuracy where answers can be checked, and whether it
        holds the floor."""
        ours = m.contender if isinstance(m.contender, StrategyContender) else None
        lossy = ours is not None and not ours.lossless
        kept = self.agreement(m) if lossy else TargetAgreement(0, 0, 0.0)
        points, base = self.rouge_l(m), self.base_rouge_l
        gained = None if points is None or base is None else points - base
        held = (
            None
            if kept.share is None or gained is None or self.floor is None
            else self.floor.held(kept.share, gained)
        )
        return {
            "target_argmax_share": kept.share,
            "quality_ratio": share(kept.share or 0.0, self.reference_share or 0.0),
            "kl": kept.kl,
            "rouge_l": points,
            "rouge_l_difference": gained,
            "holds_floor": held,
            "tasks": task_accuracy(self.prompts, self.checked(m), self.reference_checked)
            if lossy
            else {},
        }

    def checked(self, m: Measurement) -> list[Checked]:
        """For each answer whether it is right (`accuracy.checked`)."""
        return checked(self.prompts, [self.pair.decode(run.tokens) for run in m.typical])

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
        mean = mean_rouge_l([self.pair.decode(run.tokens) for run in m.typical], self.answers)
        return None if mean is None else 100 * mean

    def differences(self, m: Measurement) -> list[Difference]:
        """For each prompt the first difference from the autoregressive tokens, in the first run
        that has one."""
        found = []
        for i, runs in enumerate(m.runs):
            reference = self.reference.runs[i][0].tokens
            run = next((run for run in runs if run.tokens != reference), None)
            if run:
                found.append(
                    difference(self.pair, m.prompt_ids[i], self.encoded[i], run.tokens, reference)
                )
        return [d for d in found if d is not None]

    def agreement(self, m: Measurement) -> TargetAgreement:
        """How the emitted tokens compare with the target after the same prefixes; every prompt's
        are kept for its row."""
        label = m.contender.label
        if label not in self._agreements:
            self._agreements[label] = agreements(
                self.pair, self.encoded, [run.tokens for run in m.typical], self.temperature
            )
        return sum(self._agreements[label], TargetAgreement(0, 0, 0.0))


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
    overlap = max(
        0.0,
        s.target_seconds
        + s.draft_seconds
        + s.qualifier_seconds
        + s.prefill_seconds
        - s.busy_seconds,
    )
    draft = max(0.0, s.draft_seconds - overlap)  # alone
    target = max(0.0, s.busy_seconds - overlap - draft - s.qualifier_seconds - s.prefill_seconds)
    parts = {
        "draft": draft,
        "target": target,
        "qualifier": s.qualifier_seconds,
        "overlap": overlap,
        "prefill": s.prefill_seconds,
        "rest": s.overhead_seconds,
    }
    return {name: share(seconds, s.wall_seconds) for name, seconds in parts.items()}


def latencies(m: Measurement) -> dict[str, float | None]:
    """Medians over prompts of the time to the first token and per further token, in
    milliseconds."""
    runs = m.typical
    per_token = sorted(
        (run.seconds - run.stats.first_token_seconds) / (len(run.tokens) - 1) * 1e3
        for run in runs
        if len(run.tokens) > 1
    )
    return {
        "ttft_ms": median(run.stats.first_token_seconds for run in runs) * 1e3,
        "tpot_ms": median(per_token) if per_token else None,
        "tpot_p95_ms": per_token[min(len(per_token) - 1, int(0.95 * len(per_token)))]
        if per_token
        else None,
    }


def strategy_of(m: Measurement) -> str | None:
    """The strategy that was measured; None for a peer."""
    return m.contender.strategy if isinstance(m.contender, StrategyContender) else None


def splits_cores(m: Measurement) -> bool:
    """Whether each model had its own share of the cores."""
    return isinstance(m.contender, StrategyContender) and m.contender.split_cores


def fastest(
    measured: Sequence[Measurement], key: Callable[[Measurement], bool] = lambda m: True
) -> Measurement | None:
    """The one with the least seconds per token among those that `key` takes; None of none."""
    return min(filter(key, measured), key=lambda m: sum(m.seconds) / sum(m.tokens), default=None)


def is_baseline(strategy: str, parameters: Mapping[str, Any]) -> bool:
    """Whether this is the vanilla SD that others are compared with: the draft model drafts, behind
    the prompt's reading."""
    from draftwell.serving.runtime.strategies.lossless.vanilla_sd import VanillaSD

    if strategy != "vanilla_sd":
        return False
    config = VanillaSD.Config.model_validate(dict(parameters))
    return config.drafter == "draft" and not config.draft_first


def gamma_of_parameters(parameters: dict[str, Any]) -> int:
    """Draft length of a vanilla SD with these parameters."""
    from draftwell.serving.runtime.strategies.lossless.vanilla_sd import VanillaSD

    return int(VanillaSD.Config.model_validate(parameters).num_speculative_tokens)


def share(part: float, whole: float) -> float | None:
    """part / whole; None where there is no whole."""
    return part / whole if whole else None
