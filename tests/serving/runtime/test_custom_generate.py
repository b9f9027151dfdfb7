"""`custom_generate`: the tokens of `model.generate`, over the caller's own modules, which stay as
they were."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from draftwell.serving.runtime.custom_generate import draftwell_generate
from tests.support.errors import raises_code
from tests.support.models.resources import table_resources
from tests.support.models.tiny import EOS, VOCAB, llama, near

PROMPTS = torch.tensor([[0, 0, 5, 7, 9, 4], [3, 8, 5, 7, 9, 5], [0, 6, 6, 11, 4, 17]])
MASK = (PROMPTS != 0).long()
STRATEGIES = {
    "autoregressive": {},
    "vanilla_sd": {"num_speculative_tokens": 3},
    "hf_dynamic": {"threshold": 0.3},
    "prompt_lookup": {},
    "spide": {"parallel": False},
}


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    # not the one that other tests share: they give it attention of their own
    target = llama.__wrapped__(2)
    return target, near(target, 0.06)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ends", ["never", "one row early", "two rows early"])
def test_a_padded_batch_gets_generates_own_tokens(
    models: tuple[Any, Any], strategy: str, ends: str
) -> None:
    target, draft = models
    asked: dict[str, Any] = {
        "attention_mask": MASK,
        "max_new_tokens": 20,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    plain = target.generate(PROMPTS, **asked)
    if ends != "never":  # tokens that the models do say become ends of text
        asked["eos_token_id"] = (
            int(plain[0, 14])
            if ends == "one row early"
            else [int(plain[0, 14]), int(plain[1, 10]), EOS]
        )
        unended, plain = plain, target.generate(PROMPTS, **asked)
        assert not torch.equal(unended[:, : plain.shape[1]], plain)  # somebody is padded
    custom = draftwell_generate(
        strategy, assistant_model=draft, resources=table_resources(24), **STRATEGIES[strategy]
    )
    assert torch.equal(target.generate(PROMPTS, **asked, custom_generate=custom), plain)
    # and once more with the same object
    assert torch.equal(target.generate(PROMPTS, **asked, custom_generate=custom), plain)
    assert torch.equal(target.generate(PROMPTS, **asked), plain)  # the module is as it was


@pytest.mark.parametrize("rows", [VOCAB - 6, VOCAB + 9])
def test_a_draft_may_be_padded_to_another_size(models: tuple[Any, Any], rows: int) -> None:
    """Rows that it lacks are said by the target, and read by it in its own way."""
    target, draft = models[0], copy.deepcopy(models[1])
    draft.resize_token_embeddings(rows, mean_resizing=False)
    asked: dict[str, Any] = {"attention_mask": MASK, "max_new_tokens": 20, "do_sample": False}
    plain = target.generate(PROMPTS, eos_token_id=None, pad_token_id=0, **asked)
    assert int(plain.max()) >= VOCAB - 6
    custom = draftwell_generate("vanilla_sd", assistant_model=draft, num_speculative_tokens=3)
    asked |= {"eos_token_id": None, "pad_token_id": 0, "custom_generate": custom}
    assert torch.equal(target.generate(PROMPTS, **asked), plain)
    assert draft.config.vocab_size == rows


def test_the_modules_are_as_they_were_even_after_an_error(models: tuple[Any, Any]) -> None:
    target, draft = models
    before = [(m.config._attn_implementation, m.training) for m in models]
    with raises_code("token_out_of_vocabulary", "token 999"):
        target.generate(
            torch.tensor([[999]]),
            max_new_tokens=2,
            do_sample=False,
            custom_generate=draftwell_generate(assistant_model=draft),
        )
    assert [(m.config._attn_implementation, m.training) for m in models] == before


def test_dict_output_and_max_length(models: tuple[Any, Any]) -> None:
    target, draft = models
    asked: dict[str, Any] = {
        "max_length": 15,
        "do_sample": False,
        "eos_token_id": None,
        "return_dict_in_generate": True,
    }
    out = target.generate(
        PROMPTS[1:2], **asked, custom_generate=draftwell_generate(assistant_model=draft)
    )
    assert torch.equal(out.sequences, target.generate(PROMPTS[1:2], **asked).sequences)
    assert out.sequences.shape == (1, 15)


def test_samples_have_a_seed_and_vary_without(models: tuple[Any, Any]) -> None:
    target, draft = models
    asked: dict[str, Any] = {
        "max_new_tokens": 12,
        "do_sample": True,
        "temperature": 1.3,
        "top_k": 20,
        "top_p": 0.95,
        "eos_token_id": None,
        "pad_token_id": 0,
        "num_return_sequences": 2,
    }

    def draw(**more: Any) -> torch.Tensor:
        return target.generate(
            PROMPTS[1:2], **asked, custom_generate=draftwell_generate(assistant_model=draft, **more)
        )

    one = draw(seed=3)
    assert torch.equal(one, draw(seed=3))
    assert not torch.equal(one[0], one[1])
    assert not torch.equal(one, draw(seed=4))
    torch.manual_seed(0)
    free = draw()
    assert not torch.equal(free, draw())
    torch.manual_seed(0)
    assert torch.equal(free, draw())


def test_samples_follow_the_targets_warped_law(models: tuple[Any, Any]) -> None:
    """First token of many draws against softmax over the k largest logits at that temperature."""
    target, draft = models
    prompt = PROMPTS[1:2]
    with torch.no_grad():
        logits = target(prompt).logits[0, -1] / 1.5
    best = logits.topk(4)
    law = torch.zeros(24).scatter(0, best.indices, best.values.softmax(-1))
    drawn = target.generate(
        prompt,
        max_new_tokens=1,
        do_sample=True,
        temperature=1.5,
        top_k=4,
        top_p=1.0,
        num_return_sequences=400,
        pad_token_id=0,
        custom_generate=draftwell_generate(assistant_model=draft, seed=0),
    )
    share = torch.bincount(drawn[:, -1], minlength=24) / 400
    assert (share - law).abs().max() < 0.1  # four standard errors


class Heard:
    """A streamer that keeps what it hears."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_a_streamer_hears_prompt_and_output(models: tuple[Any, Any]) -> None:
    target, draft = models
    heard = Heard()
    custom = draftwell_generate(assistant_model=draft, streamer=heard)
    out = target.generate(PROMPTS[1:2], max_new_tokens=9, do_sample=False, custom_generate=custom)
    assert heard.ended
    assert heard.tokens == out[0].tolist()


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"repetition_penalty": 1.2}, "RepetitionPenaltyLogitsProcessor"),
        ({"max_time": 5.0}, "MaxTimeCriteria"),
        ({"num_beams": 2}, "num_beams"),
        ({"do_sample": True, "typical_p": 0.5}, "TypicalLogitsWarper"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        ({"min_new_tokens": 4, "eos_token_id": EOS}, "MinNewTokensLengthLogitsProcessor"),
    ],
)
def test_what_would_be_ignored_is_refused(
    models: tuple[Any, Any], asked: dict[str, Any], named: str
) -> None:
    target, draft = models
    with raises_code("unsupported_option", named):
        target.generate(
            PROMPTS[1:2],
            **{"max_new_tokens": 5, "do_sample": False, **asked},
            custom_generate=draftwell_generate(assistant_model=draft),
        )


def test_a_draft_in_the_wrong_place_is_told_the_right_one(models: tuple[Any, Any]) -> None:
    target, draft = models
    with raises_code("model_missing", "draftwell_generate", "assistant_model"):
        target.generate(
            PROMPTS[1:2],
            max_new_tokens=5,
            do_sample=False,
            assistant_model=draft,
            custom_generate=draftwell_generate(),
        )
