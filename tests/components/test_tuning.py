"""The tuner: a search bounded by configs and traces, a choice that never rests on noise, and refusals."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from components import search
from components.collection import collect
from components.prompts import Prompt
from components.replay import read_texts, replay
from components.search_space import MEASURED, REPLAYED, Span, combinations, defaults, grid, some_of, space_of
from components.tuning import Config, tune
from serving.runtime.artifacts.acceptance_table import AcceptanceTable
from serving.runtime.artifacts.base import Provenance
from serving.runtime.artifacts.correction_memory import CorrectionMemory
from serving.runtime.artifacts.hardware_profile import HardwareProfile
from serving.runtime.pair import LoadedPair
from serving.runtime.strategies import STRATEGIES, Kit, build_strategy
from serving.runtime.trace import TraceSet
from serving.runtime.types import DraftwellError
from tests.components.tiny import pair_of, table_pair

PROMPTS = [Prompt(f"p{i}", None, [text]) for i, text in enumerate(["hello world", "abc", "so it goes", "xyzzy!", "ok?", "1984", "q", "hm"])]
ORIGIN = Provenance(pair="tiny", fingerprint="f" * 64, device_class="cpu-test")
PROFILE = HardwareProfile(1.0, {1: 10.0, 4: 11.0, 8: 12.0}, 0.1, ORIGIN)
KIT = Kit({"acceptance_table": AcceptanceTable.empty(ORIGIN), "hardware_profile": PROFILE,
           "correction_memory": CorrectionMemory.empty(ORIGIN)}, deterministic=True)


@pytest.fixture(scope="module")
def pair() -> LoadedPair:
    return table_pair()


@pytest.fixture(scope="module")
def trace(pair: LoadedPair, tmp_path_factory: pytest.TempPathFactory) -> TraceSet:
    return collect(pair, PROMPTS, tmp_path_factory.mktemp("trace"), max_tokens=16, rollout=8, batch=4)


@dataclass
class Times:
    seconds: list[float]
    tokens: list[int]


class Clock:
    """Measures by a table of speedups, with noise of its own on every prompt; remembers what it was asked."""

    def __init__(self, speedups: dict[str, float], noise: float = 0.0):
        self.speedups, self.noise, self.asked = speedups, noise, list[Config]()

    def __call__(self, configs: Sequence[Config], prompts: Sequence[Prompt]) -> list[Times]:
        self.asked = list(configs)
        rng = random.Random(1)
        return [Times([10.0 / self.speedups.get(name, 0.5) * (1 + rng.uniform(-self.noise, self.noise)) for _ in prompts],
                      [16] * len(prompts)) for name, _ in configs]


def run(pair: LoadedPair, trace: TraceSet, evaluate: Clock, **settings: Any) -> Any:
    return tune(pair, trace, PROMPTS, settings.pop("kit", KIT), PROFILE, evaluate=evaluate, **{"trials": 30, "max_tokens": 16, **settings})


@pytest.mark.parametrize("name", [*REPLAYED, *MEASURED])
def test_every_point_of_a_space_is_a_valid_config_that_matters(name: str) -> None:
    space = (REPLAYED | MEASURED)[name]
    for parameters in combinations(name):
        build_strategy(name, parameters)
    for values in space.values():
        assert len(values.values if isinstance(values, Span) else values) > 1
    build_strategy(name, defaults(name, space))
    assert STRATEGIES[name].lossless == (name in REPLAYED or name in ("duo_decoding", "specdec_pp"))


def test_rollouts_bound_the_space() -> None:
    assert max(point["num_speculative_tokens"] for point in grid(space_of("vanilla_sd", 5))) == 5
    first, *others = some_of("csd", 4, seed=3)
    assert first == {"num_speculative_tokens": 6, "min_count": 6, "tau": 0.01}
    assert first not in others
    assert some_of("csd", 4, seed=3) == [first, *others] != some_of("csd", 4, seed=4)


def test_three_percent_in_noise_lose_to_plain_decoding(pair: LoadedPair, trace: TraceSet) -> None:
    clock = Clock({"autoregressive": 1.0, "vanilla_sd": 1.03, "spide": 0.9}, noise=0.3)
    tuned = run(pair, trace, clock, strategies=["vanilla_sd", "spide", "prompt_lookup"])
    best = max(tuned.evidence["measured"][1:], key=lambda figure: figure["speedup"])
    assert best["speedup"] > 1 > best["speedup_low"]
    assert (tuned.strategy, tuned.parameters) == ("autoregressive", {})
    assert "nothing is surely faster" in tuned.evidence["reason"]


def test_a_clear_winner_wins_over_a_clear_second(pair: LoadedPair, trace: TraceSet) -> None:
    clock = Clock({"autoregressive": 1.0, "vanilla_sd": 1.3, "spide": 1.6}, noise=0.05)
    tuned = run(pair, trace, clock)
    assert tuned.strategy == "spide"
    assert tuned.evidence["measured"][0]["strategy"] == "autoregressive"
    assert "times as fast as autoregressive" in tuned.evidence["reason"]
    assert (tuned.strategy, tuned.parameters) in clock.asked


def test_the_shortlist_is_the_predicted_best_of_each_strategy(pair: LoadedPair, trace: TraceSet) -> None:
    clock = Clock({"autoregressive": 1.0})
    tuned = run(pair, trace, clock, measure_top=4, trials=60, strategies=["vanilla_sd", "spide", "prompt_lookup"])
    trials, asked = tuned.evidence["trials"], [name for name, _ in clock.asked]
    assert asked[0] == "autoregressive"
    assert set(asked) == {"autoregressive", "vanilla_sd", "spide", "prompt_lookup"}
    assert {p["parallel"] for name, p in clock.asked if name == "spide"} == {False, True}
    for name in ("vanilla_sd", "prompt_lookup"):
        best = min((t for t in trials if t["strategy"] == name), key=lambda t: t["predicted_seconds_per_token"])
        assert (name, best["parameters"]) in clock.asked
    gammas = {t["parameters"]["num_speculative_tokens"] for t in trials if t["strategy"] == "vanilla_sd"}
    assert gammas == set(range(1, 9))  # the trial budget covers this grid, so all of it was tried, up to K = 8
    texts = read_texts(trace)
    for trial in trials[:3]:
        again = replay(texts, trial["strategy"], trial["parameters"], KIT, PROFILE, extend=True)
        assert trial["predicted_seconds_per_token"] == again.predicted_seconds_per_token
        assert trial["exact"] == again.exact


def test_evidence_is_plain_json_and_complete(pair: LoadedPair, trace: TraceSet) -> None:
    logged: list[str] = []
    tuned = run(pair, trace, Clock({"autoregressive": 1.0, "spide": 2.0}), trials=12, log=lambda name, value, step: logged.append(name))
    evidence = json.loads(json.dumps(tuned.evidence, allow_nan=False))
    assert evidence == tuned.evidence
    assert evidence["trace_digest"] == trace.digest()
    assert evidence["device_class"] == "cpu-test"
    assert evidence["choice"] == {"strategy": tuned.strategy, "parameters": tuned.parameters}
    assert len(evidence["trials"]) <= 12
    assert logged == [f"predicted_seconds_per_token/{trial['strategy']}" for trial in evidence["trials"]]
    assert evidence["left_out"]["sprinter"].startswith("it is lossy")
    figure = evidence["measured"][1]
    assert figure["speedup_low"] <= figure["speedup"] <= figure["speedup_high"]
    assert figure["predicted_seconds_per_token"] is not None


def test_the_same_seed_tries_the_same_and_a_study_file_goes_on(pair: LoadedPair, trace: TraceSet, tmp_path: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock({"autoregressive": 1.0})
    settings = {"strategies": ["spide"], "trials": 8, "study": tmp_path / "study.db"}
    first = run(pair, trace, clock, **settings).evidence["trials"]
    assert first == run(pair, trace, clock, strategies=["spide"], trials=8).evidence["trials"]
    replays: list[str] = []
    real = search.replay
    monkeypatch.setattr(search, "replay", lambda *args, **more: replays.append(args[1]) or real(*args, **more))
    assert run(pair, trace, clock, **settings).evidence["trials"] == first
    assert replays == []
    longer = run(pair, trace, clock, **settings | {"trials": 10}).evidence["trials"]
    assert longer[:8] == first
    assert len(longer) == 10
    assert len(replays) >= 2
    replays.clear()
    run(pair, trace, clock, **settings, max_tokens=8)  # another question: its trials are its own
    assert replays


def test_lossy_strategies_need_quality(pair: LoadedPair, trace: TraceSet) -> None:
    clock = Clock({"autoregressive": 1.0, "csd": 3.0, "vanilla_sd": 1.5})
    settings = {"lossless_only": False, "measure_top": 9}
    below = run(pair, trace, clock, **settings, quality=lambda config: 0.89)
    assert below.strategy == "vanilla_sd"
    assert all(name != "csd" for name, _ in clock.asked)  # not even measured
    judged = below.evidence["quality"]
    assert [entry["quality"] for entry in judged if entry["strategy"] == "csd"] == [0.89] * 3
    assert {entry["strategy"] for entry in judged} == {"csd", "fuzzy_sd", "mentored", "lossy_sd"}
    assert run(pair, trace, clock, **settings, quality=lambda config: float("nan")).strategy == "vanilla_sd"
    gentle = run(pair, trace, clock, **settings, quality=lambda config: 0.9 if config[1].get("min_count") == 6 else 0.0)
    assert (gentle.strategy, gentle.parameters["min_count"]) == ("csd", 6)
    assert run(pair, trace, clock, measure_top=9).strategy == "vanilla_sd"
    assert "verifier" in gentle.evidence["left_out"]["sprinter"]
    assert "qualifier" in gentle.evidence["left_out"]["pyramid_fuzzy"]


def test_what_cannot_be_tuned_is_refused_in_one_line(pair: LoadedPair, trace: TraceSet, tmp_path: Path) -> None:
    clock = Clock({})
    bare = Kit({"hardware_profile": PROFILE})
    foreign = LoadedPair(**{**vars(pair), "fingerprint": "e" * 64})
    alone = pair_of(pair.models["target"], None)
    cases: list[tuple[LoadedPair, TraceSet, dict[str, Any], str]] = [
        (pair, TraceSet(tmp_path / "empty"), {}, "holds no trace"), (foreign, trace, {}, "is a trace of pair tiny"),
        (pair, trace, {"strategies": ["vanila_sd"]}, "did you mean vanilla_sd"), (pair, trace, {"strategies": ["csd"]}, "it is lossy"),
        (pair, trace, {"strategies": ["spide"], "kit": bare}, "it needs acceptance_table"),
        (alone, trace, {"strategies": ["vanilla_sd"]}, "it needs draft"), (pair, trace, {"trials": 0}, "at least 1")]
    for which, traces, settings, message in cases:
        with pytest.raises(DraftwellError, match=message) as error:
            run(which, traces, clock, **settings)
        assert "\n" not in str(error.value)
    with pytest.raises(DraftwellError, match="no prompts"):
        tune(pair, trace, [], KIT, PROFILE, evaluate=clock)
    other = HardwareProfile(1.0, {1: 1.0}, 0.1, Provenance(pair="big", fingerprint="d" * 64))
    with pytest.raises(DraftwellError, match="hardware profile belongs to pair big"):
        tune(pair, trace, PROMPTS, KIT, other, evaluate=clock)
    assert clock.asked == []


def test_without_a_possible_strategy_plain_decoding_remains(pair: LoadedPair, trace: TraceSet) -> None:
    tuned = run(pair, trace, Clock({"autoregressive": 1.0}), strategies=["autoregressive"])
    assert (tuned.strategy, tuned.evidence["trials"]) == ("autoregressive", [])
    assert "nothing to compare" in tuned.evidence["reason"]
