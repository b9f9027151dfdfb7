"""Settings of a server: the one place of each option's name, default, bounds and description. The
command line is made from them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.engine.piece_sizes import SMALLEST
from draftwell.serving.settings import read_threads

StateSharing = Literal["shared", "tenant", "off"]
"""Whose requests share what strategies learn (model/strategy_pool.py)."""
PromptSharing = Literal["tenant", "request", "off"]
"""Whose requests need not read again what slots hold of each other's prompts and answers
(scheduling/scheduler.py)."""
SLOTS = 8
QUEUE = 256
STEADY_PROMPT_TOKENS = 64
"""Where answers must not depend on how fast the machine is."""
DRAIN_SECONDS = 20.0
"""With `process.FLUSH_SECONDS` and the writing of online state this ends before the 30 s that
Kubernetes waits."""
STATE_SECONDS = 30.0
FEEDBACK_PER_MINUTE = 60
FEEDBACK_MEGABYTES = 256
FEEDBACK_DAYS = 30


class FeedbackSettings(BaseModel):
    """Which requests are recorded, and how much of them."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    folder: Path = Field(description="the spool: a folder of recorded requests")
    rate: float = Field(ge=0, le=1, description="share of the requests that is recorded")
    text: bool = Field(
        False, description="record prompts and outputs too; recalibration needs them"
    )
    per_minute: float = Field(
        FEEDBACK_PER_MINUTE, gt=0, description="most requests recorded in a minute"
    )
    max_bytes: int = Field(
        FEEDBACK_MEGABYTES << 20,
        gt=0,
        description="size of the spool; beyond it the oldest files are deleted",
    )
    days: float = Field(FEEDBACK_DAYS, gt=0, description="age at which files are deleted")
    seed: int | None = Field(
        None, description="of the random choice of requests; None: a new one at each start"
    )


class ServerSettings(BaseModel):
    """Options of `draftwell-serve`, in the order of its help; an option is named after its field
    (`max_context`: `--max-context`).

    Raises:
        DraftwellError: feedback options that contradict each other (`feedback_folder_missing`,
            `feedback_rate_missing`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    bundle: Path = Field(
        description="Bundle folder that `make deploy` wrote, or the link `current` to it."
    )
    signature_key: str | None = Field(
        None,
        description="Public key (a file, or an address that cosign knows) that the bundle must be "
        "signed for; one without a fitting "
        "signature is refused. Default: signatures are not checked.",
    )
    signature_flags: str = Field(
        "", description="Further options of `cosign verify-blob`, such as --insecure-ignore-tlog."
    )
    host: str = Field(
        "127.0.0.1",
        description="Address to listen on; 0.0.0.0: all addresses of this machine. Others than "
        "127.0.0.1 need API keys, or --insecure.",
    )
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0: a free one.")
    slots: int = Field(SLOTS, ge=1, le=1024, description="Requests decoded at once; others wait.")
    queue: int = Field(
        QUEUE,
        ge=1,
        description="Requests that may wait for a slot; further requests are answered 429.",
    )
    dtype: str | None = Field(
        None,
        description=(
            "Required dtype; a bundle tuned in another dtype is refused. Default: the bundle's."
        ),
    )
    threads: Annotated[int | None, BeforeValidator(read_threads)] = Field(
        None,
        ge=1,
        description="Compute threads: a number that is never changed, or auto: one for each usable "
        "core, and fewer while other "
        "processes use them. Default: auto.",
    )
    max_context: int | None = Field(
        None,
        ge=2,
        description=(
            "Most tokens of prompt and answer together. Default: the models' limit, at most 4096."
        ),
    )
    prompt_tokens: int | None = Field(
        None,
        ge=SMALLEST,
        description="Most tokens of prompts that are read in a step while other requests are being "
        "answered: fewer keep "
        "their tokens coming evenly, more read long prompts sooner. Default: by time, so "
        "that pauses "
        "between tokens stay about below three times the usual one, or half a second "
        "longer than usual "
        "while several wait, more than one for every two that are being answered; 64 with "
        "--deterministic.",
    )
    prefix_caching: PromptSharing | None = Field(
        None,
        description="Who need not read a prompt again as far as a slot holds it: requests with the "
        "same API key, or without keys all "
        "(tenant), the answers to one prompt of a request (request), or nobody (off). "
        "Default: tenant, and off with "
        "--deterministic.",
    )
    deterministic: bool = Field(
        False,
        description="Start every request from the bundle's online state, do not shorten drafts of "
        "lossy strategies under load, and "
        "never change the number of threads: a seed then always gives the same answer.",
    )
    api_key_file: Path | None = Field(
        None,
        description="File with API keys, in a line each with what it may do (answers, metrics, or "
        "answers,metrics) and a name; it is read again when it changes. Default: the keys in the "
        "variable DRAFTWELL_API_KEY; without either, "
        "requests need no key, and come from this machine alone.",
    )
    insecure: bool = Field(
        False,
        description="Serve without API keys where not this machine alone can send requests.",
    )
    cors_origin: tuple[str, ...] = Field(
        (),
        description=(
            "Site whose pages may send requests from a browser, such as https://example.org; "
            "may be repeated."
        ),
    )
    allowed_host: tuple[str, ...] = Field(
        (),
        description="Name that the Host header of a request may hold besides localhost, such "
        "as the "
        "public name behind a proxy on this "
        "machine; may be repeated; * allows all. Default: all, but localhost alone for a "
        "server without keys that listens "
        "there.",
    )
    root_path: str = Field(
        "",
        pattern=r"^[A-Za-z0-9._~/-]*$",
        description="Prefix of all addresses behind a proxy, such as /llm, whether the proxy "
        "leaves it in or takes it out.",
    )
    body_megabytes: int = Field(
        256,
        ge=16,
        description=(
            "MiB that the bodies of all requests that are not answered yet may take; beyond that "
            "further ones are answered 503."
        ),
    )
    request_timeout: float | None = Field(
        None, ge=0.001, description="Seconds after which a request is cancelled. Default: no limit."
    )
    drain_seconds: float = Field(
        DRAIN_SECONDS,
        ge=0,
        description=(
            "Seconds that running requests get to finish after SIGTERM; then they are answered 503."
        ),
    )
    allow_parameters: bool = Field(
        False, description="Let requests, and the page at /, change the parameters of strategies."
    )
    additional_properties: bool = Field(
        False,
        description="Let objects in JSON answers and calls have properties that their schema does "
        "not list, where it does not say. Default: those that it lists alone.",
    )
    generation_config: Literal["model", "none"] = Field(
        "model",
        description="Where the sampling settings come from that a request does not name: the "
        "model's "
        "generation_config.json "
        "(model), or nowhere, so that they are OpenAI's (none). A repetition penalty there "
        "costs every request its "
        "draft trees, and feedback.",
    )
    strategies: str | None = Field(
        None,
        description="Strategies that requests may choose besides the tuned strategy and plain "
        "decoding, separated by commas. "
        "Default: the lossless ones that the bundle's models and artifacts allow; all: "
        "lossy ones too.",
    )
    state: StateSharing | None = Field(
        None,
        description="Whose requests share what strategies learn: those of all clients (shared), of "
        "each API key (tenant), or none "
        "(off). Default: tenant where requests need a key, else shared.",
    )
    shared_datastore: bool = Field(
        False,
        description="With --state tenant: let requests of all clients draft from the bundle's "
        "datastore, which holds texts that "
        "were served to any of them. Without it no datastore is used then.",
    )
    state_dir: Path | None = Field(
        None,
        description=(
            "Folder that keeps what strategies learn across restarts. Default: kept in memory only."
        ),
    )
    state_seconds: float = Field(
        STATE_SECONDS, ge=0.1, description="Seconds between two writes to --state-dir."
    )
    feedback_dir: Path | None = Field(
        None,
        description=(
            "Spool: a folder of recorded requests, which `draftwell monitor` reads. Default: "
            "nothing is recorded."
        ),
    )
    feedback_rate: float = Field(
        0.0, ge=0, le=1, description="Share of the requests that is recorded there."
    )
    feedback_text: bool = Field(
        False, description="Record prompts and outputs too; recalibration needs them."
    )
    feedback_per_minute: int = Field(
        FEEDBACK_PER_MINUTE, ge=1, description="Most requests recorded in a minute."
    )
    feedback_megabytes: int = Field(
        FEEDBACK_MEGABYTES,
        ge=1,
        description="Size of the spool; beyond it the oldest files are deleted.",
    )
    feedback_days: int = Field(
        FEEDBACK_DAYS, ge=1, description="Days after which files of the spool are deleted."
    )

    @model_validator(mode="after")
    def _feedback_is_complete(self) -> Self:
        if self.feedback_dir is None and (self.feedback_rate or self.feedback_text):
            raise DraftwellError(
                "feedback needs a folder: name one with --feedback-dir",
                code="feedback_folder_missing",
            )
        if self.feedback_dir is not None and self.feedback_rate == 0:
            raise DraftwellError(
                (
                    "--feedback-dir alone records nothing: set the share of the requests with "
                    "--feedback-rate, such as .05"
                ),
                code="feedback_rate_missing",
            )
        return self

    @classmethod
    def from_options(cls, **options: Any) -> Self:
        """The settings that a command line names.

        Raises:
            DraftwellError: a value is out of bounds (`invalid_option`), or as in the class.
        """
        try:
            return cls(**options)
        except ValidationError as error:
            first = error.errors()[0]
            raise DraftwellError(
                f"--{str(first['loc'][0]).replace('_', '-')} {first['input']}: {first['msg']}",
                code="invalid_option",
            ) from error

    @property
    def feedback(self) -> FeedbackSettings | None:
        """What is recorded; None: nothing."""
        if self.feedback_dir is None:
            return None
        return FeedbackSettings(
            folder=self.feedback_dir,
            rate=self.feedback_rate,
            text=self.feedback_text,
            per_minute=self.feedback_per_minute,
            max_bytes=self.feedback_megabytes << 20,
            days=self.feedback_days,
        )

    @property
    def prompt_sharing(self) -> PromptSharing:
        """`prefix_caching`, or its default."""
        return self.prefix_caching or ("off" if self.deterministic else "tenant")

    @property
    def offered(self) -> tuple[str, ...] | None:
        """The names in `strategies`, by default those of all lossless strategies; None: all.

        Raises:
            DraftwellError: one of them is not a strategy, or there is none (`no_strategies`).
        """
        if self.strategies == "all":
            return None
        from draftwell.serving.runtime.strategies import STRATEGIES, find_strategy  # imports torch

        if self.strategies is None:
            return tuple(name for name, strategy in STRATEGIES.items() if strategy.lossless)
        names = tuple(name for part in self.strategies.split(",") if (name := part.strip()))
        if not names:
            raise DraftwellError(
                (
                    "--strategies is empty: name one, such as vanilla_sd, or leave the option "
                    "out to offer all"
                ),
                code="no_strategies",
            )
        for name in names:
            find_strategy(name)
        return names

    def with_keys(self, keys: bool) -> ServerSettings:
        """The same settings, with the sharing of state that fits a server with or without keys
        where none is set."""
        return self.model_copy(update={"state": self.state or ("tenant" if keys else "shared")})

    def for_bundle(self, folder: Path) -> ServerSettings:
        """The same settings for another bundle."""
        return self.model_copy(update={"bundle": folder})
