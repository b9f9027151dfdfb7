"""The kinds of artifacts: one row for each, which every other module asks.

A row is plain data: a kind's class is imported when `load_class` is called, because most of them
import torch. How to add a kind: `docs/add_an_artifact.md`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from draftwell.serving.errors import DraftwellError
from draftwell.serving.plugins import Extended, Names
from draftwell.serving.temperature import class_of

if TYPE_CHECKING:
    from draftwell.serving.artifacts.base import Artifact


class Card(NamedTuple):
    """What the registry's pages say of a kind, in Markdown."""

    what: str
    made: str
    good: str
    use: str


@dataclass(frozen=True)
class ArtifactKind:
    """One kind of artifact.

    Args:
        name: the kind; registered as `<name>.<pair>`, stored in the folder `artifacts/<name>` of a
            workspace or bundle.
        class_name: its class, in the module `draftwell.serving.artifacts.<name>` or in `module`.
        made_by: the command that makes one.
        files: its data files.
        card: what people read of it in the registry.
        schema_version: that this runtime reads and writes; the same as the class's own.
        fingerprinted: it carries the pair's fingerprint; False for what is part of the fingerprint
            itself.
        calibrated: calibration makes it for every pair, and registers it.
        read_by_strategies: some `Strategy.reads()` names it, so a tuned choice names it as a
            parent.
        drift_role: field of `draftwell.components.drift.drift.WatchedArtifacts` that takes it; None
            where monitoring does not look at it.
        per_device: it holds times, or was chosen by them, and is valid on one device only: a
            workspace keeps one for each.
        pictures: patterns of the files among a workspace's reports that are published with it.
        tied_to_temperature: it, or its part for a class (`Artifact.at`), predicts acceptance for
            texts of one class of temperatures (`draftwell.serving.temperature`), which its
            provenance names; False where one is for both, as a correction memory (sampled at .6 in
            its paper, used at 0).
        engine: the one other than ours that it is for: no release of ours pins it.
        module: of the class of a plug-in's kind; None for our own.
    """

    name: str
    class_name: str
    made_by: str
    files: tuple[str, ...]
    card: Card
    schema_version: int = 1
    fingerprinted: bool = True
    calibrated: bool = False
    read_by_strategies: bool = False
    drift_role: str | None = None
    per_device: bool = False
    pictures: tuple[str, ...] = ()
    tied_to_temperature: bool = False
    engine: str | None = None
    module: str | None = None

    def load_class(self) -> type[Artifact]:
        """The class; importing it may import torch."""
        module = self.module or f"draftwell.serving.artifacts.{self.name}"
        found: type[Artifact] = getattr(import_module(module), self.class_name)
        return found


GROUP = "draftwell.artifacts"
"""Of the entry points by which other distributions add kinds."""
OUR_KINDS: dict[str, ArtifactKind] = {
    kind.name: kind
    for kind in (
        ArtifactKind(
            "acceptance_table",
            "AcceptanceTable",
            "draftwell step calibrate",
            ("table.json",),
            Card(
                (
                    "SPIDE's acceptance table: how often the target keeps a token, by the "
                    "draft's confidence."
                ),
                "`draftwell step calibrate`: at every position of the target's own texts, "
                "whether it keeps the draft's token, is counted once; "
                "`--set temperature=…` adds the same of sampled texts.",
                "`acceptance_rate` is the pair's on this traffic; `judged` says on how "
                "many tokens the table rests; `sampled_…` are those of "
                "sampled texts, where there are any.",
                "`draftwell generate --strategy spide`, which continues counting while it serves.",
            ),
            schema_version=3,
            calibrated=True,
            read_by_strategies=True,
            drift_role="table",
            pictures=("acceptance_by_confidence.png",),
            tied_to_temperature=True,
        ),
        ArtifactKind(
            "verifier",
            "Verifier",
            "draftwell step train",
            ("verifier.json", "verifier.safetensors"),
            Card(
                (
                    "SPRINTER's verifier: predicts from what the draft knows whether the "
                    "target keeps a draft token."
                ),
                (
                    "`draftwell step train`: logistic regression on the draft tokens of a trace, "
                    "scaled to probabilities on validation prompts."
                ),
                "`auc` on prompts that nothing was chosen on, compared with `baseline_auc` "
                "of the draft's confidence alone; "
                "`calibration_error` and `brier`: the lower, the better.",
                (
                    "`draftwell generate --strategy sprinter`; as a stop policy it serves "
                    "other strategies too."
                ),
            ),
            calibrated=True,
            read_by_strategies=True,
            drift_role="verifier",
            pictures=(
                "roc.png",
                "roc_by_lambda.png",
                "reliability.png",
                "verifier.json",
                "verifier.md",
            ),
            tied_to_temperature=True,
        ),
        ArtifactKind(
            "correction_memory",
            "CorrectionMemory",
            "draftwell step calibrate",
            ("memory.arrow",),
            Card(
                "CSD's correction memory: how often the target corrected one token to another.",
                "`draftwell step calibrate`: the rejections of standard speculative decoding.",
                (
                    "`patterns` of `rejections`: few patterns for many rejections mean that "
                    "there is much to rescue."
                ),
                (
                    "`draftwell generate --strategy csd` (lossy), which continues learning "
                    "while it serves."
                ),
            ),
            calibrated=True,
            read_by_strategies=True,
            drift_role="memory",
            pictures=("rejections.png",),
        ),
        ArtifactKind(
            "hardware_profile",
            "HardwareProfile",
            "draftwell step calibrate",
            ("profile.json",),
            Card(
                (
                    "Hardware profile: seconds of single forward passes of draft and target on "
                    "one class of machine."
                ),
                "`draftwell step calibrate`, measured on the machine class named below.",
                (
                    "`speed_ratio`: forward passes of the draft in the time of one of the "
                    "target. It says nothing of another class of machine."
                ),
                "Strategies pace themselves by it, and the tuner predicts with it.",
            ),
            calibrated=True,
            read_by_strategies=True,
            per_device=True,
        ),
        ArtifactKind(
            "acceptance_head",
            "AcceptanceHead",
            "draftwell step train --kind acceptance_head",
            ("acceptance_head.safetensors",),
            Card(
                (
                    "SpecDec++'s acceptance head: predicts from the draft's last hidden state "
                    "whether the target keeps a token."
                ),
                (
                    "`draftwell step train --kind acceptance_head`: residual blocks on the hidden "
                    "states of a trace."
                ),
                "The loss on held-out prompts: the lower, the better.",
                "`draftwell generate --strategy specdec_pp`.",
            ),
            read_by_strategies=True,
            pictures=("acceptance_head.png", "acceptance_head.json"),
        ),
        ArtifactKind(
            "eagle3_head",
            "Eagle3Head",
            "draftwell step train --kind eagle3_head",
            ("config.json", "head.json", "model.safetensors"),
            Card(
                (
                    "EAGLE-3 head: one decoder layer that drafts from the target's own states, "
                    "with the target's embeddings."
                ),
                (
                    "`draftwell step train --kind eagle3_head`, on texts that the target wrote, "
                    "unrolled over the head's own outputs."
                ),
                "`acceptance_depth_1`… on held-out texts: how often the target keeps the "
                "drafted token at a depth, where it kept those before; "
                "`accepted_length`: tokens of a draft that it keeps.",
                (
                    "`draftwell generate --strategy eagle3`, or `hybrid`; for vLLM and SGLang: "
                    "`draftwell export --set save_head=…`."
                ),
            ),
            read_by_strategies=True,
            pictures=("eagle3_head.png", "eagle3_head.json"),
        ),
        ArtifactKind(
            "datastore",
            "Datastore",
            "draftwell step train --kind datastore",
            ("datastore.safetensors",),
            Card(
                (
                    "Datastore: texts that the target wrote, in which drafts are looked up "
                    "(REST, SuffixDecoding)."
                ),
                (
                    "`draftwell step train --kind datastore`: the target's own texts of a trace, "
                    "with a suffix array."
                ),
                "`right_per_lookup`: draft tokens that the target would keep, counted on "
                "texts of held-out prompts; `found` is the share of "
                "positions where something was proposed.",
                (
                    "`draftwell generate --strategy rest`, or `suffix`, which drafts from the "
                    "request's own text too."
                ),
            ),
            read_by_strategies=True,
        ),
        ArtifactKind(
            "medusa_heads",
            "MedusaHeads",
            "draftwell step train --kind medusa_heads",
            ("medusa_heads.safetensors",),
            Card(
                (
                    "Medusa's heads: predict from the target's last hidden state which tokens "
                    "come after its next one."
                ),
                (
                    "`draftwell step train --kind medusa_heads`: one residual block a head, on the "
                    "target's states over its own texts."
                ),
                (
                    "`top1_1`, `top1_2` …: how often each head's likeliest token is right on "
                    "held-out texts; the higher, the better."
                ),
                "`draftwell generate --strategy medusa`.",
            ),
            read_by_strategies=True,
            pictures=("medusa_heads.json",),
        ),
        ArtifactKind(
            "decoding_config",
            "DecodingConfig",
            "draftwell step choose",
            ("config.json",),
            Card(
                (
                    "Tuned decoding configuration: the chosen strategy, its parameters and the "
                    "evidence."
                ),
                (
                    "`draftwell step choose`: replay over a trace, then measurements next to plain "
                    "decoding; the report is among the run's plots."
                ),
                (
                    "`speedup` over plain decoding and its lower bound `speedup_low`, of a "
                    "measurement made after the choice."
                ),
                (
                    "It is what a release serves. To try it by hand: `draftwell generate "
                    "--strategy … --set STRATEGY.PARAMETER=…`."
                ),
            ),
            schema_version=2,
            per_device=True,
            pictures=("tuning.html", "tuning_*.png", "tuning_sampled.html"),
        ),
        ArtifactKind(
            "engine_config",
            "EngineConfig",
            "draftwell step choose --engine vllm",
            ("engine.json",),
            Card(
                "Engine configuration: how vLLM speculates for this pair, by its own settings.",
                (
                    "`draftwell step choose --engine vllm`: vLLM's ways to speculate, measured "
                    "by running "
                    "it beside its plain decoding."
                ),
                (
                    "`speedup` over vLLM's plain decoding and its lower bound `speedup_low`, one "
                    "request at a time."
                ),
                "`draftwell gate --engine vllm` judges it, `draftwell deploy --engine vllm` "
                "builds what serves it.",
            ),
            per_device=True,
            engine="vllm",
        ),
        ArtifactKind(
            "distilled_draft",
            "DistilledDraft",
            "draftwell step distil",
            ("draft.json", "draft.safetensors"),
            Card(
                (
                    "Draft model distilled from the pair's target: some of its layers, with "
                    "the target's own embeddings."
                ),
                "`draftwell step distil`, on texts that the target wrote.",
                "Agreement with the target's own greedy outputs, where it was measured.",
                "It is the `draft` of the pair's YAML file; a bundle carries it.",
            ),
            fingerprinted=False,
        ),
    )
}
"""name → kind."""


def _problem(name: str, kind: Any) -> str:
    """Why an entry point's object is no kind; "" where it is one."""
    if not isinstance(kind, ArtifactKind):
        return "it is no ArtifactKind"
    if kind.module is None:
        return "the kind names no module of its class"
    return "" if kind.name == name else f"the kind calls itself {kind.name}"


KINDS: Mapping[str, ArtifactKind] = Extended(OUR_KINDS, GROUP, _problem)
"""Our own, and those of installed plug-ins (docs/plugins.md): name → kind."""


def find_kind(name: str) -> ArtifactKind:
    """The kind of a name.

    Raises:
        DraftwellError: this version has no such kind.
    """
    if name not in KINDS:
        raise DraftwellError(
            f"this version of draftwell has no artifacts of kind {name} (it has "
            f"{', '.join(KINDS)}): upgrade draftwell, "
            "or remove that folder",
            code="unknown_artifact_kind",
        )
    return KINDS[name]


OURS = Names(KINDS, lambda kind: kind.engine is None)
"""What releases of our own engine pin."""
CALIBRATED = Names(KINDS, lambda kind: kind.calibrated)
"""What calibration makes for every pair."""
READ_BY_STRATEGIES = Names(KINDS, lambda kind: kind.read_by_strategies)
"""What a tuned choice may rest on."""
WATCHED = Names(KINDS, lambda kind: kind.drift_role is not None)
"""What served traffic is compared with."""


def device_of(kind: str, device_class: str | None) -> str | None:
    """The device that an artifact is for, of a kind that is `per_device`; None where that is not
    known, or any will do.

    >>> (
    ...     device_of("decoding_config", "cuda-nvidia-h100"),
    ...     device_of("verifier", "cpu-x86"),
    ...     device_of("hardware_profile", ""),
    ... )
    ('cuda', None, None)
    """
    if not device_class or not find_kind(kind).per_device:
        return None
    return "cuda" if device_class.startswith("cuda") else "cpu"


def refuse_other_device(kind: str, device_class: str | None, device: str, what: str) -> None:
    """Refuse an artifact that was made for another device.

    Args:
        device: that of a release, which may name an engine, too, such as `cpu-vllm`.
        what: names the artifact, for the message.
    Raises:
        DraftwellError: `made_on_other_device`.
    """
    made_for = device_of(kind, device_class)
    if made_for is not None and made_for != device.partition("-")[0]:
        raise DraftwellError(
            f"{what} was made on {device_class}, for {made_for}, and cannot be released "
            f"for {device}: run `draftwell step choose "
            f"--device {device}`, or use --device {made_for}",
            code="made_on_other_device",
        )


def temperature_of(artifact: Artifact) -> float | None:
    """Temperature of the texts that an artifact was made from; None where that is not known."""
    recorded = artifact.provenance.parameters.get("temperature")
    if isinstance(recorded, int | float) and not isinstance(recorded, bool):
        return float(recorded)
    return None


def other_temperature(artifacts: Iterable[Artifact], temperature: float) -> str | None:
    """The first artifact that was made for the other class of temperatures, as half a sentence;
    None where there is none.

    One whose temperature is not known is not objected to.
    """
    for artifact in artifacts:
        made = (
            temperature_of(artifact.at(temperature))
            if find_kind(artifact.kind).tied_to_temperature
            else None
        )
        if made is not None and class_of(made) != class_of(temperature):
            return (
                f"the {artifact.kind} is for temperature {made:g} ({class_of(made)}), not "
                f"{temperature:g} ({class_of(temperature)})"
            )
    return None


def made_by(command: str) -> tuple[str, ...]:
    """The kinds that a command makes.

    >>> made_by("draftwell step calibrate")
    ('acceptance_table', 'correction_memory', 'hardware_profile')
    """
    return tuple(name for name, kind in KINDS.items() if kind.made_by == command)
