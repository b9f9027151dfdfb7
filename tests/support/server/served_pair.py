"""A tiny random pair with a tokenizer and a chat template, and a server that answers from it."""

from __future__ import annotations

import copy
import string
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import uvicorn

from draftwell.serving.runtime.models.transformers_model import TransformersModel
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import Strategy, StrategyResources, build_strategy
from draftwell.serving.server.app import create_app
from draftwell.serving.server.lifecycle import KEEP_ALIVE_SECONDS
from draftwell.serving.server.model.served_model import ServedModel
from draftwell.serving.server.model.strategy_pool import PLAIN, UnknownStrategy

MERGES = [("t", "h"), ("th", "e"), ("a", "n"), ("i", "n"), ("o", "n"), ("e", "r"), ("Ġ", "the")]
SPECIAL = ["<|start|>", "<|end|>"]
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('a system message "
    "must come first') }}{% endif %}"
    "<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}<|start|>assistant\n"
)
MAX_CONTEXT = 256


def tiny_tokenizer() -> Any:
    """Byte-level: every byte is a token, so that characters are spread over tokens; a few merges,
    two special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in MERGES)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=TEMPLATE
    )


def spaced_tokenizer() -> Any:
    """As Llama 2's: a space begins every text and is dropped by the decoder; what is no ASCII
    letter is spelt in bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>"]
    words = ["▁", *string.ascii_letters, "▁a", "▁Paris"]
    vocab = {
        token: i
        for i, token in enumerate([*special, *(f"<0x{byte:02X}>" for byte in range(256)), *words])
    }
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab, merges=[("▁", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocab["<s>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def tiny_module(vocab_size: int, eos: int, context: int = MAX_CONTEXT) -> Any:
    """A random Llama whose greedy text wanders instead of looping."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.35,
        eos_token_id=eos,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


def tiny_pair(slots: int, tokenizer: Any = None, context: int = MAX_CONTEXT) -> LoadedPair:
    """A target, and a draft that agrees with it often, but not always."""
    tokenizer = tokenizer or tiny_tokenizer()
    target = tiny_module(len(tokenizer), tokenizer.eos_token_id, context)
    draft = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += torch.randn(weight.shape, generator=generator) * 0.03
    modules = {"target": target, "draft": draft}
    models = {role: TransformersModel(module, slots=slots) for role, module in modules.items()}
    return LoadedPair("tiny", "float32", "cpu", models, modules, tokenizer, "none")  # type: ignore[arg-type]


class TunedOrPlain:
    """What `TunedModel` offers."""

    def __init__(self, tuned: Strategy):
        self._strategies = {tuned.name: tuned}
        self._strategies.setdefault(PLAIN, build_strategy(PLAIN))
        self._tuned = tuned

    def names(self) -> tuple[str, ...]:
        return tuple(self._strategies)

    def get(
        self, name: str | None = None, tenant: str | None = None, temperature: float = 0.0
    ) -> Strategy:
        if name is None:
            return self._tuned
        if name not in self._strategies:
            raise UnknownStrategy(name, self.names())
        return self._strategies[name]


class TunedModel(ServedModel):
    """A model that offers its tuned strategy and plain decoding, the same for all tenants and
    temperatures, unless it is given others."""

    def __init__(self, name: str, pair: LoadedPair, strategy: Strategy, *rest: Any, **changes: Any):
        changes["strategies"] = changes.get("strategies") or TunedOrPlain(strategy)
        super().__init__(name, pair, strategy, *rest, **changes)


def served_pair(
    strategy: str = "vanilla_sd",
    *,
    slots: int = 3,
    resources: StrategyResources | None = None,
    **parameters: Any,
) -> ServedModel:
    return TunedModel(
        "tiny", tiny_pair(slots), build_strategy(strategy, parameters, resources), slots
    )


def roomy_pair() -> ServedModel:
    """With a context in which tools have room."""
    return TunedModel(
        "tiny",
        tiny_pair(3, context=1024),
        build_strategy("vanilla_sd", {"num_speculative_tokens": 4}),
        3,
    )


def calling_pair() -> ServedModel:
    """With the marks of calls as tokens of their own, as Qwen's are."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    strategy = build_strategy("vanilla_sd", {"num_speculative_tokens": 4})
    return TunedModel("tiny", tiny_pair(3, tokenizer, context=4096), strategy, 3)


@contextmanager
def serving(served: ServedModel, **settings: Any) -> Iterator[tuple[str, Any]]:
    """A running server: its address and its scheduler; `settings` as `create_app` takes them."""
    app = create_app(served, **{"drain_seconds": 10, **settings})
    with running(app) as url:
        yield url, app.state.deployments.current.scheduler


@contextmanager
def running(app: Any) -> Iterator[str]:
    """An application that answers: its address."""
    with web_server(app) as server:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"


@contextmanager
def web_server(app: Any) -> Iterator[uvicorn.Server]:
    """A web server that has started."""
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host="127.0.0.1",
            port=0,
            log_level="error",
            timeout_graceful_shutdown=10,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield server
    finally:
        server.should_exit = True
        thread.join()
