"""What a proposer may be told besides vLLM's own settings: the key `draftwell` of
`--additional-config`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

KEY = "draftwell"


@dataclass(frozen=True)
class ProposerSettings:
    """Args:
    longest_ngram, shortest_ngram: tokens at the end of a text that are looked up in it. window:
    tokens at the end of a text that are searched. tau: SPIDE's; None takes the rule's own.
    threshold: of SVIP and of dynamic speculation; None takes the rule's own. entropy_scale:
    SVIP's. draft: folder of a draft model, asked where the text says nothing; None: n-grams
    alone. table: `table.json` of an acceptance table of that draft model, for SPIDE; None
    begins without counts.
    """

    longest_ngram: int = 4
    shortest_ngram: int = 1
    window: int = 16384
    tau: float | None = None
    threshold: float | None = None
    entropy_scale: float = 0.15
    draft: str | None = None
    table: str | None = None


def read_settings(additional_config: Any) -> ProposerSettings:
    """The settings in vLLM's additional config.

    Raises:
        ValueError: an unknown key, or a value out of range; one line that names it.
    """
    found = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
    known = {one.name: one for one in fields(ProposerSettings)}
    if not isinstance(found, Mapping) or (unknown := sorted(set(found) - set(known))):
        what = f"unknown key {unknown[0]!r}" if isinstance(found, Mapping) else f"{found!r}"
        raise ValueError(f"additional config, {KEY}: {what}: write a mapping of {', '.join(known)}")
    made = ProposerSettings(**found)
    checks: tuple[tuple[str, Callable[[], bool]], ...] = (
        ("shortest_ngram", lambda: is_int(made.shortest_ngram) and made.shortest_ngram >= 1),
        (
            "longest_ngram",
            lambda: is_int(made.longest_ngram) and made.longest_ngram >= made.shortest_ngram,
        ),
        ("window", lambda: is_int(made.window) and made.window >= 2),
        ("draft", lambda: made.draft is None or isinstance(made.draft, str)),
        ("table", lambda: made.table is None or isinstance(made.table, str)),
        ("tau", lambda: made.tau is None or 0 <= made.tau <= 1),
        ("threshold", lambda: made.threshold is None or 0 <= made.threshold <= 2),
        ("entropy_scale", lambda: 0 < made.entropy_scale <= 1),
    )
    for name, is_right in checks:
        try:
            right = is_right()
        except TypeError:
            right = False
        if not right:
            raise ValueError(
                f"additional config, {KEY}: {name} is {getattr(made, name)!r}, which is "
                "out of range"
            )
    return made


def is_int(value: object) -> bool:
    """Whether a value from JSON is a whole number and written as one: 1e4 is a float, which indexes
    nothing."""
    return isinstance(value, int) and not isinstance(value, bool)
