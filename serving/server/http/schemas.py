"""Requests in OpenAI's shape, with vLLM's further sampling fields and one extension: `speculation`.

Fields that cannot change the answer are ignored. Unsupported fields that would change it are refused unless they hold the value that
means "off", which is vLLM's default too. Unknown fields are refused too, so that a mistyped `temperature` is noticed. Everything is
bounded: the cost of a request is known before any work is done for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from serving.server.http.characters import whole_characters
from serving.server.http.formats import Choices, Definition, Format, ResponseFormat, Schema, StructuredOutputs
from serving.server.http.tools import END, MOST_CALLS, ChosenTool, PastCall, Tool, ToolChoice, Tools, calls_grammar
from serving.temperature import SERVED_TEMPERATURE

IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls", "reasoning_effort", "reasoning", "max_tool_calls", "request_id", "include_reasoning",
    "guided_decoding_backend",
})
"""Fields about billing, logging, caching, order and speed, and about reasoning that this server lacks. They change no answer."""

VLLM_OFF: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1,), "use_beam_search": (False,), "best_of": (1,), "bad_words": ([],), "allowed_token_ids": ([],),
    "include_stop_str_in_output": (False,), "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,), "detokenize": (True,),
    "return_tokens_as_token_ids": (False,), "return_token_ids": (False,), "prompt_logprobs": (), "truncate_prompt_tokens": (),
    "logits_processors": ([],), "vllm_xargs": ({},), "kv_transfer_params": ({},), "documents": ([],), "chat_template": (),
    "mm_processor_kwargs": ({},), "thinking_token_budget": (), "priority": (0,),
}
"""vLLM's fields that this server lacks, with the values that change nothing; null always is one."""

SMALLEST_TOP_P = 1e-9
"""Stands for OpenAI's top_p = 0: only the most likely token."""
MOST_PARAMETERS = 32
MOST_CHOICES = 128
"""Choices of one request: prompts × `n`."""
MOST_STOP_TOKENS = 128
MOST_TEMPLATE_VALUES = 32
MOST_TOOL_CALLS = 256
"""Calls of one message of a conversation."""
LONGEST_TEXT = 500_000
"""Characters of one prompt or message; encoding more takes seconds, and no context holds it."""
LONGEST_TOKENS = 131_072


Name = Annotated[str, StringConstraints(max_length=256)]
Text = Annotated[str, StringConstraints(max_length=LONGEST_TEXT), AfterValidator(whole_characters)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=256), AfterValidator(whole_characters)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[TokenId], Field(max_length=LONGEST_TOKENS, fail_fast=True)]
TokenKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
TemplateValue = bool | int | float | Annotated[str, StringConstraints(max_length=4096), AfterValidator(whole_characters)] | None

TemplateValues = Annotated[dict[Name, TemplateValue], Field(max_length=MOST_TEMPLATE_VALUES)]


def contradiction(param: str, message: str) -> PydanticCustomError:
    """The error of a field that contradicts another one."""
    return PydanticCustomError("contradiction", message, {"param": param})


class StreamOptions(BaseModel):
    """Extras of a stream."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = Field(None, description="end the stream with a chunk that holds the usage")
    continuous_usage_stats: bool | None = Field(
        None, description="with include_usage: every chunk has the tokens of its choice so far, as vLLM's have")


class SpeculationOptions(BaseModel):
    """How to decode. Lossless strategies change the speed of an answer only, lossy ones its text too."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    strategy: Name | None = Field(None, description="a strategy that this server offers; default: the one that the bundle was tuned for")
    enabled: bool | None = Field(None, description="false: plain decoding, token by token, without the prediction too")
    stats: bool | None = Field(None, description="false: leave the speculation statistics out of the answer; default: true")
    trace: bool | None = Field(None, description="report the origin of every token: accepted, rescued, recovered or target")
    parameters: Annotated[dict[Name, bool | int | float | Name], Field(max_length=MOST_PARAMETERS)] | None = Field(
        None, description="parameters of the strategy that replace the tuned ones, within their bounds; the server must allow it")


class TextPart(BaseModel):
    """A piece of a message's content."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["text"]
    text: Text


class PredictedContent(BaseModel):
    """What the client expects much of the answer to be, such as the file that it asks to have edited (OpenAI's predicted outputs)."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["content"] = "content"
    content: Text | Annotated[list[TextPart], Field(max_length=1024, fail_fast=True)]

    @property
    def text(self) -> str:
        """The parts, joined."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class OpenAIFields(BaseModel):
    """Base that handles OpenAI's other fields: `OFF` names those that are refused, with the values that mean "off"."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    OFF: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="after")
    def refuse_what_we_cannot_do(self) -> Self:
        for name, value in (self.__pydantic_extra__ or {}).items():
            if value is None or name in IGNORED:
                continue
            if name not in self.OFF:
                raise PydanticCustomError("unknown_field", "unrecognized request argument: {param}", {"param": name})
            if value not in self.OFF[name]:
                raise PydanticCustomError("unsupported_field", "this server does not support {param}: leave it out", {"param": name})
        return self


class Generation(OpenAIFields):
    """Fields of both endpoints."""

    model: Name
    max_tokens: int | None = Field(None, ge=1, description="most tokens to generate")
    n: int | None = Field(None, ge=1, le=MOST_CHOICES, description="answers to each prompt; default: 1, the first of several")
    temperature: float | None = Field(
        None, ge=0, le=2, description=f"default: the model's own, else {SERVED_TEMPERATURE:g}; 0 takes the most likely token")
    top_p: float | None = Field(None, ge=0, le=1, description="sample from the most likely tokens of this total probability; default: the "
                        "model's own, else 1")
    top_k: int | None = Field(
        None, ge=-1, le=10**6, description="sample from this many of the most likely tokens; 0 and -1: all; default: the model's own, else "
                                           "all")
    min_p: float | None = Field(
        None, ge=0, le=1, description="sample from the tokens with at least this share of the most likely one's probability; default: the "
                                      "model's own, else 0")
    repetition_penalty: float | None = Field(
        None, ge=0.01, le=10, description="divides the positive logits of tokens that prompt or answer contain, and multiplies "
                                          "the negative ones; default: the model's own, else 1")
    presence_penalty: float | None = Field(
        None, ge=-2, le=2, description="subtracted once from the logit of a token that the answer contains")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description="subtracted as many times as the answer contains the token")
    logit_bias: Annotated[dict[TokenKey, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=300)] | None = Field(
        None, description="token id → number added to its logit, for the whole answer")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="the same seed gives the same answer; default: random")
    min_tokens: int | None = Field(
        None, ge=0, description="tokens that the answer has before a stop token, the end of the text or a stop string may end it")
    ignore_eos: bool | None = Field(None, description="true: the model's end-of-text tokens do not end the answer")
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MOST_STOP_TOKENS)] | None = Field(
        None, description="tokens that end the answer and are not shown, besides the model's own")
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = Field(None, description="strings that end the answer")
    stream: bool | None = Field(None, description="send the answer as it comes, as server-sent events")
    stream_options: StreamOptions | None = None
    prediction: PredictedContent | None = Field(
        None, description="text that much of the answer is expected to equal; it is drafted wherever it fits. Answers follow the same "
                          "distribution, and greedy ones are identical; sampled ones with a seed may be other ones")
    cache_salt: Name | None = Field(
        None, description="what only requests with the same salt have read before need not be read again (vLLM's): others then cannot tell "
                          "from the time what was asked")
    response_format: ResponseFormat | None = Field(
        None, description="what the answer has to be: any text, a JSON object, or JSON by a schema")
    structured_outputs: StructuredOutputs | None = Field(None, description="vLLM's field for the same, with further kinds")
    guided_json: Schema | None = Field(None, description="a JSON schema that the answer has to follow; vLLM's older name, as those below")
    guided_regex: Definition | None = Field(None, description="a regular expression that has to match the whole answer")
    guided_choice: Choices | None = Field(None, description="the possible answers")
    guided_grammar: Definition | None = Field(None, description="a context-free grammar of the answer, in Lark or in GBNF")
    guided_whitespace_pattern: Definition | None = Field(
        None, description="with guided_json: regular expression of what may stand between the parts of a JSON text")
    timeout: float | None = Field(
        None, gt=0, le=86_400, description="seconds after which the request is cancelled; the server may have a shorter limit")
    speculation: SpeculationOptions | None = Field(None, description="Draftwell's extension: how to decode, and what to report about it")

    OFF: ClassVar[dict[str, tuple[Any, ...]]] = VLLM_OFF

    FORMATS: ClassVar[tuple[str, ...]] = (
        "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")

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
        if self.response_format is not None:
            return self.response_format.format("response_format")
        if self.structured_outputs is not None:
            return self.structured_outputs.format("structured_outputs")
        kind = next((name for name in self.FORMATS if name.startswith("guided_") and getattr(self, name) is not None), None)
        if kind is None:
            return None
        older = StructuredOutputs(**{kind.removeprefix("guided_"): getattr(self, kind)}, whitespace_pattern=self.guided_whitespace_pattern)
        return older.format(kind, within=False)

    def with_defaults(self, defaults: Mapping[str, float]) -> Self:
        """The same request, with the model's value wherever it names none."""
        return self.model_copy(update={name: value for name, value in defaults.items() if getattr(self, name) is None})

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

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_usage_so_far(self) -> bool:
        """Whether every chunk of a stream has the tokens of its choice so far."""
        return bool(self.stream_options and self.wants_usage and self.stream_options.continuous_usage_stats)

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
            "logit_bias": {int(token): float(bias) for token, bias in (self.logit_bias or {}).items()},
            "logprobs": self.alternatives,
            "repeatable": self.seed is not None,
        }


class CompletionRequest(Generation):
    """Body of `POST /v1/completions`."""

    prompt: Text | Tokens | Annotated[list[Text | Tokens], Field(max_length=MOST_CHOICES, fail_fast=True)] = Field(
        description="text or token ids, or a list of them")
    max_tokens: int | None = Field(None, ge=0, description="most tokens to generate; default: 16; 0 only with echo")
    logprobs: int | None = Field(
        None, ge=0, le=20, description="the log-prob of every token, and this many of the most likely tokens at its position")
    echo: bool | None = Field(None, description="begin the answer with the prompt, and its log-probs if requested")

    OFF: ClassVar[dict[str, tuple[Any, ...]]] = Generation.OFF | {
        "suffix": ("",), "add_special_tokens": (True,)}

    @model_validator(mode="after")
    def check_budget(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise contradiction("max_tokens", "must be at least 1, or 0 together with echo")
        return self

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or several."""
        if isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt


class Message(OpenAIFields):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(max_length=1024, fail_fast=True)] | None = None
    tool_calls: Annotated[list[PastCall], Field(max_length=MOST_TOOL_CALLS)] | None = Field(
        None, description="of an assistant: the calls that it has made")
    tool_call_id: Name | None = Field(None, description="of a tool: the call that it answers")

    # Clients send these fields of an earlier answer back; empty ones are accepted. Chat templates use no names.
    OFF: ClassVar[dict[str, tuple[Any, ...]]] = {
        "function_call": (), "audio": (), "refusal": ("",), "annotations": ([],),
    }

    name: Name | None = None

    @model_validator(mode="after")
    def check_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("no_content", "a {role} message needs content", {"role": self.role})
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("no_calls", "only an assistant's message has tool_calls")
        return self

    def plain(self) -> dict[str, Any]:
        """Role and text, as chat templates take them, and the calls of an assistant or the call that a tool answers."""
        text = "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content or ""
        said: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.tool_calls:
            said["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.role == "tool":
            said |= {key: value for key, value in (("tool_call_id", self.tool_call_id), ("name", self.name)) if value}
        return said


class Messages(OpenAIFields):
    """Messages, and how they become a prompt."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=2048, fail_fast=True)]
    add_generation_prompt: bool | None = Field(
        None, description="end the prompt with the beginning of the assistant's turn; default: true, false with continue_final_message")
    continue_final_message: bool | None = Field(None, description="true: the answer continues the last message, an assistant's")
    chat_template_kwargs: TemplateValues | None = Field(
        None, description="further values for the model's chat template, such as enable_thinking")

    @model_validator(mode="after")
    def check_end(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise contradiction("add_generation_prompt", "must be false with continue_final_message: true")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise contradiction("continue_final_message", "needs an assistant message at the end")
        return self

    @property
    def template_options(self) -> dict[str, Any]:
        """Keyword arguments for `ServedModel.encode_chat`; none for a prompt that only awaits an answer."""
        options: dict[str, Any] = {}
        if self.continue_final_message:
            options["continue_last"] = True
        elif self.add_generation_prompt is False:
            options["open_turn"] = False
        return options | ({"values": self.chat_template_kwargs} if self.chat_template_kwargs else {})


class ChatRequest(Generation, Messages):
    """Body of `POST /v1/chat/completions`."""

    max_completion_tokens: int | None = Field(None, ge=1, description="as max_tokens, and overrides it")
    logprobs: bool | None = Field(None, description="report the log-prob of every token")
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="report this many of the most likely tokens at each position; needs logprobs")

    OFF: ClassVar[dict[str, tuple[Any, ...]]] = Generation.OFF | {
        "functions": ([],), "function_call": ("none", "auto"),
        "modalities": (["text"],), "audio": (), "verbosity": ("medium",),
        "web_search_options": (), "echo": (False,), "add_special_tokens": (False,),
    }

    tools: Tools | None = Field(None, description="functions that the answer may call")
    tool_choice: ToolChoice | None = Field(
        None, description="auto, the default: the model decides whether to call; required: it calls some; a function: that one; none")
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call; default: several")

    @model_validator(mode="after")
    def check_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise contradiction("top_logprobs", "needs logprobs: true")
        return self

    @model_validator(mode="after")
    def check_tools(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise contradiction("tools", "has two functions of one name")
        if isinstance(self.tool_choice, ChosenTool) and self.tool_choice.function.name not in names:
            raise contradiction("tool_choice", "names a function that is not among the tools")
        if self.tool_choice == "required" and not names:
            raise contradiction("tool_choice", "needs tools to choose from")
        if self.offered and super().format is not None:
            raise contradiction("tools", "cannot be combined with a format of the answer: set tool_choice to none, or leave one out")
        return self

    @property
    def offered(self) -> list[Tool]:
        """The tools that the answer may call."""
        if self.tool_choice == "none":
            return []
        chosen = self.tool_choice.function.name if isinstance(self.tool_choice, ChosenTool) else None
        return [tool for tool in self.tools or () if chosen in (None, tool.function.name)]

    @property
    def format(self) -> Format | None:
        tools, choice = self.offered, self.tool_choice or "auto"
        if not tools or (choice == "auto" and not any(tool.function.strict for tool in tools)):
            return super().format
        most = 1 if self.parallel_tool_calls is False or isinstance(choice, ChosenTool) else MOST_CALLS
        return Format("tools", lambda own: calls_grammar(tools, own, most=most, text=choice == "auto"))

    @property
    def stop_strings(self) -> list[str]:
        """With a single call at most, its end ends the answer."""
        own = super().stop_strings
        return [*own, END] if self.offered and self.parallel_tool_calls is False else own

    @property
    def template_options(self) -> dict[str, Any]:
        return super().template_options | ({"tools": [tool.plain() for tool in self.tools or ()]} if self.offered else {})

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
