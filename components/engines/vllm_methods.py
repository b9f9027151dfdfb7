"""vLLM's ways to speculate: a method with its lengths, its name in tables, and its speculative
config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftwell.serving.errors import DraftwellError

OFF = "off"
CASCADE = "cascade"
METHODS = (OFF, "ngram", "suffix", CASCADE, "draft_model", "eagle3")
"""Names as vLLM has them, `off`: plain decoding, and `cascade`: n-grams of all lengths with SPIDE's
stop rule, from our plug-in."""
ONE_LENGTH = ("suffix",)
"""Methods whose longest draft is the same at all loads."""
CUSTOM = "custom_class"
"""vLLM's method whose `model` is the path of a class."""
CASCADE_CLASS = "draftwell_vllm.proposers.Spide"
NEEDS = {"draft_model": "draft", "eagle3": "head"}
"""Method → what it reads besides the target."""
DEFAULTS: dict[str, tuple[int, int]] = {
    OFF: (0, 0),
    "ngram": (5, 3),
    "suffix": (8, 0),
    CASCADE: (8, 0),
    "draft_model": (2, 0),
    "eagle3": (2, 0),
}
"""Method → (k, n) where nothing else is named."""
Schedule = tuple[tuple[int, int, int], ...]
"""(first, last, k): draft tokens by requests that are decoded at once, both ends included."""


def schedule_of(draft_length_by_batch: Mapping[int, int]) -> Schedule:
    """A table of requests at once → draft tokens as vLLM reads it; it keeps the last beyond.

    Between two sizes the length of the larger one holds: drafts pay less the more requests there
    are, so that is the careful side.

    >>> schedule_of({1: 5, 4: 3, 16: 0})
    ((1, 1, 5), (2, 4, 3), (5, 16, 0))
    """
    parts: list[tuple[int, int, int]] = []
    for size, k in sorted(draft_length_by_batch.items()):
        first = parts[-1][1] + 1 if parts else 1
        if parts and parts[-1][2] == k:
            parts[-1] = (parts[-1][0], size, k)
        else:
            parts.append((first, size, k))
    return tuple(parts)


@dataclass(frozen=True)
class VllmFiles:
    """Folders as vLLM reads them.

    Args:
        draft: with complete weights; None where the pair has none.
        head: an EAGLE-3 head with the rows that it borrows; None where the pair has none.
    """

    target: Path
    draft: Path | None = None
    head: Path | None = None


@dataclass(frozen=True)
class Method:
    """One way to speculate.

    Args:
        name: one of `METHODS`.
        k: draft tokens of a round, at most; 0 for `off`.
        n: longest n-gram that is looked up; 0 for other methods than `ngram`. The shortest is 1.
        schedule: k by requests at once; empty: always k.
    """

    name: str = OFF
    k: int = 0
    n: int = 0
    schedule: Schedule = ()

    @property
    def label(self) -> str:
        """Its name in tables and files.

        >>> (
        ...     Method("ngram", 5, 3).label,
        ...     Method("draft_model", 2, schedule=((1, 4, 2), (5, 8, 0))).label,
        ...     Method().label,
        ... )
        ('ngram(k=5,n=3)', 'draft_model(k=2@1-4,0@5-8)', 'off')
        """
        if self.name == OFF:
            return OFF
        lengths = ",".join(f"{k}@{first}-{last}" for first, last, k in self.schedule) or str(self.k)
        return f"{self.name}(k={lengths}{f',n={self.n}' if self.n else ''})"

    @property
    def family(self) -> tuple[str, int]:
        """What methods that differ in k alone have in common."""
        return self.name, self.n

    def with_k(self, k: int) -> Method:
        """The same with another length, at all loads."""
        return replace(self, k=k, schedule=())

    def speculative_config(self, files: VllmFiles) -> dict[str, Any] | None:
        """vLLM's `--speculative-config`; None for plain decoding.

        Raises:
            DraftwellError: the draft or head is missing (`no_draft_to_export`,
                `no_head_to_export`).
        """
        if self.name == OFF:
            return None
        found: dict[str, Any] = {"method": self.name, "num_speculative_tokens": self.k}
        if self.name == CASCADE:
            found |= {"method": CUSTOM, "model": CASCADE_CLASS}
        if self.name == "ngram":
            found |= {"prompt_lookup_min": 1, "prompt_lookup_max": self.n}
        if self.name == "suffix":
            # else answers are kept, and a prompt that comes again is replayed
            found["suffix_decoding_max_cached_requests"] = 0
        if needed := NEEDS.get(self.name):
            folder: Path | None = getattr(files, needed)
            if folder is None:
                raise DraftwellError(
                    (
                        f"{self.name} needs a {needed}, and this pair has none that vLLM can "
                        f"read: leave {self.name} out"
                    ),
                    code=f"no_{needed}_to_export",
                )
            found["model"] = str(folder)
        if self.schedule:
            found["num_speculative_tokens_per_batch_size"] = [list(part) for part in self.schedule]
        return found


def parse_methods(text: str) -> list[Method]:
    """Methods as options name them, `off` first whether it was named or not.

    Raises:
        DraftwellError: an unknown method or key, or a number out of range (`bad_method`); one that
            is named twice (`named_twice`).

    >>> [method.label for method in parse_methods("ngram:k=5:n=3, draft_model")]
    ['off', 'ngram(k=5,n=3)', 'draft_model(k=2)']
    """
    found = [Method()]
    for item in (part.strip() for part in text.split(",") if part.strip()):
        method = parse_method(item)
        if method.name == OFF:
            continue
        if method in found:
            raise DraftwellError(f"{item} is named twice: leave one out", code="named_twice")
        found.append(method)
    return found


def parse_method(text: str) -> Method:
    """One method: `NAME`, or `NAME:k=5:n=3`."""
    name, *pairs = text.split(":")
    if name not in METHODS:
        raise DraftwellError(
            f"vLLM has no method {name!r} here: choose from {', '.join(METHODS)}", code="bad_method"
        )
    k, n = DEFAULTS[name]
    numbers = {"k": k, "n": n}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if not numbers.get(key) or not re.fullmatch(r"[1-9]\d?", value):
            known = " and ".join(key for key, number in numbers.items() if number) or "nothing"
            raise DraftwellError(
                f"{text!r}: {name} takes {known}, as numbers from 1 to 99, such as ngram:k=5:n=3",
                code="bad_method",
            )
        numbers[key] = int(value)
    return Method(name, numbers["k"], numbers["n"])
