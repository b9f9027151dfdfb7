"""Serving another engine's bundle for a while and asking it, so that monitoring has something to
look at."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from draftwell.components.bench.servers.processes import Server
from draftwell.components.engines.environments import interpreter, peers_root
from draftwell.components.engines.failures import one_line
from draftwell.components.engines.process_group import FOREIGN
from draftwell.components.engines.vllm import NAME, file_name
from draftwell.serving.artifacts.pair_files import draftwell_home
from draftwell.serving.errors import DraftwellError

LINE_SECONDS = 5
"""Of a line of counts, so that a trial of a minute has as many as monitoring asks for."""
END_SECONDS = 60.0
LAST_WORDS_SECONDS = 5.0
"""That a server which has failed a request is given to end, so that the reason can be told."""
LIMIT_SECONDS = 300.0


def server_environment(pair: str) -> dict[str, str]:
    """Variables that a bundle's `serve.sh` is started with: vLLM's Python, and the folder that
    `draftwell monitor` reads counts from.

    `DRAFTWELL_SPOOL` names another one, or none where it is empty. `LD_PRELOAD` stays: `serve.sh`
    names one itself where a user has not.
    """
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in FOREIGN or name == "LD_PRELOAD"
    }
    variables.setdefault("DRAFTWELL_SPOOL", str(draftwell_home() / "spool" / pair))
    return {**variables, "PYTHON": str(interpreter(NAME))}


def serve_and_ask(
    bundle: Path,
    pair: str,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    seconds: float,
    clients: int,
    spool: Path,
) -> dict[str, float]:
    """Start a bundle's server, let clients ask it for a while, and end it; its log is beside those
    of the engines.

    Args:
        bundle: folder with `serve.sh`.
        prompts: token ids; clients take them in turn, round and round.
        seconds: that the clients ask for; each waits for the answer that it has asked for.
        spool: folder of the server's counts.
    Returns:
        `requests`, their `tokens`, `clients`, `tokens_per_second` and `start_seconds`.
    Raises:
        DraftwellError: the server does not start or ends (as `Server` says), or it did not answer
            all requests (`server_failed`): the line names the first failure.
    """
    log = peers_root() / "logs" / f"{file_name(f'{NAME}/serve-{pair}')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    variables = {
        "DRAFTWELL_SPOOL_SECONDS": str(LINE_SECONDS),
        **server_environment(pair),
        "DRAFTWELL_SPOOL": str(spool),
        **dict.fromkeys(("VLLM_API_KEY", "VLLM_API_KEY_FILE"), ""),  # only this process asks
    }
    begun = time.monotonic()
    server = Server(
        f"{NAME} of {bundle}",
        [str(bundle / "serve.sh")],
        log,
        end_seconds=END_SECONDS,
        env=variables,
    )
    try:
        started = time.monotonic()
        with server.running():
            answers = asked(server, prompts, max_tokens, seconds, clients)
            refuse_failed(server, answers)
        taken = time.monotonic() - started
    finally:
        server.close()
    tokens = sum(answer for answer in answers if isinstance(answer, int))
    return {
        "requests": len(answers),
        "tokens": tokens,
        "clients": clients,
        "tokens_per_second": tokens / taken,
        "start_seconds": started - begun,
    }


def refuse_failed(server: Server, answers: Sequence[int | Exception]) -> None:
    """Refuse a trial in which a request failed.

    Raises:
        DraftwellError: the server ended (as `Server.refuse_ended` says), a request failed, or none
            was sent (`server_failed`).
    """
    failed = [answer for answer in answers if isinstance(answer, Exception)]
    server.refuse_ended(LAST_WORDS_SECONDS if failed else 0.0)
    if failed or not answers:
        why = one_line(f"the first: {failed[0]}") if failed else "none was sent"
        raise DraftwellError(
            (
                f"{server.label} failed {len(failed)} of {len(answers)} requests ({why}): see "
                f"{server.log}"
            ),
            code="server_failed",
        )


def asked(
    server: Server, prompts: Sequence[Sequence[int]], max_tokens: int, seconds: float, clients: int
) -> list[int | Exception]:
    """Of every request the tokens of its answer, or why there is none; after a failure no client
    asks for more."""
    end, turns, lock = time.monotonic() + seconds, cycle(prompts), threading.Lock()
    found: list[int | Exception] = []
    failed = threading.Event()

    def client() -> None:
        while time.monotonic() < end and not failed.is_set():
            with lock:
                prompt = next(turns)
            try:
                found.append(answer_tokens(server, prompt, max_tokens))
            except Exception as error:  # told by the caller
                found.append(error)
                failed.set()

    threads = [threading.Thread(target=client, daemon=True) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def answer_tokens(server: Server, prompt: Sequence[int], max_tokens: int) -> int:
    """Tokens of a greedy answer.

    Raises:
        DraftwellError: the server refused the request (`server_failed`).
    """
    body = {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0}
    with server.post("/v1/completions", body, LIMIT_SECONDS) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])
