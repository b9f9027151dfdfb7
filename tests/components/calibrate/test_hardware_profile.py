"""The profile: what is timed, in which order, and what the runtime reads of it. No test asserts a
time."""

from types import SimpleNamespace

import pytest

from draftwell.components.calibrate import hardware_profile
from draftwell.components.calibrate.hardware_profile import (
    measure_profile,
    overheads_from,
    short_runs,
    slopes,
    time_forwards,
    time_overlapped,
    time_prompts,
)
from draftwell.components.report.provenance import provenance
from draftwell.registry.cards.model_card import figures_of
from draftwell.serving.artifacts.base import read_manifest
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.device import device_class
from draftwell.serving.runtime.models.eagle3_model import head_of
from draftwell.serving.runtime.models.lean_llama import LeanLlama
from draftwell.serving.runtime.session.stats import Stats
from tests.support.errors import raises_code
from tests.support.models.heads import random_eagle3
from tests.support.models.llama_shapes import llama
from tests.support.models.priced import Clock, Priced
from tests.support.models.tiny import pair_of, table_pair


class Spy:
    """A model that notes its forwards."""

    def __init__(self, model, seen):
        self.model, self.seen = model, seen

    def __getattr__(self, name):
        return getattr(self.model, name)

    def forward(self, rows):
        self.seen.append(
            (
                rows[0].model,
                len(rows[0].tokens),
                rows[0].keep,
                self.model.slots.lengths[rows[0].slot],
            )
        )
        return self.model.forward(rows)


def spied():
    pair, seen = table_pair(), []
    return pair_of(Spy(pair.models["target"], seen), Spy(pair.models["draft"], seen)), seen


def test_draft_and_target_alternate_and_every_pass_starts_after_the_same_context():
    pair, seen = spied()
    times = time_forwards(pair, [1, 4], repeats=3, context=16)
    assert seen[:2] == [("target", 16, 1, 0), ("draft", 16, 1, 0)]
    turn = [("draft", 1, 1, 16), ("target", 1, 1, 16), ("target", 4, 4, 16)]
    assert seen[2:] == turn * 4
    assert {key: len(values) for key, values in times.items()} == {
        ("draft", 1): 3,
        ("target", 1): 3,
        ("target", 4): 3,
    }


def priced(monkeypatch):
    """A pair whose target takes 10 ms, 1 ms a token and 1 µs a token of context, its draft a tenth
    of that."""
    pair, clock = table_pair(), Clock()
    monkeypatch.setattr(hardware_profile, "time", clock)

    def model(role, unit):
        return Priced(
            pair.models[role],
            clock,
            lambda row, length: unit * (10 + len(row.tokens) + length / 1000),
        )

    return pair_of(model("target", 1e-3), model("draft", 1e-4))


def test_a_profile_holds_the_times_of_its_models_and_is_saved(tmp_path, monkeypatch):
    pair = priced(monkeypatch)
    made = measure_profile(pair, provenance(pair), sizes=(8, 2, 4000), repeats=2, context=8)
    # 1 is always there, 4000 does not fit
    assert made.t_verify == pytest.approx({1: 0.011008, 2: 0.012008, 8: 0.018008})
    assert made.t_draft == pytest.approx(0.0011008)
    assert made.t_rest >= 0
    assert made.provenance.device_class == device_class()
    assert made.details is not None
    assert made.details.t_draft == pytest.approx(
        {k: 1e-4 * (10 + k + 0.008) for k in (1, 2, 4, 8, 32, 128)}
    )
    assert made.details.prefill["target"] == pytest.approx(
        {k: 1e-3 * (10 + k) for k in (64, 128, 256, 512)}
    )
    assert made.details.prefill["draft"] == pytest.approx(
        {k: 1e-4 * (10 + k) for k in (64, 128, 256, 512)}
    )
    assert made.details.per_context_token == pytest.approx({"target": 1e-6, "draft": 1e-7})
    assert made.details.context == 8
    assert made.details.split_alone is not None
    assert made.details.split_alone[0] == pytest.approx(0.0011008)
    assert made.details.split_alone[1] == pytest.approx(made.t_verify)
    assert not made.details.chains
    made.save(tmp_path / "p")
    loaded = HardwareProfile.load(tmp_path / "p", fingerprint=pair.fingerprint)
    assert (loaded.t_verify, loaded.details) == (made.t_verify, made.details)


def test_what_only_predictions_of_whole_requests_read_can_be_left_out(tmp_path):
    """The papers' cells do so: no pass over a prompt longer than the context, none after a deeper
    one."""
    pair, seen = spied()
    made = measure_profile(
        pair, provenance(pair), sizes=(2,), repeats=2, context=16, requests=False
    )
    assert max(length for *_, length in seen) < 64
    assert max(tokens for role, tokens, *_ in seen if role == "target") == 16
    made.save(tmp_path / "p")
    for profile in (made, HardwareProfile.load(tmp_path / "p", fingerprint=pair.fingerprint)):
        assert profile.split is not None
        assert profile.details is not None
        assert (
            profile.details.prefill,
            profile.details.per_context_token,
            profile.details.rest.figure,
        ) == ({}, {}, 0.0)
        assert (
            list(profile.details.split_alone[1])
            == list(profile.split[1])
            == list(profile.t_verify)
            == [1, 2]
        )


def test_prompts_are_timed_into_an_empty_slot_and_keep_one_row():
    pair, seen = spied()
    times = time_prompts(pair, [8, 32], repeats=2)
    turn = [("draft", 8, 1, 0), ("draft", 32, 1, 0), ("target", 8, 1, 0), ("target", 32, 1, 0)]
    assert seen == turn * 3
    assert {role: list(sizes) for role, sizes in times.items()} == {
        "target": [8, 32],
        "draft": [8, 32],
    }


def test_a_slope_compares_a_deep_context_with_the_usual_one(monkeypatch):
    assert slopes(priced(monkeypatch), 2, 16, 64) == pytest.approx({"target": 1e-6, "draft": 1e-7})
    pair, seen = spied()
    slopes(pair, 2, 16, 64)
    assert {length for _, tokens, _, length in seen if tokens == 1} == {16, 64}
    assert slopes(pair, 2, 16, 16) == {"target": 0.0, "draft": 0.0}


def test_a_slope_is_never_negative(monkeypatch):
    pair, clock = table_pair(), Clock()
    monkeypatch.setattr(hardware_profile, "time", clock)
    faster = [
        Priced(pair.models[role], clock, lambda row, length: 1.0 - length / 1000)
        for role in ("target", "draft")
    ]
    assert slopes(pair_of(*faster), 2, 16, 64) == {"target": 0.0, "draft": 0.0}


def run_of(rounds, drafted, overhead):
    return Stats(target_calls=rounds, draft_calls=drafted, wall_seconds=overhead)


def test_time_outside_forward_passes_is_divided_among_calls_tokens_and_rows_read():
    runs = {
        "autoregressive": run_of(20, 0, 20 * 0.5),
        "vanilla_sd": run_of(8, 40, 8 * 0.5 + 40 * 0.25),
        "svip": run_of(10, 30, 10 * 0.5 + 30 * 0.375),
        "spide": run_of(5, 10, 5 * 0.5 + 10 * 0.375),
    }
    rest = overheads_from(runs)
    assert (rest.round, rest.token, rest.figure) == (0.5, 0.25, 0.125)
    runs["vanilla_sd"] = run_of(8, 40, 1.0)  # noise: less than its calls alone
    assert overheads_from(runs).token == 0.0


def test_of_several_short_runs_the_least_disturbed_counts():
    """The first one is for one-time work; what else a machine does only adds."""
    waits = iter([0.5, 2.0, 1.0, 3.0])

    def generate(*_):
        return SimpleNamespace(session=SimpleNamespace(stats=run_of(4, 0, next(waits))))

    pair = SimpleNamespace(
        name="tiny",
        fingerprint="f",
        models={"target": SimpleNamespace(vocab_size=9)},
        sampling=lambda **_: None,
        engine=lambda: SimpleNamespace(generate=generate),
    )
    assert short_runs(pair)["autoregressive"].overhead_seconds == 1.0


def test_a_profile_holds_other_times_for_overlapping_strategies_than_for_serial_ones(tmp_path):
    pair = table_pair()
    both = HardwareProfile(
        1.0, {1: 4.0, 2: 5.0}, 0.1, provenance(pair, device_class="x"), (2.0, {1: 6.0, 2: 7.0})
    )
    both.save(tmp_path / "p")
    read = HardwareProfile.load(tmp_path / "p", fingerprint=pair.fingerprint)
    assert (read.when(False).speed_ratio, read.when(True).speed_ratio) == (4.0, 3.0)
    assert read.when(True).verify_seconds(2) == 7.0
    # a split was not measured
    assert HardwareProfile(1.0, {1: 4.0}, 0.1, both.provenance).when(True).speed_ratio == 4.0


def test_overlapped_forwards_are_timed_on_both_models_and_leave_the_slots_free():
    pair, seen = spied()
    t_draft, t_verify = time_overlapped(pair, [1, 4], repeats=3, context=16)
    assert list(t_verify) == [1, 4]
    assert t_draft > 0
    assert sum(row[:2] == ("target", 4) for row in seen) == 3
    assert sum(row[:2] == ("draft", 1) for row in seen) >= 6
    assert len(pair.models["draft"].model.slots._free) == len(
        pair.models["draft"].model.slots.lengths
    )


def test_forwards_on_cores_of_their_own_are_also_timed_while_the_other_model_rests():
    pair, seen = spied()
    time_overlapped(pair, [1], repeats=3, context=16, busy=False)
    roles = [row[0] for row in seen[2:]]
    assert roles.count("target") == 3
    assert [role for role in roles if role == "draft"]
    while roles:  # some drafts, then the target alone
        assert roles.pop(0) == "draft"
        while roles[0] == "draft":
            roles.pop(0)
        assert roles.pop(0) == "target"


def test_all_slots_are_free_afterwards_even_if_a_model_fails():
    pair = table_pair(slots=1)
    measure_profile(pair, provenance(pair), sizes=(1,), repeats=1, context=4)
    pair.models["draft"].table = pair.models["draft"].table[:1]  # the next forward fails
    with pytest.raises(IndexError):
        time_forwards(pair, [1], repeats=1, context=4)
    assert [pair.models[role].open() for role in ("target", "draft")] == [0, 0]


def test_what_cannot_be_profiled_is_refused():
    pair = table_pair()
    with raises_code("context_too_long", "512", pair.name):
        measure_profile(pair, provenance(pair), context=512)


def test_a_pair_without_a_draft_has_a_profile_of_its_target(tmp_path, monkeypatch):
    whole = priced(monkeypatch)
    pair = pair_of(whole.models["target"], None)
    made = measure_profile(pair, provenance(pair), sizes=(2,), repeats=2, context=8)
    made.save(tmp_path / "p")
    read = HardwareProfile.load(tmp_path / "p", fingerprint=pair.fingerprint)
    for profile in (made, read):
        assert profile.t_verify == pytest.approx({1: 0.011008, 2: 0.012008})
        assert (profile.t_draft, profile.split, profile.t_draft_onnx) == (None, None, None)
        assert profile.when(overlapping=True).t_draft is None
        assert profile.details is not None
        assert (
            profile.details.t_draft,
            list(profile.details.prefill),
            list(profile.details.per_context_token),
        ) == ({}, ["target"], ["target"])
        with raises_code("profile_without_draft"):
            _ = profile.speed_ratio
    assert figures_of(tmp_path / "p", read_manifest(tmp_path / "p"))[0][
        "t_verify_ms"
    ] == pytest.approx(11.008)
    assert "draft" not in read.details.model_dump()["prefill"]


def test_a_heads_steps_after_a_target_pass_are_timed(monkeypatch):
    """A target pass of 1 s is not counted; the head takes 1 ms and 10 µs a token, so a draft of
    three steps with four tokens 3.04 ms."""
    module, clock, order = llama(), Clock(), []
    monkeypatch.setattr(hardware_profile, "time", clock)
    target = LeanLlama(module, slots=3)
    _, head = random_eagle3(module, 40)
    model = head_of(target, head)

    class Timed:
        def __init__(self, inner, price):
            self.inner, self.price = inner, price

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def forward(self, rows):
            clock.now += self.price(len(rows[0].tokens))
            order.append((rows[0].model, len(rows[0].tokens)))
            return self.inner.forward(rows)

    monkeypatch.setattr(
        hardware_profile, "head_of", lambda *_: Timed(model, lambda tokens: 1e-3 + 1e-5 * tokens)
    )
    pair = pair_of(Timed(target, lambda tokens: 1.0), None)
    made = measure_profile(pair, provenance(pair), sizes=(2,), repeats=2, context=8, head=head)
    assert made.t_head == pytest.approx(3.04e-3 / 3)
    assert "".join(role[0] for role, _ in order).count("thhh") >= 2, (
        "each draft follows a target pass"
    )
    assert len({target.open() for _ in range(3)}) == len({model.open() for _ in range(3)}) == 3, (
        "slots were given back"
    )
