"""A server of this machine that answers as a test says."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

Answer = tuple[int, dict[str, str], bytes]
Respond = Callable[[str, dict[str, str], int], Answer]
"""Path, headers and number of the request → status, headers and body."""
SECRET = "s3cr3t-t0ken"


def ok(data: Any, **more: Any) -> Answer:
    return 200, {"Content-Type": "application/json"}, json.dumps({"status": "success", "data": data, **more}).encode()


def of_plan(path: str, headers: dict[str, str]) -> Answer | None:
    """Return the answer to the queries of a plan, and 404 to all but queries; None for a read of samples."""
    if path != "/api/v1/query":
        return 404, {}, b"not here"
    if "count" in headers["body"] or "vector" in headers["body"]:
        return ok({"resultType": "vector", "result": [{"metric": {}, "value": [1, "3"]}]})
    return None


def always(answer: Answer, *_: object) -> Answer:
    return answer


@contextmanager
def serving(respond: Respond, context: ssl.SSLContext | None = None) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Answer requests on loopback, over TLS with a context; yield the address, and the headers that came."""
    came: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode("latin-1")
            self.do_GET()

        def do_GET(self) -> None:
            came.append(dict(self.headers) | {"body": getattr(self, "body", "")})
            status, headers, body = respond(self.path, came[-1], len(came))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", came
        finally:
            server.shutdown()
            thread.join()
