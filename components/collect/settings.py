"""Settings of a collection, with every default of the command in one place. Entry points build them
and pass them on as one value.

The demo and the schedules collect less: `PipelineSettings.collect_prompts` and `max_tokens` in
flows/settings.py.
"""

from __future__ import annotations

from pydantic import Field, field_validator

from draftwell.serving.errors import DraftwellError
from draftwell.serving.recording.trace_schema import KINDS, LOSSY
from draftwell.serving.settings import Settings


class CollectionSettings(Settings):
    """What a collection records of each prompt. A worker on another machine gets the same settings
    as JSON.

    Raises:
        DraftwellError: a value out of bounds, or an unknown prefix kind.

    >>> CollectionSettings(max_tokens=48).rollout
    16
    """

    # Kinds are not strict: JSON has lists only.
    called, error_code = "collection setting", "bad_collection_settings"

    max_tokens: int = Field(96, ge=1, description="longest text, in tokens")
    temperature: float = Field(0.0, ge=0, description="of the texts; 0 is greedy")
    top_p: float = Field(
        1.0, gt=0, le=1, description="sample from the smallest set of tokens with this probability"
    )
    rollout: int = Field(
        16,
        ge=1,
        description=(
            "K: draft tokens recorded after every position, the longest draft a replay can try"
        ),
    )
    batch: int = Field(16, ge=1, description="texts written at once; at most the pair's slots")
    hidden: bool = Field(
        True,
        description=(
            "record the draft's hidden states, which verifiers need; they are most of a "
            "trace's size"
        ),
    )
    prefix_kinds: tuple[str, ...] = Field(
        KINDS,
        strict=False,
        description="a text of each of these kinds for every prompt (SPRINTER, "
        "section 3.2); bare for plain text alone, not for messages in a chat template",
    )
    turns: int = Field(1, ge=0, description="turns of a conversation that get texts; 0 takes all")
    seed: int = Field(0, ge=0, description="seed of sampled and mixed texts")

    @field_validator("prefix_kinds")
    @classmethod
    def _known_kinds(cls, kinds: tuple[str, ...]) -> tuple[str, ...]:
        if not kinds or len(set(kinds)) != len(kinds) or not set(kinds) <= {*KINDS, LOSSY}:
            raise DraftwellError(
                (
                    f"prefix kinds must be different ones of {', '.join(KINDS)}, not "
                    f"{', '.join(kinds) or 'none'}"
                ),
                code="unknown_prefix_kind",
            )
        return kinds
