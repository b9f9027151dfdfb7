"""Two strategies composed of parts, on two tiny random Llamas, the draft nearly a copy of the
target: `python examples/compose.py`. Explained in docs/compose.md.

With real models, `models` is `load_pair(...).models`, and `prompt` comes from
`pair.encode_prompt(text)`.
"""

from functools import partial

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.correction_memory import CorrectionMemory
from draftwell.serving.runtime.acceptance.exact import Exact
from draftwell.serving.runtime.acceptance.rescue import Rescue
from draftwell.serving.runtime.drafting.cascade import Cascade
from draftwell.serving.runtime.drafting.draft_model import DraftModel
from draftwell.serving.runtime.drafting.ngram import NGram
from draftwell.serving.runtime.drafting.stopping import (
    CumulativeAcceptance,
    FixedLength,
    count_kept,
)
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.pair import over_slots
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.schedules.intertwined import intertwined
from draftwell.serving.runtime.schedules.serial import serial
from draftwell.serving.runtime.strategies import build_strategy
from draftwell.serving.runtime.strategies.compose import compose

config = LlamaConfig(
    vocab_size=12,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=128,
    initializer_range=0.5,
)
torch.manual_seed(0)
target, draft = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
draft.load_state_dict(
    {name: weight + 0.05 * torch.randn_like(weight) for name, weight in target.state_dict().items()}
)
models = {"target": over_slots(target), "draft": over_slots(draft)}
prompt, sampling = [1, 2, 3], Sampling(max_tokens=100)

origin = Provenance(pair="tables", fingerprint="0" * 64)
table, memory = AcceptanceTable.empty(origin), CorrectionMemory.empty(origin)
t_draft, t_verify = 0.003, 0.012  # seconds


def spide_with_rescue(session):
    serial_draft = DraftModel(CumulativeAcceptance(table, tau=0.5), with_confidence=True)
    parallel_draft = DraftModel(FixedLength(32), with_confidence=True)
    rule = Rescue(memory, min_count=2, tau=0.2)
    steps = max(1, int(t_verify / t_draft))
    yield from intertwined(
        session,
        serial_draft,
        parallel_draft,
        rule,
        lambda unverified: steps,
        partial(count_kept, table),
    )


def ngram_then_model(session):
    drafter = Cascade(NGram(max_ngram=3, num_tokens=10), DraftModel(FixedLength(4)))
    yield from serial(session, drafter, Exact())


job = Engine(models).generate(prompt, sampling, compose(spide_with_rescue, overlaps=True))
stats = job.session.stats
print(
    f"{stats.emitted} tokens, {stats.rescued} of {stats.accepted} kept ones rescued, "
    f"{stats.target_calls} target calls"
)

job = Engine(models).generate(prompt, sampling, compose(ngram_then_model))
plain = Engine(models).generate(prompt, sampling, build_strategy("autoregressive"))
assert job.output == plain.output
print(
    f"{job.session.stats.target_calls} target calls instead of {plain.session.stats.target_calls}, "
    f"{job.session.stats.draft_calls} calls of the draft"
)
