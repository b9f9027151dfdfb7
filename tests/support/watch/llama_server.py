"""Serves a GGUF file by llama.cpp over HTTP, in an environment with xllamacpp alone: model, draft
or -, port. Its address is the first line on stdout."""

import sys
import time

import xllamacpp as llama


def settings(model: str, draft: str, port: int) -> llama.CommonParams:
    """Four requests at once, drafts of four tokens, metrics, one thread for each model."""
    given = llama.CommonParams()
    given.model.path, given.port, given.hostnames = model, port, ["127.0.0.1"]
    given.endpoint_metrics, given.verbosity = True, 0
    given.n_ctx, given.n_parallel = 8192, 4
    given.cpuparams.n_threads = given.cpuparams_batch.n_threads = 1
    if draft != "-":
        simple = llama.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE
        given.speculative.types = [simple]
        own = given.speculative.draft
        own.mparams.path, own.n_max = draft, 4
        own.cpuparams.n_threads = own.cpuparams_batch.n_threads = 1
    return given


if __name__ == "__main__":
    server = llama.Server(settings(sys.argv[1], sys.argv[2], int(sys.argv[3])))
    print(server.listening_address, flush=True)
    while True:
        time.sleep(3600)
