"""A registry with token authentication, for fault injection: knows one image and one login."""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CONFIG = json.dumps({"config": {"Entrypoint": ["/private"]}}).encode()
DIGEST = "sha256:" + hashlib.sha256(CONFIG).hexdigest()
MANIFEST = json.dumps(
    {"schemaVersion": 2, "config": {"digest": DIGEST, "size": len(CONFIG)}, "layers": []}
).encode()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        given = self.headers.get("Authorization", "")
        if self.path.startswith("/token?"):
            wanted = "Basic " + base64.b64encode(sys.argv[1].encode()).decode()
            self.answer(200 if given == wanted else 401, json.dumps({"token": "t0"}).encode())
        elif given != "Bearer t0":
            host, port = self.server.server_address[:2]
            challenge = f'Bearer realm="http://{host}:{port}/token",service="a,b",scope="s"'
            self.answer(401, b"{}", {"WWW-Authenticate": challenge})
        else:
            self.answer(200, MANIFEST if "/manifests/" in self.path else CONFIG)

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(f"127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
