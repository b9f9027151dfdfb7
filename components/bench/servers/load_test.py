"""The load test: `vllm bench serve` with several numbers of clients, server after server, as one
table."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from draftwell.components.bench.interleaved import take_turns
from draftwell.components.bench.servers.processes import Server
from draftwell.components.engines.environments import VLLM_COMMAND, interpreter
from draftwell.components.engines.failures import last_line
from draftwell.components.engines.process_group import ProcessGroup, engine_environment
from draftwell.components.prompts.prompt import Prompt
from draftwell.components.report.tables import number, rich_table
from draftwell.serving.errors import DraftwellError

if TYPE_CHECKING:
    from rich.table import Table

LIMIT_SECONDS = 3600
DATASETS = ("custom", "random", "prefix_repetition")
"""Of `vllm bench serve`: our prompts; random tokens; random tokens, of which several requests have
the first ones in common. Prompts of the latter two depend on the round, and their answers do not
end before the last token."""
INPUT_TOKENS, SUFFIX_TOKENS, PREFIXES = 256, 64, 4
"""Of random prompts, all tokens; of those with a common beginning, the tokens after it (before it:
the rest), and how many beginnings at most."""
COLUMNS = (
    "data",
    "server",
    "clients",
    "tokens/s",
    "ratio to the first",
    "TTFT ms",
    "time per token ms",
    "answered",
)


@dataclass(frozen=True)
class LoadTest:
    """What is asked.

    Args:
        prompts: one request each; a round asks them all.
        max_tokens: tokens of an answer at most.
        tokenizer: folder, for counting tokens.
        folder: for what `vllm bench serve` reads and writes.
        datasets: some of `DATASETS`; the others have as many requests as there are prompts.
    """

    prompts: Sequence[Prompt]
    max_tokens: int
    tokenizer: Path
    folder: Path
    datasets: Sequence[str] = ("custom",)

    def options(self, dataset: str, seed: int) -> list[str]:
        """What tells `vllm bench serve` to send a data set.

        Args:
            seed: of random prompts.
        """
        tokens, prefixes = str(self.max_tokens), prefixes_of(len(self.prompts))
        own = {
            "custom": [
                "--dataset-path",
                str(self.data),
                "--skip-chat-template",
                "--disable-shuffle",
                "--custom-output-len",
                tokens,
            ],
            "random": [
                "--random-input-len",
                str(INPUT_TOKENS),
                "--random-output-len",
                tokens,
                "--ignore-eos",
            ],
            "prefix_repetition": [
                "--prefix-repetition-prefix-len",
                str(INPUT_TOKENS - SUFFIX_TOKENS),
                "--prefix-repetition-suffix-len",
                str(SUFFIX_TOKENS),
                "--prefix-repetition-num-prefixes",
                str(prefixes),
                "--prefix-repetition-output-len",
                tokens,
                "--ignore-eos",
            ],
        }
        return [
            "--dataset-name",
            dataset,
            *own[dataset],
            "--num-prompts",
            str(len(self.prompts)),
            "--seed",
            str(seed),
        ]

    @property
    def data(self) -> Path:
        """The prompts, as `vllm bench serve` reads them."""
        return self.folder / "prompts.jsonl"


def prefixes_of(requests: int) -> int:
    """How many beginnings so many requests have: a divisor of theirs, since vLLM sends as many of
    each and leaves out the rest.

    >>> [prefixes_of(requests) for requests in (2, 10, 11, 64)]
    [2, 2, 1, 4]
    """
    return max(count for count in range(1, PREFIXES + 1) if requests % count == 0)


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
    dataset: str = "custom"


def compare(
    servers: Sequence[Server],
    clients: Sequence[int],
    test: LoadTest,
    *,
    rounds: int = 1,
    after: Callable[[Row], object] = lambda row: None,
) -> list[Row]:
    """Send every data set to every server with every number of clients; the order of the servers
    rotates, and only one of them runs at a time.

    Args:
        after: called with each run's row as soon as it is there.
    """
    test.data.write_text(
        "".join(json.dumps({"prompt": prompt.prompt}) + "\n" for prompt in test.prompts)
    )
    cells = [(dataset, count) for dataset in test.datasets for count in clients]

    def asking(server: Server) -> Callable[[int], Row]:
        seeds = itertools.count()

        def turn(cell: int) -> Row:
            dataset, count = cells[cell]
            with server.running():
                row = ask(server, count, test, dataset, seed=next(seeds))
            after(row)
            return row

        return turn

    found = take_turns({server.label: asking(server) for server in servers}, len(cells), rounds)
    return [median_of(rows) for cell in zip(*found.values(), strict=True) for rows in cell]


def ask(server: Server, clients: int, test: LoadTest, dataset: str, *, seed: int) -> Row:
    """One run of `vllm bench serve`.

    Args:
        seed: of random prompts: all servers get the same ones, another run others, so that no cache
            knows them.
    Raises:
        DraftwellError: it failed (`load_test_failed`).
    """
    log, result = test.folder / "bench.log", test.folder / "result.json"
    result.unlink(missing_ok=True)
    command = [*command_of(server, test, clients, result), *test.options(dataset, seed)]
    client = ProcessGroup("vllm bench serve", command, log, env=engine_environment(1))
    try:
        exit_code = client.exit_code(LIMIT_SECONDS)
    finally:
        client.end(0.0)
    if exit_code != 0 or not result.is_file():
        why = last_line(log) if exit_code is not None else f"no end within {LIMIT_SECONDS} s"
        raise DraftwellError(
            f"`vllm bench serve` failed against {server.label} ({why}): see {log} and {server.log}",
            code="load_test_failed",
        )
    data_of = json.loads(result.read_text())
    return Row(
        server.label,
        clients,
        data_of["output_throughput"],
        data_of["median_ttft_ms"],
        data_of["median_tpot_ms"],
        data_of["completed"],
        data_of["failed"],
        dataset,
    )


def command_of(server: Server, test: LoadTest, clients: int, result: Path) -> list[str]:
    """`vllm bench serve` against a server, without the options of its requests."""
    return [
        str(interpreter("vllm")),
        str(VLLM_COMMAND),
        "bench",
        "serve",
        "--backend",
        "openai-chat",
        "--base-url",
        server.url,
        "--endpoint",
        "/v1/chat/completions",
        "--model",
        server.model,
        "--tokenizer",
        str(test.tokenizer),
        "--max-concurrency",
        str(clients),
        "--temperature",
        "0",
        "--num-warmups",
        str(min(clients, len(test.prompts))),
        "--disable-tqdm",
        "--save-result",
        "--result-dir",
        str(test.folder),
        "--result-filename",
        result.name,
    ]


def median_of(rows: Sequence[Row]) -> Row:
    """Medians of the rounds; answers are summed."""
    return Row(
        rows[0].server,
        rows[0].clients,
        statistics.median(row.tokens_per_second for row in rows),
        statistics.median(row.ttft_ms for row in rows),
        statistics.median(row.tpot_ms for row in rows),
        sum(row.completed for row in rows),
        sum(row.failed for row in rows),
        rows[0].dataset,
    )


def load_table(rows: Sequence[Row], caption: str) -> Table:
    """The rows as a table for the terminal; ratios are to the first server with the same data and
    as many clients."""
    first = {(row.dataset, row.clients): row.tokens_per_second for row in reversed(rows)}
    ratios = [
        row.tokens_per_second / base if (base := first[row.dataset, row.clients]) else None
        for row in rows
    ]
    return rich_table(
        COLUMNS,
        [
            [
                row.dataset,
                row.server,
                str(row.clients),
                number(row.tokens_per_second, ".1f"),
                number(ratio, ".2f"),
                number(row.ttft_ms, ".0f"),
                number(row.tpot_ms, ".1f"),
                f"{row.completed} of {row.completed + row.failed}",
            ]
            for row, ratio in zip(rows, ratios, strict=True)
        ],
        caption,
    )


def told(row: Row) -> str:
    """One run in a line."""
    return (
        f"{row.dataset}, {row.clients} at once, {row.server}: {row.tokens_per_second:.1f} "
        f"tokens/s, {row.completed} of "
        f"{row.completed + row.failed} answered"
    )


def failures(rows: Sequence[Row]) -> list[str]:
    """A line for each row with requests that failed."""
    return [
        (
            f"{row.failed} of {row.completed + row.failed} requests failed: {row.server}, "
            f"{row.dataset}, {row.clients} at once"
        )
        for row in rows
        if row.failed
    ]


def report(rows: Sequence[Row], caption: str) -> dict[str, object]:
    """The rows as JSON."""
    return {"caption": caption, "rows": [asdict(row) for row in rows]}
