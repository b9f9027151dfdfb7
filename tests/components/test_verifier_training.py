"""The verifier learns what can be learnt, and its figures are of prompts that it never saw."""

import sys

import numpy as np
import pyarrow as pa
import pytest
import torch

from components.collection import collect
from components.prompts import Prompt
from components.verifier_data import Examples, column, read_examples, split_by_prompt
from components.verifier_report import auc_of, reliability_bins
from components.verifier_training import choose_threshold, fit, scores, train_verifier
from serving.runtime.artifacts.base import Provenance
from serving.runtime.artifacts.verifier import Verifier, scalar_features
from serving.runtime.types import DraftwellError
from tests.components.tiny import llama_pair

ORIGIN = Provenance(pair="tiny", fingerprint="f" * 64, trace_digest="d")
WIDTH = 12


def trace(rows: int = 3000, prompts: int = 30, *, informative: str = "before", shuffled: bool = False, seed: int = 0,
          hidden: bool = True) -> pa.Table:
    """Draft tokens whose ratio depends on one direction of one of the states, at scales far from 1."""
    rng = np.random.default_rng(seed)
    states = {name: rng.normal(3.0, 7.0, size=(rows, WIDTH)).astype(np.float16) for name in ("before", "after")}
    signal = (states[informative][:, 0].astype(float) - 3.0) / 7.0 + 0.6
    ratio = np.exp(-2.0 * signal + 0.3 * rng.normal(size=rows)).astype(np.float32) * 1.2
    if shuffled:
        rng.shuffle(ratio)
    confidence = rng.uniform(0.1, 1.0, size=rows).astype(np.float32)
    columns = {"prompt_id": [f"p{i * prompts // rows}" for i in range(rows)], "task": [None] * rows, "ratio": ratio,
               "draft_raw_q": confidence, "confidence": confidence, "entropy": rng.uniform(0, 3, rows).astype(np.float32),
               "rank": pa.array([0] * rows, pa.int32())}
    if hidden:
        columns |= {f"hidden_{name}": pa.array(list(part), pa.list_(pa.float16())) for name, part in states.items()}
    return pa.table(columns)


@pytest.fixture(scope="module")
def trained() -> tuple[Verifier, dict]:
    return train_verifier(trace(), ORIGIN)


def test_a_separable_trace_is_learnt_and_the_right_state_chosen(trained):
    _, report = trained
    assert report["auc"] > 0.95
    assert report["auc"] > report["baseline_auc"] + 0.3  # C says nothing here
    assert "before" in report["features"]
    assert max(report["candidates"].values()) == report["candidates"]["+".join(report["features"])]
    assert report["candidates"]["before"] > 0.95 > 0.6 > report["candidates"]["after"]


def test_shuffled_labels_teach_nothing():
    _, report = train_verifier(trace(rows=6000, prompts=60, shuffled=True), ORIGIN, features=("before", "after"))
    assert abs(report["auc"] - 0.5) < 0.06


def test_no_prompt_is_on_two_sides():
    examples = read_examples(trace(prompts=17))
    for seed in range(5):
        parts = {name: set(part.prompt) for name, part in split_by_prompt(examples, seed).items()}
        assert not parts["train"] & parts["validation"] | parts["train"] & parts["test"] | parts["validation"] & parts["test"]
        assert set.union(*parts.values()) == set(examples.prompt)
        assert all(parts.values())


def test_the_smallest_split_has_a_prompt_on_each_side():
    parts = split_by_prompt(read_examples(trace(rows=30, prompts=3)), 0)
    assert [len(set(part.prompt)) for part in parts.values()] == [1, 1, 1]


def test_the_artifact_scores_raw_features_as_training_did_in_every_form(trained, tmp_path):
    import onnxruntime

    verifier, report = trained
    verifier.save(tmp_path / "v")
    loaded = Verifier.load(tmp_path / "v", fingerprint="f" * 64)
    session = onnxruntime.InferenceSession(tmp_path / "v" / "verifier.onnx", providers=["CPUExecutionProvider"])
    examples = read_examples(trace())
    x = examples.features(tuple(report["features"]))[:200]
    from_torch = torch.sigmoid(torch.from_numpy(x) @ loaded.weight + loaded.bias).numpy()
    (from_onnx,) = session.run(None, {"features": x})
    assert np.abs(from_torch - from_onnx).max() < 1e-5
    assert loaded.threshold == report["threshold"]
    assert loaded.provenance.metrics["auc"] == pytest.approx(report["auc"])
    assert loaded.provenance.trace_digest == "d"


def test_the_runtime_scores_what_the_trace_recorded():
    """Scalars in the runtime's order, and states from the columns of a real trace."""
    generator = torch.Generator().manual_seed(0)
    raws = torch.randn(50, 20, generator=generator).softmax(-1)
    tokens = torch.randint(0, 20, (50,), generator=generator).tolist()
    rank = [int((raw > raw[t]).sum()) for raw, t in zip(raws, tokens, strict=True)]
    table = pa.table({"prompt_id": ["p"] * 50, "task": [None] * 50, "ratio": [1.0] * 50,
                      "draft_raw_q": [float(raw[t]) for raw, t in zip(raws, tokens, strict=True)],
                      "confidence": raws.amax(-1).tolist(), "entropy": torch.special.entr(raws).sum(-1).tolist(), "rank": rank})
    expected = torch.stack([scalar_features(raw, t) for raw, t in zip(raws, tokens, strict=True)]).numpy()
    assert np.allclose(read_examples(table).parts["scalars"], expected, atol=1e-6)


def test_scores_are_probabilities_although_classes_are_weighted(trained):
    _, report = trained
    assert 0.5 < report["prevalence"] < 0.95
    assert report["calibration_error"] < 0.1
    assert report["brier"] < report["prevalence"] * (1 - report["prevalence"])


def test_the_threshold_keeps_to_the_wanted_false_positives():
    rng = np.random.default_rng(0)
    ratio, score = rng.uniform(0, 2, 4000), rng.uniform(0, 1, 4000)
    for wanted in (0.0, 0.05, 0.3):
        tau = choose_threshold(ratio, score, wanted)
        kept = score >= tau
        assert kept[ratio > 1].mean() <= wanted
        assert kept[ratio > 1].mean() > wanted - 0.01
    assert choose_threshold(ratio, score, None) == 0.5
    assert 0 < choose_threshold(ratio, score, 1.0) < 1e-3
    strict = train_verifier(trace(), ORIGIN, features=("before",), wanted_false_positive=0.02)[1]
    loose = train_verifier(trace(), ORIGIN, features=("before",), wanted_false_positive=0.4)[1]
    assert strict["eta_fp"] < loose["eta_fp"]
    assert strict["eta_tp"] < loose["eta_tp"]


def test_rates_are_the_papers_and_the_labels_at_lambda(trained):
    _, report = trained
    assert 0 <= report["eta_fp"] <= report["eta_tp"] <= 1
    assert report["eta_fp_ratio"] <= report["eta_fp"]  # ratios between 1 and lambda are the easiest false positives


def test_reliability_bins_hold_every_row_once():
    score = np.array([0.0, 0.05, 0.95, 1.0])
    bins = reliability_bins(np.array([False, True, True, True]), score)
    assert [(b["count"], b["observed"]) for b in bins] == [(2, 0.5), (2, 1.0)]


def test_training_repeats_itself_and_is_logged(trained):
    seen = []
    again, report = train_verifier(trace(), ORIGIN, log=lambda name, value, step: seen.append(name))
    assert torch.equal(again.weight, trained[0].weight)
    assert report == trained[1]
    assert seen.count("validation_auc") == 7
    assert "auc" in seen


def test_without_hidden_states_the_scalars_must_do():
    _, report = train_verifier(trace(hidden=False), ORIGIN)
    assert report["features"] == ["scalars"]


def with_column(table: pa.Table, name: str, values) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, pa.array(values, table.schema.field(name).type))


@pytest.mark.parametrize(("table", "options", "words"), [
    (trace().slice(0, 0), {}, "no rows"),
    (with_column(trace(), "ratio", [0.5] * 3000), {}, "acceptable"),
    (with_column(trace(), "ratio", [float("inf")] * 3000), {}, "unacceptable"),
    (with_column(trace(), "confidence", [float("nan")] * 3000), {}, "NaN"),
    (with_column(trace(), "ratio", [None] * 3000), {}, "NaN"),
    (trace(prompts=2), {}, "at least 3"),
    (trace(hidden=False), {"features": ("after",)}, "hidden states"),
    (trace(), {"features": ("befor",)}, "befor"),
    (trace(), {"ratio": 0.0}, "positive"),
    (trace(), {"wanted_false_positive": 2.0}, "wanted_false_positive")])
def test_what_cannot_be_trained_on_is_refused_in_a_line(table, options, words):
    with pytest.raises(DraftwellError, match=words) as error:
        train_verifier(table, ORIGIN, **options)
    assert "\n" not in str(error.value)


def test_a_real_trace_trains_a_verifier(tmp_path):
    pair = llama_pair()
    prompts = [Prompt(f"p{i}", None, [f"some words about {i}, and {i * i} more"]) for i in range(12)]
    traces = collect(pair, prompts, tmp_path / "trace", max_tokens=24, rollout=4)
    verifier, report = train_verifier(traces, ORIGIN)
    assert set(report["prompts"]["train"]) | set(report["prompts"]["test"]) < {p.id for p in prompts}
    rows = traces.read()
    assert sum(report["rows"].values()) == rows.num_rows
    assert verifier.weight.numel() == read_examples(traces).features(verifier.features).shape[1]
    assert np.isfinite(column(rows, "confidence")).all()


def test_many_noisy_states_do_not_drown_the_scalars():
    """With few rows and hundreds of useless state dimensions the union must rank as the scalars alone do."""
    generator = np.random.default_rng(0)

    def examples(rows: int) -> Examples:
        confidence = generator.random(rows).astype(np.float32)
        ratio = np.where(generator.random(rows) < confidence, 1.0, 3.0).astype(np.float32)
        scalars = np.stack([confidence, confidence, 1 - confidence, np.zeros(rows)], axis=1).astype(np.float32)
        states = generator.normal(size=(rows, 300)).astype(np.float32)
        return Examples({"before": states, "scalars": scalars}, ratio, confidence, np.array(["p"] * rows))

    train, validation, test = examples(600), examples(600), examples(4000)
    found = {}
    for names in (("scalars",), ("before", "scalars"), ("before",)):
        _, weight, bias = fit(train, validation, names, 1.2)
        found[names] = auc_of(test.ratio <= 1.2, scores(test.features(names), weight, bias))
    assert found[("before",)] == pytest.approx(0.5, abs=0.04)
    assert found[("scalars",)] > 0.8
    assert found[("before", "scalars")] > found[("scalars",)] - 0.01


def test_training_without_scikit_learn_is_refused_in_a_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.metrics", None)
    with pytest.raises(DraftwellError, match="scikit-learn"):
        train_verifier(trace(), ORIGIN)
