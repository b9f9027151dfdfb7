"""The gate as a station: measure a release against autoregressive decoding and the champion, and record the verdict."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.stations import Station, now
from flows.workspace import Workspace
from serving.runtime.types import DraftwellError

if TYPE_CHECKING:
    from components.gate import Check, GateVerdict
    from components.prompts import Prompt
    from registry.releases import ReleaseVersion
    from registry.store import Store
    from serving.runtime.artifacts.base import Artifact
    from serving.runtime.pair import LoadedPair

IDENTITY_PROMPTS, IDENTITY_TOKENS = 4, 32
BASELINE_PROMPTS, BASELINE_TOKENS = 6, 32
SHOWN = ("vanilla_sd", "prompt_lookup", "sprinter", "csd", "spide")
"""What is measured beside a release for a table; `make demo` waits for it, so other strategies are left to `draftwell bench`."""
COUNTED = ("autoregressive", *SHOWN)
"""Strategies whose deterministic counts are recorded as a pair's baseline."""


def artifacts_of(store: Store, release: ReleaseVersion, fingerprint: str) -> dict[str, Artifact]:
    """kind → artifact of everything that a release pins, except the draft, which the loaded pair has.

    The pair's fingerprint covers the draft's weights, so a release with another draft is refused with its artifacts.
    """
    from serving.runtime.bundle import artifact_classes

    found: dict[str, Artifact] = {}
    classes = artifact_classes()
    with tempfile.TemporaryDirectory() as place:
        for kind, version in release.pins.items():
            if kind != "distilled_draft":
                folder = store.download(store.resolve(kind, release.pair, version), Path(place) / kind)
                found[kind] = classes[kind].load(folder, fingerprint=fingerprint)
    return found


def gate_release(station: Station, prompts: Sequence[Prompt], *, alias: str | int = "candidate", device: str = "cpu", max_tokens: int = 64,
                 all_strategies: bool = False) -> dict[str, Any]:
    """Measure a release, judge it and keep the verdict with it.

    Args:
        all_strategies: measure the strategies in `SHOWN` beside it, for a table.
    Returns:
        `report` (of the bench), `passed`, `checks`, `release` (its number), `verdict`.
    """
    from components.evaluation import bench
    from components.gate import GateVerdict, judge
    from components.measuring import StrategyContender
    from registry.gates import load_gates
    from registry.releases import find_release, record_gate
    from registry.store import Store
    from serving.runtime.strategies import Kit

    store, name = Store(), station.workspace.spec.name
    release = find_release(store, name, device, alias)
    if release.fingerprint != station.pair.fingerprint:
        raise DraftwellError(f"{release.name} was made for models with fingerprint {release.fingerprint[:12]}, the loaded ones have "
                             f"{station.pair.fingerprint[:12]}: gate it with its own draft and dtype, or tune and publish again")
    mine = artifacts_of(store, release, release.fingerprint)
    config: Any = mine["decoding_config"]
    kit = Kit(mine, station.pair.special_tokens)
    champion = champion_of(store, name, device, besides=release.version)
    extra, notes = [], []
    if champion is not None and champion.fingerprint != release.fingerprint:
        notes.append(f"{champion.name}, the champion, belongs to other weights or dtype: not measured beside the candidate")
        champion = None
    if champion is not None:
        theirs = artifacts_of(store, champion, champion.fingerprint)
        chosen: Any = theirs["decoding_config"]
        extra.append(StrategyContender(station.pair, Kit(theirs, station.pair.special_tokens), (chosen.strategy, chosen.parameters),
                                       "champion"))
    configs: list[tuple[str, dict[str, Any]]] = [("autoregressive", {})]
    if all_strategies:
        configs += [(s, {}) for s in SHOWN if (s, {}) != (config.strategy, config.parameters)]
    if config.strategy != "autoregressive":
        configs.append((config.strategy, config.parameters))
    report = bench(station.pair, configs, prompts, kit, max_tokens=max_tokens, extra=extra, progress=station.bar)
    entries = report["strategies"]
    entry = next(e for e in entries.values() if e["strategy"] == config.strategy and e["parameters"] == config.parameters)
    rival = entries.get("champion")
    same = rival if rival is not None and rival["strategy"] == config.strategy else None
    verdict = judge(entry, rival, same, load_gates().model_dump())
    identity = identity_check(station, config.strategy, config.parameters, kit, prompts[:IDENTITY_PROMPTS])
    verdict = GateVerdict((*verdict.checks, *identity), (*verdict.notes, *notes))
    record_gate(store, record_of(release, verdict, champion))
    station.report("bench", report)
    return {"report": report, "verdict": verdict, "passed": verdict.passed, "release": release.version,
            "checks": [vars(c) for c in verdict.checks]}


def champion_of(store: Store, pair: str, device: str, besides: int) -> ReleaseVersion | None:
    """The champion, unless there is none or it is the candidate itself."""
    from registry.releases import find_release

    version = store.get_aliases("release", f"{pair}.{device}").get("champion")
    return None if version is None or version == besides else find_release(store, pair, device, version)


def record_of(release: ReleaseVersion, verdict: GateVerdict, champion: ReleaseVersion | None) -> Any:
    """The verdict in the registry's words."""
    from registry.gates import GateCheck, GateRecord

    checks = tuple(GateCheck(name=c.name, value=c.value, threshold=c.threshold, passed=c.passed) for c in verdict.checks)
    return GateRecord(pair=release.pair, device=release.device, release_version=release.version, pins=release.pins, passed=verdict.passed,
                      checks=checks, baseline_version=champion.version if champion else None, created=now())


def identity_check(station: Station, strategy: str, parameters: dict[str, Any], kit: Any, prompts: Sequence[Prompt]) -> tuple[Check, ...]:
    """Whether a lossless choice gives autoregressive's tokens in float32; nothing for a lossy one."""
    from components.evaluation import bench
    from components.gate import judge
    from serving.runtime.strategies import find_strategy

    if not find_strategy(strategy).lossless or strategy == "autoregressive":
        return ()
    exact = float32_pair(station.workspace) if station.pair.dtype != "float32" else station.pair
    report = bench(exact, [("autoregressive", {}), (strategy, parameters)], prompts, kit, max_tokens=IDENTITY_TOKENS, warmup=False,
                   cost_ratios=False)
    entry = next(e for e in report["strategies"].values() if e["strategy"] == strategy)
    return judge(entry, None, None, {"lossless_identical": True}).checks


def float32_pair(workspace: Workspace) -> LoadedPair:
    """The same pair in float32."""
    return workspace.in_dtype("float32").load()


def baseline_report(pair_name: str, say: Any, bar: Any = None) -> dict[str, Any]:
    """Deterministic counts of the strategies in `COUNTED` on the shipped prompts, in float32."""
    from components.counting import deterministic_report
    from components.prompts import demo_prompts

    pair = Workspace(pair_name, "float32", say).load()
    return deterministic_report(pair, [(name, {}) for name in COUNTED], demo_prompts(BASELINE_PROMPTS), BASELINE_TOKENS, progress=bar)


def judge_baseline(pair_name: str, say: Any, bar: Any = None) -> GateVerdict:
    """Compare this checkout's deterministic counts with the recorded ones."""
    from components.gate import compare_with_baseline
    from registry.gates import load_baseline, load_gates
    from registry.pairs import find_pair

    name = find_pair(pair_name).name
    recorded = load_baseline(name)
    if recorded is None:
        raise DraftwellError(f"pair {name} has no recorded baseline: record one with `draftwell gate --pair {name} --record`")
    return compare_with_baseline(baseline_report(pair_name, say, bar), recorded.model_dump(), load_gates().model_dump())
