"""A loaded pair: models over slots, tokenizer, fingerprint."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError

from serving.artifacts.base import MANIFEST
from serving.artifacts.distilled_draft import DistilledDraft, lent_names
from serving.artifacts.pair_files import PairFiles, draftwell_home, fingerprint, model_digest, settings_digest, weights_digest
from serving.device import core_ids
from serving.errors import DraftwellError, VocabularyMismatch
from serving.runtime.commands import Role
from serving.runtime.engine.engine import Engine
from serving.runtime.engine.workers import shares
from serving.runtime.failures import room_for
from serving.runtime.models.cuda.static_llama import StaticLlama
from serving.runtime.models.lean_llama import LeanLlama, fits
from serving.runtime.models.module_model import ModuleModel
from serving.runtime.models.onnx.onnx_export import cached, export_llama, exportable
from serving.runtime.models.onnx.onnx_model import OnnxModel
from serving.runtime.models.padding import pad_to
from serving.runtime.models.transformers_model import TransformersModel
from serving.runtime.models.unbatched_model import UNBATCHED, UnbatchedModel
from serving.runtime.output import Model
from serving.runtime.requests import Sampling

BROKEN = (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError)
"""What the libraries raise on truncated, garbled or unknown files (a tokenizer library adds bare exceptions of its own)."""
Dtype = Literal["float32", "bfloat16", "float16"]
MOST_ONNX_CORES = 8
"""A draft is small: more threads wait for each other longer than they compute (a guess, not measured)."""


@dataclass
class LoadedPair:
    """Models by role over slots, with everything that text needs.

    Args:
        modules: role → the transformers module behind a model (peers run them; they must have been kept, see `load_pair`).
        fingerprint: what artifacts are checked against.
        chat: prompts go through the tokenizer's chat template, where it has one.
        padded_to: parameters of a target that was padded to cost as much as a larger one; None for the target as it is.
        settings: digest of what lay beside the weights (`pair_files.settings_digest`); "" where it was not loaded from files.
    """

    name: str
    dtype: Dtype
    device: str
    models: dict[Role, Model]
    modules: dict[Role, Any]
    tokenizer: Any
    fingerprint: str
    chat: bool = True
    padded_to: int | None = None
    settings: str = ""

    def engine(self, *, split: bool | None = None) -> Engine:
        """An engine over the pair's models; `split` as in `Engine`."""
        return Engine(self.models, split=split)

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

    def encode(self, prompt: str) -> list[int]:
        """Ids of plain text."""
        return list(self.tokenizer(prompt)["input_ids"])

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Ids of a conversation under the chat template, ready for the assistant's turn; plain text without a template.

        Raises:
            DraftwellError: the template refuses the conversation (roles out of order, say).
        """
        from jinja2 import TemplateError

        if not self.tokenizer.chat_template:
            return self.encode("\n\n".join(m["content"] for m in messages))
        try:
            return list(self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False))
        except TemplateError as error:
            raise DraftwellError(f"the model's chat template refuses these messages: {error}") from error

    def encode_messages(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """As `encode_chat` where the pair is for chat; elsewhere the messages' plain text, a blank line between two."""
        return self.encode_chat(messages) if self.chat else self.encode("\n\n".join(m["content"] for m in messages))

    def encode_prompt(self, prompt: str, before: Sequence[dict[str, str]] = ()) -> list[int]:
        """Ids of a user's turn behind the messages before it: under the chat template, or plain where the pair is not for chat."""
        return self.encode_messages([*before, {"role": "user", "content": prompt}])

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


def load_pair(files: PairFiles, *, dtype: Dtype = "bfloat16", device: str = "cpu", slots: int = 1,
              max_context: int | None = None, chat: bool = True, pad_target: float | None = None,
              onnx_draft: bool = False, draft_device: str | None = None, keep_modules: bool = False,
              qualifier: bool = True) -> LoadedPair:
    """Load the models of a pair.

    Args:
        files: where they lie.
        slots: requests that can run at once.
        max_context: positions per slot; None takes the models' own limit, at most 4096.
        chat: prompts go through the chat template.
        pad_target: parameters to which the target is padded (`models.padding`): the same outputs at a larger model's cost.
        onnx_draft: load the draft in ONNX Runtime beside the torch one, if its shape allows (`models.onnx_export`).
        draft_device: where the torch draft computes; None takes the target's device.
        keep_modules: leave the transformers modules able to run, as peers need them, at the price of holding weights twice.
        qualifier: load the model between the two, if there is one; the fingerprint is of all models either way.
    Raises:
        DraftwellError: files that are missing or no model; VocabularyMismatch: the tokenizers differ.
    """
    settings = settings_digest(files)  # before they are read: what is replaced meanwhile then differs from what is there
    tokenizer = load_tokenizer(files.target)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    modules: dict[Role, Any] = {"target": load_module(files.target, torch_dtype, device)}
    with room_for("the padded weights", "name fewer parameters"):
        padded_to = None if pad_target is None else pad_to(modules["target"], pad_target)
    models: dict[Role, Model] = {"target": over_slots(modules["target"], slots=slots, max_context=max_context)}
    vocab = models["target"].vocab_size = min(models["target"].vocab_size, len(tokenizer))
    for role, folder in (("draft", files.draft), ("qualifier", files.qualifier)):
        if folder is None or (role == "qualifier" and not qualifier):
            continue
        place = draft_device or device if role == "draft" else device
        if (folder / MANIFEST).is_file():
            draft = DistilledDraft.load(folder)
            draft.check_donor(weights_digest(files.target))
            module, head = build_distilled(draft, modules["target"], place), draft.head_tokens
        else:
            check_same_tokenizer(files.target, folder, tokenizer)
            module, head = load_module(folder, torch_dtype, place), None
        modules[role] = module  # type: ignore[index]
        small = role == "draft" and head is not None  # distilled: stored in 8 bits anyway
        own = module.config.get_text_config().vocab_size
        if head is None and own < vocab:
            vocab = models["target"].vocab_size = own
        models[role] = over_slots(module, slots=slots, max_context=max_context, head_tokens=head, vocab_size=vocab,  # type: ignore[index]
                                  int8=small)
    if onnx_draft and "draft" in models and exportable(modules["draft"]):
        models["draft_onnx"] = in_onnx(models["draft"], files, device, slots)
    for model in models.values():
        model.vocab_size = vocab  # the qualifier's may be smaller than the draft's
        if isinstance(model, LeanLlama) and not keep_modules:
            model.release()
    return LoadedPair(files.name, dtype, device, models, modules, tokenizer, fingerprint(files, dtype), chat, padded_to,
                      settings)


def over_slots(module: Any, *, int8: bool = False, static: bool | None = None, **settings: Any) -> ModuleModel:
    """A module behind the slot interface: on the fast path where its shape allows, row by row where it attends in its own way.

    Args:
        int8: as in `LeanLlama`.
        static: fixed shapes, which CUDA graphs need; None takes them on CUDA only.
    """
    if module.config.get_text_config().model_type in UNBATCHED:
        return UnbatchedModel(module, **settings)
    if not fits(module):
        return TransformersModel(module, **settings)
    on_cuda = module.device.type == "cuda"
    return (StaticLlama if (on_cuda if static is None else static) else LeanLlama)(module, int8=int8, **settings)


def in_onnx(draft: Any, files: PairFiles, device: str, slots: int) -> OnnxModel:
    """A draft's double in ONNX Runtime: on its share of the cores, or on all where the target has a device of its own."""
    assert files.draft is not None
    digests = {"draft": model_digest(files.draft), "target": model_digest(files.target)}
    try:
        graph: Path | bytes = cached(draft.module, draft.head_weight, digests, draftwell_home())
    except OSError:  # a home that cannot be written to is only slower
        graph = export_llama(draft.module, draft.head_weight).SerializeToString()
    head = None if draft.head_tokens is None else draft.head_tokens.cpu()
    cores = core_ids() if device.startswith("cuda") else shares(core_ids(), 2)[1]
    return OnnxModel(graph, draft.module, slots=slots, max_context=draft.max_context, head_tokens=head,
                     cores=cores[:MOST_ONNX_CORES])


def load_module(folder: Path, dtype: torch.dtype, device: str) -> Any:
    """A causal language model from a folder with config and safetensors."""
    from transformers import AutoModelForCausalLM

    if not (folder / "config.json").is_file():
        raise DraftwellError(f"{folder} holds no model (no config.json): check the pair's paths with `draftwell pairs`")
    try:
        with room_for(f"the weights of {folder.name}", "choose a smaller dtype or another device"):
            module: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, use_safetensors=True)
            return module.to(device).eval()
    except BROKEN as error:
        raise DraftwellError(f"{folder} holds no model that can be read ({type(error).__name__}): fetch or save it again") from error


def build_distilled(draft: DistilledDraft, target: Any, device: str | None = None) -> Any:
    """A module with the draft's layers and the target's own embeddings; a copy of them, if on another `device`."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    settings = dict(draft.config)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("cpu"), no_init_weights():  # every weight is lent or loaded below: drawing random ones took as long as all the rest
        module = AutoModelForCausalLM.from_config(config, dtype=target.dtype)
    place = torch.device(device or target.device)
    lent = target.get_input_embeddings(), target.get_output_embeddings()
    if place.type != target.device.type:
        lent = copy.deepcopy(lent)  # moving the draft must not move the target
    module.base_model.set_input_embeddings(lent[0])
    module.set_output_embeddings(lent[1])
    missing, unexpected = module.load_state_dict(draft.state, strict=False)
    if unexpected or set(missing) - lent_names(module):
        raise DraftwellError(f"the distilled draft does not fit its own config ({[*unexpected, *missing][:2]} …): distil it again")
    return module.to(place).eval()  # weights have the target's dtype already; rotary frequencies stay float32, as the target's are


def check_same_tokenizer(target: Path, draft: Path, tokenizer: Any) -> None:
    """Refuse a draft whose token ids mean something else: every id that both have must be the same token."""
    if not (draft / "tokenizer.json").is_file() and not (draft / "tokenizer_config.json").is_file():
        raise DraftwellError(f"draft {draft.name} brings no tokenizer, so nobody knows what its ids mean: save one beside its weights")
    mine, other = ({i: token for token, i in t.get_vocab().items()} for t in (tokenizer, load_tokenizer(draft)))
    if any(other[i] != mine[i] for i in mine.keys() & other.keys()):
        raise VocabularyMismatch(f"draft {draft.name} and target {target.name} have different tokenizers: "
                                 "choose a draft of the same family")


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except BROKEN as error:
        raise DraftwellError(f"{folder} holds no tokenizer that can be read ({type(error).__name__}): fetch or save it again") from error
