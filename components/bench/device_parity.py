"""Outputs of one device checked against another's: the same weights, prompts and rules, greedily,
on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from draftwell.components.bench.runner import Measurement
from draftwell.components.bench.schema import CpuCheck, ParityEntry
from draftwell.components.bench.target_agreement import departure
from draftwell.components.prompts.prompt import Prompt, ids_of
from draftwell.serving.runtime.pair import LoadedPair


def check_against(
    cpu: LoadedPair,
    measured: Mapping[str, Measurement],
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
) -> CpuCheck:
    """Read what every lossless strategy gave by the target on the CPU.

    Args:
        cpu: the same pair in the same dtype, loaded on the CPU (unpadded will do: padding changes
            no output).
        measured: greedy measurements of this run.
    Returns:
        for each label how many outputs are the CPU's own, and how many but for near-ties. It passed
        if those are all prompts of every lossless strategy.
    """
    found: dict[str, ParityEntry] = {}
    for label, m in measured.items():
        if m.ours and m.lossless:
            kinds = {
                prompt.id: departure(cpu, ids_of(cpu, prompt), run.tokens, max_tokens, exact=False)
                for prompt, run in zip(prompts, m.typical, strict=True)
            }
            found[label] = ParityEntry(
                identical=list(kinds.values()).count("none"),
                near_ties=list(kinds.values()).count("near-tie"),
                wrong=tuple(name for name, kind in kinds.items() if kind in ("wrong", "cut")),
            )
    return CpuCheck(passed=not any(one.wrong for one in found.values()), strategies=found)
