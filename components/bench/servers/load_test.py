"""The load test: `vllm bench serve` with several numbers of clients, server after server, as one table."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from components.bench.runner import rotated
from components.bench.servers.processes import Server
from components.engines.environments import VLLM_COMMAND, interpreter
from components.engines.failures import last_line
from components.engines.process import engine_environment
from components.prompts.prompt import Prompt
from components.report.tables import number, rich_table
from serving.errors import DraftwellError

if TYPE_CHECKING:
    from rich.table import Table

LIMIT_SECONDS = 3600
COLUMNS = ("server", "clients", "tokens/s", "ratio to the first", "TTFT ms", "time per token ms", "answered")


@dataclass(frozen=True)
class LoadTest:
    """What is asked.

    Args:
        prompts: one request each; a round asks them all.
        max_tokens: tokens of an answer at most.
        tokenizer: folder, for counting tokens.
        folder: for what `vllm bench serve` reads and writes.
    """

    prompts: Sequence[Prompt]
    max_tokens: int
    tokenizer: Path
    folder: Path


@dataclass(frozen=True)
class Row:
    """One server with one number of clients; of several rounds the medians."""

    server: str
    clients: int
    tokens_per_second: float
    ttft_ms: float
    tpot_ms: float
    completed: int
    failed: int


def compare(servers: Sequence[Server], clients: Sequence[int], test: LoadTest, *, rounds: int = 1) -> list[Row]:
    """Ask every server with every number of clients; the order of the servers rotates, and only one of them runs at a time."""
    data = test.folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": prompt.prompt}) + "\n" for prompt in test.prompts))
    found: dict[tuple[int, str], list[Row]] = {(count, server.label): [] for count in clients for server in servers}
    for turn in range(rounds):
        for i, count in enumerate(clients):
            for server in rotated(servers, turn + i):
                with server.running():
                    found[count, server.label].append(ask(server, count, test, data))
    return [median_of(rows) for rows in found.values()]


def ask(server: Server, clients: int, test: LoadTest, data: Path) -> Row:
    """One run of `vllm bench serve`.

    Raises:
        DraftwellError: it failed (`load_test_failed`).
    """
    log, result = test.folder / "bench.log", test.folder / "result.json"
    result.unlink(missing_ok=True)
    command = [str(interpreter("vllm")), str(VLLM_COMMAND), "bench", "serve", "--backend", "openai-chat", "--base-url", server.url,
               "--endpoint", "/v1/chat/completions", "--model", server.model, "--tokenizer", str(test.tokenizer),
               "--dataset-name", "custom", "--dataset-path", str(data), "--skip-chat-template", "--disable-shuffle",
               "--custom-output-len", str(test.max_tokens), "--num-prompts", str(len(test.prompts)), "--max-concurrency", str(clients),
               "--temperature", "0", "--num-warmups", str(min(clients, len(test.prompts))), "--disable-tqdm",
               "--save-result", "--result-dir", str(test.folder), "--result-filename", result.name]
    with log.open("wb") as out:
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=engine_environment(1), check=False,
                                  timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise DraftwellError(f"`vllm bench serve` did not end within {LIMIT_SECONDS} s against {server.label}: see {server.log}",
                                 code="load_test_failed") from error
    if done.returncode or not result.is_file():
        raise DraftwellError(f"`vllm bench serve` failed against {server.label} ({last_line(log)}): see {log} and {server.log}",
                             code="load_test_failed")
    data_of = json.loads(result.read_text())
    return Row(server.label, clients, data_of["output_throughput"], data_of["median_ttft_ms"], data_of["median_tpot_ms"],
               data_of["completed"], data_of["failed"])


def median_of(rows: Sequence[Row]) -> Row:
    """Medians of the rounds; answers are summed."""
    return Row(rows[0].server, rows[0].clients, statistics.median(row.tokens_per_second for row in rows),
               statistics.median(row.ttft_ms for row in rows), statistics.median(row.tpot_ms for row in rows),
               sum(row.completed for row in rows), sum(row.failed for row in rows))


def load_table(rows: Sequence[Row], caption: str) -> Table:
    """The rows as a table for the terminal; ratios are to the first server with as many clients."""
    first = {row.clients: row.tokens_per_second for row in reversed(rows)}
    return rich_table(COLUMNS, [[row.server, str(row.clients), number(row.tokens_per_second, ".1f"),
                                 number(row.tokens_per_second / first[row.clients] if first[row.clients] else None, ".2f"),
                                 number(row.ttft_ms, ".0f"), number(row.tpot_ms, ".1f"), f"{row.completed} of {row.completed + row.failed}"]
                                for row in rows], caption)


def report(rows: Sequence[Row], caption: str) -> dict[str, object]:
    """The rows as JSON."""
    return {"caption": caption, "rows": [asdict(row) for row in rows]}
