"""`draftwell tune`: a pair of two folders, how prompts are cut, and the card of what came of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftwell.components.card.card import Card
from draftwell.components.tune.evidence import TuningEvidence
from draftwell.flows.loading import prompts_of
from draftwell.flows.orchestration import whole
from draftwell.flows.orchestration.whole import TuneRequest, tune_models
from draftwell.flows.settings import PipelineSettings
from draftwell.flows.steps import fits, outcome_card, tune
from draftwell.flows.steps.distil import Distilled, DistilRequest
from draftwell.flows.steps.outcome_card import card_of
from draftwell.flows.steps.plan import counts_for
from draftwell.flows.workspace import Workspace
from draftwell.registry.pairs import find_pair, write_pair
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.bundle.verdict import Check
from tests.support.errors import raises_code
from tests.support.loop.tuning_evidence import CHOICE, GAMMA2, LOSSLESS, figure
from tests.support.models.resources import ORIGIN
from tests.support.own_models import ASKED, outcome, pair_of, sharegpt


def test_two_folders_are_a_pair_that_every_command_finds_by_name(models: Path, run: Any) -> None:
    spec, _ = pair_of(models)
    assert (spec.name, spec.licence) == ("big-model", "mit; not stated")
    assert find_pair("big-model").target.path == str(models / "Big Model")
    assert Workspace("big-model").files().draft == models / "small"
    assert "big-model" in run("list pairs").stdout


def test_the_same_models_are_the_same_pair_wherever_they_lie(models: Path) -> None:
    first, _ = pair_of(models)
    assert pair_of(models)[0] == first
    shutil.copytree(models / "Big Model", models / "copy")
    assert pair_of(models, target="copy")[0].name == first.name
    shutil.rmtree(models / "Big Model")
    moved, _ = pair_of(models, target="copy")
    assert (moved.name, moved.target.path) == (first.name, str(models / "copy"))


def test_another_draft_and_changed_weights_are_other_pairs(models: Path) -> None:
    first, _ = pair_of(models)
    alone, said = pair_of(models, draft=None)
    assert (alone.name, alone.draft, said) == ("big-model-2", None, [])
    shutil.copyfile(
        models / "Big Model" / "model.safetensors", models / "small" / "model.safetensors"
    )
    shutil.copyfile(models / "Big Model" / "config.json", models / "small" / "config.json")
    changed, said = pair_of(models)
    assert changed.name not in (first.name, alone.name)
    assert said == [
        f"the models have changed since big-model was tuned: now they are {changed.name}"
    ]


def test_what_is_wrong_with_models_is_one_line_and_no_pair(models: Path, own_stores: Path) -> None:
    vocabulary = json.loads((models / "small" / "tokenizer.json").read_text())
    tokens = vocabulary["model"]["vocab"]
    vocabulary["model"]["vocab"] = {name: (i + 1) % len(tokens) for name, i in tokens.items()}
    (models / "small" / "tokenizer.json").write_text(json.dumps(vocabulary))
    with raises_code("vocabulary_mismatch", "small", "Big Model"):
        pair_of(models)
    (models / "small" / "model.safetensors").unlink()
    with raises_code("no_weights", "small"):
        pair_of(models)
    with raises_code("no_model", "--target", "nowhere"):
        pair_of(models, target="nowhere")
    assert not list((own_stores / "draftwell").glob("pairs/*.yaml"))


def test_a_target_without_room_is_refused_before_anything_is_loaded(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, _ = pair_of(models)
    assert "room for" in fits.said_to_fit(Workspace(spec.name, device="cpu"))
    monkeypatch.setattr(fits, "free_memory", lambda device: 1000)
    with raises_code("pair_too_large", "does not fit"):
        fits.said_to_fit(Workspace(spec.name, device="cpu"))
    wanted = TuneRequest(target=str(models / "Big Model"), device="cpu")
    monkeypatch.setattr(whole, "run_loop", lambda settings: pytest.fail("it began"))
    with raises_code("pair_too_large", "does not fit"):
        tune_models(wanted, lambda line: None)


@pytest.mark.parametrize(("rows", "confirm"), [(40, 16), (150, 64)])
def test_forty_conversations_leave_sixteen_to_confirm(
    tmp_path: Path, rows: int, confirm: int
) -> None:
    settings = PipelineSettings(
        minutes=10, device="cpu", prompts=sharegpt(tmp_path / "chats.json", rows)
    )
    settings = settings.model_copy(update=counts_for(settings, 0.04, rows))
    cut = prompts_of(settings)
    assert len(cut["bench"]) >= confirm
    assert len(cut["tune"]) >= 8
    assert len(cut["collect"]) >= 8, "what is not confirmed with is learnt from"
    assert cut["calibrate"] == [], "only lossy strategies read what they would fill"
    every = [prompt.id for prompts in cut.values() for prompt in prompts]
    assert len(every) == len(set(every))


@pytest.mark.parametrize(("rows", "confirm"), [(18, 8), (30, 16)])
def test_with_few_prompts_every_step_still_has_some(
    tmp_path: Path, rows: int, confirm: int
) -> None:
    settings = PipelineSettings(
        minutes=10, device="cpu", prompts=sharegpt(tmp_path / "chats.json", rows)
    )
    cut = prompts_of(settings.model_copy(update=counts_for(settings, 0.04, rows)))
    assert len(cut["bench"]) >= confirm
    assert len(cut["collect"]) >= 2
    assert len(cut["tune"]) == 8


def test_too_few_prompts_are_refused_with_how_many_it_takes(tmp_path: Path) -> None:
    settings = PipelineSettings(
        minutes=10, device="cpu", prompts=sharegpt(tmp_path / "chats.json", 16)
    )
    with raises_code("too_few_prompts", "16 different prompts", "18"):
        prompts_of(settings)


def test_counts_that_are_named_stay() -> None:
    settings = PipelineSettings(minutes=600, device="cpu", max_tokens=9, bench_prompts=5)
    counts = counts_for(settings, 0.01, 500)
    assert (counts["max_tokens"], "bench_prompts" in counts) == (9, False)
    assert counts["collect_prompts"] > PipelineSettings(device="cpu").collect_prompts


@pytest.fixture
def space(models: Path) -> Workspace:
    return Workspace(pair_of(models)[0].name, device="cpu")


def card(space: Workspace, **changes: Any) -> Card:
    settings = PipelineSettings(pair=space.name, minutes=10, device="cpu")
    return card_of(outcome(**changes), settings, space, ASKED)


def test_the_cards_figures_are_the_gates(space: Workspace) -> None:
    made = card(space)
    assert made.speed is not None
    assert (made.speed.ratio, made.speed.low, made.speed.prompts) == (1.3, 1.2, 16)
    assert "1.9" not in made.model_dump_json()
    assert [one.name for one in made.by_kind] == ["code", "maths"], "the fastest first"
    assert [(one.name, one.ratio) for one in made.by_requests] == [("1", 1.3), ("4", 1.1)]
    assert (made.sure, made.needs, made.memory_bytes) == (True, None, 5)
    assert made.exact
    assert made.next_command == f"draftwell serve --pair {space.name}"


def test_a_wide_interval_is_not_yet_sure_and_says_what_it_takes(space: Workspace) -> None:
    """Half of the interval is 24 % of the ratio: twice what is allowed, so four times as many."""
    found: Mapping[str, Any] = outcome()
    entry = found["report"]["strategies"]["hybrid"]
    entry |= {"speedup": 1.0, "speedup_low": 0.76, "speedup_high": 1.24}
    made = card(space, report=found["report"])
    assert not made.sure
    assert made.needs is not None
    assert made.needs.startswith("about 64 prompts would do: --minutes 40 --set bench_prompts=64,")
    assert "chats.json" in made.needs
    assert made.speed is not None
    told = {"confirming": 64, "in_time": True}
    for changes, more in (
        ({"confirming": 64}, "--minutes 40"),
        ({"in_time": False}, "--set bench_prompts=64"),
        ({"confirming": None}, ""),
    ):
        asked = replace(ASKED, **{**told, "confirming": 16, **changes})
        assert outcome_card.more_prompts(made.speed, asked, None) == more


def test_what_was_refused_is_named_among_what_lost(
    space: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcome_card, "evidence_in", lambda space: TuningEvidence.read(LOSSLESS))
    against = vars(Check("speedup", 0.9, 1.0, False, "0.9 x autoregressive"))
    made = card(
        space,
        **{"strategy": "autoregressive", "parameters": {}, "passed": False, "verdict": "failed"},
        checks=[against],
    )
    assert (made.speed, made.sure, made.verdict) == (None, True, "failed")
    assert made.tried
    assert all(one.why_not for one in made.tried)
    assert against["detail"] not in made.model_dump_json(), "plain decoding's"
    assert made.next_command.startswith("draftwell tune --pair")


PLAINLY = {"strategy": "autoregressive", "parameters": {}, "reason": "too slow", "loads": []}


def test_what_was_measured_beside_other_work_is_not_yet_sure(space: Workspace) -> None:
    report = outcome()["report"]
    for others, sure in ((0.02, True), (0.9, False)):
        beside_others = {**report, "machine": {**report["machine"], "others": others}}
        made = card(space, report=beside_others)
        assert (made.others, made.sure) == (others, sure)
        said = "other processes used 0.9 of its cores: measure again without them"
        assert made.needs == (None if sure else said)
        assert card(space, **{**PLAINLY, "report": beside_others}).needs is None, "of no figure"


def refused_as(verdict: str, **check: Any) -> dict[str, Any]:
    """An outcome in which plain decoding passed in place of what was tuned."""
    against = vars(Check("speedup", 1.2, 1.25, False, "1.2 x", **check))
    tuned = {name: outcome()[name] for name in ("strategy", "parameters")}
    return {
        **PLAINLY,
        "refused": {**tuned, "passed": False, "verdict": verdict, "checks": [against]},
    }


def test_what_the_gate_left_open_is_on_the_card_though_plain_decoding_serves(
    space: Workspace,
) -> None:
    given = refused_as("not enough evidence", enough=False, prompts_needed=40)
    made = card(space, **given)
    assert (made.strategy, made.verdict, made.sure) == ("hybrid", "undecided", False)
    assert made.speed is not None
    assert (made.speed.ratio, made.memory_bytes) == (1.3, None), "the memory is plain decoding's"
    assert str(made.needs).startswith("plain decoding serves meanwhile; about 40 prompts would do")
    assert "--minutes 25 --set bench_prompts=40" in made.next_command
    made = card(space, **refused_as("failed"))
    assert (made.strategy, made.verdict, made.needs) == ("autoregressive", "passed", None)


def test_a_row_of_what_lost_says_what_its_own_figures_say(
    space: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {**figure(CHOICE, 30.0, 1.17), "speedup_low": 0.79, "prompts": 4}
    many = {**figure(GAMMA2, 30.0, 0.78), "prompts": 8}
    found = {**LOSSLESS, "measured": [LOSSLESS["measured"][0], few, many], "rungs": []}
    monkeypatch.setattr(outcome_card, "evidence_in", lambda space: TuningEvidence.read(found))
    first, second, replay = card(space, **PLAINLY).tried
    assert (first.speed.prompts, first.why_not) == (8, "slower than plain decoding")
    assert (second.speed.prompts, "lower end 0.79" in second.why_not) == (4, True)
    assert (replay.speed.name, replay.speed.prompts) == ("pearl", 0)
    tuned = refused_as("failed") | {"reason": "hybrid was tuned, refused by the gate"}
    tuned["refused"] |= {"strategy": "vanilla_sd", "parameters": GAMMA2["parameters"]}
    assert card(space, **tuned).tried[0].why_not == "hybrid was tuned, refused by the gate"
    monkeypatch.setattr(outcome_card, "evidence_in", lambda space: TuningEvidence.read(LOSSLESS))
    first, *_ = card(space, **PLAINLY).tried
    assert first.why_not.startswith("not faster than plain decoding beyond doubt")


@pytest.mark.parametrize("apart", [False, True])
def test_the_card_says_what_a_device_of_its_own_would_give_by_formula(
    apart: bool, space: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = SimpleNamespace(device=SimpleNamespace(type="cuda" if apart else "cpu"))
    step: Any = SimpleNamespace(pair=SimpleNamespace(models={"draft": draft}, device="cpu"))
    inputs: Any = SimpleNamespace(profile=HardwareProfile(1.0, {1: 7.0}, 0.0, ORIGIN))
    found = tune.with_own_device(step, inputs, TuningEvidence.read(LOSSLESS))
    monkeypatch.setattr(outcome_card, "evidence_in", lambda space: found)
    said = card(space).own_device
    if apart:
        assert said is None, "it has one"
    else:
        assert said is not None
        assert "times plain decoding" in said
        assert said.endswith("by formula, not measured")


def test_exact_is_what_both_choices_and_the_targets_passes_are(space: Workspace) -> None:
    lossy = {"strategy": "csd", "parameters": {"tau": 0.2}}
    kept = vars(Check("sampled quality", 0.97, 0.9, True, "97.0% of the target's choices"))
    made = card(space, sampled=lossy, checks=[kept])
    assert not made.exact
    assert made.loses == "sampled requests: it keeps 97.0% of the target's choices"
    report = outcome()["report"]
    for entry in report["strategies"].values():
        entry["exact"] = False
    made = card(space, report=report)
    assert (made.exact, made.loses) == (False, None)


@pytest.mark.parametrize(
    ("verdict", "code"), [("passed", 0), ("failed", 1), ("not enough evidence", 3)]
)
def test_the_command_ends_with_the_gates_exit_code(
    run: Any, models: Path, verdict: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def played(settings: PipelineSettings) -> dict[str, Any]:
        asked.append(settings)
        space = Workspace(settings.pair, device="cpu")
        made = card(space, verdict=verdict, passed=verdict == "passed")
        return {"card": made.model_dump(mode="json"), "bundle": "dist/there"}

    monkeypatch.setattr(whole, "run_loop", played)
    words = "--device cpu --minutes 7 --set trials=9 --set levels=1,4"
    done = run("tune", "--target", models / "Big Model", "--draft", models / "small", words)
    assert done.exit_code == 2, "levels mean nothing here"
    assert "levels means nothing with the engine draftwell" in done.stderr
    more = words.replace(" --set levels=1,4", " --json")
    done = run("tune", "--target", models / "Big Model", "--draft", models / "small", more)
    assert done.exit_code == code, (done.output, done.exception)
    assert json.loads(done.stdout)["bundle"] == "dist/there"
    assert (asked[0].minutes, asked[0].trials, asked[0].pair) == (7.0, 9, "big-model")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--pair tiny --target x", "--pair names both"),
        ("--draft x", "name that with --target"),
        ("--set bench_prompts=many", "bench_prompts"),
        ("--set bench_promts=8", "did you mean bench_prompts"),
        ("--engine http://127.0.0.1:1 --set grid=true", "grid"),
    ],
)
def test_a_mistake_is_one_line(run: Any, own_stores: Path, words: str, told: str) -> None:
    done = run(f"tune {words}")
    assert done.exit_code == 2, (done.output, done.exception)
    assert told in done.stderr
    assert "Traceback" not in done.output


def test_a_draft_is_distilled_once_for_a_target_without_one(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[DistilRequest] = []

    def played(wanted: DistilRequest, **_: Any) -> Distilled:
        asked.append(wanted)
        spec = find_pair("big-model").model_copy(update={"name": str(wanted.name), "models": None})
        write_pair(spec, spec.folder / f"{spec.name}.yaml")
        return Distilled(spec, spec.folder / f"{spec.name}.yaml", models, {})

    tuned: list[str] = []

    def loop(settings: PipelineSettings) -> dict[str, Any]:
        tuned.append(settings.pair)
        made = card(Workspace(settings.pair, device="cpu"))
        return {"card": made.model_dump(mode="json"), "bundle": None}

    monkeypatch.setattr(whole, "run_distil", played)
    monkeypatch.setattr(whole, "run_loop", loop)
    wanted = TuneRequest(target=str(models / "Big Model"), distil=3.0, device="cpu")
    for _ in range(2):
        tune_models(wanted, lambda line: None)
    assert tuned == ["big-model-distilled"] * 2
    assert [(one.minutes, one.invented) for one in asked] == [(3.0, 90)]
    tune_models(wanted.model_copy(update={"fresh": True}), lambda line: None)
    assert len(asked) == 2
    named = {"draft": str(models / "small"), "distil": 3.0}
    with raises_code("bad_tune_setting", "--distil"):
        tune_models(wanted.model_copy(update=named), lambda line: None)


def test_a_launcher_is_a_command_or_a_file_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command may be longer than the name of a file."""
    from types import SimpleNamespace

    from draftwell.flows.orchestration import whole

    asked: list[Any] = []
    monkeypatch.setattr(whole, "said_to_fit", lambda *given, **more: "it fits")
    monkeypatch.setattr(whole, "prompts_of", lambda settings: [])
    monkeypatch.setattr(
        whole, "tune_at_address", lambda space, url, launcher, *rest, **more: asked.append(launcher)
    )
    command = "serve " + "--option " * 50 + "{speculation_options}"
    (tmp_path / "start").write_text(f"{command}\n")
    workspace: Any = SimpleNamespace(name="tiny", device="cpu")
    for launcher in (command, str(tmp_path / "start")):
        settings = whole.TuneRequest(engine="http://127.0.0.1:9", launcher=launcher)
        whole.tune_there(settings, workspace)
    assert asked == [command, command]
