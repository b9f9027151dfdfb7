"""A small process that plays vLLM's server, or with `--llama` llama.cpp's: `python played_vllm.py
PORT [options]`. A token takes as long as the speculative config says, and what is answered does not
depend on it.

Options: `--speculative-config JSON`, `--config FILE`, `--seconds-per-token S`, `--refuse METHOD`
(ends with an error at its start), `--die-with METHOD` (ends in the second answer), `--child`
(leaves a process of another group behind, which `/end` ends), `--lossy` (other tokens with any
method).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

GAIN = {"ngram": 6.0, "eagle3": 6.0, "draft_model": 0.5}
"""Method → tokens a second over plain decoding's, of a draft of three tokens."""

METHODS = {"ngram-simple": "ngram"}
"""llama.cpp's names."""
LLAMA_OPTIONS = {
    "--spec-type": str,
    "--spec-ngram-simple-size-n": int,
    "--spec-ngram-simple-size-m": int,
    "--spec-ngram-simple-min-hits": int,
}


def gain_of(speculation: dict[str, Any] | None) -> float:
    """Best with a length of 3."""
    if speculation is None:
        return 1.0
    off = abs(int(speculation["num_speculative_tokens"]) - 3)
    return GAIN[speculation["method"]] * (1 - 0.1 * off)


def token_after(ids: list[int]) -> int:
    """The same for the same text."""
    return (sum(ids) * 31 + len(ids) * 17) % 977 + 5


class Handler(BaseHTTPRequestHandler):
    """Answers as much as is asked of vLLM's server."""

    protocol_version = "HTTP/1.1"
    asked: argparse.Namespace
    speculation: dict[str, Any] | None = None
    requests, tokens, rounds = 0, 0, 0
    lock = threading.Lock()

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def send(self, text: str, kind: str = "application/json", status: int = 200) -> None:
        """A whole answer."""
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        """What it is and what it counted."""
        if self.path == "/end":
            os._exit(0)
        if self.asked.llama:
            props = json.dumps({"default_generation_settings": {}, "build_info": "b1"})
            found = {"/health": "{}", "/v1/models": "{}", "/props": props}.get(self.path)
            return self.send(found or "{}", status=200 if found else 404)
        answers = {
            "/health": "",
            "/version": json.dumps({"version": "0.32.0"}),
            "/v1/models": json.dumps({"data": [{"id": "played"}]}),
        }
        if self.path == "/metrics":
            return self.send(self.metrics(), "text/plain")
        if self.path not in answers:
            return self.send("{}", status=404)
        return self.send(answers[self.path])

    def metrics(self) -> str:
        """Counters."""
        found = {
            'vllm:request_success_total{finished_reason="length"}': self.requests,
            "vllm:generation_tokens_total": self.tokens,
        }
        if self.speculation is not None:
            k = int(self.speculation["num_speculative_tokens"])
            found |= {
                "vllm:spec_decode_num_drafts_total": self.rounds,
                "vllm:spec_decode_num_draft_tokens_total": self.rounds * k,
                "vllm:spec_decode_num_accepted_tokens_total": self.rounds,
            }
        return "".join(f"{name} {value}\n" for name, value in found.items())

    def do_POST(self) -> None:
        """A completion of token ids."""
        if self.path != ("/completion" if self.asked.llama else "/v1/completions"):
            self.close_connection = True
            return self.send("{}", status=404)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        cls = type(self)
        lossy = self.asked.lossy and self.speculation is not None
        method = self.speculation["method"] if self.speculation else "off"
        if cls.requests and method == self.asked.die_with:
            print("RuntimeError: the drafter has no weights", file=sys.stderr, flush=True)
            os._exit(5)
        ids, count = list(body["prompt"]), int(body.get("max_tokens") or body["n_predict"])
        made: list[int] = []
        for _ in range(count):
            made.append(token_after([*ids, *made]) + lossy)
        with self.lock:  # one core
            time.sleep(count * self.asked.seconds_per_token / gain_of(self.speculation))
            cls.requests, cls.tokens = cls.requests + 1, cls.tokens + count
            cls.rounds += count // 2
        if self.asked.llama:
            drafted = 0 if self.speculation is None else count
            timings = {"draft_n": drafted, "draft_n_accepted": drafted // 2}
            event = {"tokens": made, "stop": True, "stop_type": "limit", "timings": timings}
            return self.send(
                f"data: {json.dumps(event | {'tokens_predicted': count})}\n\n", "text/event-stream"
            )
        choice = {"token_ids": made, "finish_reason": "length", "text": ""}
        if body.get("logprobs"):
            rows = [{f"token_id:{token}": 0.0, "token_id:1": -9.0} for token in made]
            choice["logprobs"] = {"top_logprobs": rows}
        usage = {"completion_tokens": count}
        events = [{"choices": [choice]}, {"choices": [], "usage": usage}]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        self.send(f"{text}data: [DONE]\n\n", "text/event-stream")


def main() -> None:
    """Serve until it is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--speculative-config", type=json.loads)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--seconds-per-token", type=float, default=0.0)
    parser.add_argument("--refuse")
    parser.add_argument("--die-with")
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--lossy", action="store_true")
    parser.add_argument("--llama", action="store_true")
    for name, kind in LLAMA_OPTIONS.items():
        parser.add_argument(name, type=kind)
    Handler.asked = asked = parser.parse_args()
    Handler.speculation = asked.speculative_config
    if asked.spec_type is not None:
        k = asked.spec_ngram_simple_size_m
        Handler.speculation = {"method": METHODS[asked.spec_type], "num_speculative_tokens": k}
    if asked.config is not None:
        Handler.speculation = json.loads(asked.config.read_text()).get("speculative-config")
    if Handler.speculation and asked.refuse == Handler.speculation["method"]:
        print("ValueError: no such method here", file=sys.stderr)
        print("RuntimeError: Engine core initialization failed. See root cause above.")
        sys.exit(1)
    if asked.child:
        subprocess.Popen([sys.executable, __file__, str(asked.port)], start_new_session=True)
        sys.exit(0)
    ThreadingHTTPServer(("127.0.0.1", asked.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
