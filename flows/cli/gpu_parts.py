"""The parts of `draftwell reproduce gpu`, the most important first. They are this project's own
commands: a part says with which options, and how long they may take."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path

from safetensors import safe_open

from draftwell.components.bench.gpu.parts import Part
from draftwell.components.bench.gpu.results import GpuResults
from draftwell.components.bench.servers.closed_loop import load_rows
from draftwell.components.bench.servers.load_test import Row
from draftwell.components.bench.servers.processes import Server, context_of, own_command
from draftwell.components.gate.settings import GateSettings
from draftwell.components.prompts.prompt import demo_prompts, read_prompts
from draftwell.flows.cli.gpu_kit import unpack_kit
from draftwell.flows.cli.main import app
from draftwell.flows.cli.options import EXIT_FAILED, say, write_json
from draftwell.flows.loading import open_pair
from draftwell.flows.steps.gate_parts.elsewhere import measure_candidate
from draftwell.flows.workspace import Workspace
from draftwell.serving.artifacts.base import MANIFEST
from draftwell.serving.artifacts.pair_files import models_root
from draftwell.serving.bundle.bundle import open_bundle
from draftwell.serving.bundle.manifest import MANIFEST as BUNDLE_MANIFEST, read_bundle_manifest
from draftwell.serving.files import write_text
from draftwell.serving.runtime.strategies import STRATEGIES, find_strategy

TREE = "eagle3:top_k=4:tree_tokens=15:num_speculative_tokens=4"
GREEDY = ("vanilla_sd", "eagle3", TREE, "hybrid", "suffix")
SAMPLED = ("vanilla_sd", "eagle3", "hybrid", "suffix")
AT_ONCE = ("vanilla_sd", "eagle3", "hybrid")
OVERLAPPING = ("vanilla_sd", "duo_decoding", "spide", "pearl")
TUNED = ("decoding_config", "hardware_profile")
"""Kinds that a tuning makes."""


@dataclass(frozen=True)
class Scale:
    """How much the parts do.

    Args:
        prompts, tokens: of a bench.
        compared: prompts whose texts are compared.
        padded: parameters of the large target.
        at_once, clients: numbers of requests.
        trials: configurations that the tuner tries, at most.
        file: of prompts; None takes the shipped ones.
        patience: times the parts' usual limits.
    """

    prompts: int = 8
    tokens: int = 96
    compared: int = 3
    padded: float = 7e9
    at_once: tuple[int, int] = (8, 32)
    clients: tuple[int, ...] = (1, 8, 32)
    trials: int = 40
    file: Path | None = None
    patience: float = 1.0


@dataclass(frozen=True)
class Trial:
    """What the parts work with.

    Args:
        pair: its name, or the path of its YAML file.
        kit: folder of what was brought along (`.ci/gpu-kit`).
        bundle: that the server starts from.
    """

    pair: str
    scale: Scale
    kit: Path
    bundle: Path
    device: str = "cuda"

    @property
    def space(self) -> Workspace:
        """The pair's workspace in the home of the run."""
        return Workspace(self.pair, None, say, self.device)

    def command(self, name: str, *options: object) -> None:
        """Run a command of `draftwell` in this process; one that ends because texts differ has
        measured."""
        words = [*name.split(), "--pair", self.pair, "--device", self.device, *map(str, options)]
        print("draftwell", *words)
        try:
            app(words)
        except SystemExit as end:
            if end.code not in (None, 0, EXIT_FAILED):
                sys.exit(end.code)

    def bench(self, folder: Path, *options: object, name: str = "bench") -> None:
        """Run a bench whose report goes into a folder."""
        prompts = ("--prompts", self.scale.file) if self.scale.file else ()
        self.command("bench", "--out", folder / f"{name}.json", *prompts, *options)

    def able(self, *configs: str) -> str:
        """The strategies, with commas, whose artifacts are here; others are left out with a
        line."""
        space, found = self.space, []
        for config in configs:
            needed = find_strategy(config.partition(":")[0]).artifacts
            lacking = [kind for kind in needed if not is_here(space, kind)]
            if lacking:
                print(f"{config} is left out: there is no {lacking[0]}")
            else:
                found.append(config)
        return ",".join(found)


def given(**settings: object) -> list[str]:
    """Settings as words of a command line."""
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def is_here(space: Workspace, kind: str) -> bool:
    """Whether the workspace or the catalogue has an artifact, or it is measured when it is
    needed."""
    return (
        kind == "hardware_profile"
        or (space.folder(kind) / MANIFEST).is_file()
        or space.shipped_folder(kind) is not None
    )


def import_commands() -> None:
    """Import what the commands of the parts import when they are called, so that the processes of
    the parts, which are copies of this one, need not."""
    for name in ("cli.bench_run", "steps.collect", "steps.tune"):
        import_module(f"draftwell.flows.{name}")
    import_module("transformers.models.llama.modeling_llama")


def prepare(trial: Trial) -> None:
    """Convert the models, and unpack what was brought along."""
    space = trial.space
    files = space.files()
    unpack_kit(space, trial.kit)
    print("models:", *files.roles().values())


def float32(trial: Trial, folder: Path) -> None:
    """Greedy texts of every lossless strategy in float32, compared with the CPU's."""
    plain = [name for name, one in STRATEGIES.items() if one.lossless and startable(name)]
    compared = ("--limit", trial.scale.compared, *given(max_tokens=min(32, trial.scale.tokens)))
    options = ("--strategies", trial.able(*plain), *given(dtype="float32", check_cpu="true"))
    trial.bench(folder, *options, *compared)


def startable(name: str) -> bool:
    """Whether a strategy needs no setting without a default."""
    return not any(one.is_required() for one in STRATEGIES[name].Config.model_fields.values())


def bfloat16(trial: Trial, folder: Path) -> None:
    """The trial of exactness."""
    wanted = trial.able("vanilla_sd", "eagle3", TREE, "hybrid", "suffix")
    compared = ("--limit", trial.scale.compared, *given(max_tokens=min(48, trial.scale.tokens)))
    exact = given(exactness="true")
    trial.bench(folder, *exact, "--strategies", wanted, *compared, name="exactness")


def speed(trial: Trial, folder: Path, strategies: tuple[str, ...], *options: object) -> None:
    """A bench of strategies beside plain decoding."""
    wanted = trial.able(*strategies) or "autoregressive"
    much = ("--limit", trial.scale.prompts, *given(max_tokens=trial.scale.tokens))
    trial.bench(folder, "--strategies", wanted, *much, *options)


def plain(trial: Trial, folder: Path) -> None:
    """Plain decoding of the target as it is."""
    write_json(folder / "size.json", {"parameters": parameters_of(trial.space.files().target)})
    speed(trial, folder, ())


def parameters_of(model: Path) -> int:
    """Numbers in a model's safetensors files."""
    total = 0
    for file in model.glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            total += sum(math.prod(weights.get_slice(key).get_shape()) for key in weights.keys())  # noqa: SIM118
    return total


def tuning(trial: Trial, folder: Path) -> None:
    """Collect and tune, and keep what the tuner made."""
    scale, space = trial.scale, trial.space
    source = ("--prompts", scale.file) if scale.file else ()
    tokens = given(max_tokens=min(48, scale.tokens))
    texts = given(limit=2 * scale.prompts, prefix_kinds="target")
    trial.command("step collect", *texts, *tokens, *source)
    tried = given(trials=scale.trials, limit=scale.prompts, publish="false")
    trial.command("step choose", *tried, *tokens, *source)
    shutil.copyfile(space.device_reports / "tuning.json", folder / "tuning.json")
    made = {
        kind: {file.name: file.read_text() for file in sorted(space.folder(kind).iterdir())}
        for kind in TUNED
    }
    write_json(folder / "artifacts.json", made)


def restore_tuned(trial: Trial, results: GpuResults) -> None:
    """Let the run's home have what was tuned on this card before, on another machine perhaps."""
    part = results.parts.get("tuning")
    for kind, texts in (part.reports.get("artifacts") or {} if part else {}).items():
        folder = trial.space.folder(kind)
        if not (folder / MANIFEST).is_file():
            trial.space.begin()
            for name, text in texts.items():
                write_text(folder / name, text)


def gate(trial: Trial, folder: Path) -> None:
    """Measure the tuner's choice as the gate would."""
    rows = read_prompts(trial.scale.file) if trial.scale.file else demo_prompts()
    settings = GateSettings(limit=trial.scale.prompts, max_tokens=trial.scale.tokens)
    step = open_pair(trial.pair, device=trial.device, say=say)
    found = measure_candidate(step, rows[::-1], settings)
    write_json(folder / "gate.json", found.model_dump(mode="json"))


def untuned(trial: Trial) -> str:
    """Why nothing can be gated."""
    tuned = (trial.space.folder("decoding_config") / MANIFEST).is_file()
    return "" if tuned else "nothing was tuned in this run's home"


def server(trial: Trial, folder: Path) -> None:
    """The bundle's server under a load test."""
    bundle, scale = open_bundle(trial.bundle), trial.scale
    target = bundle.files(models_root()).target
    rows = (read_prompts(scale.file) if scale.file else demo_prompts())[: 2 * max(scale.clients)]
    command = own_command(bundle, max(scale.clients), context_of(target), "off")
    started = Server("draftwell-serve", command, folder / "server.log")
    try:
        load_rows(started, scale.clients, rows, scale.tokens, partial(keep_rows, folder))
    finally:
        started.close()


def keep_rows(folder: Path, rows: list[Row]) -> None:
    """Write the rows of a load test so far."""
    write_json(folder / "server.json", {"rows": [asdict(row) for row in rows]})


def unbundled(trial: Trial) -> str:
    """Why no server can be started."""
    if not (trial.bundle / BUNDLE_MANIFEST).is_file():
        return f"there is no bundle at {trial.bundle}"
    found = read_bundle_manifest(trial.bundle)
    if (found.pair, found.device) != (trial.space.spec.name, "cuda"):
        return f"the bundle at {trial.bundle} is {found.pair}'s for {found.device}"
    return ""


def parts_of(trial: Trial) -> list[Part]:
    """All parts, the most important first."""
    pad = given(pad_target=f"{trial.scale.padded:g}")

    def part(name: str, seconds: float, run: Callable[..., object], *rest: object) -> Part:
        limit = seconds * trial.scale.patience
        return Part(name, limit, lambda folder: run(trial, folder, *rest))

    def together(name: str, count: int) -> Part:
        more = (*given(concurrency=count), "--limit", count)
        return part(name, 40, speed, AT_ONCE, *more)

    return [
        part("float32", 60, float32),
        part("bfloat16", 60, bfloat16),
        part("plain-135m", 30, plain),
        part("plain-7b", 45, speed, (), *pad),
        part("greedy-7b", 60, speed, GREEDY, *pad),
        part("sampled-7b", 50, speed, SAMPLED, *pad, *given(temperature=0.8)),
        together("together-8", trial.scale.at_once[0]),
        together("together-32", trial.scale.at_once[1]),
        part("tuning", 180, tuning),
        replace(part("gate", 60, gate), lacks=partial(untuned, trial)),
        replace(part("server", 60, server), lacks=partial(unbundled, trial)),
        part("cpu-draft", 60, speed, OVERLAPPING, *pad, *given(draft_device="cpu")),
    ]
