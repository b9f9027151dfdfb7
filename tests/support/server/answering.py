"""A server that gives one answer to everything."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def answering(status: int, content: str, body: str, headers: Mapping[str, str]) -> Iterator[str]:
    """The address of a server whose every answer has this status, content type and body.

    Args:
        headers: further ones; a `Location` counts for status 301 alone, and at its first answer.
    """

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            led = status == 301 and self.path.startswith(headers["Location"])
            self.send_response(200 if led else status)
            sent = {**headers, "Content-Type": content, "Content-Length": str(len(body))}
            for name, value in sent.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body.encode())

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
