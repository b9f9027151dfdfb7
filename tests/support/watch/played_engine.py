"""A played vLLM over HTTP: its metrics are those of a simulated minute, and it answers completions
as the simulator says that a fixed prompt fares."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

from draftwell.components.engines.remote.counters import Counters
from draftwell.components.engines.remote.dialects.vllm import NAMES
from tests.support.watch.simulator import Run

LETTERS_PER_TOKEN = 4


class PlayedEngine:
    """What the server says; tests turn `minute`, and switch it off."""

    def __init__(self, run: Run, *, plain: bool = False):
        self.run, self.plain = run, plain
        self.minute = 0
        self.away = 0
        """Status of every answer, such as 503; 0: it answers."""
        self.waiting = 0
        self.asked: list[int] = []
        """Lengths of the prompts that were decoded."""
        self.context = 100_000
        self.url = ""

    @property
    def sample(self) -> Counters:
        """Counters at the end of the minute."""
        return self.run.samples[self.minute]

    @property
    def now(self) -> float:
        """Unix seconds, simulated."""
        return self.sample.at

    def metrics(self) -> str:
        """The counters as vLLM writes them."""
        sample, lines = self.sample, [f"process_start_time_seconds {self.sample.started}"]
        for field, names in NAMES.sums.items():
            value = self.waiting if field == "waiting" else getattr(sample, field)
            lines.append(f'{names[0]}{{model_name="m"}} {value}')
        for place, count in enumerate(sample.accepted_at):
            lines.append(f'{NAMES.accepted_at}{{model_name="m",position="{place}"}} {count}')
        return "\n".join(lines) + "\n"

    def answer(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and events of a completion."""
        tokens = len(body["prompt"])
        if tokens + body["max_tokens"] > self.context:
            message = f"maximum context length is {self.context} tokens"
            return 400, {"error": {"message": message}}
        self.asked.append(tokens)
        probe = self.run.probe(self.minute, "chat", tokens, plain=self.plain)
        count, said = body["max_tokens"], probe.acceptance
        assert said is not None
        histogram = [said.rounds, *said.accepted_at, 0]
        event = {
            "choices": [{"token_ids": [7] * count, "finish_reason": "length"}],
            "usage": {"completion_tokens": count},
        }
        if not self.plain:
            event["metrics"] = {
                "speculative_decoding": {
                    "acceptance_histogram": [a - b for a, b in pairwise(histogram)],
                    "num_draft_tokens": said.drafted,
                }
            }
        return 200, event


def handler_of(engine: PlayedEngine) -> type[BaseHTTPRequestHandler]:
    """Requests to a played engine."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def send(self, status: int, text: str, kind: str = "application/json") -> None:
            self.send_response(engine.away or status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def do_GET(self) -> None:
            found: dict[str, Any] = {
                "/version": {"version": engine.sample.version},
                "/v1/models": {"data": [{"id": "m"}]},
            }
            if self.path == "/metrics":
                self.send(200, engine.metrics(), "text/plain")
            elif self.path in found:
                self.send(200, json.dumps(found[self.path]))
            else:
                self.send(404, "{}")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/tokenize":
                count = -(-len(body["prompt"]) // LETTERS_PER_TOKEN)
                self.send(200, json.dumps({"tokens": list(range(count))}))
                return
            status, event = engine.answer(body)
            if status != 200:
                self.send(status, json.dumps(event))
                return
            text = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n"
            self.send(200, text, "text/event-stream")

    return Handler


@contextmanager
def served(engine: PlayedEngine) -> Iterator[PlayedEngine]:
    """The engine at an address, until the block is left."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(engine))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    engine.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield engine
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
