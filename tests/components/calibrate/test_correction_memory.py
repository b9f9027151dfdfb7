"""The correction memory equals a slow recount of the rejections of speculative decoding."""

from collections import Counter

import pytest
import torch

from draftwell.components.calibrate import correction_memory
from draftwell.components.calibrate.correction_memory import build_correction_memory
from draftwell.components.calibrate.settings import MemorySettings
from draftwell.components.prompts.prompt import Prompt, prompts_digest
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.errors import ContextTooLong, NotFinite
from draftwell.serving.runtime.random_streams import Streams
from draftwell.serving.runtime.sampling import residual, warp
from tests.support.errors import raises_code
from tests.support.models.tiny import llama_pair, table_pair

ORIGIN = Provenance(pair="tiny", fingerprint="f" * 64)
PROMPTS = [
    Prompt(f"p{i}", None, [text])
    for i, text in enumerate(["abcab cabinet", "hello hello", "zebra", "one two three"])
]


def slow_rejections(
    pair, prompt: Prompt, seed: int, max_tokens: int, gamma: int
) -> tuple[list[int], Counter]:
    """Leviathan's algorithm on the tables, written out."""
    sampling = pair.sampling(max_tokens=max_tokens, temperature=0.6, seed=seed)
    target, draft = pair.models["target"], pair.models["draft"]

    def probs(model, context):
        return warp(model.next_logits(context), sampling)

    rng, counts = Streams(seed), Counter()
    ids = pair.encode_prompt(prompt.prompt)
    first = len(ids)
    ids.append(rng.sample.draw(probs(target, ids)))
    stops = sampling.stop_token_ids
    while len(ids) - first < max_tokens and ids[-1] not in stops:
        tokens: list[int] = []
        while len(tokens) < min(gamma, max_tokens - (len(ids) - first) - 1) and not (
            tokens and tokens[-1] in stops
        ):
            tokens.append(rng.draft.draw(probs(draft, ids + tokens)))
        for i, token in enumerate(tokens):
            p, q = probs(target, ids + tokens[:i]), probs(draft, ids + tokens[:i])
            if not rng.test.accepts(float(p[token]), float(q[token])):
                fixed = rng.sample.draw(residual(p, q))
                counts[token, fixed] += 1
                ids += [*tokens[:i], fixed]
                break
        else:
            ids += tokens
            if not (tokens and tokens[-1] in stops):
                ids.append(rng.sample.draw(probs(target, ids)))
    return ids[first:], counts


def test_the_memory_counts_the_rejections_of_standard_speculative_decoding():
    pair = table_pair()
    expected: Counter = Counter()
    for i, prompt in enumerate(PROMPTS):
        expected += slow_rejections(pair, prompt, seed=i, max_tokens=40, gamma=6)[1]
    memory = build_correction_memory(pair, PROMPTS, ORIGIN, MemorySettings(max_tokens=40))
    assert memory.counts == dict(expected)
    assert sum(memory.counts.values()) > 20
    assert memory.provenance.metrics == {
        "rejections": float(sum(expected.values())),
        "patterns": float(len(expected)),
    }
    assert memory.provenance.parameters["temperature"] == 0.6
    assert memory.provenance.parameters["prompts_digest"] == prompts_digest(PROMPTS)


def test_concurrent_requests_change_nothing():
    one = build_correction_memory(table_pair(), PROMPTS, ORIGIN, MemorySettings(max_tokens=24))
    many = build_correction_memory(
        table_pair(slots=3), PROMPTS, ORIGIN, MemorySettings(max_tokens=24, batch=8)
    )
    assert list(one.counts.items()) == list(many.counts.items())


def test_a_killed_run_resumes_and_counts_the_same(tmp_path, monkeypatch):
    """It begins with the part that it was killed in, and what it was killed in counts once."""
    monkeypatch.setattr(correction_memory, "PART", 1)
    settings, done = MemorySettings(max_tokens=24), []
    whole = build_correction_memory(table_pair(), PROMPTS, ORIGIN, settings)

    def stop(at: int, total: int, what: str) -> None:
        done.append(at)
        if at == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_correction_memory(
            table_pair(),
            PROMPTS,
            ORIGIN,
            settings,
            unfinished=tmp_path / "rejections.jsonl",
            progress=stop,
        )
    again = []
    resumed = build_correction_memory(
        table_pair(),
        PROMPTS,
        ORIGIN,
        settings,
        unfinished=tmp_path / "rejections.jsonl",
        progress=lambda at, *_: again.append(at),
    )
    assert (done, again) == ([0, 1, 2, 3], [2, 3, 4])
    assert list(resumed.counts.items()) == list(whole.counts.items())
    assert resumed.provenance == whole.provenance


@pytest.mark.parametrize(
    ("prompts", "settings"),
    [
        (PROMPTS, MemorySettings(max_tokens=24)),
        (PROMPTS[:2], MemorySettings(max_tokens=8)),
        (PROMPTS, MemorySettings(max_tokens=8, batch=1)),
    ],
)
def test_an_unfinished_run_of_other_settings_is_not_used(tmp_path, prompts, settings):
    file = tmp_path / "rejections.jsonl"
    build_correction_memory(
        table_pair(), PROMPTS, ORIGIN, MemorySettings(max_tokens=8), unfinished=file
    )
    apart = build_correction_memory(table_pair(), prompts, ORIGIN, settings)
    found = build_correction_memory(table_pair(), prompts, ORIGIN, settings, unfinished=file)
    assert found.counts == apart.counts


def test_rare_pairs_can_be_left_out():
    whole = build_correction_memory(table_pair(), PROMPTS, ORIGIN, MemorySettings(max_tokens=24))
    few = build_correction_memory(
        table_pair(), PROMPTS, ORIGIN, MemorySettings(max_tokens=24, smallest_count=2)
    )
    assert few.counts == {seen: count for seen, count in whole.counts.items() if count >= 2}
    assert 0 < len(few.counts) < len(whole.counts)
    assert few.provenance.metrics == whole.provenance.metrics, (
        "patterns and rejections are those that were seen"
    )
    assert few.provenance.parameters["smallest_count"] == 2


def test_a_failed_request_leaves_no_slot_taken():
    pair = table_pair(slots=2)
    good, broken = pair.models["target"].table.clone(), pair.models["target"]
    broken.table = torch.full_like(good, float("nan"))
    with raises_code("not_finite", "NaN", error=NotFinite):
        build_correction_memory(pair, PROMPTS, ORIGIN, MemorySettings(batch=2))
    broken.table = good
    assert build_correction_memory(
        pair, PROMPTS, ORIGIN, MemorySettings(batch=2, max_tokens=8)
    ).counts


def test_a_prompt_that_is_too_long_is_named_before_any_is_decoded():
    done = []
    long = Prompt("the long one", None, ["a" * 490])
    with raises_code("context_too_long", "the long one", "490", "512", error=ContextTooLong):
        build_correction_memory(
            table_pair(),
            [*PROMPTS, long],
            ORIGIN,
            MemorySettings(max_tokens=24),
            progress=lambda *step: done.append(step),
        )
    assert done == []


def test_no_prompts_is_a_mistake():
    with raises_code("no_prompts"):
        build_correction_memory(table_pair(), [], ORIGIN)


def test_settings_out_of_bounds_are_refused():
    for wrong in (
        {"smallest_count": 0},
        {"max_tokens": 0},
        {"batch": 0},
        {"tokens": 8},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            MemorySettings(**wrong)


def test_a_transformer_pair_fills_a_memory():
    assert build_correction_memory(
        llama_pair(), PROMPTS[:2], ORIGIN, MemorySettings(max_tokens=12, batch=2)
    ).counts
