"""vLLM's server as `serve.sh` starts it: it answers `/v1/models` and `/v1/completions`, and spools
counts as our plug-in does.

FAKE_SERVER_FAULT says how it misbehaves: a word of `LAST_WORDS`, `refuse` (every request), `once`
(the third), or `die` (at the third). FAKE_SERVER_SECONDS: that an answer takes; FAKE_START_SECONDS:
between the binding of its port and its listening there.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

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


class Engine:
    """Answers, until it is shut down."""

    running = 0
    refuses = False

    async def shutdown(self) -> None:
        self.refuses = True
        while self.running:
            await asyncio.sleep(0.01)

    async def answer(self, asked: dict[str, Any]) -> tuple[int, object]:
        asked_for.append(asked)
        if self.refuses or fault == "refuse" or (fault == "once" and len(asked_for) == 3):
            return 500, {"error": "the engine refuses"}
        if fault == "die" and len(asked_for) == 3:
            print(LAST_WORDS["memory"], file=sys.stderr, flush=True)
            os._exit(1)
        self.running += 1
        await asyncio.sleep(float(os.environ.get("FAKE_SERVER_SECONDS", "0")))
        self.running -= 1
        if os.environ.get("DRAFTWELL_SPOOL"):
            spool(
                {
                    "method": config.get("method"),
                    "num_speculative_tokens": config.get("num_speculative_tokens"),
                    "rounds": 60,
                    "accepted_at": [60, 30],
                }
            )
        return 200, {
            "usage": {"completion_tokens": asked["max_tokens"]},
            "bundle": os.environ["DRAFTWELL_BUNDLE"],
            "pid": os.getpid(),
        }


engine = Engine()


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        raise RuntimeError("no lifespan")
    if scope["method"] == "GET":
        status, found = 200, {"data": [{"id": "tiny"}]}
    else:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        status, found = await engine.answer(json.loads(body))
    answer = json.dumps(found).encode()
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(b"content-length", str(len(answer)).encode())],
        }
    )
    await send({"type": "http.response.body", "body": answer})


def spool(counts: dict[str, object]) -> None:
    """A line for each answer, so that a second has as many as monitoring asks for."""
    folder = Path(os.environ["DRAFTWELL_SPOOL"])
    folder.mkdir(parents=True, exist_ok=True)
    line = {"version": 1, "begun": time.time(), "bundle": os.environ["DRAFTWELL_BUNDLE"], **counts}
    with (folder / f"acceptance-20260101-here-{os.getpid()}.ndjson").open("a") as file:
        file.write(json.dumps(line) + "\n")


def main() -> None:
    from vllm.entrypoints.launchers import launcher

    listened = launcher.create_server_socket(
        ("127.0.0.1", int(options["--port"])), reuse_port=False
    )
    time.sleep(float(os.environ.get("FAKE_START_SECONDS", "0")))
    asyncio.run(launcher.serve_http(app, listened, engine))


if __name__ == "__main__":
    main()
