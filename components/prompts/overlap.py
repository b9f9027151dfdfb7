"""Which prompts something was made from, as short hashes, and which prompts are left to judge it
on.

A score on prompts that an artifact has learnt from says nothing about new traffic. So artifacts and
traces carry the hashes of their prompts, and whatever is measured later leaves these out. A hash
covers what a model reads before its first answer: the first turn and the messages before it, not
the id. Prompts that differ by a single character count as different, but in what the setting
redact masks: a prompt is the same with and without it, and no hash tells a phone number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from draftwell.components.prompts.prompt import context_of
from draftwell.components.prompts.redact import masked_within
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import json_digest

if TYPE_CHECKING:
    from draftwell.components.prompts.prompt import Prompt

HASH_LENGTH = 16
"""Hexadecimal digits: among 100,000 prompts two share a hash by chance once in billions of
cases."""

WHY_UNKNOWN = "not recorded, or from requests that were recorded without a text"


def hash_of(prompt: Prompt) -> str:
    """The hash of a prompt, the same whatever file it comes from and whatever its id.

    >>> from draftwell.components.prompts.prompt import Prompt
    >>> hash_of(Prompt("a", None, ["Hello"])) == hash_of(
    ...     Prompt("b", "chat", ["Hello"], reference="Hi")
    ... )
    True
    """
    asked = ["tokens", *prompt.tokens[0]] if prompt.tokens else masked_within(context_of(prompt))
    return json_digest(asked)[:HASH_LENGTH]


def hashes_of(prompts: Iterable[Prompt]) -> list[str]:
    """The hashes of prompts, sorted, each once."""
    return sorted({hash_of(prompt) for prompt in prompts})


def different(prompts: Iterable[Prompt]) -> list[Prompt]:
    """The prompts without those that repeat an earlier one, to the letter, under another id.

    >>> from draftwell.components.prompts.prompt import Prompt
    >>> asked = [Prompt(name, None, [f"Is 10.0.{name}.7 in 10.0.0.0/24?"]) for name in "01"]
    >>> len(different([*asked, *asked]))
    2
    """
    found: dict[str, Prompt] = {}
    for prompt in prompts:
        found.setdefault(json_digest([prompt.tokens[:1], context_of(prompt)]), prompt)
    return list(found.values())


def unknown_words(names: Sequence[str]) -> str:
    """That nobody knows which prompts some artifacts were made from, in a line."""
    return f"warning: training prompts unknown: {', '.join(names)} ({WHY_UNKNOWN})"


@dataclass(frozen=True)
class TrainingPrompts:
    """The prompts that several things were made from.

    Args:
        by_name: name of an artifact, or `traces` → hashes.
        unknown: names of what carries no hashes, because it records none, or not all of them, with
            what lacks them.
    """

    by_name: Mapping[str, frozenset[str]] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        recorded: Mapping[str, Iterable[str] | None],
        lacking: Mapping[str, Sequence[str]] | None = None,
    ) -> TrainingPrompts:
        """Of what each thing records; None where it records nothing.

        Args:
            lacking: name → what it was made from whose prompts are not in its record
                (`Provenance.unknown_prompts`).

        >>> TrainingPrompts.of(
        ...     {"traces": ["ab"], "verifier": None, "decoding_config": ["cd"]},
        ...     {"decoding_config": ["traces"]},
        ... ).unknown
        ('verifier', 'decoding_config (made from: traces)')
        """
        known = {name: frozenset(hashes) for name, hashes in recorded.items() if hashes is not None}
        partly = (
            f"{name} (made from: {', '.join(parts)})"
            for name, parts in (lacking or {}).items()
            if parts and name in known
        )
        return cls(known, (*(name for name, hashes in recorded.items() if hashes is None), *partly))

    @property
    def hashes(self) -> frozenset[str]:
        """All hashes."""
        return frozenset[str]().union(*self.by_name.values())

    def split(self, prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
        """The prompts that nothing was made from, each once, and the others."""
        used = self.hashes
        rows = different(prompts)
        return [p for p in rows if hash_of(p) not in used], [p for p in rows if hash_of(p) in used]

    def users_of(self, prompts: Sequence[Prompt]) -> str:
        """Which things were made from any of these prompts, for a sentence."""
        hashes = set(hashes_of(prompts))
        return ", ".join(name for name, known in self.by_name.items() if known & hashes)

    def untouched(
        self, prompts: Sequence[Prompt], limit: int | None = None
    ) -> tuple[list[Prompt], list[str]]:
        """At most `limit` prompts that nothing was made from, in order; and what a person should
        know of it, a line each.

        Raises:
            DraftwellError: none is left (`no_untouched_prompts`).
        """
        left, used = self.split(prompts)
        if not left and used:
            raise DraftwellError(
                f"no prompt is left: all {len(used)} were used to make "
                f"{self.users_of(used)}: name a file of other "
                "prompts with --prompts, or collect fewer of these (draftwell step collect "
                "--set fresh=true --set limit=…)",
                code="no_untouched_prompts",
            )
        lines = (
            [f"{len(used)} prompts left out: they were used to make {self.users_of(used)}"]
            if used
            else []
        )
        if self.unknown:
            lines.append(unknown_words(self.unknown))
        return left[:limit], lines
