"""`python -m draftwell.components.bench.servers`: our server and vLLM's under vLLM's own load test,
on the same machine with the same slots."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from draftwell.components.bench.peers.loading import LOOKUP
from draftwell.components.bench.servers.load_test import (
    DATASETS,
    LoadTest,
    Row,
    compare,
    failures,
    load_table,
    report,
    told,
)
from draftwell.components.bench.servers.long_prompt import stall, stall_table, text_of
from draftwell.components.bench.servers.processes import (
    CONTEXT,
    Server,
    context_of,
    own_command,
)
from draftwell.components.engines.environments import VLLM_COMMAND, interpreter, peers_root
from draftwell.components.engines.process_group import engine_environment
from draftwell.components.prompts.prompt import demo_prompts, read_prompts
from draftwell.serving.artifacts.pair_files import models_root
from draftwell.serving.bundle.bundle import Bundle, open_bundle
from draftwell.serving.device import usable_cores
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import write_json
from draftwell.serving.number_format import dtype_of, weights_of

STREAMS = 8
"""Answers that are being read while the long prompt is sent."""
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": LOOKUP["lookup_tokens"],
    "prompt_lookup_min": 1,
    "prompt_lookup_max": LOOKUP["lookup_ngram"],
}


BundleOption = Annotated[
    Path, typer.Option(help="Bundle that our server serves (`make deploy` builds it).")
]
Clients = Annotated[str, typer.Option(help="Numbers of clients, separated by commas.")]
Datasets = Annotated[
    str,
    typer.Option(
        help="Data sets of vLLM's load test, separated by commas: custom (--prompts), random, "
        "prefix_repetition."
    ),
]
PrefixCaching = Annotated[
    bool,
    typer.Option(
        "--prefix-caching",
        help="Let the servers keep their prefix caches; not with custom, whose prompts repeat.",
    ),
]
Alone = Annotated[bool, typer.Option("--alone", help="Ask our server only, and leave vLLM's out.")]
Slots = Annotated[int, typer.Option(min=1, help="Requests that each server decodes at once.")]
Prompts = Annotated[
    Path | None,
    typer.Option(help="JSONL file of prompts. Default: those that the project ships."),
]
Limit = Annotated[int, typer.Option(min=1, help="Requests per run: the first prompts of the file.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")]
LongPrompt = Annotated[
    int,
    typer.Option(
        min=1,
        max=CONTEXT - 256,
        help="Tokens of the prompt that is sent while others are being answered.",
    ),
]
Rounds = Annotated[int, typer.Option(min=1, help="Interleaved rounds; medians are reported.")]
Out = Annotated[
    Path | None, typer.Option("--json", help="Write the rows to this file, after every run.")
]


def main(
    bundle: BundleOption,
    clients: Clients = "1,8,32",
    datasets: Datasets = "custom",
    prefix_caching: PrefixCaching = False,
    alone: Alone = False,
    slots: Slots = 32,
    prompts: Prompts = None,
    limit: Limit = 64,
    max_tokens: MaxTokens = 64,
    long_prompt: LongPrompt = 4000,
    rounds: Rounds = 1,
    out: Out = None,
) -> None:
    """Compare our server with vLLM's and print one table."""
    from rich.console import Console

    counts, sets = numbers(clients), names(datasets, prefix_caching=prefix_caching)
    opened = open_bundle(bundle)
    target = opened.files(models_root()).target
    chosen = (read_prompts(prompts) if prompts else demo_prompts())[:limit]
    (folder := peers_root() / "logs" / "bench-server").mkdir(parents=True, exist_ok=True)
    # so that the servers are ended on the way out
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    caption = (
        f"{opened.manifest.pair}, {opened.manifest.dtype}, greedy, {len(chosen)} requests "
        f"of up to {max_tokens} tokens, "
        f"{slots} slots, {usable_cores()} cores, {rounds} round{'s' if rounds != 1 else ''}, "
        f"{'with' if prefix_caching else 'no'} prefix cache; medians of TTFT and time per token"
    )
    runs: list[Row] = []

    def after(row: Row) -> None:
        runs.append(row)
        typer.echo(told(row), err=True)
        if out is not None:
            write_json(out, report(runs, caption))

    started = commands(opened, target, slots, prefix_caching=prefix_caching)
    with started_servers(started[: 1 if alone else None], folder) as servers:
        test = LoadTest(chosen, max_tokens, target, folder, sets)
        rows = compare(servers, counts, test, rounds=rounds, after=after)
        stalls, text = [], text_of(chosen, long_prompt, target)
        for server in servers:
            with server.running():
                stalls.append(stall(server, STREAMS, chosen, text))
    if out is not None:
        parts = {
            "runs": [asdict(row) for row in runs],
            "long_prompt": [asdict(row) for row in stalls],
        }
        write_json(out, report(rows, caption) | parts)
    screen = Console(width=max(120, Console().width))
    screen.print(load_table(rows, caption))
    title = "time between parts of {} streams, before and while a prompt of {} tokens is read"
    screen.print(stall_table(stalls, title.format(STREAMS, long_prompt)))
    for line in (failed := failures(rows)):
        typer.echo(line, err=True)
    if failed:
        raise typer.Exit(1)


@contextmanager
def started_servers(
    wanted: Sequence[tuple[str, Sequence[str], Mapping[str, str] | None]], folder: Path
) -> Iterator[list[Server]]:
    """Servers by label, command and environment, each with a log in a folder; they end with the
    block."""
    with ExitStack() as stack:
        servers = []
        for label, command, env in wanted:
            typer.echo(f"starting {label}", err=True)
            log = folder / f"{label.replace(', ', '-').replace(' ', '-')}.log"
            servers.append(Server(label, command, log, env=env))
            stack.callback(servers[-1].close)
        yield servers


def commands(
    bundle: Bundle, target: Path, slots: int, *, prefix_caching: bool
) -> list[tuple[str, list[str], dict[str, str] | None]]:
    """Label, command and environment of each server: ours, vLLM's, and vLLM's with n-grams; each on
    all cores.

    Args:
        prefix_caching: not where every run sends the same prompts again.
    """
    context, cores = context_of(target), usable_cores()
    ours = own_command(bundle, slots, context, "tenant" if prefix_caching else "off")
    theirs = [
        str(interpreter("vllm")),
        str(VLLM_COMMAND),
        "serve",
        str(target),
        "--dtype",
        dtype_of(bundle.manifest.dtype),
        "--max-num-seqs",
        str(slots),
        "--max-model-len",
        str(context),
        "--served-model-name",
        bundle.manifest.pair,
        "--enable-prefix-caching" if prefix_caching else "--no-enable-prefix-caching",
    ]
    name = "vllm serve" if weights_of(bundle.manifest.dtype) is None else "vllm serve, full weights"
    return [
        ("draftwell-serve", ours, None),
        (name, theirs, engine_environment(cores)),
        (
            f"{name}, ngram",
            [*theirs, "--speculative-config", json.dumps(NGRAM)],
            engine_environment(cores),
        ),
    ]


def numbers(text: str) -> list[int]:
    """Numbers of clients.

    >>> numbers("1,8,32")
    [1, 8, 32]
    """
    counts = [int(part) for part in text.split(",") if part.strip().isdecimal()]
    if len(counts) != len(text.split(",")) or 0 in counts:
        raise DraftwellError(
            f"--clients {text!r}: write numbers above 0 separated by commas, such as 1,8,32",
            code="bad_clients",
        )
    return counts


def names(text: str, *, prefix_caching: bool) -> list[str]:
    """Names of data sets.

    >>> names("custom,random", prefix_caching=False)
    ['custom', 'random']
    """
    chosen = [part.strip() for part in text.split(",")]
    if not set(chosen) <= set(DATASETS):
        raise DraftwellError(
            f"--datasets {text!r}: write some of {', '.join(DATASETS)}, separated by commas",
            code="bad_datasets",
        )
    if prefix_caching and "custom" in chosen:
        raise DraftwellError(
            (
                "--prefix-caching with the data set custom, whose prompts repeat, would "
                "measure the cache: leave one out"
            ),
            code="bad_datasets",
        )
    return chosen


if __name__ == "__main__":
    try:
        typer.run(main)
    except DraftwellError as mistake:
        typer.echo(f"Error: {mistake}", err=True)
        sys.exit(2)
