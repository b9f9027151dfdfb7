"""The gate as a pipeline step: measure a release against autoregressive decoding and the champion, and record the verdict."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.gate.settings import DEFAULTS, GateSettings
from flows.context import StepContext, artifact_prompts, now
from flows.steps.champion import champion_number, champion_of
from flows.workspace import Workspace
from serving.artifacts.kinds import refuse_other_device
from serving.device import device_type
from serving.errors import DraftwellError

if TYPE_CHECKING:
    from components.bench.runner import StrategyContender
    from components.bench.schema import BenchEntry, BenchReport
    from components.gate.baseline_counts import CountsReport
    from components.gate.verdict import Check, GateVerdict, Thresholds
    from components.prompts.prompt import Prompt
    from registry.gates import GateRecord
    from registry.releases import ReleaseVersion
    from registry.store import Store
    from serving.artifacts.base import Artifact
    from serving.artifacts.decoding_config import DecodingConfig, SampledChoice
    from serving.runtime.pair import LoadedPair
    from serving.runtime.strategies import StrategyResources

IDENTITY_PROMPTS, IDENTITY_TOKENS = 8, 64
"""Enough tokens that a lossy strategy leaves the target's choice: CSD's rescues are one or two in a hundred."""
RUNS_IN_DOUBT = 3
START_LIMIT = 120.0
"""Seconds that a start may take where the thresholds name none."""
BASELINE_PROMPTS, BASELINE_TOKENS = 6, 32
SHOWN = ("vanilla_sd", "prompt_lookup", "sprinter", "csd", "spide")
"""What is measured together with a release for a table; `make demo` waits for it, so other strategies are left to `draftwell bench`."""
COMPARED = ("tokens_per_second", "speedup", "speedup_low", "acceptance_rate", "mat", "cost_ratio", "ttft_ms", "tpot_ms", "tpot_p95_ms")
"""Metrics of the candidate's bench that MLflow compares releases by."""
COUNTED = ("autoregressive", *SHOWN)
"""Strategies whose deterministic counts are recorded as a pair's baseline."""


def artifacts_of(store: Store, release: ReleaseVersion, fingerprint: str) -> dict[str, Artifact]:
    """kind → artifact of everything that a release pins, except the draft, which the loaded pair has.

    The pair's fingerprint covers the draft's weights, so a release with another draft is refused with its artifacts.
    """
    from serving.artifacts.kinds import find_kind

    found: dict[str, Artifact] = {}
    with tempfile.TemporaryDirectory() as place:
        for kind, version in release.pins.items():
            if kind != "distilled_draft":
                folder = store.download(store.resolve(kind, release.pair, version), Path(place) / kind)
                found[kind] = find_kind(kind).load_class().load(folder, fingerprint=fingerprint)
    return found


def gate_release(step: StepContext, prompts: Sequence[Prompt], settings: GateSettings = DEFAULTS, *, alias: str | int = "candidate",
                 beside: Sequence[GateVerdict] = ()) -> dict[str, Any]:
    """Measure a release, judge it and keep the verdict with it.

    Candidate and champion are measured in one run, prompt by prompt in turn, together with autoregressive decoding; where that is no
    clear pass, once more in several runs, and only these count. The champion itself can be judged again; its record stays.

    Args:
        prompts: candidates: those that the release's artifacts were made from are left out, and of the others `settings.limit` taken.
        beside: verdicts of other parts of the gate, such as the counts: kept in the record with this one, so that they bind promotion.
    Returns:
        of this part alone: `report` (of the bench, as JSON), `passed`, `checks`, `release` (its number), `verdict`.
    """
    from components.gate.own_prompts import untouched_prompts
    from components.gate.temperatures import judge_artifacts
    from components.gate.verdict import Thresholds
    from registry.bundles.build import build_to_judge
    from registry.gates import load_gates
    from registry.releases import find_release
    from registry.store import Store
    from serving.bundle.bundle import open_bundle
    from serving.runtime.strategies import StrategyResources

    store, thresholds = Store(), Thresholds.of(load_gates().model_dump())
    release = find_release(store, step.workspace.spec.name, gated_device(step, settings), alias)
    if release.fingerprint != step.pair.fingerprint:
        raise DraftwellError(f"{release.name} was made for models with fingerprint {release.fingerprint[:12]}, the loaded ones have "
                             f"{step.pair.fingerprint[:12]}: gate it with its own draft and dtype, or tune and publish again",
                             code="other_models")
    mine = artifacts_of(store, release, release.fingerprint)
    config: Any = mine["decoding_config"]
    for artifact in mine.values():
        refuse_other_device(artifact.kind, artifact.provenance.device_class, release.device, f"the {artifact.kind} of {release.name}")
    resources = StrategyResources(mine, step.pair.special_tokens)
    prompts, disjoint = untouched_prompts(prompts, artifact_prompts(mine, step.workspace.files().draft), settings.limit)
    rival = find_rival(step, store, release)
    judging = BenchJudge(config.strategy, config.parameters, thresholds)
    report, verdict = measured(step, prompts, judging, resources, rival, settings)
    verdict += disjoint + judge_artifacts(config, mine)
    if config.sampled is not None:
        verdict += sampled_verdict(step, prompts, config.sampled, thresholds, resources, rival, settings)
    if thresholds.lossless_identical:
        verdict += identity_verdict(step, config, resources, prompts[:IDENTITY_PROMPTS])
    if rival.unmeasured:
        verdict += missing("champion measured", rival.unmeasured, settings.unmeasured)
    verdict += prediction_check(step, mine, rival.comparable, thresholds, settings.unmeasured)
    written = step.report("bench", report.to_json(), per_device=True)
    with tempfile.TemporaryDirectory() as place:
        bundle = build_to_judge(store, release, step.workspace.spec, step.workspace.files(), Path(place))
        verdict += footprint_check(step, bundle, release, thresholds)
        if not settings.dry_run and serves(step, release):
            step.workspace.say(f"{release.name} is the champion: its record, from before, is kept")
        elif not settings.dry_run:
            total = sum(beside, start=verdict)
            record = record_of(release, total, rival.release, open_bundle(bundle).manifest.digest)
            keep_verdict(store, record, total, report, judging.entry(report.strategies), written)
            if total.passed:
                keep_bundle(step, bundle, release, rival)
    return {"report": report.to_json(), "verdict": verdict, "passed": verdict.passed, "release": release.version,
            "checks": [vars(c) for c in verdict.checks]}


def keep_bundle(step: StepContext, bundle: Path, release: ReleaseVersion, rival: ChampionComparison) -> None:
    """Keep the bundle that passed, and the champion's, for a deployment on this machine."""
    from registry.bundles.judged import keep_judged

    try:
        keep_judged(bundle, release, others=[rival.release.version] if rival.release else [])
    except OSError as error:  # the verdict counts more: without the bundle a deployment builds it again and says so
        step.workspace.say(f"the judged bundle was not kept ({error}): `draftwell deploy` will build it again")


def gated_device(step: StepContext, settings: GateSettings) -> str:
    """The device of the release: the one that the models are loaded on, since nothing else is measured."""
    loaded = device_type(step.pair.device)
    if settings.device not in (None, loaded):
        raise DraftwellError(f"the gate is for {settings.device}, and the models are loaded on {loaded}: load them with "
                             f"--device {settings.device}", code="gated_on_other_device")
    return loaded


def measured(step: StepContext, prompts: Sequence[Prompt], judging: BenchJudge, resources: StrategyResources, rival: ChampionComparison,
             settings: GateSettings, temperature: float = 0.0) -> tuple[BenchReport, GateVerdict]:
    """The bench of a candidate, and the verdict on it; what left doubt is measured again, and is in the report as `in_doubt`."""
    from components.bench.bench import run_bench
    from components.bench.settings import BenchSettings
    from flows.settings import quality_floor
    from serving.runtime.strategies import PLAIN, StrategyChoice

    candidate = StrategyChoice(judging.strategy, judging.parameters)
    both = [PLAIN] if candidate == PLAIN else [PLAIN, candidate]
    others = [choice for name in SHOWN if (choice := StrategyChoice(name)) not in both] if settings.all_strategies else []
    once = BenchSettings(max_tokens=settings.max_tokens, temperature=temperature, quality_floor=quality_floor())
    report = run_bench(step.pair, [PLAIN, *others, *both[1:]], prompts, resources, once, extra=rival.contenders, progress=step.bar)
    verdict = judging.of(report)
    if not judging.doubts(verdict):
        return report, verdict
    step.workspace.say(f"no clear pass: measured again, {RUNS_IN_DOUBT} runs")
    again = once.model_copy(update={"runs": RUNS_IN_DOUBT, "cost_ratios": False})
    longer = run_bench(step.pair, both, prompts, resources, again, extra=rival.contenders, progress=step.bar)
    return report.model_copy(update={"in_doubt": longer.strategies}), judging.of(longer)


def sampled_verdict(step: StepContext, prompts: Sequence[Prompt], choice: SampledChoice, thresholds: Thresholds,
                    resources: StrategyResources, rival: ChampionComparison, settings: GateSettings) -> GateVerdict:
    """The verdict on the choice for sampled requests, measured at its temperature; texts are not compared token by token there."""
    from components.gate.temperatures import judge_sampled

    judging = BenchJudge(choice.strategy, choice.parameters, replace(thresholds, lossless_identical=False))
    only = settings.model_copy(update={"all_strategies": False})
    report, verdict = measured(step, prompts, judging, resources, rival.at(choice.temperature), only, choice.temperature)
    step.report("bench_sampled", report.to_json(), per_device=True)
    return judge_sampled(verdict, judging.entry(report.in_doubt or report.strategies), choice.temperature, thresholds)


def serves(step: StepContext, release: ReleaseVersion) -> bool:
    """Whether a release is the champion and its record is valid: one slow minute of the machine must not withdraw what serves."""
    from registry.releases import gate_record, objection

    return champion_number(step.workspace, release.device) == release.version and objection(release, gate_record(release)) is None


@dataclass(frozen=True)
class ChampionComparison:
    """The champion that a candidate is compared with, if there is one.

    Args:
        release: None where there is none other than the candidate.
        contenders: the champion with its own artifacts, or nobody.
        comparable: its artifacts, where they are for the very models of the candidate.
        unmeasured: why a champion is not measured, or None.
    """

    release: ReleaseVersion | None = None
    contenders: tuple[StrategyContender, ...] = ()
    comparable: dict[str, Artifact] = field(default_factory=dict)
    unmeasured: str | None = None

    def at(self, temperature: float) -> ChampionComparison:
        """The same champion with what it serves at a temperature."""
        from components.bench.runner import StrategyContender
        from serving.runtime.strategies import served_choice

        contenders = []
        for one in self.contenders:
            config: Any = one.resources.artifacts["decoding_config"]
            contenders.append(StrategyContender(one.pair, one.resources, served_choice(config, temperature), one.label))
        return replace(self, contenders=tuple(contenders))


def find_rival(step: StepContext, store: Store, release: ReleaseVersion) -> ChampionComparison:
    """The pair's champion, ready to decode."""
    from components.bench.runner import StrategyContender
    from serving.runtime.strategies import StrategyChoice, StrategyResources

    champion = champion_of(step.workspace, release.device)
    if champion is None or champion.version == release.version:
        return ChampionComparison()
    pair = pair_of(step, store, champion)
    if pair is None:
        return ChampionComparison(
            champion,
            unmeasured=f"{champion.name}, the champion, has other weights or another dtype than the models here, or "
            "there is no memory for both: not measured",
        )
    theirs = artifacts_of(store, champion, champion.fingerprint)
    chosen: Any = theirs["decoding_config"]
    contender = StrategyContender(
        pair, StrategyResources(theirs, pair.special_tokens), StrategyChoice(chosen.strategy, chosen.parameters), "champion"
    )
    return ChampionComparison(champion, (contender,), theirs if pair is step.pair else {})


@dataclass(frozen=True)
class BenchJudge:
    """Reads a candidate's row, and the champion's, out of a bench and judges them."""

    strategy: str
    parameters: dict[str, Any]
    thresholds: Thresholds

    def entry(self, entries: dict[str, BenchEntry]) -> BenchEntry:
        """The candidate's row."""
        return next(e for e in entries.values() if (e.strategy, e.parameters) == (self.strategy, self.parameters))

    def of(self, report: BenchReport) -> GateVerdict:
        """The verdict; acceptance is reported with that of a champion of the same strategy and parameters only."""
        from components.gate.bench_checks import judge_release

        entries = report.strategies
        entry, rival = self.entry(entries), entries.get("champion")
        same = rival if rival is not None and (rival.strategy, rival.parameters) == (self.strategy, self.parameters) else None
        thresholds = self.thresholds
        if entry.dtype == "float32":
            thresholds = replace(thresholds, lossless_identical=False)  # `identity_check` judges it, on longer texts
        return judge_release(entry, rival, same, thresholds, reference=entries["autoregressive"])

    def doubts(self, verdict: GateVerdict) -> bool:
        """Whether the candidate is no clear pass."""
        from components.gate.bench_checks import leaves_doubt

        return leaves_doubt(verdict)


def pair_of(step: StepContext, store: Store, champion: ReleaseVersion) -> LoadedPair | None:
    """The models that a champion runs on: those that are loaded, or the same target with the distilled draft that it pins.

    Returns:
        None where they are not available here: another target or dtype, a draft that is not in the registry, or no memory for both.
    """
    from components.gate.footprint import room_for_another
    from serving.artifacts.pair_files import fingerprint
    from serving.runtime.pair import LoadSettings, load_pair
    from serving.runtime.strategies import STRATEGIES

    pair, space = step.pair, step.workspace
    if champion.fingerprint == pair.fingerprint:
        return pair
    version = champion.pins.get("distilled_draft")
    if version is None or not pair.device.startswith("cpu") or not room_for_another(space.files()):
        return None
    with tempfile.TemporaryDirectory() as place:
        draft = store.download(store.resolve("distilled_draft", champion.pair, version), Path(place) / "draft")
        files = replace(space.files(), draft=draft)
        if fingerprint(files, pair.dtype) != champion.fingerprint:
            return None
        onnx = any(strategy.prefers_onnx for strategy in STRATEGIES.values())
        return load_pair(files, LoadSettings(dtype=pair.dtype, chat=space.spec.chat, onnx_draft=onnx))


def missing(name: str, why: str, reason: str | None) -> GateVerdict:
    """What could not be measured fails, or becomes a note with the reason for which a person lets it pass."""
    from components.gate.verdict import Check, GateVerdict

    if reason:
        return GateVerdict((), (f"{why}; let pass: {reason}",))
    return GateVerdict((Check(name, 0, 1, False, f"{why}; `draftwell gate --unmeasured REASON` lets it pass", transient=True),))


def prediction_check(step: StepContext, mine: dict[str, Artifact], theirs: dict[str, Artifact], thresholds: Thresholds,
                     unmeasured: str | None = None) -> GateVerdict:
    """How well table and verifier predict the workspace's traces, compared with the champion's; nothing for a release without both."""
    from components.gate.predictive_loss import judge_predictions, predictions
    from components.gate.verdict import GateVerdict
    from flows.context import open_trace

    judged = [kind for kind in ("acceptance_table", "verifier") if kind in mine]
    if not judged:
        return GateVerdict(())
    try:
        found, notes = predictions(mine, theirs, open_trace(step))
    except DraftwellError as error:
        step.workspace.say(str(error))  # it names a folder, which nobody needs to read in the registry
        return missing("predictions measured", f"{' and '.join(judged)} not judged: the workspace's traces cannot be used", unmeasured)
    return judge_predictions(found, thresholds) + GateVerdict((), tuple(notes))


def footprint_check(step: StepContext, bundle: Path, release: ReleaseVersion, thresholds: Thresholds) -> GateVerdict:
    """The size of the release's bundle, and how fast a new process starts from it."""
    from components.gate.footprint import footprint, judge_footprint
    from registry.bundles.build import bundle_bytes

    limit = 2 * (thresholds.max_startup_seconds or START_LIMIT)
    found = footprint(bundle, bundle_bytes(bundle), step.workspace.files(), release.device, limit=limit)
    return judge_footprint(found, thresholds)


def keep_verdict(store: Store, record: GateRecord, verdict: GateVerdict, report: BenchReport, entry: BenchEntry,
                 written: Path) -> None:
    """Keep the verdict with its release: record, text, metrics to compare, the bench (`written`: its file) and its plots."""
    from components.gate.verdict_report import bench_plots, verdict_markdown
    from registry.releases import record_gate

    figures = {name: float(value) for name in COMPARED if (value := getattr(entry, name)) is not None}
    with tempfile.TemporaryDirectory() as place:
        files = [written, *bench_plots(report, Path(place))]
        record_gate(store, record, words=verdict_markdown(verdict), figures=figures, files=files)


def record_of(release: ReleaseVersion, verdict: GateVerdict, champion: ReleaseVersion | None, bundle_digest: str) -> GateRecord:
    """The verdict as the registry keeps it."""
    from registry.gates import GateCheck, GateRecord

    checks = tuple(GateCheck(name=c.name, value=c.value, threshold=c.threshold, passed=c.passed, transient=c.transient,
                             enough=c.enough, prompts_needed=c.prompts_needed)
                   for c in verdict.checks)
    return GateRecord(pair=release.pair, device=release.device, release_version=release.version, pins=release.pins, passed=verdict.passed,
                      checks=checks, baseline_version=champion.version if champion else None, bundle_digest=bundle_digest, created=now())


def identity_verdict(step: StepContext, config: DecodingConfig, resources: Any, prompts: Sequence[Prompt]) -> GateVerdict:
    """Identity at temperature 0 of every choice of a config that claims to be lossless; the sampled one's under a name of its own."""
    from components.gate.temperatures import tuned_classes
    from components.gate.verdict import GateVerdict

    checks: list[Check] = []
    for choice, temperature in tuned_classes(config):
        found = identity_check(step, choice.name, dict(choice.parameters), resources, prompts)
        checks += [replace(check, name=f"sampled {check.name}") if temperature else check for check in found]
    return GateVerdict(tuple(checks))


def identity_check(
    step: StepContext, strategy: str, parameters: dict[str, Any], resources: Any, prompts: Sequence[Prompt]
) -> tuple[Check, ...]:
    """Whether a choice that claims to be lossless gives autoregressive's tokens in float32; nothing for a lossy one."""
    from components.gate.bench_checks import judge_release
    from components.gate.losslessness import identity_entry
    from components.gate.verdict import Thresholds
    from serving.runtime.strategies import StrategyChoice, find_strategy

    if not find_strategy(strategy).lossless or strategy == "autoregressive":
        return ()
    exact = float32_pair(step.workspace) if step.pair.dtype != "float32" else step.pair
    entry = identity_entry(exact, resources, StrategyChoice(strategy, parameters), prompts, max_tokens=IDENTITY_TOKENS)
    return judge_release(entry, None, None, Thresholds(lossless_identical=True)).checks


def float32_pair(workspace: Workspace) -> LoadedPair:
    """The same pair in float32."""
    return workspace.in_dtype("float32").load()


def baseline_report(pair_name: str, say: Any, bar: Any = None) -> CountsReport:
    """Deterministic counts of the strategies in `COUNTED` on the shipped prompts, in float32."""
    return counted(pair_name, say, bar)[0]


def counted(pair_name: str, say: Any, bar: Any) -> tuple[CountsReport, GateVerdict]:
    """The counts, and whether every strategy that claims to be lossless gave the target's own tokens."""
    from components.gate.baseline_counts import deterministic_report
    from components.gate.losslessness import judge_texts
    from components.prompts.prompt import demo_prompts
    from serving.runtime.strategies import StrategyChoice

    pair, prompts = Workspace(pair_name, "float32", say).load(), demo_prompts(BASELINE_PROMPTS)
    texts: dict[str, list[list[int]]] = {}
    report = deterministic_report(pair, [StrategyChoice(name) for name in COUNTED], prompts, BASELINE_TOKENS, progress=bar, texts=texts)
    return report, judge_texts(pair, prompts, texts, BASELINE_TOKENS)


def judge_baseline(pair_name: str, say: Any, bar: Any = None) -> GateVerdict:
    """Compare this checkout's deterministic counts with the recorded ones, and lossless outputs with the target's own choices."""
    from components.gate.baseline_checks import compare_with_baseline
    from components.gate.baseline_counts import CountsReport
    from components.gate.verdict import Thresholds
    from registry.gates import load_baseline, load_gates
    from registry.pairs import find_pair

    name, gates = find_pair(pair_name).name, load_gates()
    recorded = load_baseline(name)
    if recorded is None:
        raise DraftwellError(f"pair {name} has no recorded baseline: record one with `draftwell gate --pair {name} --record`",
                             code="no_baseline")
    report, identity = counted(pair_name, say, bar)
    verdict = compare_with_baseline(report, CountsReport.model_validate(recorded.model_dump()), Thresholds.of(gates.model_dump()))
    return verdict + identity if gates.lossless_identical else verdict
