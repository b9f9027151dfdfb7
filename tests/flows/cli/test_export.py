"""`draftwell export`: from a config or a release to a document of another engine."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftwell.components.export.export import schema
from draftwell.components.export.profile import read_profile
from draftwell.registry.pairs import fetch, find_pair, model_records
from draftwell.registry.releases import create_release
from draftwell.registry.store import Store
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.decoding_config import DecodingConfig
from draftwell.serving.artifacts.pair_files import fingerprint
from tests.support.engine_figures import ENGINE, figure
from tests.support.loop.publishing import publish


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps(
            {
                "strategy": "csd",
                "parameters": {"num_speculative_tokens": 3},
                "evidence": {"speedup": 1.2},
            }
        )
    )
    return file


def test_a_config_as_a_document(run: Any, pair_file: Path, config: Path, tmp_path: Path) -> None:
    done = run(
        f"export --to vllm --pair {pair_file} --set config={config} --out {tmp_path}/vllm.json",
    )
    assert done.exit_code == 0, done.output
    document = json.loads((tmp_path / "vllm.json").read_text())
    draft = str((pair_file.parent / "draft").resolve())
    assert document["settings"] == {
        "method": "draft_model",
        "model": draft,
        "num_speculative_tokens": 3,
    }
    assert "lossless equivalent" in done.stderr
    assert "lossless equivalent" in document["notes"][0]
    assert document["engine_version"] == schema("vllm")["version"]


def test_a_head_that_the_settings_do_not_use_is_not_written(
    run: Any, pair_file: Path, config: Path, tmp_path: Path
) -> None:
    done = run(
        f"export --to vllm --pair {pair_file} --set config={config} --set "
        f"save_head={tmp_path}/head",
    )
    assert done.exit_code == 2, done.output
    assert "use no head: leave save_head out" in done.output
    assert not (tmp_path / "head").exists()


def test_both_revisions_of_a_pair_on_the_hub_are_named_and_main_is_not(
    run: Any, config: Path, tmp_path: Path
) -> None:
    file = tmp_path / "hub.yaml"
    body = (
        "name: hub\ndescription: x\nlicence: x\ntarget:\n  hub: org/target\n  revision: "
        "{}\ndraft:\n  hub: org/draft\n"
    )
    body += "  revision: {}\n"
    file.write_text(body.format("v1", "abc"))
    document = json.loads(run(f"export --to vllm --pair {file} --set config={config}").stdout)
    assert document["usage"].startswith("vllm serve org/target --revision v1 ")
    assert document["settings"]["revision"] == "abc"
    own = json.loads(
        run(
            f"export --to vllm --pair {file} --set config={config} --set target_model=./mine"
        ).stdout
    )
    assert own["usage"].startswith("vllm serve ./mine --speculative-config"), (
        "the revision is not that of another model"
    )
    file.write_text(body.format("main", "main"))
    assert (
        "revision"
        not in json.loads(run(f"export --to vllm --pair {file} --set config={config}").stdout)[
            "usage"
        ]
    )


def test_a_releases_config(
    run: Any, pair_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    spec, store = find_pair(str(pair_file)), Store()
    files = fetch(spec)
    made = Provenance(pair="tiny", fingerprint=fingerprint(files, "float32"))
    pinned = publish(
        store,
        DecodingConfig("prompt_lookup", {"prompt_lookup_num_tokens": 6}, {"speedup": 1.1}, made),
        tmp_path / "config",
    )
    create_release(
        store, "tiny", "cpu", {"decoding_config": pinned.version}, model_records(spec, files), {}
    )
    done = run(f"export --to transformers --pair {pair_file} --release candidate")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["settings"] == {
        "prompt_lookup_num_tokens": 6,
        "max_matching_ngram_size": 3,
    }
    both = run(f"export --to vllm --pair {pair_file} --release 1 --set config={tmp_path}/c.json")
    assert both.stderr == "Error: --release means nothing with --set config: leave it out\n"
    missing = run(f"export --to transformers --pair {pair_file} --release champion")
    assert missing.exit_code == 2
    assert "champion" in missing.stderr


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ('{"strategy": "svip"}', "--set draft_tokens="),
        ('{"strategy": "pyramid_fuzzy"}', "pyramid_fuzzy"),
        ("[]", "config.json"),
        ("{", "JSON"),
        ('{"strategy": "vanilla_sd", "parameters": {"gamma": 1}}', "'gamma'"),
    ],
)
def test_what_cannot_be_exported_is_one_line_and_leaves_nothing(
    run: Any, pair_file: Path, tmp_path: Path, written: str, words: str
) -> None:
    (tmp_path / "config.json").write_text(written)
    done = run(
        f"export --to sglang --pair {pair_file} --set config={tmp_path}/config.json --out "
        f"{tmp_path}/out.json",
    )
    assert done.exit_code == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out.json").exists()


def test_a_distilled_draft_is_asked_for(run: Any, config: Path) -> None:
    """The default pair's draft is stored in Draftwell's own form."""
    done = run(f"export --to sglang --set config={config} --set target_model=smollm2")
    assert done.exit_code == 2
    assert "--set save_draft=" in done.stderr


def distilled(folder: Path, into: Path, seed: int) -> Path:
    """A draft of the target in `folder`, with weights of its own."""
    from draftwell.serving.artifacts.distilled_draft import DistilledDraft, lent_names
    from draftwell.serving.artifacts.pair_files import weights_digest
    from draftwell.serving.runtime.model_files import load_module

    donor = load_module(folder, torch.float32, "cpu")
    generator = torch.Generator().manual_seed(seed)
    state = {
        name: value + torch.randn(value.shape, generator=generator) * 0.1
        for name, value in donor.state_dict().items()
        if name not in lent_names(donor)
    }
    made = Provenance(pair="tiny", fingerprint="")
    DistilledDraft(
        state, donor.config.to_dict(), torch.tensor([0, 1]), weights_digest(folder), made
    ).save(into)
    return into


@pytest.fixture
def released(pair_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """YAML file of a pair whose release pins one draft while the pair names a later one; `released`
    beside it is the pinned one."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    shutil.copytree(pair_file.parent / "target", tmp_path / "target")
    pinned, later = (
        distilled(tmp_path / "target", tmp_path / name, seed)
        for seed, name in enumerate(("released", "later"))
    )
    file = tmp_path / "tiny.yaml"
    file.write_text(
        "name: tiny\ndescription: tiny\nlicence: none\ndtype: float32\ntarget:\n  path: "
        "target\ndraft:\n  artifact: later\n"
    )
    spec, store = find_pair(str(file)), Store()
    files = replace(fetch(spec), draft=pinned)
    made = Provenance(pair="tiny", fingerprint=fingerprint(files, "float32"))
    config = publish(
        store,
        DecodingConfig("vanilla_sd", {"num_speculative_tokens": 3}, {}, made),
        tmp_path / "config",
    )
    draft = store.publish(pinned, pair="tiny")
    pins = {"decoding_config": config.version, "distilled_draft": draft.version}
    create_release(store, "tiny", "cpu", pins, model_records(spec, files), {})
    assert fingerprint(replace(files, draft=later), "float32") != made.fingerprint
    return file


def test_the_draft_that_a_release_pins_is_saved_and_not_the_pairs_present_one(
    run: Any, released: Path, tmp_path: Path
) -> None:
    from draftwell.components.export.checkpoint import save_draft
    from draftwell.serving.artifacts.pair_files import weights_digest

    done = run(
        f"export --to vllm --pair {released} --release candidate --set save_draft={tmp_path}/saved",
    )
    assert done.exit_code == 0, done.output
    expected, other = (
        save_draft(tmp_path / "target", tmp_path / name, tmp_path / f"{name}-whole")
        for name in ("released", "later")
    )
    assert weights_digest(tmp_path / "saved") == weights_digest(expected) != weights_digest(other)
    assert json.loads(done.stdout)["settings"]["model"] == str(tmp_path / "saved")
    assert not read_profile(tmp_path / "saved").measured


@pytest.mark.parametrize("mine", [True, False])
def test_what_was_measured_of_a_draft_goes_beside_it(
    run: Any, released: Path, tmp_path: Path, mine: bool
) -> None:
    """Figures of other weights are refused, before anything is written."""
    own = fingerprint(
        replace(fetch(find_pair(str(released))), draft=tmp_path / "released"), "float32"
    )
    document = {**ENGINE, "fingerprint": own if mine else "0" * 64}
    (tmp_path / "bench.json").write_text(
        json.dumps({**document, "figures": [figure("draft_model(k=2)", 10, 7, 3)]})
    )
    command = f"export --to vllm --pair {released} --release candidate"
    done = run(f"{command} --set save_draft={tmp_path}/saved --set measured={tmp_path}/bench.json")
    if not mine:
        assert (done.exit_code, (tmp_path / "saved").exists()) == (2, False)
        assert "figures of another draft_model" in done.stderr
        return
    assert done.exit_code == 0, done.output
    profile = read_profile(tmp_path / "saved")
    assert profile.expected == (0.7, 0.3)
    assert (profile.draft_checkpoint or {})["digest"] == own
    assert str(tmp_path) not in json.dumps(profile.written()), "a path says nothing elsewhere"
    nowhere = run(f"{command} --set measured={tmp_path}/bench.json")
    assert nowhere.exit_code == 2
    assert "add save_head or save_draft" in nowhere.stderr


def test_a_draft_is_not_saved_where_the_models_are_not_those_of_the_release(
    run: Any, released: Path, tmp_path: Path
) -> None:
    """A config file has no release: then the pair's own draft is meant."""
    tokenizer = tmp_path / "target" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    done = run(
        f"export --to vllm --pair {released} --release candidate --set save_draft={tmp_path}/saved",
    )
    assert done.exit_code == 2
    assert "release.tiny.cpu" in done.stderr
    assert not (tmp_path / "saved").exists()
    (tmp_path / "own.json").write_text('{"strategy": "vanilla_sd"}')
    done = run(
        f"export --to vllm --pair {released} --set config={tmp_path}/own.json "
        f"--set save_draft={tmp_path}/saved",
    )
    assert done.exit_code == 0, done.output


def test_a_release_with_a_draft_of_its_own_does_not_name_the_pairs(
    run: Any, released: Path, pair_file: Path
) -> None:
    """The pair has gone over to a draft that engines read by themselves; the release has not."""
    released.write_text(
        released.read_text().replace("artifact: later", f"path: {pair_file.parent / 'draft'}")
    )
    done = run(f"export --to vllm --pair {released} --release candidate")
    assert done.exit_code == 2
    assert "--set save_draft=" in done.stderr


def test_a_distilled_draft_as_a_folder_that_transformers_reads(tmp_path: Path) -> None:
    """The same logits as the draft behind the engine, over the tokens of its head."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from draftwell.components.export.checkpoint import save_draft
    from draftwell.serving.artifacts.distilled_draft import DistilledDraft, lent_names
    from draftwell.serving.artifacts.pair_files import weights_digest
    from draftwell.serving.runtime.model_files import build_distilled, load_module
    from tests.support.server.served_pair import tiny_pair

    pair = tiny_pair(1)
    for part in (pair.modules["target"], pair.tokenizer):
        part.save_pretrained(tmp_path / "target")
    donor = load_module(tmp_path / "target", torch.float32, "cpu")
    lent = lent_names(donor)
    state = {name: value for name, value in donor.state_dict().items() if name not in lent}
    draft = DistilledDraft(
        state,
        donor.config.to_dict(),
        torch.tensor([0, 1]),
        weights_digest(tmp_path / "target"),
        Provenance(pair="tiny", fingerprint=""),
    )
    draft.save(tmp_path / "artifact")
    saved = AutoModelForCausalLM.from_pretrained(
        save_draft(tmp_path / "target", tmp_path / "artifact", tmp_path / "draft")
    )
    wanted = build_distilled(DistilledDraft.load(tmp_path / "artifact"), donor)
    ids = torch.tensor([[1, 4, 6, 3]])
    assert torch.equal(saved(ids).logits, wanted(ids).logits)
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "draft").get_vocab() == pair.tokenizer.get_vocab()
    )
