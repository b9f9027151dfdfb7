"""How likely the target finds rejected tokens: CSD's Figure 2(b)."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from draftwell.components.collect.collect import collect_traces
from draftwell.components.collect.settings import CollectionSettings
from draftwell.components.papers.rejections import rejected_pairs
from draftwell.components.prompts.prompt import Prompt, ids_of
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import build_strategy
from tests.support.models.tiny import table_pair

PROMPTS = [
    Prompt(name, "maths", [text])
    for name, text in (("a", "the man in the inn"), ("b", "ten men"), ("c", "an onion"))
]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedPair, TraceSet]:
    pair = table_pair()
    settings = CollectionSettings(
        max_tokens=40, rollout=1, batch=1, hidden=False, prefix_kinds=("target",)
    )
    return pair, collect_traces(pair, PROMPTS, tmp_path_factory.mktemp("trace"), settings)


def test_ratios_are_the_targets_wherever_a_pair_is_rejected(
    traced: tuple[LoadedPair, TraceSet],
) -> None:
    """Of two tables, what each says behind a token is known: the pair and its ratio by hand."""
    pair, trace = traced
    target, draft = (pair.models[role].table for role in ("target", "draft"))
    wanted: Counter[tuple[str, str, float]] = Counter()
    for prompt in PROMPTS:
        token = list(ids_of(pair, prompt))[-1]
        plain, sampling = build_strategy("autoregressive", {}), pair.sampling(max_tokens=40)
        output = pair.engine().generate(ids_of(pair, prompt), sampling, plain).output
        for chosen in output:
            first = int(draft[token].argmax())
            if first != chosen:
                p = torch.softmax(target[token], -1)
                wanted[
                    pair.decode([first]),
                    pair.decode([chosen]),
                    round(math.log10(float(p[first] / p[chosen])), 3),
                ] += 1
            token = chosen
    found = rejected_pairs(pair, trace, most=1000)
    assert (
        Counter(
            (one.draft, one.target, round(value, 3)) for one in found for value in one.exponents
        )
        == wanted
    )
    assert wanted
    times = [len(one.exponents) for one in found]
    assert times == sorted(times, reverse=True)
    assert len(rejected_pairs(pair, trace, most=1)) == 1


def test_a_token_without_text_has_its_number() -> None:
    """Such as an end of text, which decoding leaves out."""
    pair = table_pair()
    pair.models["target"].table[:, 2] += 20.0
    pair.models["draft"].table[:, 2] -= 20.0
    with TemporaryDirectory() as folder:
        settings = CollectionSettings(
            max_tokens=4, rollout=1, batch=1, hidden=False, prefix_kinds=("target",)
        )
        found = rejected_pairs(pair, collect_traces(pair, PROMPTS, Path(folder), settings))
    assert {one.target for one in found} == {"token 2"}
