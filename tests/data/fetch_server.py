"""Servers of this machine that files are fetched from: a web server that can misbehave, and a
hub. What test_fetch*.py and test_sources*.py share."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from trainkit.data.fetch.recipe import FetchRecipe
from trainkit.data.fetch.retry import FetchRetryPolicy
from trainkit.data.sources import Shard

QUICK = FetchRetryPolicy(attempts=4, first=0.01, longest=0.05, longest_asked=5.0, timeout=5.0)


def fetched(shard: Shard) -> FetchRecipe:
    """How a shard is fetched."""
    assert isinstance(shard.recipe, FetchRecipe)
    return shard.recipe


SECRET = "hf_0123456789abcdef"
DATE = "Wed, 21 Oct 2026 07:28:00 GMT"


@dataclass
class Asked:
    """One request."""

    method: str
    path: str
    range: str | None
    if_range: str | None
    authorization: str | None


@dataclass
class Site:
    """Files by path, and how the server misbehaves. A list of a path is used up from its front,
    one entry a GET."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)  # Content-Type
    # codes and headers before the file itself, of HEAD too
    answers: dict[str, list[tuple[int, dict[str, str]]]] = field(default_factory=dict)
    # bytes after which the connection breaks
    cuts: dict[str, list[int]] = field(default_factory=dict)
    claims: dict[str, int] = field(default_factory=dict)  # a Content-Length that is not true
    # instead of the sum of the content; None: none
    etags: dict[str, str | None] = field(default_factory=dict)
    dates: dict[str, str | None] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    no_ranges: bool = False
    shift: int = 0  # bytes that a part begins too late
    no_length: bool = False
    no_head: bool = False
    locked: set[str] = field(default_factory=set)  # want SECRET
    held: dict[str, threading.Event] = field(default_factory=dict)  # a GET is answered only then
    asked: list[Asked] = field(default_factory=list)

    def gets(self, path: str) -> list[Asked]:
        return [a for a in self.asked if a.method == "GET" and a.path == path]


class SiteHandler(BaseHTTPRequestHandler):
    """Files of a site, with its delays, errors and broken connections."""

    site: Site  # set by `_serving`

    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None: ...

    def note(self) -> str:
        path = unquote(urlsplit(self.path).path)
        headers = self.headers
        self.site.asked.append(
            Asked(
                self.command,
                path,
                headers.get("Range"),
                headers.get("If-Range"),
                headers.get("Authorization"),
            )
        )
        return path

    def answer(self, code: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.note()
        if self.command == "GET" and path in self.site.held:
            self.site.held[path].wait()
        if self.site.answers.get(path):
            code, headers = self.site.answers[path].pop(0)
            self.answer(code, b"not now", **headers)
        elif path in self.site.locked and self.headers.get("Authorization") != f"Bearer {SECRET}":
            self.answer(401)
        elif path in self.site.redirects:
            self.answer(302, Location=self.site.redirects[path])
        elif self.command == "HEAD" and self.site.no_head:
            self.answer(405)
        elif path not in self.site.files:
            self.answer(404)
        else:
            self.file(path, self.site.files[path])

    def file(self, path: str, content: bytes) -> None:
        etag = self.site.etags.get(path, f'"{hashlib.md5(content).hexdigest()}"')
        span = self.headers.get("Range")
        condition = self.headers.get("If-Range")
        ranged = (
            span is not None
            and not self.site.no_ranges
            and (condition is None or condition == etag)
        )
        first, _, last = (span or "bytes=0-").removeprefix("bytes=").partition("-")
        start = int(first) + (self.site.shift if int(first) else 0) if ranged else 0
        end = min(int(last) + 1, len(content)) if ranged and last else len(content)
        if ranged and start >= len(content):
            self.answer(416, Content_Range=f"bytes */{len(content)}")
            return
        self.send_response(206 if ranged else 200)
        self.send_header("Content-Type", self.site.types.get(path, "application/octet-stream"))
        if etag is not None:
            self.send_header("ETag", etag)
        if date := self.site.dates.get(path):
            self.send_header("Last-Modified", date)
        if ranged:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        if self.site.no_length:
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(self.site.claims.get(path, end - start)))
        self.end_headers()
        if self.command == "HEAD":
            return
        body = content[start:end]
        cuts = self.site.cuts.get(path)
        if cuts:
            body, self.close_connection = body[: cuts.pop(0)], True
        elif len(body) != self.site.claims.get(path, len(body)):
            self.close_connection = True
        self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # many ask at once

    def handle_error(self, *args: Any) -> None:
        """A client that went away is part of the tests."""


@contextmanager
def _serving(handler: type[SiteHandler], site: Site) -> Iterator[str]:
    server = _Server(("127.0.0.1", 0), type("Handler", (handler,), {"site": site}))
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def serve(files: dict[str, bytes]) -> Iterator[Site]:
    """A web server with these files, by path."""
    site = Site(files=files)
    with _serving(SiteHandler, site) as url:
        site.url = url
        yield site


@dataclass
class HubSite(Site):
    """One repository of a hub: its files by path there. Large ones (`large`) have a sum, as
    under LFS, and come from another host."""

    kind: str = "datasets"
    name: str = "org/corpus"
    commit: str = "1" * 40
    revisions: set[str] = field(default_factory=lambda: {"main"})
    large: set[str] = field(default_factory=set)
    page: int = 1000
    gated: bool = False
    known: tuple[int, dict[str, list[str]]] = (0, {})  # paths by folder, for so many files

    def inside(self, folder: str) -> list[str]:
        if self.known[0] != len(self.files):
            folders: dict[str, list[str]] = {}
            for path in sorted(self.files):
                folders.setdefault(path.rpartition("/")[0], []).append(path)
            self.known = len(self.files), folders
        return self.known[1].get(folder, [])


class HubHandler(SiteHandler):
    """/api/{datasets,models}/NAME/revision/REVISION, .../tree/REVISION/FOLDER in pages, and
    [datasets/]NAME/resolve/REVISION/PATH."""

    site: HubSite  # set by `_serving`

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        front = f"/{'datasets/' if self.site.kind == 'datasets' else ''}{self.site.name}/resolve/"
        api = f"/api/{self.site.kind}/{self.site.name}/"
        if path.startswith(("/api", front)):
            self.note()
        if (
            self.site.gated
            and path.startswith(("/api", front))
            and self.headers.get("Authorization") != f"Bearer {SECRET}"
        ):
            self.answer(401, b"{}", X_Error_Code="GatedRepo")
        elif path.startswith("/api") and self.site.answers.get("/api"):
            code, headers = self.site.answers["/api"].pop(0)
            self.answer(code, b"{}", **headers)
        elif path.startswith(f"{api}revision/"):
            self.revision(path.removeprefix(f"{api}revision/"))
        elif path.startswith(f"{api}tree/{self.site.commit}"):
            self.tree(path.removeprefix(f"{api}tree/{self.site.commit}").strip("/"))
        elif path.startswith("/api"):
            self.answer(404, b"{}", X_Error_Code="RepoNotFound")
        elif path.startswith(front):
            self.resolve(*path.removeprefix(front).split("/", 1))
        else:
            path = path.removeprefix("/store/")
            self.note()
            self.file(path, self.site.files[path])

    def revision(self, name: str) -> None:
        if name not in self.site.revisions:
            self.answer(404, b"{}", X_Error_Code="RevisionNotFound")
            return
        self.answer(
            200,
            json.dumps({"id": self.site.name, "sha": self.site.commit, "siblings": []}).encode(),
            Content_Type="application/json",
        )

    def tree(self, folder: str) -> None:
        inside = self.site.inside(folder)
        if not inside:
            self.answer(404, b"{}", X_Error_Code="EntryNotFound")
            return
        start = int(parse_qs(urlsplit(self.path).query).get("cursor", ["0"])[0])
        rows = []
        for path in inside[start : start + self.site.page]:
            content = self.site.files[path]
            lfs = (
                {
                    "lfs": {
                        "oid": hashlib.sha256(content).hexdigest(),
                        "size": len(content),
                        "pointerSize": 130,
                    }
                }
                if path in self.site.large
                else {}
            )
            rows.append({"type": "file", "path": path, "size": len(content), "oid": "b", **lfs})
        more = (
            {
                "Link": (
                    f"<{self.site.url}{urlsplit(self.path).path}?cursor={start + self.site.page}>;"
                    ' rel="next"'
                )
            }
            if start + self.site.page < len(inside)
            else {}
        )
        self.answer(200, json.dumps(rows).encode(), Content_Type="application/json", **more)

    def resolve(self, revision: str, path: str) -> None:
        content = self.site.files.get(path)
        if content is None or revision not in {self.site.commit, *self.site.revisions}:
            self.answer(404, b"", X_Error_Code="EntryNotFound")
        elif path in self.site.large:
            # as the hub's store is: it must not see the token
            elsewhere = self.site.url.replace("127.0.0.1", "localhost")
            self.answer(
                302,
                Location=f"{elsewhere}/store/{quote(path)}",
                X_Repo_Commit=self.site.commit,
                X_Linked_Size=str(len(content)),
                X_Linked_ETag=f'"{hashlib.sha256(content).hexdigest()}"',
            )
        else:
            self.file(path, content)


@contextmanager
def serve_hub(files: dict[str, bytes], **words: Any) -> Iterator[HubSite]:
    """A hub with one repository."""
    site = HubSite(files=files, **words)
    with _serving(HubHandler, site) as url:
        site.url = url
        yield site
