"""A pair with a qualifier, from its YAML file to the tables: pairs, strategies, generate and
bench."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.loop.tiny_files import write_pair
from tests.support.server.served_pair import tiny_pair


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pair with a third model: the target with less noise than the draft has."""
    folder = tmp_path_factory.mktemp("three")
    file = write_pair(folder, "three")
    pair = tiny_pair(1)
    module, generator = pair.modules["target"], torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in module.parameters():
            weight += torch.randn(weight.shape, generator=generator) * 0.015
    module.save_pretrained(folder / "qualifier")
    pair.tokenizer.save_pretrained(folder / "qualifier")
    file.write_text(file.read_text() + "qualifier:\n  path: qualifier\n")
    return file


def answer(run: Any, file: Path, strategy: str, *more: Any) -> dict[str, Any]:
    done = run(
        f"generate --pair {file} --strategy {strategy} --prompt",
        "the man in the inn",
        "--max-tokens 24 --json",
        *more,
    )
    assert done.exit_code == 0, (done.output, done.exception)
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("strategy", ["pyramid_assisted", "pyramid_fuzzy"])
def test_generate_with_three_models(run: Any, three: Path, strategy: str) -> None:
    made = answer(
        run, three, strategy, f"--set {strategy}.tau_target=0.5 --set {strategy}.divergence=tv"
    )
    assert made["parameters"]["divergence"] == "tv"
    stats = made["stats"]
    assert stats["emitted"] == len(made["token_ids"])
    assert stats["qualifier_calls"] > 0
    assert 0 < stats["inner_acceptance_rate"] < 1, (
        "the qualifier, the target with noise, keeps some of the draft's tokens and not all"
    )
    plain = answer(run, three, "autoregressive")
    strict = answer(
        run,
        three,
        strategy,
        f"--set {strategy}.tau_target=0",
        *(["--set", "pyramid_fuzzy.tau_qualifier=0"] if strategy == "pyramid_fuzzy" else []),
    )
    assert strict["token_ids"] == plain["token_ids"], (
        "a threshold of zero leaves nothing but the target's own tokens"
    )
    assert plain["stats"]["qualifier_calls"] == 0
    assert plain["stats"]["inner_acceptance_rate"] is None


@pytest.mark.parametrize("strategy", ["fuzzy_sd", "mentored", "lossy_sd", "vanilla_sd"])
def test_other_strategies_leave_the_qualifier_alone(run: Any, three: Path, strategy: str) -> None:
    assert answer(run, three, strategy)["stats"]["qualifier_calls"] == 0


@pytest.mark.slow
def test_bench_with_three_models(run: Any, three: Path, prompts_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    done = run(
        f"bench --pair {three} --strategies "
        f"vanilla_sd,pyramid_assisted,pyramid_fuzzy,mentored --prompts {prompts_file} "
        f"--limit 2 --set max_tokens=12 --set pyramid_fuzzy.tau_target=0.4 --out {out}",
    )
    assert done.exit_code == 0, (done.output, done.exception)
    report = json.loads(out.read_text())["strategies"]
    named = [name for name in report if not name.startswith("vanilla_sd(")]  # the fastest length
    assert named == [
        "autoregressive",
        "vanilla_sd",
        "pyramid_assisted",
        "pyramid_fuzzy",
        "mentored",
    ]
    for name in ("pyramid_assisted", "pyramid_fuzzy"):
        assert report[name]["qualifier_calls"] > 0
        assert not report[name]["lossless"]
        assert report[name]["time_share"]["qualifier"] > 0
        assert sum(report[name]["time_share"].values()) == pytest.approx(1)
    assert report["vanilla_sd"]["qualifier_calls"] == 0
    assert report["mentored"]["identical_outputs"] == 2, "exact when greedy"
    assert "pyramid_assisted" in done.stdout


def test_a_pair_without_a_qualifier_is_refused(run: Any, pair_file: Path) -> None:
    done = run(f"generate --pair {pair_file} --strategy pyramid_assisted --prompt then")
    assert "needs a qualifier model" in done.output
    done = run(
        f"generate --pair {pair_file} --strategy pyramid_fuzzy --set "
        f"pyramid_fuzzy.tau_qualifier=0.9 "
        "--prompt then",
    )
    assert "must not exceed tau_target" in done.output


def test_the_lists_name_models_and_choices(run: Any) -> None:
    rows = {row["name"]: row for row in json.loads(run("list strategies --json").stdout)}
    assert rows["pyramid_fuzzy"]["models"] == ["target", "draft", "qualifier"]
    assert rows["fuzzy_sd"]["parameters"]["divergence"]["choices"] == [
        "tv",
        "kl",
        "js",
        "logit_gap",
        "fsd_js",
    ]
    assert rows["fuzzy_sd"]["parameters"]["tau"]["choices"] is None
    table = run("list strategies").stdout
    assert "[tv, kl, js, logit_gap, fsd_js]" in table
    assert "qualifier" in table
    assert "qualifier" in run("list pairs").stdout
