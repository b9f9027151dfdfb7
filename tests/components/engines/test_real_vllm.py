"""The real vLLM behind the port: `DRAFTWELL_TEST_PEERS` names the folder that `make peers`
filled."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from draftwell.components.engines.environments import INSTALLED
from draftwell.components.engines.port import Decoded, EngineSettings
from draftwell.components.engines.vllm import VllmEngine
from draftwell.components.engines.vllm_methods import Method, VllmFiles, schedule_of
from draftwell.components.export.profile import profile_of
from draftwell.serving.runtime.requests import Sampling

TOKENS = 24


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of environments; without it the test is skipped."""
    folder = os.environ.get("DRAFTWELL_TEST_PEERS")
    if not folder or not (Path(folder) / "vllm" / INSTALLED).is_file():
        pytest.skip(
            "vllm is not installed: `make peers PEERS=vllm PEERS_DIR=folder`, then "
            "DRAFTWELL_TEST_PEERS=folder"
        )
    monkeypatch.setenv("DRAFTWELL_PEERS", folder)
    return Path(folder)


def test_vllms_own_reader_takes_our_schedules(peers: Path) -> None:
    """Only its plain functions are loaded, not vLLM."""
    file = next(
        (peers / "vllm").glob("lib/python*/site-packages/vllm/v1/spec_decode/dynamic/utils.py")
    )
    spec = importlib.util.spec_from_file_location("vllm_schedules", file)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    schedule = [list(part) for part in schedule_of({1: 5, 4: 3, 16: 0})]
    read = module.build_dynamic_sd_schedule_lookup(schedule, 32, 5)
    assert read[1:] == [5] + [3] * 3 + [0] * 28


READS = """
import json, sys
from vllm.config.speculative import SpeculativeConfig
given = {"prompt_lookup_max": 3, **json.loads(sys.argv[1])}
made = SpeculativeConfig(method="ngram", num_speculative_tokens=3, **given)
print(json.dumps([made.num_speculative_tokens_per_batch_size, made.synthetic_acceptance_rates]))
"""


@pytest.mark.slow  # imports vLLM
def test_vllms_own_config_takes_our_schedule_and_the_rates_of_our_profiles(peers: Path) -> None:
    """Its synthetic sampler wants shares of all rounds, which never rise; shares of those that came
    so far may."""
    profile = profile_of(10, (5, 4, 4), method="eagle3", k=3)
    schedule = schedule_of({1: 3, 8: 1})

    def read(rates: list[float] | None) -> subprocess.CompletedProcess[str]:
        synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
        given = {"num_speculative_tokens_per_batch_size": [list(part) for part in schedule]}
        asked = json.dumps({**given, **synthetic})
        python = peers / "vllm" / "bin" / "python"
        return subprocess.run(
            [python, "-c", READS, asked], capture_output=True, text=True, timeout=600, check=False
        )

    done = read(profile.marginal_accept_rates)
    assert done.returncode == 0, done.stderr
    taken = json.loads(done.stdout.splitlines()[-1])
    assert taken == [[[1, 1, 3], [2, 8, 1]], [0.5, 0.4, 0.4]]
    assert "non-increasing" in read(profile.conditional_accept_rates).stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        Method("ngram", 4, 3),
        Method("draft_model", 2),
        Method("draft_model", 2, schedule=((1, 1, 2), (2, 4, 0))),
    ],
    ids=lambda method: method.label,
)
def test_it_decodes_counts_and_ends(peers: Path, method: Method) -> None:
    from draftwell.components.bench.peers.model_files import model_folder
    from tests.support.models.default_pair import default_pair, generated

    pair = default_pair()
    files = VllmFiles(model_folder(pair, "target"), draft=model_folder(pair, "draft"))
    prompts = [list(ids) for _, ids, _ in generated()[:2]]
    plain, other = (
        VllmEngine(f"vllm/{label}", files.target, dtype="float32", threads=2)
        for label in ("off", method.label)
    )
    try:
        plain.start(EngineSettings(slots=2, context=512))
        about = other.start(
            EngineSettings(speculation=method.speculative_config(files), slots=2, context=512)
        )
        assert about.version.startswith("vllm 0.32")
        sampling = Sampling(max_tokens=TOKENS, logprobs=3)
        expected, one, both = (
            plain.decode(prompts, sampling),
            other.decode(prompts[:1], sampling),
            other.decode(prompts, sampling),
        )
        check(expected, False)
        check(one, True)
        check(both, not method.schedule)
        assert first_tokens(both) == first_tokens(expected)
    finally:
        plain.stop()
        other.stop()


@pytest.mark.slow
def test_our_proposers_leave_outputs_as_they_are(peers: Path) -> None:
    """float32, where near-ties are rare: greedy texts are plain decoding's, and drafts were made
    and kept."""
    from draftwell.components.bench.peers.model_files import model_folder
    from draftwell.registry.bundles.wheel import PLUGIN
    from tests.support.models.default_pair import default_pair, generated

    files = VllmFiles(model_folder(default_pair(), "target"))
    prompts = [list(ids) for _, ids, _ in generated()[:3]]
    plain, cascade = (
        VllmEngine(f"vllm/{label}", files.target, dtype="float32", threads=1, plugins=PLUGIN.parent)
        for label in ("off", "cascade")
    )
    try:
        plain.start(EngineSettings(slots=3, context=512))
        expected = [
            answer.tokens for answer in plain.decode(prompts, Sampling(max_tokens=TOKENS)).answers
        ]
        plain.stop()
        cascade.start(
            EngineSettings(
                speculation=Method("cascade", 8).speculative_config(files), slots=3, context=512
            )
        )
        found = cascade.decode(prompts, Sampling(max_tokens=TOKENS))
        assert [answer.tokens for answer in found.answers] == expected
        assert sum(answer.acceptance.accepted for answer in found.answers) > 0
    finally:
        plain.stop()
        cascade.stop()


@pytest.mark.slow
def test_it_drafts_with_an_exported_head(peers: Path) -> None:
    """A head that vLLM loads without its states, its rows or its vocabulary in the right order
    decodes as plainly, and nothing is accepted.

    As of our proposers: float32, where near-ties are rare.
    """
    from draftwell.components.bench.peers.model_files import head_folder, model_folder
    from draftwell.serving.artifacts.eagle3_head import Eagle3Head
    from tests.support.models.default_pair import SHIPPED, default_pair, generated

    pair = default_pair()
    files = VllmFiles(
        model_folder(pair, "target"),
        head=head_folder(pair, Eagle3Head.load(SHIPPED / "eagle3_head")),
    )
    prompts = [list(ids) for _, ids, _ in generated()[:3]]
    plain, drafting = (
        VllmEngine(f"vllm/{label}", files.target, dtype="float32", threads=1)
        for label in ("off", "eagle3")
    )
    try:
        plain.start(EngineSettings(slots=3, context=512))
        expected = [
            answer.tokens for answer in plain.decode(prompts, Sampling(max_tokens=TOKENS)).answers
        ]
        plain.stop()
        drafting.start(
            EngineSettings(
                speculation=Method("eagle3", 3).speculative_config(files), slots=3, context=512
            )
        )
        found = drafting.decode(prompts, Sampling(max_tokens=TOKENS))
        assert [answer.tokens for answer in found.answers] == expected
        assert sum(answer.acceptance.accepted for answer in found.answers) > 0
    finally:
        plain.stop()
        drafting.stop()


@pytest.mark.slow
@pytest.mark.parametrize("planted", ["lossy", "slow"])
def test_the_gate_catches_what_is_planted(peers: Path, planted: str) -> None:
    """A setting that is slower than plain decoding, and one whose outputs are another model's
    though it says that it is lossless."""
    from draftwell.components.bench.engines.figures import figure_of
    from draftwell.components.bench.engines.measure import groups_of, measure_beside
    from draftwell.components.bench.peers.model_files import model_folder
    from draftwell.components.gate.engine_checks import differences, judge_engine
    from draftwell.serving.bundle.verdict import Thresholds
    from tests.support.models.default_pair import default_pair, generated

    pair = default_pair()
    files = VllmFiles(model_folder(pair, "target"), draft=model_folder(pair, "draft"))
    assert files.draft is not None
    method = Method("draft_model", 8) if planted == "slow" else Method("ngram", 4, 3)
    config = method.speculative_config(files)
    groups = groups_of([list(ids) for _, ids, _ in generated()[:8]], 1, 8)
    sampling = Sampling(max_tokens=TOKENS)
    plain = VllmEngine("vllm/off", files.target, dtype="float32", threads=1)
    other = VllmEngine(
        f"vllm/{planted}",
        files.target if planted == "slow" else files.draft,
        dtype="float32",
        threads=1,
    )
    try:
        plain.start(EngineSettings(slots=1, context=512))
        other.start(EngineSettings(speculation=config, slots=1, context=512))
        beside = measure_beside(plain, other, groups, sampling)
        figure = figure_of(planted, beside)
        unlike = differences(beside, groups, plain, "float32", sampling)
    finally:
        plain.stop()
        other.stop()
    real = sum(not one.near_tie for one in unlike)
    print(
        f"{planted}: {figure.ratio:.2f} [{figure.low:.2f}, {figure.high:.2f}], {real} real "
        "differences"
    )
    assert not judge_engine(
        [figure], unlike, Thresholds(min_speedup_lower_bound=1.0), config
    ).passed
    assert bool(real) == (planted == "lossy")
    assert planted == "lossy" or figure.ratio < 0.85


def test_vllm_calls_proposers_and_loggers_as_the_stub_of_our_tests_does(peers: Path) -> None:
    """Its sources are read, not run: the call of a custom proposer, the logger's methods, the
    counters that we read."""
    root = next((peers / "vllm").glob("lib/python*/site-packages/vllm"))
    runner = " ".join((root / "v1" / "worker" / "gpu_model_runner.py").read_text().split())
    assert (
        "propose( sampled_token_ids, self.input_batch.num_tokens_no_spec, "
        "self.input_batch.token_ids_cpu, slot_mappings="
    ) in runner
    loggers = (root / "v1" / "metrics" / "loggers.py").read_text()
    base = loggers[
        loggers.index("class StatLoggerBase") : loggers.index(
            "def load_stat_logger_plugin_factories"
        )
    ]
    assert "__init__(self, vllm_config: VllmConfig, engine_index: int = 0)" in base
    assert {
        name for name in ("record(", "log(", "log_engine_initialized(") if f"def {name}" in base
    } == {"record(", "log(", "log_engine_initialized("}
    counters = (root / "v1" / "spec_decode" / "metrics.py").read_text()
    for name in (
        "num_drafts",
        "num_draft_tokens",
        "num_accepted_tokens",
        "num_accepted_tokens_per_pos",
    ):
        assert f"    {name}: " in counters


def first_tokens(decoded: Decoded) -> list[list[int]]:
    """Before near-ties can matter."""
    return [answer.tokens[:4] for answer in decoded.answers]


def check(decoded: Decoded, drafts: bool) -> None:
    """Tokens, clocks, log-probabilities and acceptance are there."""
    for answer in decoded.answers:
        assert 1 <= len(answer.tokens) <= TOKENS
        assert 0 < answer.first_token_seconds <= answer.seconds <= decoded.seconds + 1e-3
        assert answer.top_logprobs is not None
        assert [len(row) for row in answer.top_logprobs] == [3] * len(answer.tokens)
        assert (
            sum(answer.acceptance.accepted_at)
            == answer.acceptance.accepted
            <= answer.acceptance.drafted
        )
    if drafts:
        assert sum(answer.acceptance.rounds for answer in decoded.answers) > 0
