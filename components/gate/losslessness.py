"""Whether a strategy that claims to be lossless is: every greedy token must be the target's choice
after the tokens before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from draftwell.components.bench.runner import Config
from draftwell.components.bench.schema import BenchEntry, PromptRow
from draftwell.components.bench.target_agreement import departure
from draftwell.components.collect.decoding import encode_all, room, run_all
from draftwell.components.gate.bench_checks import identity
from draftwell.components.prompts.prompt import Prompt, ids_of
from draftwell.serving.bundle.verdict import Check, GateVerdict
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import (
    PLAIN,
    StrategyResources,
    build_strategy,
    find_strategy,
)


def identity_entry(
    pair: LoadedPair,
    resources: StrategyResources,
    config: Config,
    prompts: Sequence[Prompt],
    max_tokens: int,
) -> BenchEntry:
    """A strategy's greedy outputs, each read once by the target: as autoregressive decoding would
    write them, or not.

    As many requests are decoded at once as the models have slots, which is how a server decodes
    them; no time is taken.

    Args:
        pair: exact, or loaded in float32.
    Returns:
        the fields of an entry that identity is checked by (see `entry_of`), with `rescued`.
    """
    strategy = build_strategy(config.name, dict(config.parameters), resources.private())
    engine, sampling = pair.engine(), pair.sampling(max_tokens=max_tokens)
    requests = [(ids, sampling) for ids in encode_all(pair, prompts, max_tokens, ["target"])]
    jobs = run_all(engine, requests, [strategy] * len(requests), room(engine, len(requests)))
    entry = entry_of(pair, config.name, prompts, [job.output for job in jobs], max_tokens)
    return entry.model_copy(update={"rescued": sum(job.session.stats.rescued for job in jobs)})


def judge_texts(
    pair: LoadedPair,
    prompts: Sequence[Prompt],
    texts: Mapping[str, Sequence[Sequence[int]]],
    max_tokens: int,
) -> GateVerdict:
    """Judge the greedy outputs of every strategy that claims to be lossless.

    Args:
        pair: loaded in float32.
        texts: strategy → an output for each prompt.
    """
    lossless = {
        name: outputs
        for name, outputs in texts.items()
        if find_strategy(name).lossless and name != PLAIN.name
    }
    found = {
        name: identity(entry_of(pair, name, prompts, outputs, max_tokens))
        for name, outputs in lossless.items()
    }
    return GateVerdict.of(
        replace(check, name=f"{name}: {check.name}")
        for name, check in found.items()
        if isinstance(check, Check)
    )


def entry_of(
    pair: LoadedPair,
    strategy: str,
    prompts: Sequence[Prompt],
    outputs: Sequence[Sequence[int]],
    max_tokens: int,
) -> BenchEntry:
    """Outputs read by the target, after the complete prompt (`ids_of`).

    One forward pass per prompt shows what they are (`departure`), where decoding them again would
    take one per token.

    Returns:
        `lossless` (what the strategy claims), `dtype`, `identical_outputs`, `near_ties` (outputs
        that leave the argmax at near-ties only), `per_prompt`.
    """
    kinds = [
        departure(pair, ids_of(pair, prompt), output, max_tokens, exact=pair.exact)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    rows = tuple(
        PromptRow(prompt_id=prompt.id, departure=kind)
        for prompt, kind in zip(prompts, kinds, strict=True)
    )
    return BenchEntry(
        strategy=strategy,
        lossless=find_strategy(strategy).lossless,
        dtype=pair.dtype,
        exact=pair.exact,
        per_prompt=rows,
        identical_outputs=kinds.count("none"),
        near_ties=kinds.count("near-tie"),
    )
