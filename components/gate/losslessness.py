"""Whether a strategy that claims to be lossless is: every greedy token must be the target's choice after the tokens before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from components.bench.runner import Config, measure
from components.bench.schema import BenchEntry, PromptRow
from components.bench.settings import BenchSettings
from components.bench.target_agreement import near_tie_gap, target_logits
from components.gate.bench_checks import judge_release
from components.gate.verdict import Check, GateVerdict, Thresholds
from components.prompts.prompt import Prompt, ids_of
from serving.runtime.pair import LoadedPair
from serving.runtime.strategies import StrategyResources, find_strategy


def identity_entry(
    pair: LoadedPair, resources: StrategyResources, config: Config, prompts: Sequence[Prompt], *, max_tokens: int
) -> BenchEntry:
    """A strategy's greedy outputs, each read once by the target: as autoregressive decoding would write them, or not.

    Returns:
        the fields of an entry that identity is checked by (see `entry_of`), with `rescued`.
    """
    measured = next(iter(measure(pair, resources, [config], prompts, BenchSettings(max_tokens=max_tokens, warmup=False)).values()))
    runs = measured.typical
    entry = entry_of(pair, config.name, prompts, [run.tokens for run in runs], max_tokens)
    return entry.model_copy(update={"rescued": sum(run.stats.rescued for run in runs)})


def judge_texts(pair: LoadedPair, prompts: Sequence[Prompt], texts: Mapping[str, Sequence[Sequence[int]]], max_tokens: int) -> GateVerdict:
    """Judge the greedy outputs of every strategy that claims to be lossless.

    Args:
        pair: loaded in float32.
        texts: strategy → an output for each prompt.
    """
    checks: list[Check] = []
    for name, outputs in texts.items():
        if find_strategy(name).lossless and name != "autoregressive":
            verdict = judge_release(entry_of(pair, name, prompts, outputs, max_tokens), None, None, Thresholds(lossless_identical=True))
            checks += [replace(check, name=f"{name}: {check.name}") for check in verdict.checks]
    return GateVerdict(tuple(checks))


def entry_of(pair: LoadedPair, strategy: str, prompts: Sequence[Prompt], outputs: Sequence[Sequence[int]],
             max_tokens: int) -> BenchEntry:
    """Outputs read by the target, after the complete prompt (`ids_of`).

    By induction over positions, outputs whose every token is the target's argmax are the autoregressive ones; one forward pass
    per prompt shows it, where decoding them again would take one per token.

    Returns:
        `lossless` (what the strategy claims), `dtype`, `identical_outputs`, `near_ties` (outputs that leave the argmax at near-ties
        only), `per_prompt`.
    """
    kinds = [departure(pair, ids_of(pair, prompt), output, max_tokens)
             for prompt, output in zip(prompts, outputs, strict=True)]
    rows = tuple(PromptRow(prompt_id=prompt.id, departure=kind) for prompt, kind in zip(prompts, kinds, strict=True))
    return BenchEntry(strategy=strategy, lossless=find_strategy(strategy).lossless, dtype=pair.dtype, per_prompt=rows,
                      identical_outputs=kinds.count("none"), near_ties=kinds.count("near-tie"))


def departure(pair: LoadedPair, prompt: Sequence[int], output: Sequence[int], max_tokens: int) -> str:
    """How a greedy output leaves the target's own: "none", at a "near-tie" only, "wrong", or "cut" short of its end."""
    if not output or (len(output) < max_tokens and output[-1] not in pair.stop_tokens):
        return "cut"
    rows = target_logits(pair, prompt, output[:-1], keep=len(output)).float()
    found = "none"
    for row, token in zip(rows, output, strict=True):
        gap = float(row.max() - row[token])
        if gap > near_tie_gap(pair.dtype, row):
            return "wrong"
        if gap > 0:
            found = "near-tie"
    return found
