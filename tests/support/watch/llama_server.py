"""Serves a GGUF file by llama.cpp over HTTP, in an environment with xllamacpp alone: model, port,
and llama-server's options of speculation. Its address is the first line on stdout."""

import argparse
import time

import xllamacpp as llama

KIND = llama.common_speculative_type
KINDS = {
    "none": KIND.COMMON_SPECULATIVE_TYPE_NONE,
    "draft-simple": KIND.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE,
    "ngram-simple": KIND.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE,
}


def options() -> argparse.Namespace:
    """Of the command line, named as llama-server's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("port", type=int)
    parser.add_argument("--spec-type", default="none", choices=KINDS)
    parser.add_argument("--spec-draft-model")
    parser.add_argument("--spec-draft-n-max", type=int, default=4)
    parser.add_argument("--spec-draft-n-min", type=int, default=0)
    parser.add_argument("--spec-draft-p-min", type=float, default=0.0)
    parser.add_argument("--spec-ngram-simple-size-n", type=int, default=2)
    parser.add_argument("--spec-ngram-simple-size-m", type=int, default=4)
    parser.add_argument("--spec-ngram-simple-min-hits", type=int, default=1)
    return parser.parse_args()


def settings(given: argparse.Namespace) -> llama.CommonParams:
    """Four requests at once, metrics, one thread for each model."""
    found = llama.CommonParams()
    found.model.path, found.port, found.hostnames = given.model, given.port, ["127.0.0.1"]
    found.endpoint_metrics, found.verbosity = True, 0
    found.n_ctx, found.n_parallel = 8192, 4
    found.cpuparams.n_threads = found.cpuparams_batch.n_threads = 1
    found.speculative.types = [KINDS[given.spec_type]]
    if given.spec_type == "draft-simple":
        own = found.speculative.draft
        own.mparams.path, own.n_max = given.spec_draft_model, given.spec_draft_n_max
        own.n_min, own.p_min = given.spec_draft_n_min, given.spec_draft_p_min
        own.cpuparams.n_threads = own.cpuparams_batch.n_threads = 1
    elif given.spec_type == "ngram-simple":
        ngrams = found.speculative.ngram_simple
        ngrams.size_n = given.spec_ngram_simple_size_n
        ngrams.size_m = given.spec_ngram_simple_size_m
        ngrams.min_hits = given.spec_ngram_simple_min_hits
    return found


if __name__ == "__main__":
    server = llama.Server(settings(options()))
    print(server.listening_address, flush=True)
    while True:
        time.sleep(3600)
