"""What users see of a request that cannot be served, or that a machine could not serve: one line
with the fix.

Requests are checked before any forward pass (`check_request`), because an id beyond the vocabulary
fails inside a kernel, where on CUDA it would take the whole process with it. Running out of memory,
and a device that has failed, have many names in torch; `readable` gives each of them one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from draftwell.serving.errors import DeviceLost, InvalidRequest, OutOfMemory, VocabularyMismatch
from draftwell.serving.runtime.commands import Role
from draftwell.serving.runtime.model import Model
from draftwell.serving.runtime.requests import Sampling

ALLOCATION_FAILED = (
    "can't allocate memory",
    "cannot allocate memory",
    "out of memory",
    "failed to allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Storage size calculation overflowed",
)
"""What torch's and ONNX Runtime's errors say when there is no room; their types say nothing."""
DEVICE_FAILED = (
    "cudaErrorIllegalAddress",
    "illegal memory access",
    "device-side assert",
    "unspecified launch failure",
    "uncorrectable ECC error",
    "GPU is lost",
)
"""What torch says once a CUDA context is broken. CUDA repeats such an error at every later call,
until the process ends."""
CALL_REFUSED = (
    "invalid argument",
    "invalid configuration argument",
    "no kernel image",
    "operation not permitted",
)
"""What an `AcceleratorError` says where one call was wrong and the next may succeed."""
FORWARD_FIX = "start with fewer slots, a shorter context or a smaller batch of requests"


def check_request(prompt: Sequence[int], sampling: Sampling, models: Mapping[Role, Model]) -> None:
    """Refuse a request that the models cannot read.

    Raises:
        VocabularyMismatch: the models' vocabularies differ in size.
        InvalidRequest: a token of the prompt, a ban or a bias outside the vocabulary; or everything
            is banned.
    """
    sizes = {role: model.vocab_size for role, model in models.items()}
    size = sizes["target"] if "target" in sizes else next(iter(sizes.values()))
    for role, other in sizes.items():
        if other != size:
            raise VocabularyMismatch(
                f"the {role} knows {other} tokens and the target {size}: choose models "
                "that share a tokenizer"
            )
    named = {
        "the prompt": prompt,
        "banned_token_ids": sampling.banned_token_ids,
        "logit_bias": [t for t, _ in sampling.biases],
    }
    for name, tokens in named.items():
        wrong = next((t for t in tokens if not 0 <= t < size), None)
        if wrong is not None:
            raise InvalidRequest(
                (
                    f"{name} holds token {wrong}, the vocabulary ends at {size - 1}: encode "
                    "with the pair's own tokenizer"
                ),
                code="token_out_of_vocabulary",
            )
    if len(sampling.banned_token_ids) >= size:
        raise InvalidRequest(
            f"banned_token_ids names all {size} tokens: leave at least one",
            code="every_token_banned",
        )


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that there was no room."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return any(words.lower() in str(error).lower() for words in ALLOCATION_FAILED)


def lost_device(error: BaseException) -> bool:
    """Whether an error means that the device cannot be used any more by this process. Running out
    of memory does not."""
    if isinstance(error, DeviceLost):
        return True
    said = str(error).lower()
    if ran_out_of_memory(error) or any(words in said for words in CALL_REFUSED):
        return False
    broken = isinstance(error, torch.AcceleratorError) and "cuda error" in said
    return broken or any(words.lower() in said for words in DEVICE_FAILED)


def readable(error: Exception) -> Exception:
    """An error of a running request as users see it: out of memory and a lost device under their
    names, all others as they are."""
    typed: Exception
    if isinstance(error, OutOfMemory | DeviceLost):
        return error
    if ran_out_of_memory(error):
        typed = OutOfMemory(f"a forward pass ran out of memory: {FORWARD_FIX}")
    elif lost_device(error):
        typed = DeviceLost(
            f"the device has failed ({(str(error).splitlines() or [''])[0]}): restart the process"
        )
    else:
        return error
    typed.__cause__ = error
    return typed


@contextmanager
def room_for(what: str, fix: str) -> Iterator[None]:
    """Name what did not fit.

    Raises:
        OutOfMemory: the body ran out of memory.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OutOfMemory) or not ran_out_of_memory(error):
            raise
        raise OutOfMemory(f"{what} do not fit into memory: {fix}") from error
