"""The pipeline steps on another engine: what it reads of a pair, and collect, tune, gate and bench over the engine port."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from components.engines.environments import peers_root
from components.engines.vllm import NAME, VllmEngine, check_version, command, distribution, gpu_share, lacks
from components.engines.vllm_methods import CASCADE, OFF, Method, VllmFiles
from flows.context import Bar, now, training_prompts
from flows.workspace import Workspace
from registry.bundles.vllm.plugin_wheel import PACKAGE, plugin_version
from serving.errors import DraftwellError
from serving.files import json_digest, write_json
from serving.number_format import dtype_of

if TYPE_CHECKING:
    from components.bench.engines.figures import Figure
    from components.bench.engines.store import Measurements
    from components.gate.engine_checks import Difference, EngineGateRecord, Null
    from components.gate.verdict import GateVerdict, Thresholds
    from components.prompts.prompt import Prompt
    from components.tune.engines.budget import Budget
    from components.tune.engines.choice import EngineChoice
    from components.tune.engines.lab import Lab
    from components.tune.engines.ngram_replay import Text
    from components.tune.engines.settings import EngineTuneSettings
    from serving.runtime.pair import LoadedPair
    from serving.runtime.requests import Sampling

ROOM = 64
"""Positions beyond prompt and answer: drafts reach over the end."""
CHOICE, RECORD, MEASUREMENTS = "tuned", "gate", "measurements"
"""Names of files, without what `file_of` adds."""
SEARCH = 3
"""Version of the search in `tune_engine`: a choice that an earlier version made is made again, from the measurements that are kept."""


@dataclass(frozen=True)
class EngineSpace:
    """A pair on an engine of its own environment.

    Args:
        threads: that the engine computes with.
    """

    workspace: Workspace
    threads: int
    bar: Bar | None = None

    @property
    def folder(self) -> Path:
        """Where choices, records and measurements of this engine are kept."""
        return self.workspace.device_root / NAME

    @cached_property
    def version(self) -> str:
        """Of the installed engine.

        Raises:
            DraftwellError: it is not installed, or another version (`peer_not_installed`, `engine_version`).
        """
        command()
        return check_version() or "unknown"

    @cached_property
    def fingerprint(self) -> str:
        from serving.artifacts.pair_files import fingerprint

        return fingerprint(self.workspace.files(), self.workspace.dtype)

    @cached_property
    def pair(self) -> LoadedPair:
        """The pair without its models: it encodes prompts and knows stop tokens."""
        from transformers import GenerationConfig

        from serving.runtime.model_files import load_tokenizer
        from serving.runtime.pair import LoadedPair

        space = self.workspace
        target = space.files().target
        config = GenerationConfig.from_pretrained(target) if (target / "generation_config.json").is_file() else GenerationConfig()
        dtype: Any = space.dtype
        modules: dict[Any, Any] = {"target": SimpleNamespace(generation_config=config)}
        return LoadedPair(space.spec.name, dtype, "cpu", {}, modules, load_tokenizer(target), self.fingerprint, space.spec.chat)

    @cached_property
    def files(self) -> VllmFiles:
        """Target, and draft and head with complete weights, written once where they borrow the target's."""
        files = self.workspace.files()
        return VllmFiles(files.target, draft=self._draft(files.draft), head=self._head())

    def _draft(self, folder: Path | None) -> Path | None:
        if folder is None or (folder / "config.json").is_file():
            return folder
        from components.export.checkpoint import save_draft

        return self._written("draft", self.fingerprint, lambda out: save_draft(self.workspace.files().target, folder, out,
                                                                               dtype_of(self.workspace.dtype)))

    def _head(self) -> Path | None:
        from components.export.checkpoint import save_head
        from serving.artifacts.eagle3_head import Eagle3Head

        own = self.workspace.folder("eagle3_head")
        folder = own if (own / "artifact.json").is_file() else self.workspace.shipped_folder("eagle3_head")
        if folder is None:
            return None
        head = Eagle3Head.load(folder, fingerprint=self.fingerprint)
        return self._written("head", str(head.digest), lambda out: save_head(self.workspace.files().target, head, out))

    def _written(self, role: str, digest: str, write: Callable[[Path], Any]) -> Path:
        folder = peers_root() / "models" / f"{self.workspace.spec.name}-{role}-{digest[:12]}"
        if not folder.is_dir():
            self.workspace.say(f"writing the {role} for {NAME}")
            folder.parent.mkdir(parents=True, exist_ok=True)
            write(folder)
        return folder

    def engine(self, label: str) -> VllmEngine:
        """An engine, not yet started."""
        device = self.workspace.device.partition(":")[0]
        return VllmEngine(f"{NAME}/{label}", self.files.target, dtype=dtype_of(self.workspace.dtype), threads=self.threads,
                          device=device, plugins=PACKAGE.parent, gpu_share=gpu_share() if device == "cuda" else None)

    def encoded(self, prompts: Sequence[Prompt], max_tokens: int) -> tuple[list[list[int]], int]:
        """Token ids of the prompts, and positions that the longest needs.

        Raises:
            DraftwellError: one is too long for the target (`context_too_long`).
        """
        from components.prompts.prompt import ids_of

        ids = [ids_of(self.pair, prompt) for prompt in prompts]
        config = json.loads((self.files.target / "config.json").read_text())
        limit = int(config.get("max_position_embeddings") or 1 << 20)
        for prompt, one in zip(prompts, ids, strict=True):
            if len(one) + max_tokens > limit:
                raise DraftwellError(f"prompt {prompt.id} has {len(one)} tokens, which with {max_tokens} more exceed the target's {limit}: "
                                     "leave it out, or ask for fewer tokens", code="context_too_long")
        return ids, min(limit, max(map(len, ids)) + max_tokens + ROOM)

    def subject(self, ids: Sequence[Sequence[int]], sampling: Sampling, **more: Any) -> dict[str, Any]:
        """What a measurement depends on."""
        from serving.device import device_class

        return {"engine": NAME, "version": self.version, "device_class": device_class(self.workspace.device), "threads": self.threads,
                "fingerprint": self.fingerprint, "dtype": self.workspace.dtype, "prompts": json_digest(list(ids)),
                "head": str(self.files.head), "plugin": plugin_version(),
                "sampling": [sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.seed], **more}

    def file_of(self, what: str, temperature: float) -> Path:
        """`tuned.json` of greedy requests, `tuned-t0.7.json` of those that are sampled at .7."""
        return self.folder / (f"{what}-t{temperature:g}.json" if temperature else f"{what}.json")

    def tuned(self, temperature: float = 0.0) -> dict[str, Any]:
        """The document of the last tuning for requests of this temperature; empty where there is none."""
        try:
            found = json.loads(self.file_of(CHOICE, temperature).read_text())
            return found if isinstance(found, dict) else {}
        except (OSError, ValueError):
            return {}

    def temperatures(self) -> list[float]:
        """Of all choices that are there, ascending."""
        found = [0.0, *(float(number) for path in self.folder.glob(f"{CHOICE}-t*.json")
                        if (number := path.stem.removeprefix(f"{CHOICE}-t")).replace(".", "", 1).isdecimal())]
        return sorted(one for one in found if self.tuned(one))

    def choice(self, temperature: float = 0.0) -> EngineChoice | None:
        """What was tuned last for requests of this temperature; None where nothing was, or what is there is not readable."""
        from pydantic import ValidationError

        from components.tune.engines.choice import EngineChoice

        try:
            return EngineChoice.model_validate_json(json.dumps(self.tuned(temperature)["choice"]))
        except (KeyError, ValidationError):
            return None


def engine_space(pair: str, dtype: str | None, device: str | None, threads: int | None, say: Callable[[str], None]) -> EngineSpace:
    """A pair on the engine; a missing or wrong engine is refused before models are looked for.

    Args:
        device: None takes the one that the engine is built for, or where it does not say the default one.
        threads: None takes all cores.
        say: is told what is not confirmed.
    Raises:
        DraftwellError: the engine is not installed or not the one that is needed (as `EngineSpace.version` says), the device is not here,
            or the pair has a draft that other engines cannot read (`engine_option`).
    """
    from components.engines.vllm import device_for
    from serving.device import checked_device, default_device, usable_cores

    command()
    on = device_for(device)
    space = EngineSpace(Workspace(pair, dtype, say, default_device() if on is None else checked_device(on)), threads or usable_cores())
    if (draft := space.workspace.spec.draft) is not None and draft.near_copy is not None:
        raise DraftwellError(f"the draft of {space.workspace.spec.name} is a copy of the target that our own engine makes in memory: name "
                             "another pair for --engine vllm", code="engine_option")
    if space.workspace.device != "cpu":
        say("vLLM on a GPU was never run by this project: what it says there is unconfirmed")
    _ = space.version
    return space


def tune_on_engine(space: EngineSpace, prompts: Sequence[Prompt], settings: EngineTuneSettings, *, fresh: bool = False,
                   texts: Sequence[Text] | None = None, budget: Budget | None = None) -> dict[str, Any]:
    """Choose how the engine speculates; the document is written into the workspace and returned.

    Args:
        texts: greedy texts of the target that were collected, which decide which n-grams are looked up.
        budget: of time; None takes as long as it takes.
    """
    from components.prompts.overlap import hashes_of
    from components.tune.engines.tune import tune_engine

    lab, store = lab_of(space, prompts, settings, fresh=fresh)
    lab.budget = budget or lab.budget
    space.file_of(RECORD, settings.temperature).unlink(missing_ok=True)  # it judged another choice
    if store.read:
        space.workspace.say(f"{store.read} measurements of an earlier run are reused: --fresh measures again")
    choice = tune_engine(lab, settings, lacks, texts)
    document = {**about(space), "temperature": settings.temperature, "prompt_hashes": hashes_of(prompts),
                "subject": tuning_subject(store, settings, texts), "choice": choice.model_dump(mode="json"),
                "exports": exports(choice, space.files)}
    write_json(space.file_of(CHOICE, settings.temperature), document)
    return document


def refuse_if_nothing_is_left(space: EngineSpace, settings: EngineTuneSettings) -> None:
    """Refuse a tuning in which none of the methods that a person named can be tried: plain decoding would be no answer to that.

    Raises:
        DraftwellError: the line says why for each (`no_method_left`).
    """
    from components.tune.engines.candidates import left_out

    out = left_out(settings, space.files, lacks)
    if all(name in out for name in settings.methods if name != OFF):
        reasons = "; ".join(f"{name}, {why}" for name, why in out.items())
        raise DraftwellError(f"none of the methods that were named can be tried ({reasons or 'off alone'}): name others with --methods",
                             code="no_method_left")


def tuning_subject(store: Measurements, settings: EngineTuneSettings, texts: Sequence[Text] | None) -> str:
    """Digest of all that a choice depends on but for the time that there was."""
    return json_digest([SEARCH, store.subject, settings.model_dump(mode="json"), texts])


def lab_of(space: EngineSpace, prompts: Sequence[Prompt], settings: EngineTuneSettings, *, fresh: bool) -> tuple[Lab, Measurements]:
    """What a tuning measures with, and its store."""
    from components.bench.engines.store import Measurements
    from components.tune.engines.lab import Lab

    ids, context = space.encoded(prompts, settings.max_tokens)
    sampling = space.pair.sampling(max_tokens=settings.max_tokens, temperature=settings.temperature, seed=settings.seed)
    slots = max(settings.levels)
    subject = space.subject(ids, sampling, slots=slots, context=context, explore=settings.explore, groups=settings.groups)
    store = Measurements(space.file_of(MEASUREMENTS, settings.temperature), subject, fresh=fresh)
    return Lab(space.engine, space.files, ids, sampling, slots, context, settings.groups, store, space.bar), store


def about(space: EngineSpace) -> dict[str, Any]:
    """What a document is about."""
    from serving.device import device_class

    return {"engine": NAME, "version": space.version, "pair": space.workspace.spec.name, "fingerprint": space.fingerprint,
            "dtype": space.workspace.dtype, "device_class": device_class(space.workspace.device), "distribution": distribution(),
            "threads": space.threads, "made": now()}


def exports(choice: EngineChoice, files: VllmFiles) -> dict[str, Any]:
    """The choice as settings of engines; a key is missing where the engine cannot express it."""
    from components.export.schedules import sglang_adaptive, tensorrt_llm_schedule

    found: dict[str, Any] = {"vllm": choice.chosen.speculative_config(files)}
    if choice.levels and choice.method == "eagle3":
        found["sglang_adaptive"] = sglang_adaptive([(level.at_once, level.open) for level in choice.levels])
    if choice.levels and choice.method not in (OFF, CASCADE):
        found["tensorrt_llm"] = tensorrt_llm_schedule([(level.at_once, level.k) for level in choice.levels])
    return found


def bench_on_engine(space: EngineSpace, prompts: Sequence[Prompt], methods: Sequence[Method], sampling: Sampling,
                    at_once: int = 1) -> list[Figure]:
    """Ways to speculate beside plain decoding; nothing is kept."""
    from components.bench.engines.store import Measurements
    from components.tune.engines.lab import Lab

    ids, context = space.encoded(prompts, sampling.max_tokens)
    groups = max(2, -(-len(ids) // at_once))
    lab = Lab(space.engine, space.files, ids, sampling, at_once, context, groups, Measurements(None, {}), space.bar)
    with lab.open():
        return [lab.measure(method, "bench", (at_once,))[0] for method in methods if method.name != OFF]


def gate_on_engine(space: EngineSpace, prompts: Sequence[Prompt], thresholds: Thresholds, max_tokens: int, *,
                   temperature: float = 0.0, keep: bool = True) -> tuple[GateVerdict, EngineGateRecord]:
    """Judge what was tuned for the engine, beside its plain decoding; the record is written unless `keep` is False.

    Args:
        temperature: of the requests that it was tuned for, at which it is judged; outputs are compared at 0.

    Raises:
        DraftwellError: nothing was tuned (`not_tuned`), or for other models (`other_models`).
    """
    from components.bench.engines.store import Measurements
    from components.gate.engine_checks import EngineGateRecord, judge_engine
    from components.tune.engines.lab import Lab

    choice, known = tuned_choice(space, temperature), about(space)
    if keep:
        space.file_of(RECORD, temperature).unlink(missing_ok=True)  # a gate that breaks off leaves no verdict of an earlier one
    ids, context = space.encoded(prompts, max_tokens)
    levels = tuple(level.at_once for level in choice.levels) or (1,)
    sampling = space.pair.sampling(max_tokens=max_tokens, temperature=temperature)
    lab = Lab(space.engine, space.files, ids, sampling, max(levels), context, 8, Measurements(None, {}), space.bar)
    with lab.open():
        figures = lab.measure(choice.chosen, "gate", levels) if choice.method != OFF else []
        unlike, null = compare_outputs(lab, choice.chosen, levels, space.workspace.dtype) if figures and not temperature else (None, None)
        idle = frozenset(level.at_once for level in choice.levels if level.k == 0)
        verdict = judge_engine(figures, unlike, thresholds, null, choice.chosen.speculative_config(space.files), idle)
    plugin = plugin_version() if choice.method == CASCADE else None
    names = ("engine", "version", "distribution", "device_class", "dtype", "fingerprint", "threads", "made")
    record = EngineGateRecord(**{name: known[name] for name in names}, temperature=temperature, plugin=plugin, passed=verdict.passed,
                              judged=judged_digest(prompts, max_tokens), settings=choice.chosen.speculative_config(space.files),
                              checks=[vars(check) for check in verdict.checks], figures=tuple(figures))
    if keep:
        write_json(space.file_of(RECORD, temperature), record.model_dump(mode="json"))
    return verdict, record


def judged_digest(prompts: Sequence[Prompt], max_tokens: int) -> str:
    """Digest of what a gate judges with."""
    from components.prompts.overlap import hashes_of

    return json_digest([sorted(hashes_of(prompts)), max_tokens])


def compare_outputs(lab: Lab, method: Method, levels: Sequence[int], dtype: str) -> tuple[list[Difference], Null | None]:
    """Differences at every level, and where near-ties are among them how often plain decoding differs from itself.

    Another width is that of a pass over a draft.
    """
    from components.gate.engine_checks import differences, null_of

    unlike = [one for level in levels
              for one in differences(lab.found(method, "gate", level), lab.groups_at(level), lab.plain(), dtype, lab.sampling)]
    if not any(one.near_tie for one in unlike):
        return unlike, None
    width = method.k + 1
    with lab.wide(width) as engine:
        return unlike, null_of(lab.found(method, "gate", levels[0]), lab.groups_at(levels[0]), engine, width, lab.sampling)


def tuned_choice(space: EngineSpace, temperature: float = 0.0) -> EngineChoice:
    """What was tuned for these models and requests of this temperature.

    Raises:
        DraftwellError: nothing was (`not_tuned`), or for other models (`other_models`).
    """
    choice = space.choice(temperature)
    if choice is None:
        raise DraftwellError(f"nothing is tuned for {NAME}: run `draftwell tune --engine {NAME} --pair {space.workspace.spec.name}` first",
                             code="not_tuned")
    if space.tuned(temperature).get("fingerprint") != space.fingerprint:
        raise DraftwellError(f"the choice for {NAME} was made for other models: tune again", code="other_models")
    return choice


def untouched(space: EngineSpace, prompts: Sequence[Prompt], limit: int | None, temperature: float = 0.0) -> list[Prompt]:
    """At most `limit` prompts that neither the draft, the head nor the choice was made from; a person reads how many were left out.

    Raises:
        DraftwellError: none is left (`no_untouched_prompts`).
    """
    from components.prompts.overlap import TrainingPrompts

    made = training_prompts(space.workspace, kinds=("eagle3_head",))
    tuned = frozenset(space.tuned(temperature).get("prompt_hashes", ()))
    left, lines = TrainingPrompts({**made.by_name, f"the choice for {NAME}": tuned}, made.unknown).untouched(prompts, limit)
    for line in lines:
        space.workspace.say(line)
    return left


def collect_on_engine(space: EngineSpace, prompts: Sequence[Prompt], method: Method, sampling: Sampling, file: Path, *,
                      at_once: int = 8, fresh: bool = False) -> dict[str, Any]:
    """Texts, top log-probabilities and acceptance, one JSON object a line; a run that was stopped resumes after the last whole group.

    Args:
        sampling: of the first prompt; each further prompt has the next seed. `logprobs` says how many tokens are named.
        file: is written atomically after every group; one of other prompts or settings is refused unless `fresh`.
    Returns:
        `rows`, `tokens`, `tokens_per_second` (of those that were decoded now) and `acceptance` (of all).
    """
    from components.engines.port import EngineSettings
    from components.engines.texts import EngineTexts

    ids, context = space.encoded(prompts, sampling.max_tokens)
    unused = {} if method.name != OFF else {"head": None, "plugin": None}  # a head that is trained later changes no plain text
    subject = space.subject(ids, sampling, method=method.label, logprobs=sampling.logprobs, **unused)
    texts = EngineTexts(file, {**about(space), "subject": json_digest(subject), "method": method.label}, fresh=fresh)
    with ExitStack() as stack:
        engine = space.engine(method.label)
        stack.callback(engine.stop)
        settings = EngineSettings(speculation=method.speculative_config(space.files), slots=at_once, context=context)
        return texts.write(engine, settings, prompts, ids, sampling, decode=space.pair.decode, progress=space.bar)
