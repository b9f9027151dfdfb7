"""A loaded pair: models over slots, tokenizer, fingerprint."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from draftwell.serving.artifacts.distilled_draft import DistilledDraft
from draftwell.serving.artifacts.near_copy import is_near_copy, read_near_copy
from draftwell.serving.artifacts.pair_files import (
    PairFiles,
    draftwell_home,
    fingerprint,
    is_artifact,
    model_digest,
    settings_digest,
    weights_digest,
)
from draftwell.serving.device import core_ids, kernel_problem, usable_cores
from draftwell.serving.errors import DraftwellError, VocabularyMismatch
from draftwell.serving.files import json_digest
from draftwell.serving.number_format import NumberFormat, Weights, dtype_of, weights_of
from draftwell.serving.runtime.commands import Role
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.engine.prompt_budget import PromptBudget
from draftwell.serving.runtime.engine.thread_governor import ThreadGovernor
from draftwell.serving.runtime.engine.workers import shares
from draftwell.serving.runtime.failures import room_for
from draftwell.serving.runtime.model import Model
from draftwell.serving.runtime.model_files import (
    build_distilled,
    context_within,
    load_module,
    load_tokenizer,
    read_config,
    released_as_read,
)
from draftwell.serving.runtime.models.cuda.cuda_llama import CudaLlama
from draftwell.serving.runtime.models.lean_llama import LeanLlama, runs
from draftwell.serving.runtime.models.module_model import ModuleModel
from draftwell.serving.runtime.models.native.library import Compile
from draftwell.serving.runtime.models.near_copy import drop_layers
from draftwell.serving.runtime.models.onnx.onnx_export import cached, export_llama, exportable
from draftwell.serving.runtime.models.onnx.onnx_model import OnnxModel
from draftwell.serving.runtime.models.padding import pad_at_least, pad_to
from draftwell.serving.runtime.models.transformers_model import TransformersModel
from draftwell.serving.runtime.models.unbatched_model import UnbatchedModel, row_by_row
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.tool_prompt import knows_tools, told
from draftwell.serving.runtime.vocabulary import (
    check_alike,
    end_token,
    names_of,
    not_shared,
    shared_ids,
    what_differs,
)
from draftwell.serving.settings import Settings

log = logging.getLogger(__name__)
SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
RESERVED = frozenset({"self", "messages", "conversations", "raise_exception", "strftime_now"})
"""Names in a chat template that are no request's to set, besides Jinja's own."""
ENCODING = threading.Lock()
"""Held by a tokenizer in Python, whose settings may change while it encodes."""
MOST_ONNX_CORES = 8
"""A draft is small: more threads wait for each other longer than they compute (a guess, not
measured)."""


@dataclass
class LoadedPair:
    """Models by role over slots, with everything that text needs.

    Args:
        modules: role → the transformers module behind a model (peers run them; they must have been
            kept, see `load_pair`).
        fingerprint: what artifacts are checked against.
        chat: prompts go through the tokenizer's chat template, where it has one.
        padded_to: parameters of a target that was padded to cost as much as a larger one; None for
            the target as it is.
        settings: digest of what lay next to the weights (`pair_files.settings_digest`); "" where it
            was not loaded from files.
    """

    name: str
    dtype: NumberFormat
    device: str
    models: dict[Role, Model]
    modules: dict[Role, Any]
    tokenizer: Any
    fingerprint: str
    chat: bool = True
    padded_to: int | None = None
    settings: str = ""

    def __post_init__(self) -> None:
        if (backend := getattr(self.tokenizer, "backend_tokenizer", None)) is not None:
            backend.no_truncation()
            backend.no_padding()

    def engine(
        self,
        *,
        split: bool | None = None,
        budget: PromptBudget | None = None,
        governor: ThreadGovernor | None = None,
    ) -> Engine:
        """An engine over the pair's models; arguments as in `Engine`."""
        return Engine(self.models, split=split, budget=budget, governor=governor)

    @property
    def exact(self) -> bool:
        """Whether a greedy request has one answer, whatever the lossless strategy and the load."""
        return self.models["target"].exact

    @property
    def special_tokens(self) -> frozenset[int]:
        return frozenset(self.tokenizer.all_special_ids)

    @property
    def stop_tokens(self) -> frozenset[int]:
        """End-of-text ids of model and tokenizer."""
        config = self.modules["target"].generation_config.eos_token_id
        ids = config if isinstance(config, list) else [config]
        return frozenset(i for i in [*ids, self.tokenizer.eos_token_id] if i is not None)

    def sampling(self, **settings: Any) -> Sampling:
        """Sampling parameters with this pair's stop tokens."""
        return Sampling(**{"stop_token_ids": self.stop_tokens, **settings})

    @property
    def sampling_defaults(self) -> dict[str, float]:
        """What the target's generation config sets of temperature, top_k, top_p, min_p and
        repetition_penalty."""
        config = self.modules["target"].generation_config.to_diff_dict()
        return {name: config[name] for name in SAMPLING_DEFAULTS if config.get(name) is not None}

    def encode(self, prompt: str, *, special: bool = True) -> list[int]:
        """Ids of plain text; any thread may call it. `special`: with the special tokens that the
        tokenizer puts around a text."""
        if (backend := getattr(self.tokenizer, "backend_tokenizer", None)) is None:
            with ENCODING:
                return list(self.tokenizer(prompt, add_special_tokens=special)["input_ids"])
        # a batch, because that alone lets other threads run meanwhile
        return list(backend.encode_batch_fast([prompt], add_special_tokens=special)[0].ids)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        open_turn: bool = True,
        continue_last: bool = False,
        values: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Ids of a conversation under the chat template; plain text without a template.

        Args:
            open_turn: end with the beginning of the assistant's turn.
            continue_last: end within the last message instead, so that the answer continues it.
            values: further ones for the template; a name that means something to transformers is
                refused.
            tools: functions that may be called, as in OpenAI's API. A template that has no place
                for them, nor for calls and results in messages, gets them as text (tool_prompt.py).
        Raises:
            DraftwellError: the template refuses the conversation (roles out of order, say), or it
                does not end with the message that is to be continued (`messages_refused`); a value
                may not be set (`template_value_refused`).
        """
        tokenizer, values = self.tokenizer, dict(values or {})
        if values:
            self._check_values(values)
        custom = bool(values)
        calling = bool(tools) or any(message.get("tool_calls") for message in messages)
        if (
            tools or any("tool_calls" in m or m["role"] == "tool" for m in messages)
        ) and not self._template_knows_tools(bool(tools)):
            messages, tools = told(messages, tools), ()
        if not tokenizer.chat_template:
            return self.encode("\n\n".join(m["content"] for m in messages))
        if continue_last:
            values["continue_final_message"] = True
        if tools:
            values["tools"] = list(tools)
        with _template_errors(custom=custom, calling=calling):
            text = tokenizer.apply_chat_template(
                list(messages),
                add_generation_prompt=open_turn and not continue_last,
                tokenize=False,
                **values,
            )
        return self.encode(text, special=False)

    def _check_values(self, values: Mapping[str, Any]) -> None:
        """Refuse values for the chat template that mean something to transformers."""
        from jinja2.defaults import DEFAULT_NAMESPACE

        own = inspect.signature(self.tokenizer.apply_chat_template).parameters.keys()
        if reserved := sorted(values.keys() & (own | DEFAULT_NAMESPACE.keys() | RESERVED)):
            raise DraftwellError(
                f"the chat template takes no value {reserved[0]!r} from a request: leave it out",
                code="template_value_refused",
            )

    def _template_knows_tools(self, offered: bool) -> bool:
        """Whether the chat template, or the one of several that transformers takes where tools are
        offered, has a place for tools."""
        tokenizer = self.tokenizer
        return bool(tokenizer.chat_template) and knows_tools(
            tokenizer.get_chat_template(tools=[{}] if offered else None)
        )

    @property
    def in_chat_template(self) -> bool:
        """Whether prompts other than raw ones are framed by a chat template."""
        return self.chat and bool(self.tokenizer.chat_template)

    def encode_messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """As `encode_chat` where the pair is for chat; elsewhere the messages' plain text, a blank
        line between two."""
        if self.chat:
            return self.encode_chat(messages, tools=tools)
        return self.encode("\n\n".join(m["content"] for m in told(messages, tools)))

    def encode_prompt(self, prompt: str, before: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Ids of a user's turn after the messages before it: under the chat template, or plain
        where the pair is not for chat."""
        return self.encode_messages([*before, {"role": "user", "content": prompt}])

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


@contextmanager
def _template_errors(*, custom: bool, calling: bool) -> Iterator[None]:
    """Turn what a chat template raises into one line.

    Args:
        custom: a request gave values for the template.
        calling: it has tools or calls; templates look into schemas and arguments, which may have
            any shape.
    """
    from jinja2 import TemplateError

    try:
        yield
    except (TemplateError, ValueError) as error:
        raise DraftwellError(
            f"the model's chat template refuses these messages: {error}", code="messages_refused"
        ) from error
    except Exception as error:
        if not custom and not calling:
            raise
        what = "values" if custom else "tools or calls"
        raise DraftwellError(
            f"the model's chat template cannot work with these {what}: "
            f"{' '.join(str(error).split())}",
            code="template_value_refused" if custom else "messages_refused",
        ) from error


class LoadSettings(Settings):
    """How the models of a pair are loaded."""

    called = "loading setting"

    dtype: NumberFormat = Field(
        "bfloat16",
        description="what the models compute in; with -int8 or -int4 the target's weights are "
        "rounded "
        "when they are loaded (models/quantised.py; CPU only)",
    )
    device: str = Field("cpu", description="where the models compute: cpu, cuda or cuda:<index>")
    slots: int = Field(1, ge=1, description="requests that can run at once")
    max_context: int | None = Field(
        None, ge=1, description="positions per slot; None: the models' own limit, at most 4096"
    )
    pad_target: float | None = Field(
        None,
        description=(
            "parameters to which the target is padded (models/padding.py): same outputs at a "
            "larger model's cost"
        ),
    )
    compile: Compile = Field(
        "auto",
        description="on CPUs: layers by a library (models/native), compiled in seconds where it "
        "is missing; torch's layers where that fails (auto), or an error (on); or torch's (off)",
    )


def load_pair(
    files: PairFiles,
    settings: LoadSettings | None = None,
    *,
    chat: bool = True,
    qualifier: bool = True,
    onnx_draft: bool = False,
    draft_device: str | None = None,
    keep_modules: bool = False,
    libraries: Path | None = None,
) -> LoadedPair:
    """Load the models of a pair. A draft or a qualifier with another vocabulary altogether is left
    out with a warning, and strategies that need it are refused.

    Args:
        files: the model folders.
        settings: None takes every default of `LoadSettings`.
        chat: prompts go through the chat template.
        qualifier: load the model between the two, if any; the fingerprint is of all models.
        onnx_draft: load the draft in ONNX Runtime as well, if its shape allows (models/onnx).
        draft_device: where the torch draft computes; None: the target's device.
        keep_modules: transformers' modules can run, as peers need; weights are then held twice.
        libraries: folder of compiled layers besides this machine's own, such as a bundle's.
    Raises:
        DraftwellError: files that are missing or no model, or weights that nothing would read.
    """
    settings = settings or LoadSettings()
    files_digest = settings_digest(files)  # first: what is replaced meanwhile then differs
    _check_folders(files, settings, qualifier, keep_modules)
    tokenizer = load_tokenizer(files.target)
    modules: dict[Role, Any] = {}
    found = [libraries] if libraries else []
    built = {"compiled": settings.compile, "libraries": found, "release": not keep_modules}
    target, padded_to = _load_target(files, settings, modules, built)
    models: dict[Role, Model] = {"target": target}
    if files.draft is not None:
        its = settings.model_copy(update={"device": draft_device or settings.device})
        how = {**built, "release": not (keep_modules or onnx_draft)}  # it is exported first
        _load_smaller("draft", files.draft, files, its, tokenizer, modules, models, how)
    if files.qualifier is not None and qualifier:
        _load_smaller(
            "qualifier", files.qualifier, files, settings, tokenizer, modules, models, built
        )
    if onnx_draft and "draft" in models and exportable(modules["draft"]):
        models["draft_onnx"] = in_onnx(models["draft"], files, settings.device, settings.slots)
    for model in models.values():
        if isinstance(model, LeanLlama) and not keep_modules:
            model.release()
    return LoadedPair(
        files.name,
        settings.dtype,
        settings.device,
        models,
        modules,
        tokenizer,
        fingerprint(files, settings.dtype),
        chat,
        padded_to,
        files_digest,
    )


def _check_folders(
    files: PairFiles, settings: LoadSettings, qualifier: bool, keep_modules: bool
) -> None:
    """Refuse folders that hold no model, and rounded weights that nothing would read, before the
    weights of one are read."""
    for role, path in files.roles().items():
        if role == "qualifier" and not qualifier:
            continue
        if is_near_copy(path):
            check_weights(read_near_copy(path).weights, settings, keep_modules)
        elif not is_artifact(path):
            read_config(path)
    check_weights(weights_of(settings.dtype), settings, keep_modules)


def _load_target(
    files: PairFiles,
    settings: LoadSettings,
    modules: dict[Role, Any],
    built: dict[str, Any],
) -> tuple[ModuleModel, int | None]:
    """The target, and the parameters that it was padded to; its module goes into `modules`."""
    dtype = getattr(torch, dtype_of(settings.dtype))
    module = modules["target"] = load_module(files.target, dtype, settings.device)
    with room_for("the padded weights", "name fewer parameters"):
        padded_to = None if settings.pad_target is None else pad_to(module, settings.pad_target)
    target = over_slots(
        module,
        slots=settings.slots,
        max_context=settings.max_context,
        weights=weights_of(settings.dtype),
        **built,
    )
    return target, padded_to


def _load_smaller(
    role: Role,
    folder: Path,
    files: PairFiles,
    settings: LoadSettings,
    tokenizer: Any,
    modules: dict[Role, Any],
    models: dict[Role, Model],
    built: dict[str, Any],
) -> None:
    """Add the draft or the qualifier to `modules` and `models`, or the reason why it cannot run to
    the target's `left_out`.

    Args:
        settings: with the device of this model.
        built: how `over_slots` builds it.
    """
    vocab = models["target"].vocab_size
    try:
        small = load_small(folder, files, settings, role, tokenizer, modules["target"])
    except VocabularyMismatch as error:
        log.warning("pair %s: %s", files.name, error)
        models["target"].left_out = {**models["target"].left_out, role: str(error)}
        return
    module, head = small.module, small.head_tokens
    if small.differs:
        log.warning("pair %s: %s", files.name, small.differs)
    modules[role] = module
    weights = read_near_copy(folder).weights if is_near_copy(folder) else None
    context = context_within(module.config, settings.max_context)
    on_cpu = module.dtype == torch.bfloat16 and module.device.type == "cpu"
    if role == "draft" and is_artifact(folder) and on_cpu and on_fast_path(module, context):
        weights = "int8"  # distilled: stored in 8 bits anyway
    models[role] = over_slots(
        module,
        weights=weights,
        slots=settings.slots,
        head_tokens=head,
        vocab_size=vocab,
        max_context=context,
        lender=modules["target"],
        **built,
    )
    models[role].stand_ins = small.stand_ins


def check_weights(weights: Weights | None, settings: LoadSettings, keep_modules: bool) -> None:
    """Refuse rounded weights where nothing would read them."""
    if weights is None:
        return
    if settings.device != "cpu":
        raise DraftwellError(
            f"{weights} weights are read on CPUs only, not on {settings.device}: use "
            "the device cpu, or the dtype "
            f"{dtype_of(settings.dtype)}",
            code="weights_unsupported",
        )
    if keep_modules:
        raise DraftwellError(
            "other libraries and distillation run transformers' module, which has the "
            f"full weights, not {weights}: use "
            f"the dtype {dtype_of(settings.dtype)}",
            code="weights_unsupported",
        )


@dataclass
class SmallModel:
    """A draft or a qualifier that was read.

    Args:
        head_tokens: `[head]` ids that its head covers; None: all.
        stand_ins: as in `Model`.
        differs: a line about the ids that it does not share with the target; "": all are shared.
    """

    module: Any
    head_tokens: Tensor | None = None
    stand_ins: Mapping[int, int] = field(default_factory=dict)
    differs: str = ""


def load_small(
    folder: Path, files: PairFiles, settings: LoadSettings, role: Role, tokenizer: Any, target: Any
) -> SmallModel:
    """A draft or a qualifier.

    A distilled draft brings no embeddings of its own: it takes the target module's. A near copy is
    the target, loaded once more, before it was padded.

    Raises:
        VocabularyMismatch: its vocabulary is another one altogether.
    """
    if is_artifact(folder):
        draft = DistilledDraft.load(folder)
        draft.check_donor(weights_digest(files.target))
        return SmallModel(build_distilled(draft, target, settings.device), draft.head_tokens)
    if is_near_copy(folder):
        recipe = read_near_copy(folder)
        copied = drop_layers(
            load_module(files.target, getattr(torch, dtype_of(settings.dtype)), settings.device),
            recipe.drop_layers,
        )
        if settings.pad_target is not None and recipe.padded_share is not None:
            pad_at_least(copied, recipe.padded_share * settings.pad_target)
        return SmallModel(copied)
    own, theirs = names_of(tokenizer), names_of(load_tokenizer(folder))
    check_alike(f"{role} {folder.name}", theirs, f"target {files.target.name}", own)
    module = load_module(folder, getattr(torch, dtype_of(settings.dtype)), settings.device)
    rows, their_rows = (one.config.get_text_config().vocab_size for one in (target, module))
    lacking = not_shared(own, rows, theirs, their_rows)
    differs = what_differs(f"{role} {folder.name}", lacking, own, theirs, rows) if lacking else ""
    stand_ins = dict.fromkeys(lacking, end_token(module))
    return SmallModel(module, shared_ids(lacking, rows), stand_ins, differs)


def on_fast_path(module: Any, max_context: int | None) -> bool:
    """Whether a module runs in layers of ours, over slots of so many positions."""
    return runs(module) and not row_by_row(module.config.get_text_config(), max_context)


def over_slots(
    module: Any, *, release: bool = False, lender: Any = None, **settings: Any
) -> ModuleModel:
    """A module wrapped in the slot interface: on the fast path where its shape allows, row by row
    where it attends in its own way.

    Args:
        release: the module need not run any more; where the model brings weights into a layout of
            its own, each layer is then held twice only while it is brought there.
        lender: a module that may have lent it embeddings.
        settings: as `chosen` takes them.
    """
    lean = on_fast_path(module, settings.get("max_context"))
    with released_as_read(module, lender) if release and lean else nullcontext():
        return chosen(module, **settings)


def chosen(
    module: Any,
    *,
    static: bool | None = None,
    compiled: Compile = "off",
    libraries: Sequence[Path] = (),
    weights: Weights | None = None,
    **settings: Any,
) -> ModuleModel:
    """A module in the slot interface that suits it.

    Args:
        compiled, libraries, weights: as in `LeanLlama`.
        static: passes as CUDA graphs need them; None: on CUDA only.
    Raises:
        DraftwellError: `weights` for a module that is not on the fast path.
    """
    if weights is not None and not on_fast_path(module, settings.get("max_context")):
        raise DraftwellError(
            f"{module.config.model_type} models have no {weights} weights here, only "
            "Llama-like ones on the fast path: "
            "load the pair with full weights",
            code="weights_unsupported",
        )
    if row_by_row(module.config.get_text_config(), settings.get("max_context")):
        return UnbatchedModel(module, **settings)
    on_cuda = module.device.type == "cuda"
    if not runs(module):
        return TransformersModel(module, **settings)
    if static is None and on_cuda and (why := kernel_problem(module.device)) is not None:
        log.warning("%s: forward passes on %s are slower, and not exact", why, module.device)
    elif on_cuda if static is None else static:
        return CudaLlama(module, **settings)
    return LeanLlama(module, compiled=compiled, libraries=libraries, weights=weights, **settings)


def in_onnx(draft: Any, files: PairFiles, device: str, slots: int) -> OnnxModel:
    """A draft's double in ONNX Runtime: on its share of the cores, or on all where the target has a
    device of its own."""
    assert files.draft is not None
    digests = {"draft": model_digest(files.draft), "target": model_digest(files.target)}
    if draft.stand_ins:  # which rows its head has depends on tokenizers, too
        digests["shared"] = json_digest(sorted(draft.stand_ins))
    try:
        graph: Path | bytes = cached(draft.module, draft.head_weight, digests, draftwell_home())
    except OSError:  # a home that cannot be written to is only slower
        graph = export_llama(draft.module, draft.head_weight).SerializeToString()
    head = None if draft.head_tokens is None else draft.head_tokens.cpu()
    cores = core_ids() if device.startswith("cuda") else shares(core_ids(), 2)[1]
    made = OnnxModel(
        graph,
        draft.module,
        slots=slots,
        max_context=draft.max_context,
        head_tokens=head,
        vocab_size=draft.vocab_size,
        cores=cores[: min(MOST_ONNX_CORES, usable_cores())],
    )
    made.stand_ins = draft.stand_ins
    return made
