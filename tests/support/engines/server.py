"""A simulated engine behind HTTP, which plays the API and the metrics of vLLM 0.32, SGLang 0.5,
llama.cpp's server (with and without a draft length by request), ours, or plain OpenAI; and fails as
servers and proxies do. Names of fields and series are those of the real ones."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.engines.simulated import SimulatedEngine

Json = dict[str, Any]
MODEL = "served"
PATHS = {
    "vllm": ("/version", "/v1/models", "/metrics", "/tokenize", "/v1/completions"),
    "sglang": ("/server_info", "/v1/models", "/metrics", "/tokenize", "/generate"),
    "llama.cpp": ("/props", "/v1/models", "/metrics", "/tokenize", "/completion"),
    "draftwell": (
        *("/version", "/v1/speculation", "/v1/models", "/metrics", "/tokenize"),
        "/v1/completions",
    ),
    "openai": ("/v1/models", "/v1/completions"),
}


@dataclass
class EngineServer:
    """What plays an engine.

    Args:
        engine: decodes and counts.
        speaks: one of `PATHS`.
        key: that every path but /version wants; None wants none.
        mishap: what goes wrong with answers: `hang`, `die` (in the middle), `html`, `gateway`
            (502), `redirect`, `short` (fewer tokens), `too long`, `silent` (ends without a
            reason), `gone` (closes without an answer), `abort` (a reason that is no end), `more`
            (a token too many), `one line` (metrics without an end, in `pieces` of a letter or, for
            0, of 1 MiB); "" nothing.
        busy: answers 429 that come first, with `retry_after`.
        counted: whether each answer says how its drafts fared, where the real one can.
        lengths_by_request: llama.cpp: a build that reads `speculative.n_max` of requests.
        away: status of every answer, such as 503; 0: it answers.
        hangs_up: whether each connection is for one request.
        asked: path and body of each request.
    """

    engine: SimulatedEngine
    speaks: str = "vllm"
    key: str | None = None
    mishap: str = ""
    busy: int = 0
    counted: bool = True
    metrics: bool = True
    lengths_by_request: bool = False
    models: tuple[str, ...] = (MODEL,)
    retry_after: str = "3"
    pieces: int = 0
    away: int = 0
    hangs_up: bool = False
    asked: list[tuple[str, Json]] = field(default_factory=list)

    def about(self, path: str) -> Json:
        """What the server says of itself."""
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": name} for name in self.models]}
        if path == "/version":
            return {"version": self.engine.version}
        if path == "/server_info":
            drafts = len(self.engine.accepts) + 1 if self.engine.accepts else None
            return {
                "model_path": MODEL,
                "tp_size": 1,
                "version": self.engine.version,
                "speculative_num_draft_tokens": drafts,
            }
        if path == "/v1/speculation":
            return {"model": MODEL, "default": "spide", "tuned": {"greedy": "spide"}}
        params: Json = {"temperature": 0.8, "speculative.types": "none"}
        if self.lengths_by_request:
            params["speculative.n_max"] = 16
        return {
            "default_generation_settings": {"params": params, "n_ctx": 4096},
            "build_info": self.engine.version,
            "endpoint_metrics": self.metrics,
        }

    def events(self, path: str, body: Json) -> Iterator[Json]:
        """What a request is answered with."""
        if path == "/generate":
            yield from self._sglang(body)
        elif path == "/completion":
            yield from self._llama_cpp(body)
        else:
            yield from self._completions(body)

    def is_too_long(self, body: Json) -> bool:
        """Whether it has no room for a request."""
        return self.mishap == "too long"

    def _ending(self, text: Sequence[int]) -> str:
        if self.mishap == "abort":
            return "abort"
        return "stop" if text[-1] == self.engine.stop else "length"

    def _completions(self, body: Json) -> Iterator[Json]:
        speculate = (body.get("speculation") or {}).get("enabled", True)
        deliveries, rounds = self.engine.decode(
            body["prompt"], body["max_tokens"], speculate=speculate
        )
        text = [token for one in deliveries for token in one]
        if self.mishap == "short":
            deliveries = deliveries[:2]
        if self.mishap == "more":
            deliveries = [*deliveries, [7]]
        for tokens in deliveries:
            choice: Json = {"index": 0, "text": "?" * len(tokens)}
            if self.speaks != "openai":
                choice["token_ids"] = tokens
            if body.get("logprobs") is not None:
                rows = [{f"token_id:{t}": -0.1, f"token_id:{t + 1}": -2.5} for t in tokens]
                choice["logprobs"] = {"top_logprobs": rows}
            yield {"choices": [choice]}
        if self.mishap == "silent":
            return
        yield {"choices": [{"index": 0, "text": "", "finish_reason": self._ending(text)}]}
        last: Json = {"choices": [], "usage": {"completion_tokens": len(text)}}
        drafted = sum(count for count, _ in rounds)
        if self.speaks == "vllm" and self.counted and self.engine.accepts:
            last["metrics"] = {
                "speculative_decoding": {
                    "acceptance_histogram": self.engine.histogram(rounds),
                    "num_draft_tokens": drafted,
                    "num_spec_steps": len(rounds),
                }
            }
        if self.speaks == "draftwell":
            at = [sum(a > i for _, a in rounds) for i in range(len(self.engine.accepts))]
            last["speculation"] = {
                "rounds": len(rounds),
                "drafted": drafted,
                "accepted": sum(at),
                "accepted_at": at,
            }
        yield last

    def _sglang(self, body: Json) -> Iterator[Json]:
        params = body["sampling_params"]
        deliveries, rounds = self.engine.decode(body["input_ids"], params["max_new_tokens"])
        ids: list[int] = []
        for tokens in deliveries:
            ids += tokens
            meta: Json = {"completion_tokens": len(ids), "finish_reason": None}
            if body.get("return_logprob"):
                top = [[(-2.5, t + 1, None), (-0.1, t, None)] for t in ids]
                meta["output_top_logprobs"] = top
            yield {"output_ids": list(ids), "meta_info": meta}
        meta = {"completion_tokens": len(ids), "finish_reason": {"type": self._ending(ids)}}
        if rounds:
            meta |= {
                "spec_verify_ct": len(rounds),
                "spec_num_correct_drafts": sum(accepted for _, accepted in rounds),
                "spec_num_proposed_drafts": sum(drafted for drafted, _ in rounds),
                "spec_correct_drafts_histogram": self.engine.histogram(rounds),
            }
        yield {"output_ids": list(ids), "meta_info": meta}

    def _llama_cpp(self, body: Json) -> Iterator[Json]:
        off = self.lengths_by_request and body.get("speculative.n_max") == 0
        deliveries, rounds = self.engine.decode(
            body["prompt"], body["n_predict"], speculate=not off
        )
        text = [token for tokens in deliveries for token in tokens]
        # the server rates no token that it accepted from a draft
        drawn = [place == len(tokens) - 1 for tokens in deliveries for place in range(len(tokens))]
        for token, rated in zip(text, drawn, strict=True):
            event: Json = {"tokens": [token], "content": "?", "stop": False}
            if body.get("n_probs") and rated:
                top = [{"id": token, "logprob": -0.1}, {"id": token + 1, "logprob": -2.5}]
                event["completion_probabilities"] = [{"id": token, "top_logprobs": top}]
            yield event
        timings: Json = {"predicted_n": len(text)}
        if rounds:
            timings["draft_n"] = sum(drafted for drafted, _ in rounds)
            timings["draft_n_accepted"] = sum(accepted for _, accepted in rounds)
        yield {
            "tokens": [],
            "stop": True,
            "stop_type": {"stop": "eos", "length": "limit"}[self._ending(text)],
            "tokens_predicted": len(text),
            "timings": timings,
        }

    def metrics_text(self) -> str:
        """The metrics, as the real server names them."""
        engine = self.engine
        if self.speaks == "llama.cpp":
            rows = llama_cpp_rows(engine)
        elif self.speaks == "sglang":
            rows = sglang_rows(engine)
        else:
            rows = vllm_rows(engine)
        return "".join(f"{name} {value}\n" for name, value in rows)


def vllm_rows(engine: SimulatedEngine) -> list[tuple[str, float]]:
    """vLLM's series, which ours repeats."""
    labels = f'{{engine="0",model_name="{MODEL}"}}'
    rows: list[tuple[str, float]] = [
        ("process_start_time_seconds", engine.start_seconds),
        (f"vllm:num_requests_running{labels}", engine.running),
        (f"vllm:num_requests_waiting{labels}", 0),
        (f"vllm:prompt_tokens_total{labels}", engine.prompt_tokens),
        (f"vllm:prompt_tokens_cached_total{labels}", engine.cached_tokens),
        (f"vllm:generation_tokens_total{labels}", engine.new_tokens),
        ('vllm:request_success_total{finished_reason="length"}', engine.requests),
        ('vllm:request_success_total{finished_reason="stop"}', 0),
        (f"vllm:request_time_per_output_token_seconds_sum{labels}", engine.decode_seconds),
        (f"vllm:request_time_per_output_token_seconds_count{labels}", engine.requests),
    ]
    if not engine.accepts:
        return rows
    rows += [
        (f"vllm:spec_decode_num_drafts_total{labels}", engine.rounds),
        (f"vllm:spec_decode_num_draft_tokens_total{labels}", engine.drafted),
        (f"vllm:spec_decode_num_accepted_tokens_total{labels}", engine.accepted),
    ]
    position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    return rows + [
        (f'{position}{{model_name="{MODEL}",position="{place}"}}', count)
        for place, count in enumerate(engine.accepted_at)
    ]


def sglang_rows(engine: SimulatedEngine) -> list[tuple[str, float]]:
    """SGLang's series: those of a process with one tokenizer manager."""
    labels = f'{{model_name="{MODEL}",is_streaming="true"}}'
    return [
        (f"sglang:num_running_reqs{labels}", engine.running),
        (f"sglang:num_queue_reqs{labels}", 0),
        (f"sglang:num_requests_total{labels}", engine.requests),
        (f"sglang:prompt_tokens_total{labels}", engine.prompt_tokens),
        ('sglang:cached_tokens_total{cache_source="device"}', engine.cached_tokens),
        (f"sglang:generation_tokens_total{labels}", engine.new_tokens),
        (f"sglang:spec_verify_calls_total{labels}", engine.rounds),
        (f"sglang:inter_token_latency_seconds_sum{labels}", engine.decode_seconds),
        (f"sglang:inter_token_latency_seconds_count{labels}", engine.new_tokens),
    ]


def llama_cpp_rows(engine: SimulatedEngine) -> list[tuple[str, float]]:
    """llama.cpp's series."""
    position = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"
    return [
        ("llamacpp:prompt_tokens_total", engine.prompt_tokens - engine.cached_tokens),
        ("llamacpp:prompt_tokens_cached_total", engine.cached_tokens),
        ("llamacpp:tokens_predicted_total", engine.new_tokens),
        ("llamacpp:tokens_predicted_seconds_total", engine.decode_seconds),
        ("llamacpp:spec_decode_num_draft_tokens_total", engine.drafted),
        ("llamacpp:spec_decode_num_accepted_tokens_total", engine.accepted),
        ("llamacpp:spec_decode_num_drafts_total", engine.rounds),
        ("llamacpp:requests_processing", engine.running),
        ("llamacpp:requests_deferred", 0),
        *((f'{position}{{position="{i}"}}', n) for i, n in enumerate(engine.accepted_at)),
    ]


class Handler(BaseHTTPRequestHandler):
    """Answers for the `EngineServer` of its class."""

    protocol_version = "HTTP/1.1"
    plays: EngineServer
    ended: threading.Event

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # a client that gave up
            super().handle()

    def log_message(self, *_: Any) -> None:
        pass

    def end_headers(self) -> None:
        if self.plays.hangs_up:
            self.send_header("Connection", "close")
        super().end_headers()

    def do_GET(self) -> None:
        if self.refused():
            return
        if self.plays.mishap == "one line":
            self.send_one_line()
        elif self.path == "/metrics" and self.plays.metrics:
            self.send(200, self.plays.metrics_text(), "text/plain; version=0.0.4")
        elif self.path == "/metrics":
            self.send_json(404, {"detail": "Not Found"})
        else:
            self.send_json(200, self.plays.about(self.path))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.plays.asked.append((self.path, body))
        if self.refused():
            return
        if self.path == "/tokenize":
            text = body.get("content", body.get("prompt"))
            self.send_json(200, {"tokens": self.plays.engine.split(text)})
        elif body.get("model", MODEL) not in self.plays.models:
            said = f"The model `{body['model']}` does not exist."
            self.send_json(404, {"error": {"message": said, "code": 404}})
        elif self.plays.is_too_long(body):
            said = "This model's maximum context length is 64 tokens. You asked for more."
            self.send_json(400, {"error": {"message": said, "code": 400}})
        elif self.plays.busy:
            self.plays.busy -= 1
            self.send_json(
                429, {"error": {"message": "busy"}}, ("Retry-After", self.plays.retry_after)
            )
        else:
            self.stream(body)

    def refused(self) -> bool:
        """Whether something else was answered than what was asked for."""
        mishap, plays = self.plays.mishap, self.plays
        if plays.away:
            self.send_json(plays.away, {})
        elif self.path not in PATHS[plays.speaks]:
            self.send_json(404, {"detail": "Not Found"})
        elif plays.key and self.headers["authorization"] != f"Bearer {plays.key}":
            self.send_json(401, {"error": "Unauthorized"})
        elif mishap == "html":
            self.send(200, "<html><title>Welcome</title><p>It works</p></html>", "text/html")
        elif mishap == "gateway":
            self.send(502, "<html><h1>502 Bad Gateway</h1>nginx</html>", "text/html")
        elif mishap == "redirect":
            self.send(308, "", "text/plain", ("Location", "https://elsewhere.example/"))
        elif mishap == "hang" and self.command == "POST":
            self.ended.wait(30)
        elif mishap == "gone":
            self.close_connection = True
        else:
            return False
        return True

    def send_one_line(self) -> None:
        """An answer that has no end of a line."""
        self.send_response(200)
        self.end_headers()
        self.close_connection = True
        for _ in range(4 if not self.plays.pieces else self.plays.pieces):
            self.wfile.write(b"x" * (1 if self.plays.pieces else 1 << 20))
            self.wfile.flush()
            if self.plays.pieces:
                self.plays.pieces -= 1
                self.ended.wait(0.05)

    def stream(self, body: Json) -> None:
        """Events, chunk by chunk."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number, event in enumerate(self.plays.events(self.path, body)):
            if self.plays.mishap == "die" and number == 1:
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return
            self.chunk(f": ping\n\ndata: {json.dumps(event)}\n\n")
        self.chunk("data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def chunk(self, text: str) -> None:
        """A piece of an answer."""
        self.wfile.write(f"{len(text.encode()):x}\r\n{text}\r\n".encode())
        self.wfile.flush()
        time.sleep(0.0005)

    def send_json(self, status: int, value: Json, *headers: tuple[str, str]) -> None:
        self.send(status, json.dumps(value), "application/json", *headers)

    def send(self, status: int, text: str, kind: str, *headers: tuple[str, str]) -> None:
        """A whole answer."""
        self.send_response(status)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(text))), *headers):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())


@contextmanager
def serving(plays: EngineServer, port: int = 0, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """The URL at which it is played."""
    ended = threading.Event()
    handler = type("Handler", (Handler,), {"plays": plays, "ended": ended})
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    server.daemon_threads = True
    scheme = "http"
    if tls is not None:
        server.socket, scheme = tls.wrap_socket(server.socket, server_side=True), "https"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"{scheme}://127.0.0.1:{server.server_address[1]}"
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
