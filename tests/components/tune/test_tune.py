"""The tuner: a search bounded by configs and traces, a choice that never rests on noise, and
refusals."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from draftwell.components.prompts.prompt import Prompt
from draftwell.components.replay.replay import replay_strategy
from draftwell.components.replay.texts import Texts, read_texts
from draftwell.components.replay.trace_model import RolloutExhausted, TracedText
from draftwell.components.report.machine import using_threads
from draftwell.components.tune import tune as tune_step
from draftwell.components.tune.evaluator import Measured, Quality
from draftwell.components.tune.evidence import Trial, TuningEvidence
from draftwell.components.tune.search import search
from draftwell.components.tune.search.search import artifact_digest
from draftwell.components.tune.search.space import (
    MEASURED,
    REPLAYED,
    combinations,
    nearest_default,
    replayable,
    rollout_needed,
)
from draftwell.components.tune.settings import Constraints, TuneSettings
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.errors import ContextTooLong, DraftwellError
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import (
    PLAIN,
    STRATEGIES,
    StrategyChoice,
    StrategyResources,
    build_strategy,
)
from tests.support.collecting import collect_traces
from tests.support.errors import raises_code
from tests.support.loop.scripted_clock import Clock, gamma
from tests.support.loop.tuning import ORIGIN, PROFILE, RESOURCES, run_tuner
from tests.support.models.tiny import pair_of, table_pair

PROMPTS = [
    Prompt(f"p{i}", None, [text])
    for i, text in enumerate(
        ["hello world", "abc", "so it goes", "xyzzy!", "ok?", "1984", "q", "hm"]
    )
]


@pytest.fixture(scope="module")
def pair() -> LoadedPair:
    return table_pair()


@pytest.fixture(scope="module")
def trace(pair: LoadedPair, tmp_path_factory: pytest.TempPathFactory) -> TraceSet:
    return collect_traces(
        pair, PROMPTS, tmp_path_factory.mktemp("trace"), max_tokens=16, rollout=8, batch=4
    )


LOSSY = Constraints(lossless_only=False, max_quality_loss=0.1, max_rouge_l_loss=2.0)


def judge(prompts: Sequence[Prompt], measured: Measured) -> Quality:
    """Outputs of a scripted clock are all zeros: the target's own."""
    return Quality(1.0)


def by_calls(losses: dict[int, float], rouge: dict[int, float] | None = None) -> Any:
    """A judge that tells configs apart by the target calls that a `Calls` gave them; plain
    decoding's are 16."""
    return lambda prompts, measured: Quality(
        1.0 - losses.get(measured.calls[0], 0.0),
        (rouge or {}).get(measured.calls[0], 30.0) if rouge is not None else None,
    )


class Calls(Clock):
    """A clock whose lossy configs have their own numbers of target calls: csd's are its gamma,
    others' 9."""

    def __call__(
        self, configs: Sequence[StrategyChoice], prompts: Sequence[Prompt], **more: Any
    ) -> list[Measured]:
        results = super().__call__(configs, prompts, **more)
        own = {"autoregressive": lambda config: 16, "csd": gamma}
        return [
            Measured(
                result.seconds,
                result.outputs,
                [own.get(config.name, lambda config: 9)(config)] * len(prompts),
            )
            for config, result in zip(configs, results, strict=True)
        ]


def run(pair: LoadedPair, trace: TraceSet, evaluate: Any, **settings: Any) -> TuningEvidence:
    return run_tuner(
        pair,
        trace,
        PROMPTS,
        evaluate,
        **{"trials": 30, "max_tokens": 16, "quality": judge, "profile": PROFILE, **settings},
    )


@pytest.mark.parametrize("name", [*REPLAYED, *MEASURED])
def test_every_point_of_a_space_is_a_valid_config_that_matters(name: str) -> None:
    space = (REPLAYED | MEASURED)[name]
    for choice in combinations(name):
        build_strategy(choice.name, dict(choice.parameters))
    for values in space.values():
        assert len(values) > 1
    first = nearest_default(name, combinations(name))
    build_strategy(name, dict(first.parameters))
    cls = STRATEGIES[name]
    assert cls.lossless == (".lossless." in cls.__module__)
    assert cls.lossless or name in MEASURED, "a lossy strategy writes other texts than the trace"


def gammas_of(name: str, rollout: int) -> list[int | None]:
    return [one.parameters["num_speculative_tokens"] for one in replayable(name, rollout, PROFILE)]


def test_rollouts_bound_the_space() -> None:
    """PEARL drafts gamma tokens behind gamma − 1 unverified ones; its own gamma is 10 under this
    profile."""
    assert gammas_of("vanilla_sd", 5) == [1, 2, 3, 4, 5]
    assert gammas_of("pearl", 4) == gammas_of("pearl", 3) == [1, 2]
    assert gammas_of("pearl", 18) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert gammas_of("pearl", 19) == [None, 1, 2, 3, 4, 5, 6, 7, 8]
    # s is Eq. 6's with a longest draft; without one 18 drafts fit into a pass over 33 tokens
    for longest, needed in ((4, 2 * 4 - 1), (32, 2 * 10 - 1), (None, 2 * 18 - 1)):
        spide = {"parallel": True, "overlap_tau": 0.0, "max_draft": longest}
        assert rollout_needed(StrategyChoice("spide", spide), PROFILE) == needed
    points = [choice.parameters for choice in replayable("spide", 8, PROFILE)]
    assert {(p["parallel"], p["overlap_tau"], p["max_draft"]) for p in points} == {
        *((False, 0.0, longest) for longest in (None, 4, 8, 16)),
        (True, 0.0, 4),
        *((True, tau, longest) for tau in (0.05, 0.2) for longest in (None, 4, 8, 16)),
    }


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("sprinter", {"tau": None}),  # the verifier's own threshold
        ("csd", {"num_speculative_tokens": 6, "min_count": 6, "tau": 0.01}),
        ("pearl", {"num_speculative_tokens": None}),  # as many as the profile says
    ],
)
def test_the_nearest_to_the_defaults(name: str, parameters: dict[str, Any]) -> None:
    assert nearest_default(name, combinations(name)).parameters == parameters


@pytest.mark.parametrize("gamma", [2, 5])
def test_pearl_needs_as_long_a_rollout_as_the_bound_says(gamma: int) -> None:
    """Of the first draft the first token is right and the second wrong, so gamma − 1 unverified
    tokens and gamma more stand behind it."""
    parameters = {"num_speculative_tokens": gamma}
    needed = rollout_needed(StrategyChoice("pearl", parameters), PROFILE)
    assert needed == 2 * gamma - 1

    def texts(rollout: int) -> Texts:
        drafts = [[10, *[99] * (rollout - 1)], *[[99] * rollout] * 15]
        figures = [[0.5] * rollout] * 16
        text = TracedText("t", [1, 2, *range(10, 26)], 2, drafts, figures, figures)
        return Texts([text], 16, frozenset(), rollout)

    assert replay_strategy(texts(needed), "pearl", parameters, RESOURCES, PROFILE).exact
    with pytest.raises(RolloutExhausted):
        replay_strategy(texts(needed - 1), "pearl", parameters, RESOURCES, PROFILE)


def test_drafts_of_fixed_length_are_replayed_exactly_and_the_others_say_so(
    pair: LoadedPair, trace: TraceSet
) -> None:
    clock = Clock({"autoregressive": 1.0})
    found = run(pair, trace, clock, strategies=["vanilla_sd", "pearl", "svip"], trials=60)
    pearls = [trial for trial in found.trials if trial.strategy == "pearl"]
    assert {trial.parameters["num_speculative_tokens"] for trial in pearls} == {1, 2, 3, 4}
    inexact = [trial.strategy for trial in found.trials if not trial.exact]
    assert set(inexact) == {"svip"}
    assert found.rollouts is not None
    assert found.rollouts.model_dump() == {
        "length": 8,
        "beyond": {"vanilla_sd": 4, "pearl": 5},
        "inexact": len(inexact),
        "replayed": len(found.trials),
    }
    assert f"{len(inexact)} of {len(found.trials)} replays are" in found.rollouts.summary
    assert "5 of pearl" in found.rollouts.summary
    serial = run(pair, trace, clock, strategies=["prompt_lookup"]).rollouts
    assert serial is not None
    assert (serial.beyond, serial.inexact, serial.summary) == ({}, 0, "")


def test_what_has_no_effect_is_not_varied() -> None:
    """A serial SPIDE has no continuation for `overlap_tau` to end."""
    found = [choice.parameters for choice in combinations("spide")]
    taus = {
        parallel: {one["overlap_tau"] for one in found if one["parallel"] == parallel}
        for parallel in (False, True)
    }
    assert taus == {False: {0.0}, True: {0.0, 0.05, 0.2}}


def test_three_percent_in_noise_lose_to_plain_decoding(pair: LoadedPair, trace: TraceSet) -> None:
    clock = Clock({"autoregressive": 1.0, "vanilla_sd": 1.03, "spide": 0.9}, noise=0.3)
    tuned = run(pair, trace, clock, strategies=["vanilla_sd", "spide", "prompt_lookup"])
    best = max(tuned.confirmed[1:], key=lambda figure: figure.speedup or 0.0)
    assert (best.speedup_low or 0.0) < 1
    assert tuned.choice == PLAIN
    assert "nothing is surely faster" in tuned.reason


@pytest.mark.parametrize("count", [1, 7])
def test_few_prompts_choose_nothing(pair: LoadedPair, trace: TraceSet, count: int) -> None:
    """However clear it looks: on two prompts chance says "faster" twice in a quarter of all
    cases."""
    few = run_tuner(
        pair,
        trace,
        PROMPTS[:count],
        Clock({"autoregressive": 1.0, "vanilla_sd": 5.0}),
        strategies=["vanilla_sd"],
        max_tokens=16,
        trials=4,
    )
    assert few.choice == PLAIN
    assert f"{count} prompts are too few to choose anything else" in few.reason


def test_a_clear_winner_wins_over_a_clear_second(pair: LoadedPair, trace: TraceSet) -> None:
    clock = Clock({"autoregressive": 1.0, "vanilla_sd": 1.3, "spide": 1.6}, noise=0.05)
    tuned = run(pair, trace, clock, strategies=["vanilla_sd", "spide", "prompt_lookup"])
    assert tuned.choice.name == "spide"
    assert tuned.measured[0].strategy == "autoregressive"
    assert "times as fast as autoregressive" in tuned.reason
    assert tuned.choice in clock.asked
    confirmed = {figure.strategy for figure in tuned.measured if figure.confirmed}
    assert confirmed == {"autoregressive", "spide"}, "serial and parallel are the two fastest here"


def test_the_shortlist_is_the_predicted_best_of_each_strategy(
    pair: LoadedPair, trace: TraceSet
) -> None:
    clock, names = Clock({"autoregressive": 1.0}), ["vanilla_sd", "spide", "prompt_lookup"]
    tuned = run(pair, trace, clock, measured=4, trials=60, strategies=names)
    assert clock.asked[0] == PLAIN
    assert len(clock.asked) == 5
    spides = [choice for choice in clock.asked if choice.name == "spide"]
    assert {choice.parameters["parallel"] for choice in spides} == {False, True}
    for name in ("vanilla_sd", "prompt_lookup"):
        tried = [trial for trial in tuned.trials if trial.strategy == name]
        best = min(tried, key=lambda trial: trial.predicted_seconds_per_token)
        assert best.choice in clock.asked
    texts = read_texts(trace)
    for trial in tuned.trials[:3]:
        again = replay_strategy(
            texts, trial.strategy, trial.parameters, RESOURCES, PROFILE, extend=True
        )
        assert trial.predicted_seconds_per_token == again.predicted_seconds_per_token
        assert trial.target_calls_per_token == again.stats.calls_per_token
        assert (trial.divergence, trial.source, trial.exact) == (0.0, "replayed", again.exact)


def test_a_prompt_that_is_too_long_is_named_before_anything_is_measured(
    pair: LoadedPair, trace: TraceSet
) -> None:
    clock = Clock({"autoregressive": 1.0})
    prompts = [*PROMPTS, Prompt("the long one", None, ["a" * 500])]
    with raises_code(
        "context_too_long",
        "prompt the long one",
        "500 tokens",
        "context of 512",
        error=ContextTooLong,
    ):
        run_tuner(pair, trace, prompts, clock, quality=judge, trials=3, max_tokens=16)
    assert clock.calls == []


def test_evidence_is_plain_json_and_complete(pair: LoadedPair, trace: TraceSet) -> None:
    tuned = run(pair, trace, Clock({"autoregressive": 1.0, "spide": 2.0}), trials=12)
    evidence = json.loads(json.dumps(tuned.to_json(), allow_nan=False))
    assert TuningEvidence.read(evidence) == tuned
    assert evidence["schema_version"] == 3
    assert evidence["trace_digest"] == trace.digest()
    assert evidence["device_class"] == "cpu-test"
    assert (evidence["max_tokens"], evidence["replayed_tokens"]) == (16, 16)
    assert evidence["choice"] == tuned.choice.to_json()
    assert evidence["artifacts"] == {
        kind: artifact_digest(artifact) for kind, artifact in RESOURCES.artifacts.items()
    }
    assert evidence["constraints"] == {
        "lossless_only": True,
        "max_quality_loss": None,
        "max_rouge_l_loss": None,
        "max_cost_ratio": None,
    }
    assert {"machine", "prompts_digest", "seed", "fingerprint", "rungs"} <= set(evidence)
    assert 0 < sum(trial.source == "replayed" for trial in tuned.trials) <= 12
    assert tuned.left_out["sprinter"].startswith("it is lossy")
    for figure in tuned.measured:
        assert figure.speedup_low <= figure.speedup <= figure.speedup_high
        assert (figure.predicted_seconds_per_token is None) == (figure.strategy in MEASURED)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The strategies that are replayed, one after the other."""
    made: list[str] = []
    monkeypatch.setattr(
        search,
        "replay_strategy",
        lambda *args, **more: made.append(args[1]) or replay_strategy(*args, **more),
    )
    return made


def test_the_same_seed_tries_the_same_and_a_study_file_goes_on(
    pair: LoadedPair,
    trace: TraceSet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    replays: list[str],
) -> None:
    def replays_of(**more: Any) -> tuple[list[Trial], int]:
        """The trials, and how many of them were replayed now."""
        replays.clear()
        settings = {"strategies": ["spide"], "trials": 8, "study": study, **more}
        tuned = run(pair, trace, Clock({"autoregressive": 1.0}), **settings)
        return tuned.trials, replays.count("spide")

    def with_table(table: AcceptanceTable) -> StrategyResources:
        return StrategyResources(
            {**RESOURCES.artifacts, "acceptance_table": table}, deterministic=True
        )

    study = tmp_path / "trials.jsonl"
    first, count = replays_of()
    assert count == 8
    assert replays_of(study=None) == (first, 8)
    assert replays_of() == (first, 0)
    longer, count = replays_of(trials=10)
    assert (longer[:8], len(longer), count) == (first, 10, 2)
    assert replays_of(max_tokens=8)[1] == 8, "another question has trials of its own"
    other = with_table(AcceptanceTable([9] * 20, [1] * 20, ORIGIN))
    assert replays_of(resources=other)[1] == 8, "so has another table"
    later = ORIGIN.model_copy(update={"git_commit": "c" * 40})
    AcceptanceTable.empty(later).save(tmp_path / "table")
    same = with_table(AcceptanceTable.load(tmp_path / "table"))
    monkeypatch.setattr(
        f"{__name__}.PROFILE", HardwareProfile(1.0, {1: 10.0, 4: 11.0, 8: 12.0}, 0.1, later)
    )
    assert replays_of(resources=same) == (first, 0), "not the same ones of another commit"


def test_without_a_limit_every_configuration_is_replayed(pair: LoadedPair, trace: TraceSet) -> None:
    """The tuner chooses from the best of all, not from those that a sampler happened to propose."""
    told: list[tuple[int, int, str]] = []
    names = ["vanilla_sd", "svip"]
    tuned = run(
        pair,
        trace,
        Clock({}),
        trials=None,
        strategies=names,
        progress=lambda *row: told.append(row),
    )
    everything = [choice for name in names for choice in replayable(name, 8, PROFILE)]
    assert [trial.choice for trial in tuned.trials] == everything
    assert [row[:2] for row in told] == [
        (done, len(everything)) for done in range(1, len(everything) + 1)
    ]


def test_a_search_that_was_killed_goes_on(
    pair: LoadedPair, trace: TraceSet, tmp_path: Path, replays: list[str]
) -> None:
    settings: dict[str, Any] = {"strategies": ["vanilla_sd"], "trials": None}
    whole = run(pair, trace, Clock({}), **settings).trials
    settings["study"] = tmp_path / "trials.jsonl"

    def dies(done: int, total: int, strategy: str) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(pair, trace, Clock({}), progress=dies, **settings)
    replays.clear()
    assert run(pair, trace, Clock({}), **settings).trials == whole
    assert replays.count("vanilla_sd") == len(whole) - 5


def test_a_broken_line_costs_one_replay(
    pair: LoadedPair, trace: TraceSet, tmp_path: Path, replays: list[str]
) -> None:
    """Whatever stands in the file: the half line of a process that was killed, or a line that
    somebody has damaged."""
    file = tmp_path / "trials.jsonl"
    settings: dict[str, Any] = {"strategies": ["vanilla_sd"], "trials": None, "study": file}
    whole = run(pair, trace, Clock({}), **settings).trials
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:3], b'{"search": 3}\n', *lines[4:-1], lines[-1][:-30]]))
    for needed in (3, 1):  # two trials and plain decoding; then plain decoding alone
        replays.clear()
        assert run(pair, trace, Clock({}), **settings).trials == whole
        assert len(replays) == needed


def test_a_limit_covers_every_value_before_it_repeats_one(
    pair: LoadedPair, trace: TraceSet
) -> None:
    tuned = run(pair, trace, Clock({}), constraints=LOSSY, strategies=["csd"], explored=5)
    tried = [trial.parameters for trial in tuned.trials]
    assert {len({point[name] for point in tried}) for name in ("min_count", "tau")} == {4, 5}, (
        "all values of both"
    )
    few = run(
        pair, trace, Clock({}), trials=12, strategies=["vanilla_sd", "prompt_lookup", "spide"]
    )
    counted = Counter(trial.strategy for trial in few.trials)
    assert counted == {"vanilla_sd": 4, "prompt_lookup": 4, "spide": 4}


def test_lossy_strategies_need_a_limit_of_their_loss(pair: LoadedPair, trace: TraceSet) -> None:
    """The floor is data of the gate, and components have no number of their own."""
    with raises_code("no_quality_limit"):
        run(pair, trace, Clock({}), constraints=Constraints(lossless_only=False))


def test_a_tuning_that_was_killed_in_the_second_rung_measures_the_rest_only(
    pair: LoadedPair, trace: TraceSet, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "study": tmp_path / "trials.jsonl",
        "rungs": tmp_path / "rungs.jsonl",
        "strategies": ["vanilla_sd", "csd"],
        "constraints": LOSSY,
        "measured": 5,
    }
    speeds = {"autoregressive": 1.0, "vanilla_sd": 1.3, "csd": 1.2}
    whole = Clock(speeds)
    expected = run(pair, trace, whole, **settings | {"study": None, "rungs": None})
    rungs = [i for i, (configs, _, fresh) in enumerate(whole.calls, 1) if not fresh]
    assert len(rungs) >= 2
    with pytest.raises(KeyboardInterrupt):
        run(pair, trace, Clock(speeds, die_at=rungs[1]), **settings)
    second = Clock(speeds)
    assert run(pair, trace, second, **settings) == expected
    assert second.calls == whole.calls[rungs[1] - 1 :]


def test_a_tuning_with_other_threads_measures_anew(
    pair: LoadedPair, trace: TraceSet, tmp_path: Path
) -> None:
    """Seconds of one thread beside seconds of two would be compared as if a config were twice as
    fast."""
    settings: dict[str, Any] = {
        "study": tmp_path / "trials.jsonl",
        "rungs": tmp_path / "rungs.jsonl",
        "strategies": ["vanilla_sd", "csd"],
        "constraints": LOSSY,
    }
    first, same, other = Clock({"vanilla_sd": 1.3}), Clock({}), Clock({"vanilla_sd": 1.3})
    with using_threads(1):
        run(pair, trace, first, **settings)
        run(pair, trace, same, **settings)
    assert same.calls == []
    with using_threads(2):
        run(pair, trace, other, **settings)
        assert other.calls == first.calls, "explored and measured once more"


def test_explored_configs_are_measured_briefly(pair: LoadedPair, trace: TraceSet) -> None:
    clock = Clock({"autoregressive": 1.0})
    evidence = run(pair, trace, clock, constraints=LOSSY, explored=5)
    explored = [trial for trial in evidence.trials if trial.source == "measured"]
    for name in ("csd", "fuzzy_sd", "mentored", "lossy_sd"):
        tried = [trial.choice for trial in explored if trial.strategy == name]
        assert len(set(tried)) == len(tried) == 5
        assert tried[0] == nearest_default(name, combinations(name))
    brief = [prompts for configs, prompts, fresh in clock.calls if fresh][:-1]
    assert all(prompts == ["p0", "p1"] for prompts in brief)
    assert sum(configs == [PLAIN] for configs, _, fresh in clock.calls if fresh) == 1
    assert {(one.divergence, one.target_calls_per_token) for one in explored} == {(0.0, 10 / 16)}


def test_few_tokens_do_not_drop_what_may_keep_to_the_limit(
    pair: LoadedPair, trace: TraceSet
) -> None:
    """On the two explored prompts csd loses .18 and .05, on average more than the limit: the
    confirmation decides."""

    def quality(prompts: Sequence[Prompt], measured: Measured) -> Quality:
        losses = {"p0": 0.18, "p1": 0.05} if measured.calls[0] != 16 else {}
        return Quality(1.0 - sum(losses.get(one.id, 0.0) for one in prompts) / len(prompts))

    names = ("vanilla_sd", "csd")
    clock = Calls({"csd": 2.0})
    settings: dict[str, Any] = {"strategies": names, "quality": quality, "explored": 2}
    evidence = run(pair, trace, clock, constraints=LOSSY, **settings)
    explored = [trial for trial in evidence.trials if trial.source == "measured"]
    assert all(trial.divergence == pytest.approx(0.115) for trial in explored)
    assert evidence.choice.name == "csd"


def test_quality_binds(pair: LoadedPair, trace: TraceSet) -> None:
    """csd is by far the fastest; how much it writes that is not the target's decides."""
    speeds = {"autoregressive": 1.0, "csd": 3.0, "vanilla_sd": 1.5}
    settings: dict[str, Any] = {"strategies": ["csd", "vanilla_sd"], "explored": 30}
    settings["quality"] = by_calls({2: 0.5, 3: 0.5, 4: 0.5, 6: 0.1, 8: 0.11})
    loose = run(pair, trace, Calls(speeds), constraints=LOSSY, **settings)
    assert (loose.choice.name, loose.choice.parameters["num_speculative_tokens"]) == ("csd", 6)
    tight = Constraints(lossless_only=False, max_quality_loss=0.05)
    strict = run(pair, trace, Calls(speeds), constraints=tight, **settings)
    assert strict.choice.name == "vanilla_sd"
    forbidden = run(pair, trace, Calls(speeds), measured=9)
    assert forbidden.choice.name == "vanilla_sd"
    assert forbidden.left_out["csd"].startswith("it is lossy")


def test_rouge_binds_where_there_are_references(pair: LoadedPair, trace: TraceSet) -> None:
    settings: dict[str, Any] = {
        "strategies": ["csd", "vanilla_sd"],
        "explored": 30,
        "measured": 60,
        "constraints": LOSSY,
    }
    speeds = {"autoregressive": 1.0, "csd": 3.0, "vanilla_sd": 1.5}
    rouge = {16: 30.0, 2: 20.0, 3: 20.0, 4: 27.9, 6: 28.0, 8: 20.0}
    chosen = run(pair, trace, Calls(speeds), quality=by_calls({}, rouge), **settings)
    assert (chosen.choice.name, chosen.choice.parameters["num_speculative_tokens"]) == ("csd", 6)
    lower = run(pair, trace, Calls(speeds), quality=by_calls({}, rouge | {6: 27.0}), **settings)
    assert lower.choice.name == "vanilla_sd"
    assert any("ROUGE-L" in gone.why for rung in lower.rungs for gone in rung.dropped)


def test_cost_binds(pair: LoadedPair, trace: TraceSet) -> None:
    """In these texts n-grams are found often: prompt_lookup asks the target less than any vanilla
    SD does."""
    clock = Clock({"autoregressive": 1.0, "vanilla_sd": 3.0, "prompt_lookup": 1.5})
    settings: dict[str, Any] = {"strategies": ["vanilla_sd", "prompt_lookup"], "trials": 60}
    free = run(pair, trace, clock, **settings)
    assert free.choice.name == "vanilla_sd"
    costs = {trial.choice: trial.target_calls_per_token for trial in free.trials}
    vanilla = [trial for trial in free.trials if trial.strategy == "vanilla_sd"]
    base = costs[min(vanilla, key=lambda trial: trial.predicted_seconds_per_token).choice]
    least = min(costs[trial.choice] for trial in vanilla)
    fewer = min(cost for choice, cost in costs.items() if choice.name == "prompt_lookup")
    limit = (fewer + least) / 2 / base
    bound = run(pair, trace, clock, constraints=Constraints(max_cost_ratio=limit), **settings)
    assert bound.choice.name == "prompt_lookup"
    for figure in bound.confirmed[1:]:
        assert figure.cost_ratio == pytest.approx(costs[figure.choice] / base)
        assert figure.cost_ratio <= limit
    none = run(pair, trace, clock, constraints=Constraints(max_cost_ratio=0.01), **settings)
    assert none.choice == PLAIN
    assert "keeps to the constraints" in none.reason


def test_the_champion_is_beside_and_may_stay(pair: LoadedPair, trace: TraceSet) -> None:
    champion = StrategyChoice("svip", {"threshold": 0.37, "max_draft": 11})  # in no grid
    clock = Clock({"autoregressive": 1.0, "vanilla_sd": 1.2, "svip": 1.4})
    tuned = run(pair, trace, clock, strategies=["vanilla_sd"], champion=champion)
    assert tuned.choice == tuned.champion == champion
    assert tuned.to_json()["champion"] == champion.to_json()
    assert all(champion in configs for configs, _, _ in clock.calls)


@pytest.mark.parametrize(
    ("name", "parameters", "word"),
    [
        ("sprinter", {}, "verifier"),
        ("spide", {"gamma": 4}, "gamma"),
        ("vanished", {}, "unknown strategy"),
    ],
)
def test_a_champion_that_cannot_run_here_is_left_out(
    pair: LoadedPair, trace: TraceSet, name: str, parameters: dict[str, Any], word: str
) -> None:
    tuned = run(
        pair,
        trace,
        Clock({"autoregressive": 1.0, "vanilla_sd": 1.2}),
        strategies=["vanilla_sd"],
        champion=StrategyChoice(name, parameters),
    )
    assert word in tuned.left_out["champion"]
    assert (tuned.champion, tuned.choice.name) == (None, "vanilla_sd")


def test_a_champion_that_is_not_allowed_any_more_is_measured_and_not_chosen(
    pair: LoadedPair, trace: TraceSet
) -> None:
    clock = Clock({"autoregressive": 1.0, "vanilla_sd": 1.2, "csd": 2.0})
    tuned = run(pair, trace, clock, strategies=["vanilla_sd"], champion=StrategyChoice("csd"))
    assert tuned.choice.name == "vanilla_sd"
    (figure,) = [figure for figure in tuned.confirmed if figure.strategy == "csd"]
    assert "only lossless" in (figure.objection or "")


def test_what_cannot_be_tuned_is_refused_in_one_line(
    pair: LoadedPair, trace: TraceSet, tmp_path: Path
) -> None:
    clock = Clock({})
    bare = StrategyResources({"hardware_profile": PROFILE})
    foreign = LoadedPair(**{**vars(pair), "fingerprint": "e" * 64})
    alone = pair_of(pair.models["target"], None)
    other = HardwareProfile(1.0, {1: 1.0}, 0.1, Provenance(pair="big", fingerprint="d" * 64))
    cases: list[tuple[LoadedPair, TraceSet, dict[str, Any], str, str]] = [
        (pair, TraceSet(tmp_path / "empty"), {}, "", "holds no trace"),
        (foreign, trace, {}, "", "is a trace of pair tiny"),
        (pair, trace, {"strategies": ["vanila_sd"]}, "", "did you mean vanilla_sd"),
        (pair, trace, {"strategies": ["csd"]}, "not_tunable", "it is lossy"),
        (
            pair,
            trace,
            {"strategies": ["csd"], "constraints": LOSSY, "quality": None},
            "not_tunable",
            "nothing measures its quality",
        ),
        (
            pair,
            trace,
            {"strategies": ["spide"], "resources": bare},
            "not_tunable",
            "acceptance_table",
        ),
        (
            alone,
            trace,
            {"constraints": Constraints(max_cost_ratio=1.0)},
            "no_draft_model",
            "max_cost_ratio",
        ),
        (alone, trace, {"strategies": ["vanilla_sd"]}, "not_tunable", "it needs draft"),
        (pair, trace, {"trials": 0}, "bad_tune_setting", "trials"),
        (pair, trace, {"profile": other}, "foreign_profile", "pair big"),
    ]
    for which, traces, settings, code, named in cases:
        with pytest.raises(DraftwellError) as error:
            run(which, traces, clock, **settings)
        assert named in str(error.value)
        assert code in ("", error.value.code)
        assert "\n" not in str(error.value)
    with raises_code("no_prompts"):
        run_tuner(pair, trace, [], clock)
    with raises_code("bad_tune_setting", "max_quality_loss", "1.5"):
        Constraints(max_quality_loss=1.5)
    with raises_code("bad_tune_setting", "max_cost_ratio", "nan"):
        Constraints(max_cost_ratio=float("nan"))
    with raises_code("bad_tune_setting", "max_cost_ratio"):
        TuneSettings(constraints={"max_cost_ratio": 0.0})  # type: ignore[arg-type]
    assert clock.calls == []


def test_a_file_that_is_no_study_is_refused_and_kept(
    pair: LoadedPair, trace: TraceSet, tmp_path: Path
) -> None:
    text, database = tmp_path / "notes.txt", tmp_path / "others.db"
    text.write_text("not a database, and longer than the sixteen bytes of a header\n" * 40)
    with sqlite3.connect(database) as connection:
        connection.execute("create table diary (day text)")
    connection.close()
    for file in (text, database):
        before = file.read_bytes()
        with raises_code("not_a_study", file.name) as error:
            run(pair, trace, Clock({}), strategies=["vanilla_sd"], study=file)
        assert "\n" not in str(error.value)
        assert file.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "others.db"]


def test_without_a_possible_strategy_plain_decoding_remains(
    pair: LoadedPair, trace: TraceSet
) -> None:
    tuned = run(pair, trace, Clock({"autoregressive": 1.0}), strategies=["autoregressive"])
    assert (tuned.choice, tuned.trials) == (PLAIN, [])
    assert "nothing to compare" in tuned.reason


def test_a_digest_is_that_of_the_folder(tmp_path: Path) -> None:
    for kind, artifact in RESOURCES.artifacts.items():
        assert artifact.save(tmp_path / kind) == artifact_digest(artifact)
    empty, other = AcceptanceTable.empty(ORIGIN), AcceptanceTable([9] * 20, [1] * 20, ORIGIN)
    assert artifact_digest(empty) != artifact_digest(other)
    assert artifact_digest(empty) == artifact_digest(
        AcceptanceTable.empty(Provenance(pair="other", fingerprint="a" * 64))
    )


def test_hybrid_is_confirmed_as_it_is_by_default() -> None:
    rows = [
        ("suffix", {}),
        ("hybrid", {"drafter": "none", "max_draft": 8}),
        ("hybrid", {"drafter": "auto", "max_draft": 8}),
    ]
    trials = [
        Trial.of(
            StrategyChoice(name, parameters),
            predicted_seconds_per_token=1.0,
            target_calls_per_token=1.0,
        )
        for name, parameters in rows
    ]
    assert tune_step.default_among(trials) == trials[2].choice
    assert tune_step.default_among(trials[:2]) == trials[1].choice
    assert tune_step.default_among(trials[:1]) is None


def test_hybrid_is_confirmed_however_slow_it_looked(pair: LoadedPair, trace: TraceSet) -> None:
    """A busy moment may hide what is fastest: the first rungs have few prompts."""
    speeds = {"autoregressive": 1.0, "vanilla_sd": 1.3, "spide": 1.6, "hybrid": 0.5}
    clock = Clock(speeds, noise=0.05)
    tuned = run(pair, trace, clock, strategies=["vanilla_sd", "spide", "hybrid"])
    assert tuned.choice.name == "spide"
    assert {"autoregressive", "spide", "hybrid"} <= {one.strategy for one in tuned.confirmed}
