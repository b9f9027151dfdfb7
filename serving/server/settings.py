"""Settings of a server: the one place of each option's name, default, bounds and description. The
command line is made from them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from draftwell.serving.errors import DraftwellError
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
FEEDBACK_DAYS = 30


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
