"""A server that answers kubectl with what a test has written down, and keeps what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

REASONS = {
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    409: "AlreadyExists",
    410: "Expired",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}


@dataclass(frozen=True)
class Asked:
    """One request."""

    method: str
    path: str
    query: Mapping[str, str]
    body: str


@dataclass
class ApiStub:
    """Answers by "METHOD PATH" in order, the last again and again: a document, (code, message), or
    the events of a watch, after which the stream is cut."""

    answers: dict[str, list[object]] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)

    def answer(self, request: Asked) -> object:
        watch = " watch" if "watch" in request.query else ""
        there = self.answers.get(f"{request.method} {request.path}{watch}", [])
        if request.path == "/version":  # some builds of kubectl ask it first
            return {"gitVersion": "v1.36.0"}
        self.asked.append(request)
        if not there:
            return 404, f'"{request.path.rpartition("/")[2]}" not found'
        return there.pop(0) if len(there) > 1 else there[0]


def serve(stub: ApiStub) -> ThreadingHTTPServer:
    """Serve it on a free port of this machine; the caller shuts it down."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _any(self) -> None:
            place = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(place.query).items()}
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
            if self.headers.get("Transfer-Encoding") == "chunked":
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size).decode()
                    self.rfile.readline()
                self.rfile.readline()
            found = stub.answer(Asked(self.command, place.path, query, body))
            code = 200
            if isinstance(found, tuple):
                code, message = found
                reason = REASONS[code]
                if message.startswith("the object has been modified"):
                    reason = "Conflict"
                found = {
                    "kind": "Status",
                    "apiVersion": "v1",
                    "status": "Failure",
                    "reason": reason,
                    "message": message,
                    "code": code,
                }
            if isinstance(found, Sequence):
                data = "".join(
                    each if isinstance(each, str) else json.dumps(each) + "\n" for each in found
                ).encode()
                self.close_connection = True
            else:
                data = json.dumps(found).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            if not isinstance(found, Sequence):
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PATCH = do_DELETE = _any

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return server


def write_kubeconfig(path: Path, port: int) -> None:
    """A configuration of kubectl with one context, `stub`."""
    cluster = {"server": f"http://127.0.0.1:{port}"}
    path.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "stub", "cluster": cluster}],
                "users": [{"name": "me", "user": {"token": "t"}}],
                "contexts": [{"name": "stub", "context": {"cluster": "stub", "user": "me"}}],
                "current-context": "stub",
            }
        )
    )
