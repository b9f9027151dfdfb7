"""Pairs whose vocabularies differ: what the draft lacks is never drafted, and the output is the
target's all the same."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from draftwell.components.prompts.prompt import Prompt
from draftwell.serving.artifacts.pair_files import PairFiles
from draftwell.serving.runtime.commands import Forward, Role
from draftwell.serving.runtime.logits import Span
from draftwell.serving.runtime.model import Model
from draftwell.serving.runtime.pair import LoadedPair, LoadSettings, load_pair, over_slots
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import STRATEGIES, build_strategy
from draftwell.serving.runtime.vocabulary import names_of, not_shared
from tests.support.collecting import collect_traces
from tests.support.errors import raises_code
from tests.support.models.enumeration import law_error
from tests.support.models.resources import table_pair, table_resources
from tests.support.models.spans import all_rows
from tests.support.models.table_model import TableModel
from tests.support.server.served_pair import (
    SPECIAL,
    TunedModel,
    serving,
    tiny_module,
    tiny_tokenizer,
)

WORDS = len(tiny_tokenizer())
"""Tokens of the base tokenizer; the last is the end."""
PROMPT = "the other end of the line is in her hand, then on the ant"
HIDDEN = 32
TURN, FINISH = "<|turn|>", "<|finish|>"
END = (WORDS - 1,)
NO_DRAFT = [name for name, one in STRATEGIES.items() if "draft" not in one.roles]


def longer(tokenizer: Any, *names: str) -> Any:
    """A tokenizer with further special tokens at its end."""
    other = copy.deepcopy(tokenizer)
    other.add_tokens(list(names), special_tokens=True)
    return other


def renamed(tokenizer: Any, folder: Path, names: dict[str, str]) -> Any:
    """A tokenizer with other names for some of its tokens."""
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(folder)
    for file in folder.glob("tokenizer*.json"):
        text = file.read_text()
        for old, new in names.items():
            text = text.replace(f'"{old}"', f'"{new}"')
        file.write_text(text)
    return AutoTokenizer.from_pretrained(folder)


def with_rows(module: Any, rows: int, seed: int) -> Any:
    """A module whose vocabulary has so many rows, further ones random."""
    other = copy.deepcopy(module)
    torch.manual_seed(seed)
    other.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        for part in (other.get_input_embeddings(), other.get_output_embeddings()):
            known = min(rows, module.config.vocab_size)
            part.weight[known:] = torch.randn_like(part.weight[known:]) * 0.35
    return other.eval()


def greedy(module: Any, ids: Sequence[int], count: int, ends: Sequence[int] = ()) -> list[int]:
    """What transformers writes."""
    settings = {"eos_token_id": list(ends) or None, "pad_token_id": 0, "do_sample": False}
    with torch.inference_mode():
        out = module.generate(torch.tensor([list(ids)]), max_new_tokens=count, **settings)
    return out[0, len(ids) :].tolist()


def say(module: Any, token: int, instead_of: int) -> None:
    """Let a target prefer a token wherever it would say another one."""
    head = module.get_output_embeddings()
    with torch.no_grad():
        head.weight[token] = head.weight[instead_of] * 1.5


class Case:
    """A target and its draft, of so many rows and with these tokenizers.

    Args:
        said: an id that the draft does not share, which the target says after a few tokens.
    """

    def __init__(
        self, target: int, draft: int, own: Any, theirs: Any, said: int, ends: Sequence[int] = END
    ):
        base = tiny_module(WORDS, WORDS - 1)
        base.generation_config.eos_token_id = None
        self.target, self.draft = with_rows(base, target, 11), with_rows(base, draft, 12)
        with torch.no_grad():
            for weight in self.draft.parameters():
                weight += torch.randn(weight.shape) * 0.02
        self.own, self.theirs, self.said = own, theirs, said
        self.prompt = own(PROMPT)["input_ids"]
        self.prompt.insert(5, said)
        say(self.target, said, greedy(self.target, self.prompt, 12)[9])
        for module, end in ((self.target, list(ends)), (self.draft, WORDS - 1)):
            module.generation_config.eos_token_id = module.config.eos_token_id = end
        self.wanted = greedy(self.target, self.prompt, 48, ends)

    def save(self, folder: Path) -> PairFiles:
        for role, module, tokenizer in (
            ("target", self.target, self.own),
            ("draft", self.draft, self.theirs),
        ):
            module.save_pretrained(folder / role)
            tokenizer.save_pretrained(folder / role)
        return PairFiles("differs", folder / "target", folder / "draft")


def end_of_its_own(_: Path) -> Case:
    own = longer(tiny_tokenizer(), TURN, FINISH)
    own.eos_token = FINISH
    return Case(WORDS + 2, WORDS, own, tiny_tokenizer(), WORDS + 1, ends=[WORDS + 1])


def padded_target(_: Path) -> Case:
    return Case(WORDS + 7, WORDS, tiny_tokenizer(), tiny_tokenizer(), WORDS + 4)


def both_padded(_: Path) -> Case:
    own = longer(tiny_tokenizer(), TURN)
    return Case(WORDS + 128, WORDS + 64, own, tiny_tokenizer(), WORDS)


def longer_draft(_: Path) -> Case:
    theirs = longer(tiny_tokenizer(), TURN, FINISH)
    return Case(WORDS + 1, WORDS + 9, tiny_tokenizer(), theirs, WORDS)


def other_names(folder: Path) -> Case:
    names = {SPECIAL[0]: "<|reserved_1|>", "Z": "<|reserved_2|>"}
    theirs = renamed(tiny_tokenizer(), folder / "renamed", names)
    return Case(WORDS, WORDS, tiny_tokenizer(), theirs, WORDS - 2)


CASES: list[Callable[[Path], Case]] = [
    end_of_its_own,
    padded_target,
    both_padded,
    longer_draft,
    other_names,
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.__name__)
def made(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, PairFiles]:
    folder = tmp_path_factory.mktemp("differs")
    case = request.param(folder)
    return case, case.save(folder)


@pytest.fixture(scope="module")
def differs(made: tuple[Case, PairFiles]) -> tuple[Case, LoadedPair]:
    case, files = made
    return case, load_pair(files, LoadSettings(dtype="float32", slots=3))


WITH_DRAFT: list[tuple[str, dict[str, Any]]] = [
    ("vanilla_sd", {"num_speculative_tokens": 4}),
    ("svip", {}),
    ("draft_verify", {"threshold": 0.3}),
    ("adaedl", {"threshold": 0.01, "max_draft": 5}),
    ("hf_dynamic", {}),
    ("specdec_pp", {"max_draft": 4}),
    ("spide", {"tau": 0.4, "max_draft": 4}),
    ("pearl", {"num_speculative_tokens": 3}),
    ("duo_decoding", {"num_speculative_tokens": 3, "max_sequences": 2}),
    ("hybrid", {"drafter": "draft"}),
]


@pytest.mark.parametrize(("name", "parameters"), WITH_DRAFT, ids=lambda one: str(one))
def test_greedy_output_is_that_of_the_target_in_transformers(
    differs: tuple[Case, LoadedPair], name: str, parameters: dict[str, Any]
) -> None:
    case, pair = differs
    strategy = build_strategy(name, parameters, table_resources(HIDDEN))
    job = pair.engine().generate(case.prompt, pair.sampling(max_tokens=48), strategy)
    assert job.output == case.wanted
    assert case.said in case.wanted, "the draft cannot propose it"
    assert len(set(case.wanted)) > 5
    assert job.session.stats.drafted > 0
    if case.said in pair.stop_tokens:
        assert len(case.wanted) < 48, "the end is the target's alone"


def test_a_draft_proposes_what_it_shares_and_nothing_else(
    differs: tuple[Case, LoadedPair],
) -> None:
    case, pair = differs
    shared = set(range(case.target.config.vocab_size)) - set(
        not_shared(
            names_of(case.own),
            case.target.config.vocab_size,
            names_of(case.theirs),
            case.draft.config.vocab_size,
        )
    )
    assert case.said not in shared
    assert len(shared) >= WORDS - 2
    model = pair.models["draft"]
    # it reads its own end in the place of what it lacks
    read = [token if token in shared else WORDS - 1 for token in case.prompt]
    with torch.inference_mode():
        wanted = case.draft(torch.tensor([read])).logits[0].float()
    graphs = over_slots(
        copy.deepcopy(case.draft),
        static=True,  # as on CUDA
        head_tokens=model.head_tokens,
        vocab_size=model.vocab_size,
    )
    graphs.stand_ins = model.stand_ins
    for one in (model, graphs):
        slot = one.open()
        (span,) = one.forward([Forward("draft", slot, tuple(case.prompt), len(case.prompt))])
        one.close(slot)
        assert set(span.raw(0).nonzero()[:, 0].tolist()) == shared
        assert torch.allclose(span.values, wanted[:, sorted(shared)], atol=2e-4)


def test_a_head_of_the_first_ids_is_no_copy() -> None:
    module = tiny_module(WORDS, WORDS - 1)
    rows = module.get_output_embeddings().weight
    first = over_slots(module, head_tokens=torch.arange(WORDS - 3)).head_weight
    assert first.data_ptr() == rows.data_ptr()
    assert torch.equal(first, rows[: WORDS - 3])
    others = torch.arange(1, WORDS)
    assert torch.equal(over_slots(module, head_tokens=others).head_weight, rows[others])


def test_what_differs_is_listed_once(
    made: tuple[Case, PairFiles], caplog: pytest.LogCaptureFixture
) -> None:
    case, files = made
    with caplog.at_level(logging.WARNING, "draftwell"):
        pair = load_pair(files, LoadSettings(dtype="float32", slots=2))
        for _ in range(2):
            pair.engine().generate(
                case.prompt, pair.sampling(max_tokens=8), build_strategy("vanilla_sd")
            )
    (line,) = [one.getMessage() for one in caplog.records if "never drafts" in one.getMessage()]
    count = len(pair.models["draft"].stand_ins)
    assert f"never drafts {count} of the target's {case.target.config.vocab_size} token" in line
    name = names_of(case.own).get(case.said)
    assert (repr(name) if name else "padding") in line


def test_a_pair_of_equal_vocabularies_is_as_it_was(tmp_path: Path) -> None:
    """Padding that both have is no difference, and costs nothing."""
    case = Case(WORDS + 4, WORDS + 4, tiny_tokenizer(), tiny_tokenizer(), WORDS)
    pair = load_pair(case.save(tmp_path), LoadSettings(dtype="float32"))
    draft = pair.models["draft"]
    assert draft.head_tokens is None
    assert not draft.stand_ins
    assert {model.vocab_size for model in pair.models.values()} == {WORDS + 4}
    job = pair.engine().generate(
        case.prompt, pair.sampling(max_tokens=48), build_strategy("vanilla_sd")
    )
    assert job.output == case.wanted


def test_three_models_of_three_vocabularies(tmp_path: Path) -> None:
    """The qualifier reads and drafts in ids of its own."""
    case = end_of_its_own(tmp_path)
    files = case.save(tmp_path)
    qualifier = both_padded(tmp_path)
    qualifier.draft.save_pretrained(tmp_path / "qualifier")
    longer(tiny_tokenizer(), TURN).save_pretrained(tmp_path / "qualifier")
    pair = load_pair(
        PairFiles("three", files.target, files.draft, tmp_path / "qualifier"),
        LoadSettings(dtype="float32", slots=2),
    )
    lacks = {role: set(pair.models[role].stand_ins) for role in ("draft", "qualifier")}
    assert lacks == {"draft": {WORDS, WORDS + 1}, "qualifier": {WORDS + 1}}
    drafter = build_strategy("vanilla_sd", {"drafter": "qualifier"})
    asked = pair.sampling(max_tokens=48)
    assert pair.engine().generate(case.prompt, asked, drafter).output == case.wanted
    for name, parameters in (
        ("pyramid_assisted", {}),
        ("pyramid_fuzzy", {"divergence": "js"}),
        ("fuzzy_sd", {"divergence": "tv"}),
        ("sprinter", {}),
        ("csd", {}),
        ("mentored", {}),
        ("lossy_sd", {}),
        ("fly", {}),
        ("asd", {}),
    ):
        strategy = build_strategy(name, parameters, table_resources(HIDDEN))
        job = pair.engine().generate(case.prompt, asked, strategy)
        assert job.output


def test_traces_hold_the_targets_ids(tmp_path: Path) -> None:
    """A collection over a pair whose draft lacks the end and a token of every prompt."""
    case = end_of_its_own(tmp_path)
    pair = load_pair(case.save(tmp_path), LoadSettings(dtype="float32", slots=8))
    prompts = [Prompt(f"p{i}", None, [f"{PROMPT[i:]}{TURN}"], raw=True) for i in range(4)]
    traces = collect_traces(pair, prompts, tmp_path / "traces", max_tokens=12)
    rows = traces.read(["token", "draft_token"])
    lacks = pair.models["draft"].stand_ins
    assert not set(rows["draft_token"].to_pylist()) & set(lacks)
    plain = [
        pair.engine()
        .generate(
            pair.encode(one.prompt), pair.sampling(max_tokens=12), build_strategy("autoregressive")
        )
        .output
        for one in prompts
    ]
    assert set(rows["token"].to_pylist()) <= {token for text in plain for token in text}


def test_a_server_writes_padding_that_the_target_says_as_nothing(tmp_path: Path) -> None:
    case = padded_target(tmp_path)
    pair = load_pair(case.save(tmp_path), LoadSettings(dtype="float32", slots=2))
    served = TunedModel("tiny", pair, build_strategy("vanilla_sd"), 2)
    assert case.said in case.wanted
    asked = {"model": "tiny", "prompt": case.prompt, "max_tokens": 48, "temperature": 0}
    with serving(served) as (url, _):
        answer = httpx.post(f"{url}/v1/completions", json=asked | {"logprobs": 1}).json()
        assert answer["choices"][0]["text"] == pair.decode(case.wanted)
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == len(case.wanted)
        grammar = {"structured_outputs": {"choice": ["the ant", "the man"]}}
        answer = httpx.post(f"{url}/v1/completions", json=asked | grammar).json()
        assert answer["choices"][0]["text"] in grammar["structured_outputs"]["choice"]


def shuffled(tokenizer: Any, folder: Path) -> Any:
    """Another vocabulary: every id means the token before it."""
    import json

    from transformers import AutoTokenizer

    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer.json"
    body = json.loads(file.read_text())
    vocab = body["model"]["vocab"]
    body["model"]["vocab"] = {name: (i + 1) % len(vocab) for name, i in vocab.items()}
    file.write_text(json.dumps(body))
    return AutoTokenizer.from_pretrained(folder)


def test_a_draft_of_another_vocabulary_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = shuffled(tiny_tokenizer(), tmp_path / "other")
    case = Case(WORDS, WORDS, tiny_tokenizer(), other, WORDS - 2)
    with caplog.at_level(logging.WARNING, "draftwell"):
        pair = load_pair(case.save(tmp_path), LoadSettings(dtype="float32"), onnx_draft=True)
    assert set(pair.models) == {"target"}
    (line,) = [one.getMessage() for one in caplog.records]
    assert "`draftwell step distil`" in line
    assert "draft draft cannot draft for target target" in line
    engine, asked = pair.engine(), pair.sampling(max_tokens=24)
    for name in NO_DRAFT:
        if name in ("eagle3", "medusa", "swift"):  # of artifacts, or layers to leave out
            continue
        strategy = build_strategy(name, {}, table_resources(HIDDEN))
        assert engine.generate(case.prompt, asked, strategy).output == case.wanted[:24]
    for name, parameters in WITH_DRAFT:
        if name not in NO_DRAFT:
            strategy = build_strategy(name, parameters, table_resources(HIDDEN))
            with raises_code("model_missing", "needs a draft model", "`draftwell step distil`"):
                engine.submit(case.prompt, asked, strategy)


class PartialTable(TableModel):
    """A table whose head covers some tokens, and that reads others in the place of some."""

    def forward(self, rows: Sequence[Forward]) -> list[Span]:
        spans = super().forward(self.as_read(rows))
        assert self.head_tokens is not None
        return [
            all_rows(span.values[:, self.head_tokens], span.states, self.head_tokens, 4)
            for span in spans
        ]


@pytest.mark.parametrize("warpers", [{}, {"top_k": 2}, {"temperature": 0.7, "top_p": 0.8}], ids=str)
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("vanilla_sd", {"num_speculative_tokens": 2}),
        ("svip", {}),
        ("specdec_pp", {}),
        ("hybrid", {"max_draft": 2, "drafter": "draft"}),
        ("spide", {"tau": 0.4, "max_draft": 2}),
        ("pearl", {"num_speculative_tokens": 2}),
        ("duo_decoding", {"num_speculative_tokens": 2}),
    ],
    ids=str,
)
def test_sampled_output_has_the_targets_distribution(
    name: str, parameters: dict[str, Any], warpers: dict[str, Any]
) -> None:
    """The draft knows neither token 1 nor the end, token 3; the prompt holds both."""
    models: dict[Role, Model] = table_pair(vocab=4)
    draft = PartialTable(models["draft"].table)  # type: ignore[attr-defined]
    draft.head_tokens, draft.stand_ins = torch.tensor([0, 2]), {1: 2, 3: 2}
    models["draft"] = draft
    sampling = Sampling(
        max_tokens=3, stop_token_ids=frozenset({3}), **{"temperature": 1.0, **warpers}
    )
    error = law_error(
        lambda: build_strategy(name, parameters, table_resources(4)), models, [0, 3, 1], sampling
    )
    assert error < 1e-6
