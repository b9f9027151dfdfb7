"""`generate` and `bench` on a tiny pair of local folders: the fields that others read, and what
must be reproducible."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.loop.publishing import artifacts

FIGURES = {
    "tokens_per_second",
    "speedup",
    "target_calls",
    "cost_ratio",
    "acceptance_rate",
    "draft_efficiency",
    "mat",
    "mean_acceptance_length",
    "ttft_ms",
    "tpot_ms",
    "identical_outputs",
    "near_ties",
}


def answer(run: Any, pair_file: Path, *more: Any) -> dict[str, Any]:
    done = run(
        f"generate --pair {pair_file} --prompt",
        "the man in the inn",
        "--max-tokens 24 --json",
        *more,
    )
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


def test_generate_json(run: Any, pair_file: Path) -> None:
    made = answer(run, pair_file, "--set vanilla_sd.num_speculative_tokens=3")
    assert {
        "pair",
        "strategy",
        "parameters",
        "dtype",
        "prompt",
        "text",
        "token_ids",
        "finish_reason",
        "stats",
    } <= set(made)
    assert (made["pair"], made["strategy"], made["dtype"]) == ("tiny", "vanilla_sd", "float32")
    assert made["parameters"]["num_speculative_tokens"] == 3
    stats = made["stats"]
    assert stats["emitted"] == len(made["token_ids"]) <= 24
    assert stats["accepted"] <= stats["judged"] <= stats["drafted"]
    assert stats["target_calls"] < stats["emitted"]


def test_greedy_generate_is_the_targets_own(run: Any, pair_file: Path) -> None:
    plain = answer(run, pair_file, "--strategy autoregressive")
    assert answer(run, pair_file, "--strategy vanilla_sd")["token_ids"] == plain["token_ids"]
    assert answer(run, pair_file, "--strategy prompt_lookup")["token_ids"] == plain["token_ids"]


def test_the_seed_alone_decides(run: Any, pair_file: Path) -> None:
    first, again, other = (
        answer(run, pair_file, f"--temperature 1.0 --set seed={seed}")["token_ids"]
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_generate_text(run: Any, pair_file: Path) -> None:
    """The answer alone goes to stdout, what is said about it to stderr."""
    made = answer(run, pair_file)
    done = run(f"generate --pair {pair_file} --prompt", "the man in the inn", "--max-tokens 24")
    assert done.stdout == made["text"] + "\n"
    assert f"{made['stats']['emitted']} tokens in" in done.stderr


@pytest.fixture(scope="module")
def report(
    pair_file: Path, prompts_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    from typer.testing import CliRunner

    from draftwell.flows.cli.main import app

    out = tmp_path_factory.mktemp("bench") / "report.json"
    done = CliRunner().invoke(
        app,
        [
            "bench",
            "--pair",
            str(pair_file),
            "--strategies",
            "vanilla_sd,prompt_lookup,spide",
            "--prompts",
            str(prompts_file),
            "--limit",
            "3",
            "--set",
            "max_tokens=12",
            "--set",
            "dtype=float32",
            "--set",
            "threads=1",
            "--set",
            "peers=transformers",
            "--set",
            f"artifacts={artifacts(pair_file)}",
            "--out",
            str(out),
        ],
    )
    assert done.exit_code == 0, (done.output, done.exception)
    assert "vanilla_sd" in done.stdout
    return dict(json.loads(out.read_text()))


def test_bench_report(report: dict[str, Any]) -> None:
    assert {"pair", "machine", "prompts", "strategies", "peers"} <= set(report)
    assert (report["pair"], report["prompts"]) == ("tiny", 3)
    reference = report["cost_reference"]
    named = ["autoregressive", "vanilla_sd", "prompt_lookup", "spide"]
    rows = list(report["strategies"])
    assert rows[:4] == named
    # the fastest length of vanilla SD in a short run, unless it is the default's
    assert [row.partition("(")[0] for row in rows[4:]] in ([], ["vanilla_sd"])
    assert reference in ("vanilla_sd", *rows[4:]), "whichever length was fastest when measured"
    for name, figures in report["strategies"].items():
        assert set(figures) >= FIGURES, name
        assert figures["tokens_per_second"] > 0
    assert report["strategies"]["autoregressive"]["speedup"] == 1
    assert report["strategies"][reference]["cost_ratio"] == 1, (
        "the fastest vanilla SD, of those that were named and the one that a pilot found"
    )
    assert report["machine"]["threads"] == 1


def test_bench_peers(report: dict[str, Any]) -> None:
    peers = report["peers"]["transformers"]
    assert {"autoregressive", "assisted", "prompt_lookup"} <= set(peers)
    for name in ("autoregressive", "assisted", "prompt_lookup"):
        assert peers[name]["tokens_per_second"] > 0


def test_lossless_strategies_are_identical_in_float32(report: dict[str, Any]) -> None:
    for name, figures in report["strategies"].items():
        assert figures["identical_outputs"] + figures["near_ties"] == 3, name
        assert figures["identical_outputs"] == 3, name


@pytest.mark.slow
def test_bench_settings_reach_their_strategy(
    run: Any, pair_file: Path, prompts_file: Path, tmp_path: Path
) -> None:
    """Autoregressive is measured though it was not named; --set names the strategy it is for."""
    out = tmp_path / "out.json"
    done = run(
        f"bench --pair {pair_file} --strategies prompt_lookup,vanilla_sd --prompts "
        f"{prompts_file} --limit 1 --set max_tokens=8 --set "
        f"vanilla_sd.num_speculative_tokens=2 --out {out}",
    )
    assert done.exit_code == 0, (done.output, done.exception)
    found = json.loads(out.read_text())["strategies"]
    assert int(found["vanilla_sd"]["parameters"]["num_speculative_tokens"]) == 2
    beside = [name for name in found if not name.startswith("vanilla_sd(")]  # the fastest length
    assert beside == ["autoregressive", "prompt_lookup", "vanilla_sd"]


def test_bench_of_concurrent_requests(
    run: Any, pair_file: Path, prompts_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    done = run(
        f"bench --pair {pair_file} --strategies vanilla_sd --prompts {prompts_file} "
        f"--limit 3 --set max_tokens=8 --set dtype=float32 --set concurrency=3 --out {out}",
    )
    assert done.exit_code == 0, (done.output, done.exception)
    assert "tokens/s, 3 at once" in done.stdout
    found = json.loads(out.read_text())["configs"]
    assert list(found) == ["autoregressive", "vanilla_sd"]
    assert all(figures["identical"] == 3 and figures["ratio"] > 0 for figures in found.values())
