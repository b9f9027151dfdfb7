"""A verifier's score from the draft's rows: what the whole distribution would give, without making
it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftwell.components.replay.trace_model import NotInTrace, TraceModel, TraceSpan
from draftwell.serving.artifacts import verifier as verifier_file
from draftwell.serving.artifacts.verifier import SCALAR_NAMES, Verifier, logistic
from draftwell.serving.errors import NotFinite
from draftwell.serving.runtime.logits import Span
from draftwell.serving.runtime.random_streams import RandomStream
from draftwell.serving.runtime.requests import Sampling
from tests.support.errors import raises_code
from tests.support.models.resources import ORIGIN, whole_scalars
from tests.support.models.spans import all_rows, sampled, span_of

VOCAB, HIDDEN = 500, 6
HEAD = torch.arange(0, VOCAB, 3)
REQUESTS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"banned_token_ids": frozenset({0, 3, 6})},
    {"temperature": 1.0, "banned_token_ids": frozenset({9})},
    {"logit_bias": {12: 9.0}, "presence_penalty": 0.5},
]
FEATURES = [
    ("before",),
    ("after",),
    ("scalars",),
    ("before", "scalars"),
    ("before", "after"),
    ("before", "after", "scalars"),
]


def outputs(seed: int, columns: int, support: Tensor | None) -> tuple[Span, Span]:
    """A row and the one behind it, from flat to sharp."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, columns, generator=generator) * (0.1 + 2 * (seed % 4)) + 5
    hidden = torch.randn(2, HIDDEN, generator=generator).to(
        torch.bfloat16 if seed % 2 else torch.float32
    )
    row, after = (
        all_rows(logits[i : i + 1], hidden[i : i + 1], support, VOCAB if support is not None else 0)
        for i in (0, 1)
    )
    return row, after


def verifier(features: tuple[str, ...], seed: int) -> Verifier:
    width = HIDDEN * sum(name != "scalars" for name in features) + 4 * ("scalars" in features)
    return Verifier(
        torch.randn(width, generator=torch.Generator().manual_seed(seed)),
        0.3,
        features,
        0.5,
        1.2,
        ORIGIN,
    )


def whole_score(judge: Verifier, before: Tensor, after: Tensor, raw: Tensor, token: int) -> float:
    """The score from the features that a verifier is trained on, of the whole distribution."""
    parts = {"before": before, "after": after, "scalars": whole_scalars(raw, token)}
    features = torch.cat([parts[name].float() for name in judge.features])
    return float(torch.sigmoid(features @ judge.weight + judge.bias))


@pytest.mark.parametrize("support", [None, HEAD], ids=["vocabulary", "reduced head"])
@pytest.mark.parametrize("settings", REQUESTS, ids=str)
def test_a_score_is_that_of_the_whole_distribution(settings: dict, support: Tensor | None) -> None:
    """Whichever token was drafted: the likeliest, one far down, or one that the head cannot say (a
    replayed text may hold it)."""
    sampling = Sampling(**settings)
    seen = set()
    for seed in range(8):
        first, second = outputs(seed, VOCAB if support is None else len(HEAD), support)
        row, after = first.under(sampling), second.under(sampling)
        ranked = row.raw(0).argsort(descending=True).tolist()
        for token in {
            sampled(row, 0, RandomStream(seed, 1)),
            ranked[0],
            ranked[1],
            ranked[40],
            7,
            12,
        }:
            for number, features in enumerate(FEATURES):
                judge = verifier(features, number)
                old = whole_score(judge, row.hidden(0), after.hidden(0), row.raw(0), token)
                fresh = first.under(sampling)
                assert judge.score_drafted(fresh, after, token) == pytest.approx(old, abs=1e-6), (
                    seed,
                    token,
                    features,
                )
                seen.add(round(old, 1))
    assert len(seen) > 8


def test_figures_of_a_token_are_those_of_its_row() -> None:
    rows = span_of(torch.tensor([[0.0, 2.0, 2.0, -math.inf, 1.0]]), Sampling())
    for token, rank in ((0, 3), (1, 0), (2, 0), (3, 4), (4, 2)):
        found = rows.token_figures(0, token)
        assert found.rank == rank
        assert found.raw_prob == pytest.approx(rows.raw_prob(0, token), abs=1e-7)
        assert found.confidence == pytest.approx(rows.confidence(0), abs=1e-7)
        assert found.entropy == pytest.approx(rows.entropy(0), abs=1e-6)
    certain = span_of(torch.tensor([[-90.0, 60.0, -100.0]]), Sampling()).token_figures(0, 1)
    assert certain == (1.0, 1.0, 0.0, 0)


def test_one_of_several_rows_is_scored_as_alone() -> None:
    """Rows of a chain of draft steps are views into one output."""
    rows = span_of(
        torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2)),
        Sampling(),
        torch.randn(3, HIDDEN),
    )
    judge = verifier(("before", "scalars"), 1)
    for at in range(3):
        view = rows[at]
        for token in (view.top[0], 3):
            expected = whole_score(judge, rows.hidden(at), rows.hidden(at), rows.raw(at), token)
            assert judge.score_drafted(view, None, token) == pytest.approx(expected, abs=1e-6)


def test_a_score_never_spreads_a_reduced_head_over_the_vocabulary() -> None:
    output = all_rows(
        torch.randn(1, len(HEAD), generator=torch.Generator().manual_seed(0)),
        torch.zeros(1, HIDDEN),
        HEAD,
        vocab_size=-1,
    )
    for sampling in (Sampling(), Sampling(temperature=0.8)):
        row = output.under(sampling)
        assert (
            0
            < verifier(("before", "scalars"), 0).score_drafted(
                row, None, sampled(row, 0, RandomStream(1, 1))
            )
            < 1
        )
    with pytest.raises(RuntimeError):
        output.under(Sampling()).raw(0)


def test_weights_that_fit_nothing_are_refused() -> None:
    for size, features in (
        (3, ("scalars",)),
        (5, ("scalars",)),
        (4, ("before", "scalars")),
        (5, ("before", "after")),
        (0, ("before",)),
    ):
        with raises_code("weights_do_not_fit", str(size), *features):
            Verifier(torch.ones(size), 0.0, features, 0.5, 1.2, ORIGIN)
    with raises_code("unknown_features", "scalars", "before"):
        Verifier(torch.ones(6), 0.0, ("scalars", "before"), 0.5, 1.2, ORIGIN)
    row, _ = outputs(0, VOCAB, None)
    with raises_code("state_size_differs", "7 numbers", str(HIDDEN)):
        Verifier(torch.ones(7), 0.0, ("before",), 0.5, 1.2, ORIGIN).score_drafted(
            row.under(Sampling()), None, 0
        )


def test_a_verifier_of_other_numbers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was trained before the numbers changed would weigh them in the wrong order. Files
    from before names were kept read the first numbers, and those of states alone need none."""
    for features in (("before",), ("scalars",)):
        verifier(features, 0).write_files(tmp_path)
        written = json.loads((tmp_path / "verifier.json").read_text())
        names = written.pop("scalars", None)
        assert names == (SCALAR_NAMES if "scalars" in features else None)
        (tmp_path / "verifier.json").write_text(json.dumps(written))
        assert Verifier.read_files(tmp_path, ORIGIN).features == features
    for other in (["margin", *SCALAR_NAMES], SCALAR_NAMES[::-1]):
        (tmp_path / "verifier.json").write_text(json.dumps(written | {"scalars": other}))
        with raises_code("other_scalars", ", ".join(other), ", ".join(SCALAR_NAMES)):
            Verifier.read_files(tmp_path, ORIGIN)
    (tmp_path / "verifier.json").write_text(json.dumps(written))
    monkeypatch.setattr(verifier_file, "SCALAR_NAMES", SCALAR_NAMES[::-1])
    with raises_code("other_scalars"):
        Verifier.read_files(tmp_path, ORIGIN)


def test_a_replay_has_no_ranks() -> None:
    rows = TraceSpan([3], [(0, 0)], TraceModel.__new__(TraceModel), Sampling())
    with pytest.raises(NotInTrace, match="measured instead"):
        rows.token_figures(0, 3)


def test_a_score_that_is_no_number_is_refused() -> None:
    """`min(60.0, nan)` is 60.0: the token would count as certainly accepted."""
    for z in (math.nan, math.inf, -math.inf):
        with raises_code("not_finite", "score", error=NotFinite):
            logistic(z)
    assert 0 < logistic(-1e9) < logistic(1e9) <= 1
    row = all_rows(torch.zeros(1, VOCAB), torch.full((1, HIDDEN), math.nan)).under(Sampling())
    with pytest.raises(NotFinite):
        verifier(("before",), 0).score_drafted(row, None, 3)
