"""The profile: what is timed, in which order, and what the runtime reads of it. No test asserts a time."""

import pytest

from components.calibrate.hardware_profile import (
    filler,
    measure_profile,
    overheads_from,
    slopes,
    time_forwards,
    time_overlapped,
    time_prompts,
)
from components.report.provenance import provenance
from serving.artifacts.hardware_profile import HardwareProfile
from serving.device import device_class
from serving.errors import DraftwellError
from serving.runtime.stats import Stats
from tests.support.models.tiny import pair_of, table_pair


class Spy:
    """A model that notes its forwards."""

    def __init__(self, model, seen):
        self.model, self.seen = model, seen

    def __getattr__(self, name):
        return getattr(self.model, name)

    def forward(self, rows):
        self.seen.append((rows[0].model, len(rows[0].tokens), rows[0].keep, self.model.slots.lengths[rows[0].slot]))
        return self.model.forward(rows)


def spied():
    pair, seen = table_pair(), []
    return pair_of(Spy(pair.models["target"], seen), Spy(pair.models["draft"], seen)), seen


def test_draft_and_target_alternate_and_every_forward_starts_behind_the_same_context():
    pair, seen = spied()
    times = time_forwards(pair, [1, 4], repeats=3, context=16)
    assert seen[:2] == [("target", 16, 1, 0), ("draft", 16, 1, 0)]
    turn = [("draft", 1, 1, 16), ("target", 1, 1, 16), ("target", 4, 4, 16)]
    assert seen[2:] == turn * 4
    assert {key: len(values) for key, values in times.items()} == {("draft", 1): 3, ("target", 1): 3, ("target", 4): 3}


def test_a_profile_is_complete_saved_and_of_this_machine(tmp_path):
    pair, logged = table_pair(), []
    made = measure_profile(pair, provenance(pair), sizes=(8, 2, 4000), repeats=2, context=8, log=lambda *row: logged.append(row))
    assert list(made.t_verify) == [1, 2, 8]  # 1 is always there, what does not fit is left out
    assert made.t_draft > 0
    assert made.t_rest >= 0
    assert made.provenance.device_class == device_class()
    made.save(tmp_path / "p")
    loaded = HardwareProfile.load(tmp_path / "p", fingerprint=pair.fingerprint)
    assert (loaded.t_verify, loaded.details) == (made.t_verify, made.details)
    assert [name for name, _, _ in logged] == ["t_draft_ms", *["t_verify_ms"] * 3, "t_draft_split_ms", *["t_verify_split_ms"] * 3,
                                               "t_rest_ms", *["t_prompt_target_ms"] * 4, *["t_prompt_draft_ms"] * 4]
    assert made.details is not None
    assert list(made.details.t_draft) == [1, 2, 4, 8, 32, 128]
    assert made.details.context == 8
    assert made.details.split_alone is not None
    assert list(made.details.split_alone[1]) == [1, 2, 8]
    assert not made.details.chains


def test_prompts_are_timed_into_an_empty_slot_and_keep_one_row():
    pair, seen = spied()
    times = time_prompts(pair, [8, 32], repeats=2)
    turn = [("target", 8, 1, 0), ("target", 32, 1, 0), ("draft", 8, 1, 0), ("draft", 32, 1, 0)]
    assert seen == turn * 3
    assert {role: list(sizes) for role, sizes in times.items()} == {"target": [8, 32], "draft": [8, 32]}


def test_a_slope_compares_a_deep_context_with_the_usual_one():
    pair, seen = spied()
    found = slopes(pair, 2, 16, 64)
    assert {length for _, tokens, _, length in seen if tokens == 1} == {16, 64}
    assert set(found) == {"target", "draft"}
    assert min(found.values()) >= 0
    assert slopes(pair, 2, 16, 16) == {"target": 0.0, "draft": 0.0}


def run_of(rounds, drafted, overhead):
    return Stats(target_calls=rounds, draft_calls=drafted, wall_seconds=overhead)


def test_time_outside_forwards_is_shared_out_among_calls_tokens_and_figures():
    runs = {"autoregressive": run_of(20, 0, 20 * 0.5), "vanilla_sd": run_of(8, 40, 8 * 0.5 + 40 * 0.25),
            "svip": run_of(10, 30, 10 * 0.5 + 30 * 0.375), "spide": run_of(5, 10, 5 * 0.5 + 10 * 0.375)}
    rest = overheads_from(runs)
    assert (rest.round, rest.token, rest.figure) == (0.5, 0.25, 0.125)
    runs["vanilla_sd"] = run_of(8, 40, 1.0)  # noise: less than its calls alone
    assert overheads_from(runs).token == 0.0


def test_a_profile_tells_overlapping_strategies_other_times_than_serial_ones(tmp_path):
    pair = table_pair()
    both = HardwareProfile(1.0, {1: 4.0, 2: 5.0}, 0.1, provenance(pair, device_class="x"), (2.0, {1: 6.0, 2: 7.0}))
    both.save(tmp_path / "p")
    read = HardwareProfile.load(tmp_path / "p", fingerprint=pair.fingerprint)
    assert (read.when(False).speed_ratio, read.when(True).speed_ratio) == (4.0, 3.0)
    assert read.when(True).verify_seconds(2) == 7.0
    assert HardwareProfile(1.0, {1: 4.0}, 0.1, both.provenance).when(True).speed_ratio == 4.0  # never measured apart


def test_overlapped_forwards_are_timed_on_both_models_and_leave_the_slots_free():
    pair, seen = spied()
    t_draft, t_verify = time_overlapped(pair, [1, 4], repeats=3, context=16)
    assert list(t_verify) == [1, 4]
    assert t_draft > 0
    assert sum(row[:2] == ("target", 4) for row in seen) == 3
    assert sum(row[:2] == ("draft", 1) for row in seen) >= 6
    assert len(pair.models["draft"].model.slots._free) == len(pair.models["draft"].model.slots.lengths)


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
    with pytest.raises(DraftwellError, match="context"):
        measure_profile(pair, provenance(pair), context=512)
    with pytest.raises(DraftwellError, match="no draft"):
        measure_profile(pair_of(pair.models["target"], None), provenance(pair))


def test_filler_ids_are_in_the_vocabulary():
    pair = table_pair()
    assert set(filler(pair, 100)) <= set(range(pair.models["target"].vocab_size))
