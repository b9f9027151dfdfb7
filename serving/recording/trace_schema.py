"""The columns of a trace and the header that binds a shard to the pair that made it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from draftwell.serving.errors import DraftwellError

if TYPE_CHECKING:
    import pyarrow as pa


TRACE_VERSION = 2
HEADER = b"draftwell.trace"
KINDS = ("bare", "draft", "target", "mixed")
"""What the prefixes of a text are made of (SPRINTER, section 3.2): original text, or text by draft,
target, or both."""
LOSSY = "lossy"
"""Kind of the texts that a lossy strategy has served, or has written in a collection as it would
serve them: text by both models, but by that strategy's own rule and not by the coin that writes
`mixed` ones, so that the two are other texts."""


class TraceError(DraftwellError):
    """A trace that is missing, empty, broken, of another version, or of another pair."""

    code = "bad_trace"


class TraceHeader(BaseModel):
    """What a shard was made with; the same for all shards of a set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int = TRACE_VERSION
    pair: str = Field(description="name of the pair in the catalogue")
    fingerprint: str = Field(description="pair fingerprint")
    dtype: str = Field(description="dtype that the models ran in")
    rollout: int = Field(ge=1, description="K: draft tokens after every position")
    max_tokens: int = Field(ge=1, description="longest continuation")
    temperature: float = Field(ge=0)
    top_k: int = Field(0, ge=0, description="0 keeps all tokens")
    top_p: float = Field(1.0, gt=0, le=1)
    stop_token_ids: tuple[int, ...] = Field(description="tokens that end a text, ascending")
    rollout_kinds: tuple[str, ...] = Field(
        KINDS, description="prefix kinds whose rows have rollouts"
    )
    batch: int | None = Field(
        None,
        description=(
            "texts written at once, which a bfloat16 text may depend on; None: not recorded"
        ),
    )


def trace_schema(header: TraceHeader) -> pa.Schema:
    """The columns of a trace; *raw* probabilities are at temperature 1, the others warped by the
    request (docs/methods.md)."""
    import pyarrow as pa

    ints, floats, halves = pa.list_(pa.int32()), pa.list_(pa.float32()), pa.list_(pa.float16())
    columns = [
        ("prompt_id", pa.string()),
        ("task", pa.string()),  # null where the prompt names none
        ("turn", pa.int32()),  # 0 is the first turn of a conversation
        ("kind", pa.string()),  # one of KINDS, or LOSSY
        ("temperature", pa.float32()),
        ("position", pa.int32()),  # 0 is the first position of the continuation
        ("prompt_tokens", ints),  # at position 0, else null
        # at position 0, else null: tokens left out of the prompt, which was too long
        ("cut_tokens", pa.int32()),
        ("token", pa.int32()),  # the text's token at this position
        # the target's own choice here; equals `token` where kind is target
        ("target_token", pa.int32()),
        ("target_p", pa.float32()),  # its raw target probability
        ("target_gap", pa.float32()),  # the target's largest logit minus its second largest
        ("text_q", pa.float32()),  # draft probability of `token`, warped
        ("text_p", pa.float32()),  # its target probability, warped
        ("text_raw_q", pa.float32()),  # its raw draft probability
        # what the target puts for a rejected draft_token: argmax, or from the residual
        ("correction", pa.int32()),
        ("correction_p", pa.float32()),  # its raw target probability
        ("draft_token", pa.int32()),  # what the draft samples here
        ("draft_q", pa.float32()),  # its draft probability, warped
        ("draft_p", pa.float32()),  # its target probability, warped
        ("draft_raw_q", pa.float32()),  # its raw draft probability
        ("draft_raw_p", pa.float32()),  # its raw target probability
        ("ratio", pa.float32()),  # draft_raw_q / draft_raw_p, inf where the target gives it nothing
        ("rank", pa.int32()),  # tokens that the raw draft distribution prefers to draft_token
        ("confidence", pa.float32()),  # C, the largest raw draft probability
        ("entropy", pa.float32()),  # of the raw draft distribution, nats
        ("candidates", ints),  # the draft's 8 likeliest tokens
        ("candidate_q", floats),  # their raw draft probabilities
        ("hidden_before", halves),  # the draft's state that produced draft_token, or null
        ("hidden_after", halves),  # the draft's state having read it, or null
        # What the draft writes after the prefix, K tokens; null where the text's kind is none of
        # the header's `rollout_kinds`. At temperature 0 its greedy tokens. Above, the first is one
        # that the target rejects here, drawn from norm(max(0, q − p)), and the draft samples the
        # others: where it drafts `token` itself, the next row continues.
        ("rollout_tokens", ints),
        ("rollout_q", floats),  # raw draft probability of each
        ("rollout_confidence", floats),  # C of the distribution that each comes from
        ("rollout_entropy", floats),  # its entropy
    ]
    return pa.schema(columns, metadata={HEADER: header.model_dump_json().encode()})
