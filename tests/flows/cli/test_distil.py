"""`draftwell step distil`: from a folder to a pair that the other commands take, and what is
refused before any work."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftwell.registry.pairs import find_pair
from draftwell.registry.store import Store
from draftwell.serving.artifacts.base import digest_of
from draftwell.serving.errors import DraftwellError
from tests.support.loop.tiny_files import snapshot, write_prompts
from tests.support.patching import replace_everywhere

QUICK = "--set tokens=2000 --set max_tokens=12 --set head_tokens=64 --set dtype=float32"


@pytest.fixture
def place(own_stores: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with stores of its own."""
    monkeypatch.setenv("DRAFTWELL_MODELS", str(own_stores / "models"))
    (own_stores / "work").mkdir()
    monkeypatch.chdir(own_stores / "work")
    return own_stores


def test_a_folder_becomes_a_pair(
    run: Any, place: Path, pair_file: Path, prompts_file: Path, empty_database: Path
) -> None:
    shutil.copyfile(empty_database, place / "mlflow.db")
    target = pair_file.parent / "target"
    done = run(f"step distil --target {target} --prompts {prompts_file} --set name=kept", QUICK)
    assert done.exit_code == 0, (done.output, done.exception)
    assert "next: draftwell step collect --pair kept" in done.stdout
    home = place / "draftwell" / "pairs"
    assert yaml.safe_load((home / "kept.yaml").read_text())["draft"] == {"artifact": "kept/draft"}
    spec = find_pair("kept")
    assert (spec.target.path, spec.dtype) == (str(target), "float32")
    report = json.loads(
        (home / "kept" / "float32" / "reports" / "distilled_draft.json").read_text()
    )
    assert report["tokens"] >= 2000
    published = Store().resolve("distilled_draft", "kept", 1)
    assert published.digest == digest_of(home / "kept" / "draft")
    assert published.tags["trace_digest"], "the digest of the text it was trained on"
    done = run(
        f"step collect --pair kept --prompts {prompts_file} --set limit=2 --set max_tokens=6"
    )
    assert done.exit_code == 0, (done.output, done.exception)
    assert "positions" in done.stdout
    done = run(
        "generate --pair kept --strategy vanilla_sd --prompt",
        "the inn",
        "--max-tokens 8",
    )
    assert done.exit_code == 0, (done.output, done.exception)

    before = snapshot(home)
    other = run(
        f"step distil --target {pair_file.parent}/draft --prompts {prompts_file} --set "
        "name=kept --set publish=false",
        QUICK,
    )
    assert (other.exit_code, other.stdout) == (2, "")
    assert "pair named kept already" in other.stderr
    assert snapshot(home) == before
    finished = run(
        f"step distil --target {target} --prompts {prompts_file} --set name=kept --set "
        f"publish=false",
        QUICK,
    )
    assert finished.exit_code == 0, (finished.output, finished.exception)
    assert "tokens by the target" not in finished.stderr, "the corpus is there already"
    assert published.digest == digest_of(home / "kept" / "draft")


def test_a_target_that_asks_itself(
    run: Any, place: Path, pair_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without prompts the target invents them; layers, loss and folders are the user's; a pair's
    name names its target."""
    from draftwell.components.prompts import prompt as prompts

    monkeypatch.setattr(prompts, "DEMO", write_prompts(place / "demo.jsonl"))
    folders = f"--set out={place}/draft --set work={place}/shards"
    done = run(
        f"step distil --target {pair_file} --set invent=24 --set layers=1 --set loss=tv --set "
        f"name=asked --set publish=false",
        folders,
        QUICK,
    )
    assert done.exit_code == 0, (done.output, done.exception)
    assert not (place / "mlflow.db").exists()
    assert find_pair("asked").draft.artifact == str(place / "draft")  # type: ignore[union-attr]
    made = json.loads((place / "draft" / "artifact.json").read_text())["provenance"]
    assert (made["parameters"]["layers"], made["parameters"]["loss"]) == ("1", "tv")
    assert made["metrics"]["agreement_positions"] > 0
    assert list((place / "shards").glob("instructions-*.json"))
    assert not (place / "draftwell" / "distill").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--set layers=0,99", ("0,99", "2 layers")),
        ("--set layers=0,x", ("0,x", "numbers with commas")),
        ("--set layers=,", ("numbers with commas",)),
        ("--set name=smollm2-135m", ("pair named smollm2-135m already",)),
        ("--set name=default", ("pair named default already",)),
        ("--set name='Mine!'", ("'Mine!'", "lower case")),
        ("--set max_tokens=300", ("300 new tokens", "256", "max_tokens")),
        ("--prompts nowhere.jsonl", ("nowhere.jsonl",)),
        ("--set out=no/such/folder", ("no/such/folder",)),
        (f"--set out={Path(__file__).parent}", (str(Path(__file__).parent), "out")),
        ("--set out=both --set work=both", ("out or work",)),
        ("--set out=.", ("you are in",)),
        ("--device tpu", ("tpu",)),
    ],
)
def test_refused_before_any_work(
    run: Any,
    place: Path,
    pair_file: Path,
    prompts_file: Path,
    arguments: str,
    words: tuple[str, ...],
) -> None:
    done = run(
        f"step distil --target {pair_file.parent}/target --prompts {prompts_file} --set "
        f"publish=false",
        arguments,
    )
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.strip().splitlines()[-1].startswith("Error: ")
    assert [word for word in words if word not in done.stderr] == []
    assert "Traceback" not in done.stderr
    assert snapshot(place) == {}


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("./nowhere", "no such folder"),
        ("smolm2-135m", "did you mean smollm2-135m"),
        (".", "holds no model"),
    ],
)
def test_targets_that_are_none(run: Any, place: Path, target: str, words: str) -> None:
    done = run(f"step distil --target {target} --set publish=false --set name=some")
    assert (done.exit_code, done.stdout) == (2, "")
    assert words in done.stderr
    assert snapshot(place) == {}


@pytest.mark.parametrize("held", ["draftwell/pairs/kept", "draftwell/distill/kept"])
def test_two_distillations_of_one_name_or_work_folder_exclude_each_other(
    run: Any, place: Path, pair_file: Path, prompts_file: Path, held: str
) -> None:
    from draftwell.components.collect.plan import exclusive_folder

    command = (
        f"step distil --target {pair_file.parent}/target --prompts {prompts_file} --set name=kept "
        f"--set publish=false {QUICK}"
    )
    with exclusive_folder(place / held, "distillation"):
        done = run(command)
        assert (done.exit_code, done.stdout) == (2, "")
        assert f"another distillation is writing to {place / held}: wait for it" in done.stderr
        assert not [path for path in snapshot(place) if not path.endswith(".lock")], (
            "nothing was loaded or written"
        )
    done = run(command)
    assert done.exit_code == 0, (done.output, done.exception)


def test_prompts_of_any_source(
    run: Any, place: Path, pair_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table with a column of the user's own, and a spool of served traffic, as `collect` takes
    them."""
    from draftwell.flows.steps import distil as distil_step

    asked: list[distil_step.DistilRequest] = []

    def note(wanted: distil_step.DistilRequest, **settings: Any) -> None:
        asked.append(wanted)
        raise DraftwellError("noted")

    monkeypatch.setattr(distil_step, "run_distil", note)
    (place / "t.csv").write_text("saying,story\nx,the inn\ny,the man\n")
    (place / "spool").mkdir()
    talk = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "an inn"}]
    (place / "spool" / "day.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    for source in (f"{place}/t.csv --set column=story", f"{place}/spool"):
        done = run(
            f"step distil --target {pair_file.parent}/target --set publish=false --prompts {source}"
        )
        assert "noted" in done.stderr, (done.output, done.exception)
    table, spool = (wanted.prompts for wanted in asked)
    assert table is not None
    assert [p.prompt for p in table] == ["the inn", "the man"]
    assert spool is not None
    assert [(p.prompt, p.messages) for p in spool] == [("an inn", (talk[0],))]


@pytest.mark.parametrize(
    "command", ["step distil --target", "step choose --pair", "step calibrate --pair"]
)
def test_a_column_that_a_table_lacks_is_refused_first(
    run: Any, place: Path, pair_file: Path, command: str
) -> None:
    (place / "t.csv").write_text("saying,story\nx,the inn\n")
    done = run(
        f"{command} {pair_file} --set publish=false --prompts {place}/t.csv --set column=tale"
    )
    assert (done.exit_code, done.stdout) == (2, "")
    assert "no column tale" in done.stderr
    assert list(snapshot(place)) == ["t.csv"]


def test_too_few_prompts(run: Any, place: Path, pair_file: Path) -> None:
    prompts = write_prompts(place / "two.jsonl", 2)
    done = run(
        f"step distil --target {pair_file.parent}/target --prompts {prompts} --set publish=false"
    )
    assert (done.exit_code, done.stdout) == (2, "")
    assert "2 prompts are too few" in done.stderr


def test_what_is_measured_is_not_learnt() -> None:
    """A prompt that stands twice in a file cannot be on both sides."""
    from draftwell.components.distil.instructions import split
    from draftwell.components.prompts.prompt import Prompt

    learnt, untouched = split([Prompt(str(i), None, [f"text {i % 45}"]) for i in range(60)])
    assert len(untouched) == 6
    assert [int(p.id) for p in untouched] == [0, 12, 24, 35, 47, 59], "evenly spread over the file"
    assert not {p.prompt for p in learnt} & {p.prompt for p in untouched}
    assert {p.prompt for p in learnt} | {p.prompt for p in untouched} == {
        f"text {i}" for i in range(45)
    }


def test_a_prompt_is_what_stands_before_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target is asked with the system message, and the same turn behind another one is another
    prompt."""
    from draftwell.components.distil.instructions import split
    from draftwell.components.prompts.prompt import Prompt, ids_of
    from draftwell.flows.steps import distil as distil_step
    from tests.support.models.tiny import table_pair

    system = {"role": "system", "content": "be brief"}
    told = [
        Prompt(f"told{i}", None, [text], messages=(system,))
        for i, text in enumerate(["abc", "hello", "zebra"])
    ]
    bare = [Prompt(f"bare{i}", None, prompt.turns) for i, prompt in enumerate(told)]
    learnt, untouched = split([*told, *bare])
    assert (len(learnt), [p.id for p in untouched]) == (5, ["told0"])
    monkeypatch.setattr("draftwell.flows.steps.distil.weights_digest", lambda folder: "d" * 64)
    replace_everywhere(
        monkeypatch,
        "draftwell.components.distil.writers.Writer",
        lambda pair, batch, governor: None,
    )
    pair, files = table_pair(), distil_step.PairFiles("tiny", tmp_path)
    source = distil_step.source_of(
        pair,
        files,
        distil_step.DistilRequest("tiny", max_tokens=4),
        (learnt, untouched),
        lambda line: None,
    )
    assert source.prompts == [ids_of(pair, prompt) for prompt in learnt]
    assert [ids for _, ids in source.untouched] == [ids_of(pair, told[0])]
    assert len(source.untouched[0][1]) > len(pair.encode_prompt("abc"))
