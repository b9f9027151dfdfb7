"""Whether a strategy that claims to be lossless is: every greedy token must be the target's choice
after the tokens before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from draftwell.components.bench.runner import Config
from draftwell.components.bench.schema import BenchEntry, PromptRow
from draftwell.components.bench.target_agreement import near_tie_gap, target_logits
from draftwell.components.collect.decoding import encode_all, room, run_all
from draftwell.components.gate.bench_checks import identity
from draftwell.components.gate.verdict import Check, GateVerdict
from draftwell.components.prompts.prompt import Prompt, ids_of
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import (
    PLAIN,
    StrategyResources,
    build_strategy,
    find_strategy,
)


def identity_entry(
    reader: OutputReader, resources: StrategyResources, config: Config, prompts: Sequence[Prompt]
) -> BenchEntry:
    """A strategy's greedy outputs, each read once by the target: as autoregressive decoding would
    write them, or not.

    As many requests are decoded at once as the models have slots, which is how a server decodes
    them; no time is taken.

    Returns:
        the fields of an entry that identity is checked by (see `entry_of`), with `rescued`.
    """
    pair, max_tokens = reader.pair, reader.max_tokens
    strategy = build_strategy(config.name, dict(config.parameters), resources.private())
    engine, sampling = pair.engine(), pair.sampling(max_tokens=max_tokens)
    requests = [(ids, sampling) for ids in encode_all(pair, prompts, max_tokens, ["target"])]
    jobs = run_all(engine, requests, [strategy] * len(requests), room(engine, len(requests)))
    entry = entry_of(reader, config.name, prompts, [job.output for job in jobs])
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
    reader = OutputReader(pair, max_tokens)
    lossless = {
        name: outputs
        for name, outputs in texts.items()
        if find_strategy(name).lossless and name != PLAIN.name
    }
    found = {
        name: identity(entry_of(reader, name, prompts, outputs))
        for name, outputs in lossless.items()
    }
    return GateVerdict.of(
        replace(check, name=f"{name}: {check.name}")
        for name, check in found.items()
        if isinstance(check, Check)
    )


def entry_of(
    reader: OutputReader, strategy: str, prompts: Sequence[Prompt], outputs: Sequence[Sequence[int]]
) -> BenchEntry:
    """Outputs read by the target, after the complete prompt (`ids_of`).

    By induction over positions, outputs whose every token is the target's argmax are the
    autoregressive ones; one forward pass per prompt shows it, where decoding them again would take
    one per token.

    Returns:
        `lossless` (what the strategy claims), `dtype`, `identical_outputs`, `near_ties` (outputs
        that leave the argmax at near-ties only), `per_prompt`.
    """
    kinds = [
        reader.departure(ids_of(reader.pair, prompt), output)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    rows = tuple(
        PromptRow(prompt_id=prompt.id, departure=kind)
        for prompt, kind in zip(prompts, kinds, strict=True)
    )
    return BenchEntry(
        strategy=strategy,
        lossless=find_strategy(strategy).lossless,
        dtype=reader.pair.dtype,
        per_prompt=rows,
        identical_outputs=kinds.count("none"),
        near_ties=kinds.count("near-tie"),
    )


class OutputReader:
    """Reads greedy outputs by the target, which takes a pass each; what several strategies gave is
    read once.

    Args:
        pair: loaded in float32.
        max_tokens: that the outputs were allowed to have.
    """

    def __init__(self, pair: LoadedPair, max_tokens: int):
        self.pair, self.max_tokens = pair, max_tokens
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], str] = {}

    def departure(self, prompt: Sequence[int], output: Sequence[int]) -> str:
        """How a greedy output leaves the target's own: "none", at a "near-tie" only, "wrong", or
        "cut" short of its end."""
        what = (tuple(prompt), tuple(output))
        if what not in self._known:
            self._known[what] = self._read(prompt, output)
        return self._known[what]

    def _read(self, prompt: Sequence[int], output: Sequence[int]) -> str:
        if not output or (
            len(output) < self.max_tokens and output[-1] not in self.pair.stop_tokens
        ):
            return "cut"
        rows = target_logits(self.pair, prompt, output[:-1], keep=len(output)).float()
        found = "none"
        for row, token in zip(rows, output, strict=True):
            gap = float(row.max() - row[token])
            if gap > near_tie_gap(self.pair.dtype, row):
                return "wrong"
            if gap > 0:
                found = "near-tie"
        return found
