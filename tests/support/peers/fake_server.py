"""A server that only says which model it serves."""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

if "--fail" in sys.argv:
    sys.exit("no bundle")


class Models(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if "--refuse" in sys.argv:
            self.send_error(401)
            return
        body = json.dumps({"data": [{"id": "tiny"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Models).serve_forever()
