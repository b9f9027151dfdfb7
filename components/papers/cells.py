"""Cells: what is measured in one piece, and how large a run is.

A cell is one interleaved bench of several contenders on one pair and one set of prompts. Its
settings make its key, so that a run that was interrupted measures only what is still missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from draftwell.components.bench.runner import labels_of
from draftwell.serving.files import json_digest
from draftwell.serving.runtime.strategies import StrategyChoice
from draftwell.serving.settings import Settings

FORMAT = 2
"""Of the files of cells; part of every key."""
PADDED = 1.1e9
"""Parameters that targets are padded to, so that a draft of the target's own depth is cheap next to
it."""
FEWER = ("prompts", "seeds", "max_tokens", "training_prompts", "training_tokens")
"""Settings of a paper's file that a quick run leaves out."""
LATER = (
    *("replay", "counted", "memory", "run_length", "seeds", "verifiers"),
    *("training_prompts", "training_tokens"),
)
"""Settings that came later: where they have their default, keys are as they were without them."""
MEMORY, CONFIDENCE = "correction_memory", "confidence"
"""Names of what a counted cell makes for itself: CSD's memory, and the draft's confidence as the
score that a verifier is compared with."""
PLAIN = "plain"
"""Role of plain decoding, which every cell measures."""


@dataclass(frozen=True)
class Scale:
    """How large a run is.

    Args:
        prompts, max_tokens: of every cell that does not set its own.
        repeats: forward passes per median of a hardware profile.
        one_setting: each role is measured with one setting, the middle one of its list.
        replayed: prompts of cells that are replayed.
        training: prompts of a verifier that is trained for a cell.
        training_tokens: of each text that it learns from.
        remark: a sentence for the page on what a run of this size can decide; empty for none.
        pad_target: parameters that the targets of measured cells are padded to.
    """

    name: str
    prompts: int
    max_tokens: int
    repeats: int
    replayed: int = 4
    one_setting: bool = False
    training: int = 6
    training_tokens: int = 16
    remark: str = ""
    pad_target: float = PADDED

    @property
    def usual(self) -> bool:
        """Whether targets have the padding of the project's pages."""
        return self.pad_target == PADDED

    @property
    def pad_option(self) -> str:
        """What a command needs for it; empty for the usual padding.

        >>> Scale("a run", 1, 1, 1, pad_target=7e9).pad_option
        ' --set pad_target=7e9'
        """
        return (
            ""
            if self.usual
            else f" --set pad_target={self.pad_target:g}".replace("e+0", "e").replace("e+", "e")
        )


QUICK = Scale(
    "quick",
    prompts=2,
    max_tokens=12,
    repeats=3,
    one_setting=True,
    remark=(
        "This is a quick run: 2 prompts of 12 tokens a cell, one draft length and one threshold. "
        "A bootstrap over 2 prompts knows three different draws, so its intervals are too narrow, "
        "and its verdicts decide little: it shows that everything runs, and roughly where."
    ),
)
FULL = Scale(
    "full",
    prompts=12,
    max_tokens=64,
    repeats=9,
    replayed=32,
    training=64,
    training_tokens=64,
)


class Cell(Settings):
    """One interleaved bench.

    A contender's spec is written as for `draftwell bench`: NAME, NAME@1+1,
    NAME:key=value:key=value.
    """

    called = "cell setting"

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$", description="of its file, next to the key")
    pair: str = Field(description="name of a pair in the catalogue")
    pad_target: float | None = Field(None, description="parameters that the target is padded to")
    data: str = Field(description="a name of `prompts.SETS`")
    contenders: dict[str, Annotated[tuple[str, ...], Field(strict=False)]] = Field(
        min_length=1, description="role → specs, of which the fastest plays the role"
    )
    prompts: int = Field(ge=1)
    max_tokens: int = Field(ge=1)
    temperature: float = Field(0.0, ge=0)
    seed: int = Field(0, ge=0)
    seeds: int = Field(
        1, ge=1, description="how often each prompt is decoded, each time with another seed"
    )
    repeats: int = Field(9, ge=1, description="forward passes per median of the hardware profile")
    replay: int | None = Field(
        None,
        ge=1,
        description="the paper's s, draft passes in a target pass: contenders are replayed on "
        "a trace, at this ratio of costs, and none is run",
    )

    counted: dict[Literal["draft", "qualifier"], float] | None = Field(
        None,
        description="the paper's costs of passes, in target passes: contenders decode on the bare "
        "target, many requests at once, and their passes are counted",
    )
    memory: str = Field(
        "",
        description="of a counted cell: the set that CSD's memory is counted on; empty: the "
        "pair's own",
    )
    run_length: float | None = Field(
        None,
        gt=0,
        description="of a counted cell with verifiers: SPRINTER's tokens a target call, at which "
        "the verifier and the draft's confidence are compared",
    )
    verifiers: dict[str, str] = Field(
        {},
        description="role → name of `prompts.SETS`: SPRINTER at τ .5 with a verifier that is "
        "trained on these prompts before the bench; the first role's are of the measured kind",
    )
    training_prompts: int = Field(0, ge=0, description="of each verifier, or of the memory")
    training_tokens: int = Field(
        FULL.training_tokens, ge=1, description="of each text that it learns from"
    )

    @model_validator(mode="after")
    def _possible(self) -> Cell:
        if both := sorted({*self.contenders} & {*self.verifiers}):
            raise ValueError(f"{', '.join(both)}: a role has contenders or a verifier, not both")
        counted, lengths = self.counted is not None, bool(self.run_length)
        if (self.memory or lengths) and not counted:
            raise ValueError("memory and run_length are a counted cell's: set counted")
        if counted and (self.replay or self.pad_target or bool(self.verifiers) != lengths):
            raise ValueError(
                "a counted cell is not replayed, its target is not padded, and it has verifiers "
                "and a run_length, or neither"
            )
        if self.seeds > 1 and not self.temperature:
            raise ValueError(
                "greedy texts are the same with every seed: leave seeds out, or set a temperature"
            )
        return self

    def choices(self) -> list[StrategyChoice]:
        """The strategies that it measures, each once."""
        specs = sum(self.contenders.values(), ())
        return list(dict.fromkeys(map(choice_of, specs)))

    def labels(self) -> dict[str, list[str]]:
        """Role → labels of its contenders in the bench's report; plain decoding among them."""
        return {
            PLAIN: ["autoregressive"],
            **{role: list(map(self.label_of, specs)) for role, specs in self.contenders.items()},
            **{role: [role] for role in self.further},
        }

    @property
    def kind(self) -> str:
        """How its values come about."""
        if self.counted is not None:
            return "counted"
        return "measured" if self.replay is None else "replayed"

    @property
    def cost_words(self) -> str:
        """The costs of passes that a cell is replayed or counted at, in target passes."""
        if self.counted is not None:
            return ", ".join(f"{cost:g}" for cost in self.counted.values()) + " (assumed)"
        return f"1/{self.replay}"

    @property
    def collects(self) -> bool:
        """Whether texts are collected for it, several at once: its pair has a slot for each of
        them."""
        return self.kind != "measured" or bool(self.verifiers)

    @property
    def further(self) -> list[str]:
        """Roles of contenders whose artifacts are made for the cell."""
        return [*self.verifiers, *([CONFIDENCE] if self.run_length else [])]

    @property
    def training(self) -> dict[str, str]:
        """What is made for the cell → the set that it is made from."""
        return {**self.verifiers, **({MEMORY: self.memory} if self.memory else {})}

    def label_of(self, spec: str) -> str:
        """The label of one contender."""
        return self.by_choice[choice_of(spec)]

    @cached_property
    def by_choice(self) -> dict[StrategyChoice, str]:
        """Choice → label in the bench's report."""
        return {choice: label for label, choice in self.by_label.items()}

    @cached_property
    def by_label(self) -> dict[str, StrategyChoice]:
        """Label in the bench's report → choice."""
        choices = self.choices()
        return dict(zip(labels_of(choices), choices, strict=True))

    def settings(self) -> dict[str, Any]:
        """As JSON, without the defaults of `LATER`."""
        fields = type(self).model_fields
        usual = {name for name in LATER if getattr(self, name) == fields[name].default}
        return self.model_dump(mode="json", exclude=usual)

    def key(self, prompts_digest: str, where: str, made_of: Mapping[str, str]) -> str:
        """What its file is named by: settings, prompts, where it runs (number format and device),
        and what it is measured with.

        Args:
            made_of: kind → digest of the artifacts that its strategies read, and the pair's
                fingerprint.
        """
        return json_digest(
            [FORMAT, prompts_digest, where, dict(sorted(made_of.items())), self.settings()]
        )[:12]


def padding_name(padded: float | None) -> str:
    """What marks pages, pictures and folders of cells whose target has another padding; empty for
    the usual one, and for none.

    >>> padding_name(7e9), padding_name(PADDED)
    ('padded-7b', '')
    """
    return "" if padded is None or padded == PADDED else f"padded-{padded / 1e9:g}b"


def choice_of(spec: str) -> StrategyChoice:
    """A spec as a choice.

    >>> str(choice_of("spide@1+1:tau=0.7"))
    'spide@1+1(tau=0.7)'
    """
    name, *pairs = spec.split(":")
    return StrategyChoice(name, dict(pair.split("=", 1) for pair in pairs))


def specs_of(text: str) -> list[str]:
    """A spec with all values of its braces.

    >>> specs_of("spide:tau={0.3,0.5}")
    ['spide:tau=0.3', 'spide:tau=0.5']
    """
    before, brace, rest = text.partition("{")
    if not brace:
        return [text]
    values, _, after = rest.partition("}")
    return [before + value + tail for value in values.split(",") for tail in specs_of(after)]


def sized(scale: Scale, name: str, settings: Mapping[str, Any]) -> Cell:
    """A cell of a run of this size, by what a paper's file says of it.

    A quick run takes its own number of prompts and one seed, and of each role that is measured one
    setting.
    """
    replayed = "replay" in settings
    contenders = {
        role: tuple(one for spec in specs for one in specs_of(spec))
        for role, specs in settings["contenders"].items()
    }
    if scale.one_setting and not replayed:
        contenders = {role: (specs[len(specs) // 2],) for role, specs in contenders.items()}
    usual = {
        "prompts": scale.replayed if replayed else scale.prompts,
        "max_tokens": scale.max_tokens,
        "repeats": scale.repeats,
        "pad_target": None if replayed or "counted" in settings else scale.pad_target,
    }
    if {"verifiers", "memory"} & settings.keys():
        usual |= {"training_prompts": scale.training, "training_tokens": scale.training_tokens}
    own = {
        key: value for key, value in settings.items() if not scale.one_setting or key not in FEWER
    }
    return Cell.model_validate({**usual, **own, "name": name, "contenders": contenders})
