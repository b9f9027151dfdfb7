"""Outputs of one device checked against another's: the same weights, prompts and rules, greedily,
on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from draftwell.components.bench.runner import Measurement, measure
from draftwell.components.bench.schema import CpuCheck, ParityEntry
from draftwell.components.bench.settings import BenchSettings
from draftwell.components.bench.target_agreement import differences
from draftwell.components.prompts.prompt import Prompt, ids_of
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import PLAIN, StrategyResources


def check_against(
    cpu: LoadedPair,
    measured: Mapping[str, Measurement],
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
) -> CpuCheck:
    """Compare what every lossless strategy gave with autoregressive decoding on the CPU.

    Args:
        cpu: the same pair in the same dtype, loaded on the CPU (unpadded will do: padding changes
            no output).
        measured: greedy measurements of this run.
    Returns:
        for each label the first differences, with the CPU's logit gap there. It passed if every
        prompt of every lossless strategy is identical or first differs at a near-tie.
    """
    settings = BenchSettings(max_tokens=max_tokens, warmup=False)
    reference = measure(cpu, StrategyResources(), [PLAIN], prompts, settings)[PLAIN.name]
    names, encoded = reference.prompt_ids, [ids_of(cpu, prompt) for prompt in prompts]
    theirs = [run.tokens for run in reference.typical]
    found: dict[str, ParityEntry] = {}
    for label, m in measured.items():
        if m.ours and m.lossless:
            outputs = [run.tokens for run in m.typical]
            differing = differences(cpu, names, encoded, outputs, theirs)
            found[label] = ParityEntry(
                identical=len(prompts) - len(differing),
                near_ties=sum(d.near_tie for d in differing),
                differences=tuple(differing),
            )
    return CpuCheck(
        passed=all(f.identical + f.near_ties == len(prompts) for f in found.values()),
        strategies=found,
    )
