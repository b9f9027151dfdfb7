"""vLLM's server as `serve.sh` starts it: it answers `/v1/models` and `/v1/completions`, and spools
counts as our plug-in does.

FAKE_SERVER_FAULT says how it misbehaves: a word of `LAST_WORDS`, `refuse` (every request), `once`
(the third), or `die` (at the third).
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

LAST_WORDS = {
    "memory": "ValueError: No available memory for the cache blocks.",
    "port": "OSError: [Errno 98] Address already in use",
    "plugin": (
        "Traceback (most recent call last):\nModuleNotFoundError: No module named 'draftwell_vllm'"
    ),
}
options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False))
config = json.loads(options.get("--speculative-config", "{}"))
asked_for: list[object] = []
fault = os.environ.get("FAKE_SERVER_FAULT", "")
if fault in LAST_WORDS:
    sys.exit(LAST_WORDS[fault])


class Api(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(200, {"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked_for.append(asked)
        if fault == "refuse" or (fault == "once" and len(asked_for) == 3):
            self.answer(500, {"error": "the engine refuses"})
            return
        if fault == "die" and len(asked_for) == 3:
            print(LAST_WORDS["memory"], file=sys.stderr, flush=True)
            os._exit(1)
        if os.environ.get("DRAFTWELL_SPOOL"):
            spool(
                {
                    "method": config.get("method"),
                    "num_speculative_tokens": config.get("num_speculative_tokens"),
                    "rounds": 60,
                    "accepted_at": [60, 30],
                }
            )
        found = {"usage": {"completion_tokens": asked["max_tokens"]}}
        self.answer(200, {**found, "bundle": os.environ["DRAFTWELL_BUNDLE"], "pid": os.getpid()})

    def answer(self, status: int, found: object) -> None:
        body = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def spool(counts: dict[str, object]) -> None:
    """A line for each answer, so that a second has as many as monitoring asks for."""
    folder = Path(os.environ["DRAFTWELL_SPOOL"])
    folder.mkdir(parents=True, exist_ok=True)
    line = {"version": 1, "begun": time.time(), "bundle": os.environ["DRAFTWELL_BUNDLE"], **counts}
    with (folder / f"acceptance-20260101-here-{os.getpid()}.ndjson").open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(options["--port"])), Api).serve_forever()
