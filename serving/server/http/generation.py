"""What the requests of all endpoints have: how an answer is drawn, what it has to be, and where it
ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from draftwell.serving.server.http.fields import (
    Name,
    OpenAIFields,
    StopString,
    Text,
    TokenId,
    TokenKey,
    contradiction,
)
from draftwell.serving.server.http.formats import (
    Choices,
    Definition,
    Format,
    ResponseFormat,
    Schema,
    StructuredOutputs,
)
from draftwell.serving.server.http.messages import TextPart
from draftwell.serving.server.scheduling.detokenize import StopStrings
from draftwell.serving.temperature import SERVED_TEMPERATURE

VLLM_OFF: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "best_of": (1,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "detokenize": (True,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "logits_processors": ([],),
    "vllm_xargs": ({},),
    "kv_transfer_params": ({},),
    "documents": ([],),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "thinking_token_budget": (),
    "priority": (0,),
    "early_stopping": (False,),
    "watermarking": (False,),
    "ec_transfer_params": ({},),
    "repetition_detection": (),
    "logprob_token_ids": ([],),
    "prompt_embeds": (),
    "return_mm_kwargs": (False,),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "enable_response_messages": (False,),
    "previous_input_messages": ([],),
}
"""vLLM's fields that this server lacks, with the values that change nothing; null always is one."""

SMALLEST_TOP_P = 1e-9
"""Stands for OpenAI's top_p = 0: only the most likely token."""
MOST_PARAMETERS = 32
MOST_CHOICES = 128
"""Choices of one request: prompts × `n`."""
MOST_STOP_TOKENS = 128


class StreamOptions(BaseModel):
    """Extras of a stream."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = Field(
        None, description="end the stream with a chunk that holds the usage"
    )
    continuous_usage_stats: bool | None = Field(
        None,
        description=(
            "with include_usage: every chunk has the tokens of its choice so far, as vLLM's have"
        ),
    )


class SpeculationOptions(BaseModel):
    """How to decode. Lossless strategies change the speed of an answer only, lossy ones its text
    too."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    strategy: Name | None = Field(
        None,
        description=(
            "a strategy that this server offers; default: the one that the bundle was tuned for"
        ),
    )
    enabled: bool | None = Field(
        None, description="false: plain decoding, token by token, without the prediction too"
    )
    stats: bool | None = Field(
        None, description="false: leave the speculation statistics out of the answer; default: true"
    )
    trace: bool | None = Field(
        None, description="report the origin of every token: accepted, rescued, recovered or target"
    )
    parameters: (
        Annotated[dict[Name, bool | int | float | Name], Field(max_length=MOST_PARAMETERS)] | None
    ) = Field(
        None,
        description=(
            "parameters of the strategy that replace the tuned ones, within their bounds; the "
            "server must allow it"
        ),
    )


class PredictedContent(BaseModel):
    """What the client expects much of the answer to be, such as the file that it asks to have
    edited (OpenAI's predicted outputs)."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["content"] = "content"
    content: Text | Annotated[list[TextPart], Field(max_length=1024, fail_fast=True)]

    @property
    def text(self) -> str:
        """The parts, joined."""
        return (
            self.content
            if isinstance(self.content, str)
            else "".join(part.text for part in self.content)
        )


class Generation(OpenAIFields):
    """Fields of both endpoints."""

    model: Name
    max_tokens: int | None = Field(None, ge=1, description="most tokens to generate")
    n: int | None = Field(
        None,
        ge=1,
        le=MOST_CHOICES,
        description="answers to each prompt; default: 1, the first of several",
    )
    temperature: float | None = Field(
        None,
        ge=0,
        le=2,
        description=(
            f"default: the model's own, else {SERVED_TEMPERATURE:g}; 0 takes the most likely token"
        ),
    )
    top_p: float | None = Field(
        None,
        ge=0,
        le=1,
        description="sample from the most likely tokens of this total probability; default: the "
        "model's own, else 1",
    )
    top_k: int | None = Field(
        None,
        ge=-1,
        le=10**6,
        description="sample from this many of the most likely tokens; 0 and -1: all; default: the "
        "model's own, else "
        "all",
    )
    min_p: float | None = Field(
        None,
        ge=0,
        le=1,
        description="sample from the tokens with at least this share of the most likely one's "
        "probability; default: the "
        "model's own, else 0",
    )
    repetition_penalty: float | None = Field(
        None,
        ge=0.01,
        le=10,
        description="divides the positive logits of tokens that prompt or answer contain, and "
        "multiplies "
        "the negative ones; default: the model's own, else 1",
    )
    presence_penalty: float | None = Field(
        None,
        ge=-2,
        le=2,
        description="subtracted once from the logit of a token that the answer contains",
    )
    frequency_penalty: float | None = Field(
        None, ge=-2, le=2, description="subtracted as many times as the answer contains the token"
    )
    logit_bias: (
        Annotated[dict[TokenKey, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=300)]
        | None
    ) = Field(None, description="token id → number added to its logit, for the whole answer")
    seed: int | None = Field(
        None,
        ge=-(2**63),
        lt=2**63,
        description="the same seed gives the same answer; default: random",
    )
    min_tokens: int | None = Field(
        None,
        ge=0,
        description=(
            "tokens that the answer has before a stop token, the end of the text or a stop "
            "string may end it"
        ),
    )
    ignore_eos: bool | None = Field(
        None, description="true: the model's end-of-text tokens do not end the answer"
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MOST_STOP_TOKENS)] | None = Field(
        None, description="tokens that end the answer and are not shown, besides the model's own"
    )
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = Field(
        None, description="strings that end the answer"
    )
    stream: bool | None = Field(
        None, description="send the answer as it comes, as server-sent events"
    )
    stream_options: StreamOptions | None = None
    prediction: PredictedContent | None = Field(
        None,
        description="text that much of the answer is expected to equal; it is drafted wherever it "
        "fits. Answers follow the same "
        "distribution, and greedy ones are identical; sampled ones with a seed may be other ones",
    )
    cache_salt: Name | None = Field(
        None,
        description="what only requests with the same salt have read before need not be read again "
        "(vLLM's): others then cannot tell "
        "from the time what was asked",
    )
    response_format: ResponseFormat | None = Field(
        None, description="what the answer has to be: any text, a JSON object, or JSON by a schema"
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="vLLM's field for the same, with further kinds"
    )
    guided_json: Schema | None = Field(
        None,
        description=(
            "a JSON schema that the answer has to follow; vLLM's older name, as those below"
        ),
    )
    guided_regex: Definition | None = Field(
        None, description="a regular expression that has to match the whole answer"
    )
    guided_choice: Choices | None = Field(None, description="the possible answers")
    guided_grammar: Definition | None = Field(
        None, description="a context-free grammar of the answer, in Lark or in GBNF"
    )
    guided_whitespace_pattern: Definition | None = Field(
        None,
        description=(
            "with guided_json: regular expression of what may stand between the parts of a "
            "JSON text"
        ),
    )
    timeout: float | None = Field(
        None,
        gt=0,
        le=86_400,
        description=(
            "seconds after which the request is cancelled; the server may have a shorter limit"
        ),
    )
    speculation: SpeculationOptions | None = Field(
        None, description="Draftwell's extension: how to decode, and what to report about it"
    )

    OFF: ClassVar[dict[str, tuple[Any, ...]]] = VLLM_OFF

    FORMATS: ClassVar[tuple[str, ...]] = (
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
    )

    @model_validator(mode="after")
    def check_format(self) -> Self:
        asked = [name for name in self.FORMATS if getattr(self, name) is not None]
        if len(asked) > 1:
            raise contradiction(asked[1], f"cannot be combined with {asked[0]}: ask for one format")
        if self.guided_whitespace_pattern is not None and self.guided_json is None:
            raise contradiction("guided_whitespace_pattern", "needs guided_json")
        return self

    @property
    def format(self) -> Format | None:
        """What the answer has to be; None: any text."""
        return self.asked_format

    @property
    def asked_format(self) -> Format | None:
        """The format that the request names; None: none."""
        if self.response_format is not None:
            return self.response_format.format("response_format")
        if self.structured_outputs is not None:
            return self.structured_outputs.format("structured_outputs")
        kind = next(
            (
                name
                for name in self.FORMATS
                if name.startswith("guided_") and getattr(self, name) is not None
            ),
            None,
        )
        if kind is None:
            return None
        older = StructuredOutputs(
            **{kind.removeprefix("guided_"): getattr(self, kind)},
            whitespace_pattern=self.guided_whitespace_pattern,
        )
        return older.format(kind, within=False)

    def with_defaults(self, defaults: Mapping[str, float]) -> Self:
        """The same request, with the model's value wherever it names none."""
        return self.model_copy(
            update={name: value for name, value in defaults.items() if getattr(self, name) is None}
        )

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def used_temperature(self) -> float:
        """The temperature, or the default where the request names none."""
        return SERVED_TEMPERATURE if self.temperature is None else float(self.temperature)

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def stops(self) -> StopStrings:
        """What looks for the end of one answer."""
        return StopStrings(self.stop_strings)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_usage_so_far(self) -> bool:
        """Whether every chunk of a stream has the tokens of its choice so far."""
        return bool(
            self.stream_options and self.wants_usage and self.stream_options.continuous_usage_stats
        )

    @property
    def decoding(self) -> SpeculationOptions:
        return self.speculation or SpeculationOptions()

    @property
    def alternatives(self) -> int | None:
        """How many of the most likely tokens to list with each one; None: no log-probs."""
        raise NotImplementedError

    def sampling_settings(self) -> dict[str, Any]:
        """Keyword arguments for `Sampling`, with OpenAI's defaults."""
        return {
            "temperature": self.used_temperature,
            "top_p": 1.0 if self.top_p is None else max(float(self.top_p), SMALLEST_TOP_P),
            "top_k": max(0, self.top_k or 0),
            "min_p": float(self.min_p or 0.0),
            "repetition_penalty": float(self.repetition_penalty or 1.0),
            "min_tokens": self.min_tokens or 0,
            "presence_penalty": float(self.presence_penalty or 0.0),
            "frequency_penalty": float(self.frequency_penalty or 0.0),
            "logit_bias": {
                int(token): float(bias) for token, bias in (self.logit_bias or {}).items()
            },
            "logprobs": self.alternatives,
            "repeatable": self.seed is not None,
        }
