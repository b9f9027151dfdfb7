"""Tiny random models of every architecture in `matrix.yaml`, and what is written with them here and
by transformers. docs/models.md is made of them (`model_page.py`).

Windows are of 16 positions and pre-training lengths of 32, both shorter than the texts.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from draftwell.serving.artifacts.pair_files import PairFiles
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.models.lean_llama import LeanLlama
from draftwell.serving.runtime.models.unbatched_model import UnbatchedModel
from draftwell.serving.runtime.pair import LoadedPair, LoadSettings, load_pair
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import build_strategy
from tests.support.server.served_pair import tiny_tokenizer

LIMIT = 256
"""The longest text of a row's model."""
TOKENS = 60
"""Tokens of a text that is compared."""
FILE = Path(__file__).with_name("matrix.yaml")
PROMPTS = [[(7 * i + 3) % 240 + 10 for i in range(40)], [5, 90, 33, 200, 17, 60, 111]]
TABLE = yaml.safe_load(FILE.read_text(encoding="utf-8"))
ROPE = {"rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}


@dataclass(frozen=True)
class Row:
    """A tiny model of `matrix.yaml`, where the fields are described."""

    name: str
    kind: str
    base: str = "sizes"
    groups: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    rope: dict[str, Any] | None = None
    images: dict[str, Any] | None = None
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    def config(self) -> Any:
        """The configuration of transformers."""
        from transformers import AutoConfig

        settings = dict(TABLE["bases"][self.base])
        for group in self.groups:
            settings |= TABLE["groups"][group]
        settings |= self.settings
        if self.rope is not None:
            settings["rope_parameters"] = ROPE | self.rope
        if self.images is None:
            return AutoConfig.for_model(self.kind, **settings)
        common = {key: settings[key] for key in ("initializer_range", "tie_word_embeddings")}
        return AutoConfig.for_model(
            self.kind, text_config=settings, vision_config=self.images, **common
        )

    def module(self) -> Any:
        """The model in float32; norms and biases differ from element to element."""
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        auto: Any = AutoModelForCausalLM if self.images is None else AutoModelForImageTextToText
        torch.manual_seed(self.seed)
        module = auto.from_config(self.config()).float().eval()
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.dim() == 1:
                    parameter += 0.2 * torch.randn_like(parameter)
        return module


ROWS = [Row(**row) for row in TABLE["rows"]]


@dataclass(frozen=True)
class Outcome:
    """What became of a row: the pair and the way its target computes, or why it was refused."""

    way: str = ""
    refusal: str = ""
    pair: LoadedPair | None = None


def near(module: Any) -> Any:
    """A copy that agrees with the module often, not always."""
    other = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if parameter.dim() > 1 and not any(part in name for part in ("embed", "head", "wte")):
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += 0.05 * parameter.std() * noise
    return other


def generated(module: Any, prompt: list[int], tokens: int = TOKENS) -> list[int]:
    """What transformers' `generate` writes greedily."""
    ids = torch.tensor([prompt])
    out = module.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    written: list[int] = out[0, len(prompt) :].tolist()
    return written


def loaded(module: Any, folder: Path) -> LoadedPair:
    """The pair of a model and its noisy copy, from files.

    Raises:
        DraftwellError: the model is refused.
    """
    tokenizer = tiny_tokenizer()
    for role, one in (("target", module), ("draft", near(module))):
        one.save_pretrained(folder / role)
        tokenizer.save_pretrained(folder / role)
    return load_pair(
        PairFiles("tiny", folder / "target", folder / "draft"),
        LoadSettings(dtype="float32", slots=2, max_context=LIMIT),
        chat=False,
    )


def way_of(pair: LoadedPair) -> str:
    """How the target computes, as the page names it."""
    target = pair.models["target"]
    if isinstance(target, LeanLlama):
        return "lean layers" if target.native is None else "native"
    if isinstance(target, UnbatchedModel):
        return "transformers, row by row"
    return "transformers, packed"


def check(row: Row, folder: Path) -> Outcome:
    """Decode a row's model plainly, one prompt alone and both at once, and both at once by vanilla
    speculative decoding, and compare with transformers.

    Raises:
        AssertionError: a text differs, or is too dull to tell.
    """
    module = row.module()
    try:
        pair = loaded(module, folder)
    except DraftwellError as error:
        refusal = error
    else:
        compare(pair, module)
        return Outcome(way_of(pair), pair=pair)
    assert refusal.code == "unsupported_architecture", refusal
    assert "\n" not in str(refusal)
    return Outcome(refusal=str(refusal).partition(": ")[0])


def compare(pair: LoadedPair, module: Any) -> None:
    """Check all texts of a pair against those of its target's module."""
    wanted = [generated(module, prompt) for prompt in PROMPTS]
    assert min(len(set(text)) for text in wanted) >= 20, [len(set(text)) for text in wanted]
    engine, sampling = pair.engine(), Sampling(max_tokens=TOKENS)
    alone = engine.generate(PROMPTS[0], sampling, build_strategy("autoregressive"))
    assert alone.output == wanted[0]
    for name, settings in (("autoregressive", {}), ("vanilla_sd", {"num_speculative_tokens": 4})):
        jobs = [
            engine.submit(prompt, sampling, build_strategy(name, settings)) for prompt in PROMPTS
        ]
        engine.run(jobs)
        assert [job.output for job in jobs] == wanted, name
    stats = [job.session.stats for job in jobs]
    assert 0 < sum(one.accepted for one in stats) < sum(one.drafted for one in stats)
