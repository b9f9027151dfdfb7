"""The verifier learns what can be learnt, and its figures are of prompts that it never saw."""

import gc
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from scipy.special import expit

from draftwell.components.collect.trace_columns import column
from draftwell.components.prompts.prompt import Prompt
from draftwell.components.train import examples as verifier_data, verifier as verifier_training
from draftwell.components.train.examples import (
    Examples,
    VerifierLabel,
    folds,
    read_examples,
    split_by_prompt,
)
from draftwell.components.train.logistic import cross_validate, fit, platt
from draftwell.components.train.metrics import auc_of
from draftwell.components.train.reports import VerifierReport
from draftwell.components.train.settings import LabelKind, VerifierSettings
from draftwell.components.train.verifier import choose_threshold, train_verifier
from draftwell.serving.artifacts.verifier import Verifier
from draftwell.serving.errors import DraftwellError
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.recording.trace_schema import KINDS, TraceHeader, trace_schema
from tests.support.collecting import collect_traces
from tests.support.errors import raises_code
from tests.support.loop.verifier_trace import ORIGIN, trace
from tests.support.models.resources import whole_scalars
from tests.support.models.tiny import llama_pair


def on_disk(table: pa.Table, folder: Path, shard: int = 1000) -> TraceSet:
    """The table as a trace set; columns that it lacks are null."""
    header = TraceHeader(
        pair="tiny",
        fingerprint="f" * 64,
        dtype="float32",
        rollout=1,
        max_tokens=8,
        temperature=0,
        stop_token_ids=(2,),
    )
    schema, traces = trace_schema(header), TraceSet(folder)
    columns = [
        table.column(field.name).cast(field.type)
        if field.name in table.column_names
        else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    whole = pa.table(columns, schema=schema)
    for number, start in enumerate(range(0, table.num_rows, shard)):
        traces.write_shard(number, whole.slice(start, shard))
    return traces


@pytest.fixture(scope="module")
def trained() -> tuple[Verifier, VerifierReport]:
    return train_verifier(trace(), ORIGIN)


def test_a_separable_trace_is_learnt_and_the_right_state_chosen(trained):
    _, report = trained
    assert report.metrics.auc > 0.95
    assert report.metrics.auc > report.metrics.baseline_auc + 0.3  # C says nothing here
    assert "before" in report.features
    assert max(report.candidates.values()) == report.candidates["+".join(report.features)]
    assert report.candidates["before"] > 0.95 > 0.6 > report.candidates["after"]


def test_shuffled_labels_teach_nothing():
    _, report = train_verifier(
        trace(rows=6000, prompts=60, shuffled=True),
        ORIGIN,
        VerifierSettings(features=("before", "after")),
    )
    assert abs(report.metrics.auc - 0.5) < 0.06


def test_no_prompt_is_on_two_sides():
    examples = read_examples(trace(prompts=17))
    for seed in range(5):
        train, test = split_by_prompt(examples, seed)
        assert not set(train.prompt) & set(test.prompt)
        assert set(train.prompt) | set(test.prompt) == set(examples.prompt)
        assert len(set(test.prompt)) == 3
        held = folds(train, seed)
        assert (np.sum(held, axis=0) == 1).all(), "each row is held out once"
        sides = [(set(train.prompt[mask]), set(train.prompt[~mask])) for mask in held]
        assert not any(out & rest for out, rest in sides)
        assert sorted(len(out) for out, _ in sides) == [4, 5, 5]


def test_a_question_asked_twice_is_one_prompt():
    """Served traffic repeats itself: under two ids, one to learn from and one to test on, the same
    text would be both."""
    twice = pa.concat_tables(
        [
            trace(rows=120, prompts=4, name="p"),
            trace(rows=120, prompts=4, name="p").set_column(
                0, "prompt_id", [[f"again{i // 30}" for i in range(120)]]
            ),
        ]
    )
    examples = read_examples(twice)
    assert set(examples.prompt) == {"p0", "p1", "p2", "p3"}
    assert (examples.prompt[:120] == examples.prompt[120:]).all()


def test_three_prompts_are_enough():
    train, test = split_by_prompt(read_examples(trace(rows=30, prompts=3)), 0)
    assert (len(set(train.prompt)), len(set(test.prompt)), len(folds(train, 0))) == (2, 1, 2)


def test_a_single_prompt_is_too_few_beside_a_test_trace_too():
    with raises_code("too_few_prompts", "at least 2"):
        train_verifier(trace(prompts=1, name="p"), ORIGIN, test=trace(prompts=3, name="q"))


def test_a_trace_on_disk_is_read_in_small_parts_and_says_the_same(tmp_path, monkeypatch):
    table = trace(rows=950)
    traces = on_disk(table, tmp_path, shard=300)
    sizes = []
    real = TraceSet.batches
    monkeypatch.setattr(
        TraceSet,
        "batches",
        lambda self, columns: (sizes.append(b.num_rows) or b for b in real(self, columns, 128)),
    )
    read, direct = read_examples(traces), read_examples(table)
    assert max(sizes) <= 128
    assert sum(sizes) == 950 == traces.num_rows
    for name, part in direct.parts.items():
        assert (read.parts[name] == part).all()
    for name in ("ratio", "confidence", "prompt", "kind"):
        assert (getattr(read, name) == getattr(direct, name)).all(), name


@pytest.mark.slow
def test_a_large_trace_is_never_spread_out_as_a_whole(tmp_path, monkeypatch):
    """What may lie in memory: the trace's float16 once, and the rows of one fit as float32. Twice
    that, or float64, is too much."""
    import sklearn.linear_model
    import sklearn.metrics  # noqa: F401

    rows, width = 12_000, 256
    monkeypatch.setattr(verifier_data, "BLOCK", 512)
    traces = on_disk(trace(rows, 60, width=width), tmp_path, shard=4000)
    halves = rows * 2 * width * 2
    gc.collect()
    tracemalloc.start()
    try:
        examples = read_examples(traces)
        reading = tracemalloc.get_traced_memory()[1]
        del examples
        gc.collect()
        tracemalloc.reset_peak()
        train_verifier(traces, ORIGIN, VerifierSettings(features=("before", "after")))
        training = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert halves < reading < 1.6 * halves
    assert training < halves + 1.35 * (2 * 0.8 * halves)


def test_the_artifact_scores_raw_features_as_training_did(trained, tmp_path):
    verifier, report = trained
    verifier.save(tmp_path / "v")
    loaded = Verifier.load(tmp_path / "v", fingerprint="f" * 64)
    assert torch.equal(loaded.weight, verifier.weight)
    assert (loaded.threshold, loaded.provenance.trace_digest) == (report.threshold, "d")
    metrics = loaded.provenance.metrics
    assert {"auc", "gain", "prevalence", "baseline_auc"} <= metrics.keys()
    assert {name: getattr(report.metrics, name) for name in metrics} == metrics
    seen = np.isin(read_examples(trace()).prompt, report.prompts["test"])
    raw = read_examples(trace()).take(seen)
    score = expit(raw.features(loaded.features) @ loaded.weight.numpy() + loaded.bias)
    assert auc_of(raw.ratio <= 1.2, score) == pytest.approx(report.metrics.auc, abs=1e-6)


def test_the_runtime_scores_what_the_trace_recorded():
    """Scalars in the runtime's order, and states from the columns of a real trace."""
    generator = torch.Generator().manual_seed(0)
    raws = torch.randn(50, 20, generator=generator).softmax(-1)
    tokens = torch.randint(0, 20, (50,), generator=generator).tolist()
    rank = [int((raw > raw[t]).sum()) for raw, t in zip(raws, tokens, strict=True)]
    table = pa.table(
        {
            "prompt_id": ["p"] * 50,
            "task": [None] * 50,
            "ratio": [1.0] * 50,
            "draft_raw_q": [float(raw[t]) for raw, t in zip(raws, tokens, strict=True)],
            "confidence": raws.amax(-1).tolist(),
            "entropy": torch.special.entr(raws).sum(-1).tolist(),
            "rank": rank,
        }
    )
    expected = torch.stack(
        [whole_scalars(raw, t) for raw, t in zip(raws, tokens, strict=True)]
    ).numpy()
    assert np.allclose(read_examples(table).parts["scalars"], expected, atol=1e-6)


def test_scores_are_probabilities_although_classes_are_weighted(trained):
    _, report = trained
    assert 0.5 < report.metrics.prevalence < 0.95
    assert report.metrics.calibration_error < 0.06
    assert report.metrics.brier < report.metrics.prevalence * (1 - report.metrics.prevalence)


def test_the_threshold_keeps_to_the_wanted_false_positives():
    rng = np.random.default_rng(0)
    ratio, score = rng.uniform(0, 2, 4000), rng.uniform(0, 1, 4000)
    for wanted in (0.0, 0.05, 0.3):
        tau = choose_threshold(ratio > 1, score, wanted)
        kept = score >= tau
        assert kept[ratio > 1].mean() <= wanted
        assert kept[ratio > 1].mean() > wanted - 0.01
    assert choose_threshold(ratio > 1, score, None) == 0.5
    assert 0 < choose_threshold(ratio > 1, score, 1.0) < 1e-3
    strict = train_verifier(trace(), ORIGIN, VerifierSettings(features=("before",), eta_fp=0.02))[1]
    loose = train_verifier(trace(), ORIGIN, VerifierSettings(features=("before",), eta_fp=0.4))[1]
    assert strict.metrics.eta_fp < loose.metrics.eta_fp
    assert strict.metrics.eta_tp < loose.metrics.eta_tp


def test_rates_are_the_papers_and_the_labels_at_lambda(trained):
    _, report = trained
    assert 0 <= report.metrics.eta_fp <= report.metrics.eta_tp <= 1
    # ratios between 1 and lambda are the easiest false positives
    assert report.metrics.eta_fp_ratio <= report.metrics.eta_fp


def test_training_repeats_itself(trained):
    again, report = train_verifier(trace(), ORIGIN)
    assert torch.equal(again.weight, trained[0].weight)
    assert report == trained[1]
    assert len(report.candidates) == 7


def test_every_lambda_of_the_paper_is_reported(trained):
    _, report = trained
    grid = report.lambda_grid
    assert list(grid) == ["1", "1.2", "1.5"]
    assert grid["1"].prevalence < grid["1.2"].prevalence < grid["1.5"].prevalence
    assert all(found.auc > 0.95 for found in grid.values())
    for name in ("auc", "baseline_auc", "prevalence", "gain", "intervals", "roc"):
        assert getattr(grid["1.2"], name) == getattr(report.metrics, name)
    wider = VerifierSettings(features=("before",), ratio=2.0)
    assert list(train_verifier(trace(), ORIGIN, wider)[1].lambda_grid) == ["1", "1.2", "1.5", "2"]


def test_a_lambda_that_nothing_exceeds_has_no_figures():
    table = trace()
    low = np.minimum(table.column("ratio").to_numpy(), 1.3)
    report = train_verifier(
        with_column(table, "ratio", low), ORIGIN, VerifierSettings(features=("before",))
    )[1]
    assert report.lambda_grid["1.5"] is None
    assert report.lambda_grid["1"].auc > 0.9


def test_a_test_trace_is_not_learnt_from_and_its_known_prompts_are_left_out():
    """Ids say nothing: those of two files may be the same. What the prompts say does."""
    learnt, other = trace(prompts=10), trace(rows=900, prompts=9, name="q", seed=1)
    same_ids = with_column(
        other,
        "prompt_id",
        [name.replace("q", "p") for name in other.column("prompt_id").to_pylist()],
    )
    report = train_verifier(learnt, ORIGIN, VerifierSettings(features=("before",)), test=same_ids)[
        1
    ]
    assert report.left_out == []
    assert report.rows == {"train": 3000, "test": 900}
    assert report.metrics.auc > 0.95
    assert report.metrics.test_rows == 900
    turned = trace(rows=900, prompts=9, name="q", seed=1, tasks=("t",), turned=("t",))
    report = train_verifier(learnt, ORIGIN, VerifierSettings(features=("before",)), test=turned)[1]
    assert report.metrics.auc < 0.2, "the test trace taught nothing"
    mixed = pa.concat_tables([other, learnt.slice(0, 600)])
    report = train_verifier(learnt, ORIGIN, VerifierSettings(features=("before",)), test=mixed)[1]
    assert report.left_out == ["p0", "p1"]
    assert report.prompts["test"] == [f"q{i}" for i in range(9)]
    with raises_code("test_prompts_known", "test trace"):
        train_verifier(learnt, ORIGIN, test=learnt.slice(0, 600))


def test_a_large_trace_is_compared_on_some_rows_and_fitted_to_all(monkeypatch):
    compared = []
    real = verifier_training.cross_validate
    monkeypatch.setattr(
        verifier_training,
        "cross_validate",
        lambda examples, *more: compared.append((len(examples), more[1])) or real(examples, *more),
    )
    monkeypatch.setattr(verifier_training, "SELECTION_ROWS", 1000)
    verifier, report = train_verifier(trace(rows=4000, prompts=40), ORIGIN)
    assert [size for size, _ in compared] == [800] * 7 + [3200]
    assert compared[-1][1] == verifier.features
    assert report.metrics.auc > 0.95


def test_without_hidden_states_the_scalars_must_do():
    _, report = train_verifier(trace(hidden=False), ORIGIN)
    assert report.features == ["scalars"]


def with_column(table: pa.Table, name: str, values) -> pa.Table:
    return table.set_column(
        table.column_names.index(name), name, pa.array(values, table.schema.field(name).type)
    )


def with_state(value: float) -> pa.Table:
    """One number of one state is `value`."""
    table = trace()
    states = table.column("hidden_after").to_pylist()
    states[1234][5] = value
    return with_column(table, "hidden_after", [np.array(row, np.float16) for row in states])


@pytest.mark.parametrize(
    ("table", "options", "code", "named"),
    [
        (trace().slice(0, 0), {}, "empty_trace", "draftwell step collect"),
        (with_column(trace(), "ratio", [0.5] * 3000), {}, "one_class", "acceptable"),
        (with_column(trace(), "ratio", [float("inf")] * 3000), {}, "one_class", "unacceptable"),
        (with_column(trace(), "confidence", [float("nan")] * 3000), {}, None, "confidence"),
        (with_column(trace(), "ratio", [float("-inf")] * 3000), {}, None, "ratio"),
        (with_state(float("nan")), {}, None, "hidden_after"),
        (trace(prompts=2), {}, "too_few_prompts", "at least 3"),
        (trace(hidden=False), {"features": ("after",)}, "no_hidden_states", "after"),
        (trace(), {"features": ("befor",)}, "unknown_features", "befor"),
        (trace(), {"label": "argmax"}, "no_probabilities", "draft_p"),
        (
            trace(matches=0.7, temperature=0.7),
            {"label": "argmax"},
            "sampled_trace",
            "temperature 0.7",
        ),
    ],
)
def test_what_cannot_be_trained_on_is_refused_in_a_line(table, options, code, named):
    """Codes of None are those of `draftwell.components.collect`, which refuses values that are not
    finite."""
    with pytest.raises(DraftwellError, match=named) as error:
        train_verifier(table, ORIGIN, VerifierSettings(**options))
    assert code in (None, error.value.code)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("wrong", [{"ratio": 0.0}, {"eta_fp": 2.0}, {"eta_fp": -0.1}])
def test_settings_out_of_bounds_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        VerifierSettings(**wrong)


def test_a_real_trace_trains_a_verifier(tmp_path):
    pair = llama_pair()
    prompts = [
        Prompt(f"p{i}", None, [f"some words about {i}, and {i * i} more"]) for i in range(12)
    ]
    traces = collect_traces(pair, prompts, tmp_path / "trace", max_tokens=24, rollout=4)
    verifier, report = train_verifier(traces, ORIGIN)
    assert set(report.prompts["train"]) | set(report.prompts["test"]) == {p.id for p in prompts}
    rows = traces.read()
    assert sum(report.rows.values()) == rows.num_rows
    assert verifier.weight.numel() == read_examples(traces).features(verifier.features).shape[1]
    assert np.isfinite(column(rows, "confidence")).all()


def test_the_label_is_what_is_predicted(tmp_path):
    """The target's choice depends on another state than the ratio does: each label finds its
    own."""
    table = trace(matches=0.7, temperature=0.0)
    choice, report = train_verifier(table, ORIGIN, VerifierSettings(label="argmax"))
    assert report.metrics.auc > 0.9
    assert report.features == ["after"]
    assert (
        choice.label,
        choice.provenance.parameters["label"],
        choice.provenance.parameters["temperature"],
    ) == ("argmax", "argmax", 0.0)
    # of the tokens that are not the target's choice
    assert report.metrics.eta_fp == pytest.approx(0.1, abs=0.06)
    choice.save(tmp_path / "choice")
    assert Verifier.load(tmp_path / "choice").label == "argmax"
    with raises_code("unknown_label"):
        Verifier(choice.weight, 0.0, ("after",), 0.5, 1.2, ORIGIN, "rank")
    by_ratio, other = train_verifier(table, ORIGIN)
    assert (by_ratio.label, other.features, other.metrics.auc > 0.9) == ("ratio", ["before"], True)
    greedy, _ = train_verifier(table, ORIGIN, VerifierSettings(label="soft"))
    assert torch.equal(greedy.weight, choice.weight), (
        "at temperature 0 the chance to be kept is 0 or 1"
    )


def test_a_soft_label_gives_chances():
    table = trace(matches=0.7, temperature=0.7)
    verifier, report = train_verifier(table, ORIGIN, VerifierSettings(label="soft"))
    assert "after" in report.features
    assert report.metrics.calibration_error < 0.06
    examples = read_examples(table)
    wanted = VerifierLabel(LabelKind.SOFT).targets(examples)
    assert ((wanted > 0) & (wanted < 1)).mean() > 0.5, "some are between"
    given = expit(examples.features(verifier.features) @ verifier.weight.numpy() + verifier.bias)
    assert np.corrcoef(wanted, given)[0, 1] > 0.9


def test_many_noisy_states_do_not_drown_the_scalars():
    """With few rows and hundreds of useless state dimensions the union must rank as the scalars
    alone do."""
    generator = np.random.default_rng(0)

    def examples(rows: int) -> Examples:
        confidence = generator.random(rows).astype(np.float32)
        ratio = np.where(generator.random(rows) < confidence, 1.0, 3.0).astype(np.float32)
        scalars = np.stack([confidence, confidence, 1 - confidence, np.zeros(rows)], axis=1).astype(
            np.float32
        )
        states = generator.normal(size=(rows, 300)).astype(np.float32)
        return Examples(
            {"before": states, "scalars": scalars},
            ratio,
            confidence,
            np.array(["p"] * rows),
        )

    train, test = examples(1200), examples(4000)
    held = [np.arange(1200) < 600, np.arange(1200) >= 600]
    found = {}
    for names in (("scalars",), ("before", "scalars"), ("before",)):
        line = fit(
            train,
            names,
            VerifierLabel(),
            cross_validate(train, held, names, VerifierLabel()).strength,
        )
        found[names] = auc_of(test.ratio <= 1.2, line.logits(test))
    assert found[("before",)] == pytest.approx(0.5, abs=0.04)
    assert found[("scalars",)] > 0.8
    assert found[("before", "scalars")] > found[("scalars",)] - 0.01


def test_validation_scores_are_of_prompts_that_the_fit_did_not_see():
    """With labels of chance and as many dimensions as rows, a fit knows its own rows by heart and
    nothing about others."""
    generator = np.random.default_rng(0)
    states = generator.normal(size=(400, 400)).astype(np.float32)
    ratio = np.where(generator.random(400) < 0.5, 1.0, 3.0).astype(np.float32)
    examples = Examples(
        {"before": states}, ratio, ratio, np.array([f"p{i // 40}" for i in range(400)])
    )
    found = cross_validate(examples, folds(examples, 0), ("before",), VerifierLabel())
    assert abs(auc_of(ratio <= 1.2, found.logits) - 0.5) < 0.1
    assert (
        auc_of(
            ratio <= 1.2,
            expit(fit(examples, ("before",), VerifierLabel(), 1e-2).logits(examples)),
        )
        > 0.95
    )


def test_training_without_scikit_learn_is_refused_in_a_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.metrics", None)
    with raises_code("missing_package", "scikit-learn"):
        train_verifier(trace(), ORIGIN)


@pytest.mark.parametrize("spread", [0.5, 2.0, 4.0])
def test_scaling_finds_the_best_line_whatever_the_spread_of_the_scores(spread: float) -> None:
    generator = np.random.default_rng(0)
    z = spread * generator.normal(size=4000)
    target = (generator.random(4000) < expit(0.4 * z - 1)).astype(np.float32)

    def loss(slope: float, shift: float) -> float:
        chance = expit(slope * z + shift)
        return float(-np.log(np.where(target > 0, chance, 1 - chance)).mean())

    slope, shift = platt(z, target)
    assert slope == pytest.approx(0.4, abs=0.1)
    around = [loss(slope + a, shift + b) for a in (-0.02, 0.02) for b in (-0.02, 0.02)]
    assert loss(slope, shift) < min(around)
    assert platt(-z, target) == (1.0, 0.0), "an order that is worse than chance is not reversed"


def test_what_is_taken_has_the_right_features():
    examples = read_examples(trace(rows=900))
    whole = examples.features(("after", "scalars"))
    part = examples.take(np.arange(len(examples)) % 3 == 1).take(np.array([5, 0, 7]))
    assert (part.features(("after", "scalars")) == whole[[16, 1, 22]]).all()
    assert (part.ratio == examples.ratio[[16, 1, 22]]).all()
    assert part.kind.tolist() == [KINDS[i % 4] for i in (16, 1, 22)]
    assert (whole.dtype, examples.parts["after"].dtype) == (np.float32, np.float16)
