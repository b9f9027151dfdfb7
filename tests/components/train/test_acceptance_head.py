"""The acceptance head learns what can be learnt, from the texts and labels that the paper names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from draftwell.components.prompts.prompt import Prompt
from draftwell.components.train.acceptance_head import head_metrics, train_acceptance_head
from draftwell.components.train.examples import Examples, VerifierLabel
from draftwell.components.train.head_examples import labels_of, read_mixed
from draftwell.components.train.head_network import train_network, weighted_loss
from draftwell.components.train.metrics import ranking
from draftwell.components.train.settings import LabelKind
from draftwell.serving.artifacts.acceptance_head import AcceptanceHead
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import StrategyResources, build_strategy
from tests.support.collecting import collect_traces
from tests.support.errors import raises_code
from tests.support.models.tiny import llama_pair, pair_of

ORIGIN = Provenance(pair="tiny", fingerprint="f" * 64, trace_digest="d")
PROMPTS = [Prompt(f"p{i}", None, [f"some words about {i}, and {i * i} more"]) for i in range(12)]


@pytest.fixture(scope="module")
def pair() -> LoadedPair:
    return llama_pair()


@pytest.fixture(scope="module")
def trace(pair: LoadedPair, tmp_path_factory: pytest.TempPathFactory) -> TraceSet:
    return collect_traces(
        pair,
        PROMPTS,
        tmp_path_factory.mktemp("trace"),
        max_tokens=24,
        rollout=2,
        prefix_kinds=("bare", "target"),
    )


def separable(rows: int = 8000, width: int = 8, seed: int = 0) -> Examples:
    """Ratios that depend on one direction of the states, at scales far from 1."""
    rng = np.random.default_rng(seed)
    states = rng.normal(3.0, 7.0, size=(rows, width)).astype(np.float32)
    ratio = np.where(states[:, 0] < 3.0, 0.8, 5.0).astype(np.float32)
    return Examples(
        {"after": states},
        ratio,
        np.zeros(rows, np.float32),
        np.array([f"p{i % 20}" for i in range(rows)]),
        accepted=(ratio < 1).astype(np.float32),
    )


def test_accepted_tokens_are_ranked_before_others_where_a_constant_ranks_nothing() -> None:
    examples, unseen = separable(), separable(seed=1)
    head = train_network(examples, ORIGIN)
    found = head_metrics(head, examples, unseen)
    assert found.auc > 0.8 > found.baseline_auc == 0.5
    assert found.loss < 0.9 * found.constant_loss
    low, high = found.intervals["auc"]
    assert 0.5 < low < found.auc < high
    assert sum(part.count for part in found.reliability) == len(unseen)
    observed = sum(part.count * part.observed for part in found.reliability) / len(unseen)
    assert observed == pytest.approx(found.mean_label, abs=1e-5)
    again = train_network(examples, ORIGIN)
    assert torch.equal(again.weight, head.weight), "the same seed trains the same head"


def test_a_chance_counts_on_both_sides() -> None:
    """At temperature > 0: the AUC over tokens that were accepted or not by lot, many times over."""
    rng = np.random.default_rng(0)
    chance, score = rng.random(60).astype(np.float32), rng.normal(size=60)
    chance[:10], chance[10:20] = 1.0, 0.0
    score += 2 * chance
    prompts = np.repeat([f"p{i}" for i in range(6)], 10)
    examples = Examples({}, chance, score.astype(np.float32), prompts, accepted=chance)
    drawn = rng.random((4000, 60)) < chance
    found = ranking(examples, score, VerifierLabel(LabelKind.SOFT))
    expected = roc_auc_score(drawn.ravel(), np.tile(score, 4000))
    assert found.auc == pytest.approx(expected, abs=0.01)
    assert found.prevalence == pytest.approx(drawn.mean(), abs=0.01)


def test_the_label_is_the_raw_chance_of_acceptance() -> None:
    ratios = np.array([0.5, 1.0, 4.0, np.inf], np.float32)
    examples = Examples({}, ratios, ratios, np.array(["p"] * 4))
    assert labels_of(examples).tolist() == [1.0, 1.0, 0.25, 0.0]


def test_the_loss_by_hand() -> None:
    """f = .5 everywhere costs log 2 whatever the weights; the best constant is below the mean
    label, as rejections weigh more."""
    labels = torch.tensor([1.0, 0.25])
    assert float(weighted_loss(torch.zeros(2), labels)) == pytest.approx(np.log(2))
    logits = torch.tensor([np.log(3.0), 0.0])  # f = .75, .5
    expected = -(np.log(0.75) + 0.25 * np.log(0.5) + 6 * 0.75 * np.log(0.5)) / (1 + 0.25 + 6 * 0.75)
    assert float(weighted_loss(logits.float(), labels)) == pytest.approx(expected)
    grid = torch.linspace(-4, 4, 401)
    best = grid[
        torch.stack([weighted_loss(torch.full((2,), float(z)), labels) for z in grid]).argmin()
    ]
    assert float(best.sigmoid()) == pytest.approx(1.25 / (1.25 + 6 * 0.75), abs=0.01)


def test_the_draft_reads_a_mixture_and_only_its_own_tokens_count(
    pair: LoadedPair, trace: TraceSet
) -> None:
    rows = trace.read()
    target = [row for row in rows.to_pylist() if row["kind"] == "target"]
    own = read_mixed(pair, trace, 0.0, 0)
    assert len(own) == len(target) < rows.num_rows  # the other kinds of prefix are left out
    assert own.ratio.tolist() == [np.float32(row["ratio"]) for row in target]
    assert own.prompt.tolist() == [row["prompt_id"] for row in target]
    assert own.accepted is not None
    assert own.accepted.tolist() == [float(row["draft_token"] == row["token"]) for row in target]
    mixed = read_mixed(pair, trace, 0.15, 0)
    assert 0.75 < len(mixed) / len(own) < 0.95
    # The state is the one behind the token that it is a prediction about, in a text of draft
    # tokens.
    first = [row for row in target if row["prompt_id"] == target[0]["prompt_id"]]
    model = pair.models["draft"]
    slot = model.open()
    read = (*first[0]["prompt_tokens"], *(row["draft_token"] for row in first[:3]))
    hidden: Any = model.forward([Forward("draft", slot, read, prefill=True)])[0].states
    model.close(slot)
    assert np.allclose(own.parts["after"][2], hidden[0].numpy(), atol=1e-4)


def test_a_real_trace_trains_a_head_that_decodes(
    pair: LoadedPair, trace: TraceSet, tmp_path: Path
) -> None:
    head, report = train_acceptance_head(pair, trace, ORIGIN)
    assert not set(report.prompts["train"]) & set(report.prompts["test"])
    assert set(report.prompts["train"]) | set(report.prompts["test"]) == {p.id for p in PROMPTS}
    assert (report.mixing, report.mismatch_weight) == (0.15, 6)
    plain = report.to_json()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert head.provenance.trace_digest == "d"
    assert head.provenance.parameters["epochs"] == 3
    assert head.provenance.metrics["loss"] == report.metrics.loss == plain["loss"]
    head.save(tmp_path / "head")
    loaded = AcceptanceHead.load(tmp_path / "head", fingerprint="f" * 64)
    sampling, ids = pair.sampling(max_tokens=30), pair.encode_prompt("some words")
    engine = pair.engine()
    resources = StrategyResources({"acceptance_head": loaded})
    job = engine.generate(ids, sampling, build_strategy("specdec_pp", {}, resources))
    assert job.output == engine.generate(ids, sampling, build_strategy("autoregressive")).output
    assert job.session.stats.drafted >= 2 * (job.session.stats.rounds - 1)


def test_a_test_trace_of_other_prompts(pair: LoadedPair, trace: TraceSet, tmp_path: Path) -> None:
    other = [Prompt(f"p{i}", None, [f"quite another matter, number {i}"]) for i in range(5)]
    unseen = collect_traces(
        pair,
        [*other, Prompt("known", None, PROMPTS[3].turns)],
        tmp_path / "t",
        max_tokens=24,
        rollout=1,
    )
    head, report = train_acceptance_head(pair, trace, ORIGIN, test=unseen)
    assert report.left_out == ["known"]
    assert report.prompts == {
        "train": sorted(p.id for p in PROMPTS),
        "test": sorted(p.id for p in other),
    }
    assert head.provenance.parameters["test_trace"] == report.test_trace == unseen.digest()
    with raises_code("test_prompts_known", "test trace"):
        train_acceptance_head(pair, trace, ORIGIN, test=trace)


class Stateless:
    """A model that gives no hidden states."""

    def __init__(self, model: Any):
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, rows: list[Forward]) -> Any:
        outputs = self.model.forward(rows)
        for output in outputs:
            output.whole.hidden = None
        return outputs


def test_what_cannot_be_trained_on_is_refused_in_a_line(
    pair: LoadedPair, trace: TraceSet, tmp_path: Path
) -> None:
    bare = collect_traces(
        pair, PROMPTS[:4], tmp_path / "bare", max_tokens=4, rollout=1, prefix_kinds=("bare",)
    )
    few = collect_traces(pair, PROMPTS[:2], tmp_path / "few", max_tokens=4, rollout=1)
    alone = pair_of(pair.models["target"], None)
    stateless = pair_of(pair.models["target"], Stateless(pair.models["draft"]))
    for which, traces, code, named in (
        (pair, bare, "no_target_texts", "collect"),
        (pair, few, "too_few_prompts", "at least 3"),
        (alone, trace, "no_draft", alone.name),
        (stateless, trace, "no_hidden_states", "another pair"),
    ):
        with raises_code(code, named) as error:
            train_acceptance_head(which, traces, ORIGIN)
        assert "\n" not in str(error.value)
