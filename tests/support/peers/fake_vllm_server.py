"""vLLM's server as `serve.sh` starts it: it answers `/v1/models` and `/v1/completions`, and spools counts as our plug-in does.

FAKE_SERVER_FAULT says how it misbehaves: a word of `LAST_WORDS`, `refuse` (every request), `once` (the third), or `die` (at the third).
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

LAST_WORDS = {"memory": "ValueError: No available memory for the cache blocks.", "port": "OSError: [Errno 98] Address already in use",
              "plugin": "Traceback (most recent call last):\nModuleNotFoundError: No module named 'draftwell_vllm'"}
options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False))
config = json.loads(options.get("--speculative-config", "{}"))
asked_for: list[object] = []
fault = os.environ.get("FAKE_SERVER_FAULT", "")
if fault in LAST_WORDS:
    sys.exit(LAST_WORDS[fault])


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.say({"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked_for.append(asked)
        if fault == "refuse" or (fault == "once" and len(asked_for) == 3):
            self.send_error(500)
            return
        if fault == "die" and len(asked_for) == 3:
            print(LAST_WORDS["memory"], file=sys.stderr, flush=True)
            os._exit(1)
        spool({"method": config.get("method"), "num_speculative_tokens": config.get("num_speculative_tokens"), "rounds": 60,
               "accepted_at": [60, 30]})
        self.say({"usage": {"completion_tokens": asked["max_tokens"]}})

    def say(self, answer: object) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


def spool(counts: dict[str, object]) -> None:
    """A line for each answer, so that a second has as many as monitoring asks for."""
    folder = Path(os.environ["DRAFTWELL_SPOOL"])
    folder.mkdir(parents=True, exist_ok=True)
    line = {"version": 1, "begun": time.time(), "bundle": os.environ["DRAFTWELL_BUNDLE"], **counts}
    with (folder / f"acceptance-20260101-here-{os.getpid()}.ndjson").open("a") as file:
        file.write(json.dumps(line) + "\n")


ThreadingHTTPServer(("127.0.0.1", int(options["--port"])), Answers).serve_forever()
