"""What `draftwell tune` is asked: what has no effect is refused, secrets and folders of the machine
are shown nowhere, and what it prints can be typed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from draftwell.components.card.card import Card
from draftwell.flows import settings as loop
from draftwell.flows.cli.tune import resuming, typed, value_of
from draftwell.flows.orchestration import whole
from draftwell.flows.orchestration.whole import TuneRequest, loop_settings, tune_models
from draftwell.flows.settings import PipelineSettings
from draftwell.flows.steps.distil import DistilRequest, find_target
from draftwell.flows.steps.engine import at_address
from draftwell.flows.steps.engine.at_address import AddressSettings
from draftwell.flows.steps.keep_card import keep_with_release
from draftwell.flows.steps.outcome_card import card_of, machine_words
from draftwell.flows.workspace import Workspace
from draftwell.registry.pairs import write_pair
from tests.support.errors import raises_code
from tests.support.own_models import ASKED, outcome, pair_of


def test_a_card_names_no_folder_of_this_machine(models: Path, pair_file: Path) -> None:
    own = Workspace(pair_of(models)[0].name, device="cpu")
    elsewhere = Workspace(str(pair_file), device="cpu")
    for space in (own, elsewhere):
        settings = PipelineSettings(pair=space.name, minutes=10, device="cpu")
        made = card_of(outcome(), settings, space, ASKED)
        assert str(pair_file.parent) not in made.model_dump_json()
        assert str(models) not in made.model_dump_json()
    assert card_of(outcome(), settings, own, ASKED).target == "Big Model"
    assert made.next_command == f"draftwell serve --pair {pair_file.name}"
    assert typed(made, str(pair_file)).next_command == f"draftwell serve --pair {pair_file}"


def test_a_header_stands_as_it_is_written_and_is_shown_in_no_error(
    run: Any, own_stores: Path
) -> None:
    text = "Authorization: Bearer s3cret, with a comma"
    given = AddressSettings.model_validate({"engine_header": value_of("engine_header", text)})
    assert given.address("http://h:1").headers == (
        ("Authorization", "Bearer s3cret, with a comma"),
    )
    listed = value_of("engine_header", '["A: 1", "B: 2"]')
    assert AddressSettings.model_validate({"engine_header": listed}).engine_header == (
        "A: 1",
        "B: 2",
    )
    for word in ('[{"Authorization": "s3cret"}]', "s3cret"):
        done = run("tune --engine http://127.0.0.1:1 --set", f"engine_header={word}")
        assert done.exit_code == 2
        assert "NAME:VALUE" in done.stderr
        assert "s3cret" not in done.output


URL = "--engine http://127.0.0.1:1"
LAUNCHER = "--pair default --launcher 'serve {port} {speculation_options}'"
ELSEWHERE = "--engine http://gpu1:8000"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--launcher X", "--launcher starts an engine at a URL"),
        ("--launcher X --engine vllm", "--launcher starts an engine at a URL"),
        (f"{URL} --minutes 5", "--minutes has no effect"),
        (f"{URL} --fresh", "--fresh has no effect"),
        (f"{URL} --set levels=1,4", "levels has no effect"),
        (f"{URL} --set start_minutes=4", "start_minutes has no effect"),
        (f"{URL} {LAUNCHER} --set plain=http://127.0.0.1:2", "plain has no effect"),
        (f"{URL} {LAUNCHER} --set levels=8", "levels"),
        (f"{URL} {LAUNCHER} --set methods=magic", "no method 'magic'"),
        (f"{URL} --launcher nothing.txt --pair default", "no file nothing.txt"),
        (f"{URL} --launcher 'serve it' --pair default", "does not say how to speculate"),
        (f"{URL} --launcher 'serve {{speculation_options}}'", "--pair default"),
        (ELSEWHERE, "name the model at http://gpu1:8000 with --target or --pair"),
        (f"{ELSEWHERE} --pair default --prompts nowhere.jsonl", "nowhere.jsonl"),
        (f"{URL} --prompts nowhere.jsonl", "nowhere.jsonl"),
        (f"{URL} --set engine_key_file=nowhere", "nowhere"),
        (f"{URL} --set dtype=float32", "dtype is for --engine draftwell or vllm"),
        ("--set engine_key_file=/x", "engine_key_file is for --engine URL"),
        ("--engine vllm --set engine_draft=x", "engine_draft is for --engine URL"),
    ],
)
def test_what_has_no_effect_is_refused_before_any_work(
    run: Any, own_stores: Path, words: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "tune_models", lambda *arguments: pytest.fail("it began"))
    done = run(f"tune {words}")
    assert done.exit_code == 2, (done.output, done.exception)
    assert told in done.stderr
    assert "Traceback" not in done.output


class Shown(BaseModel):
    """What a card says of the machine."""

    fits: str
    machine: str = "this one"


def test_an_engine_elsewhere_may_have_a_device_that_this_machine_lacks(
    pair_file: Path, own_stores: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    seen: list[Any] = []
    monkeypatch.setattr(
        at_address, "launched_at", lambda space, *_, **__: (seen.append(space), ("played", None))[1]
    )
    monkeypatch.setattr(
        at_address, "engine_card", lambda space, found, asked: Shown(fits=asked.fits)
    )
    monkeypatch.setattr(at_address, "keep_with_release", lambda *arguments: None)
    card = tune_models(
        TuneRequest(
            pair=str(pair_file),
            engine="http://gpu1:8100",
            launcher="serve {port} {speculation_options}",
            device="cuda",
        ),
        lambda line: None,
    )
    assert seen[0].device == "cuda"
    assert (card.fits, card.machine) == (
        "not looked at, because the engine runs elsewhere",
        "that of gpu1",
    )
    assert "another machine" in machine_words("cuda")
    with raises_code("no_cuda"):
        whole.device_of(TuneRequest(device="cuda"))


def test_vllm_takes_the_device_that_it_is_built_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "device_for", lambda named: "cuda")
    assert loop_settings(TuneRequest(engine="vllm"), "tiny", "cpu").device == "cuda"


def test_a_draft_is_distilled_for_the_target_of_a_pair_in_a_file(
    pair_file: Path, own_stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = pair_file.with_name("mine.yaml")
    spec = whole.find_pair(str(pair_file)).model_copy(update={"name": "mine", "draft": None})
    write_pair(spec, file)

    def played(wanted: DistilRequest, **_: Any) -> Any:
        assert find_target(wanted.target)[1] is not None
        raise InterruptedError

    monkeypatch.setattr(whole, "run_distil", played)
    with pytest.raises(InterruptedError):
        tune_models(TuneRequest(pair=str(file), distil=1.0, device="cpu"), print)


def test_the_command_of_a_bundle_elsewhere_names_it(models: Path, tmp_path: Path) -> None:
    space = Workspace(pair_of(models)[0].name, device="cpu")
    settings = PipelineSettings(pair=space.name, minutes=10, device="cpu", out=tmp_path / "my out")
    made: Card = card_of(outcome(), settings, space, ASKED)
    named = whole.with_bundle(made, str(tmp_path / "my out" / "big" / "1-cpu"), settings)
    assert named.next_command == f"draftwell serve --bundle '{tmp_path}/my out/big/current'"
    usual = settings.model_copy(update={"out": Path("dist")})
    assert whole.with_bundle(made, "dist/big/1-cpu", usual).next_command == made.next_command


def test_an_unknown_setting_is_named_without_its_value() -> None:
    asked = TuneRequest(more={"bench_promts": "s3cret"})
    with raises_code("bad_setting", "no setting bench_promts") as caught:
        loop_settings(asked, "default", "cpu")
    assert "s3cret" not in str(caught.value)


def test_a_run_that_began_again_is_resumed_without_beginning_again() -> None:
    assert resuming(["tune", "--fresh", "--target", "my model"]) == (
        "draftwell tune --target 'my model'"
    )
    assert resuming(["tune", "--target", "x"]) == "", "the same command"


def test_where_a_card_is_kept_is_said_and_is_another_place_for_another_engine(
    models: Path,
) -> None:
    said: list[str] = []
    space = Workspace(pair_of(models)[0].name, say=said.append, device="cpu")
    settings = PipelineSettings(pair=space.name, minutes=10, device="cpu")
    made = card_of(outcome(release=None), settings, space, ASKED)
    for engine in ("draftwell", "vllm 0.32.0 at http://h:1"):
        keep_with_release(space, made.model_copy(update={"engine": engine}))
    folders = [Path(line.removeprefix("the card is in ")) for line in said]
    assert [folder.name for folder in folders] == ["card", "card-vllm"]
    assert all((folder / "card.html").is_file() for folder in folders)


def test_a_resumed_tuning_that_finds_the_same_keeps_its_card(models: Path, tmp_path: Path) -> None:
    """Else its bundle would be another one each time."""
    space = Workspace(pair_of(models)[0].name, device="cpu")
    settings = PipelineSettings(pair=space.name, minutes=10, device="cpu")
    first = card_of(outcome(release=None), settings, space, ASKED)
    keep_with_release(space, first)
    file = space.device_reports / "card" / "card.json"
    kept = file.read_bytes()
    later = {"seconds": 1.0, "fits": "less memory is free", "memory_bytes": 7}
    keep_with_release(space, first.model_copy(update=later))
    assert file.read_bytes() == kept
    keep_with_release(space, first.model_copy(update={**later, "strategy": "svip"}))
    assert file.read_bytes() != kept
