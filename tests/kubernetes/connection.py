"""One connection to the API server: HTTP/1.1, one request after another."""

from __future__ import annotations

import base64
import contextlib
import json
import random
import socket
import ssl
import time
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import yaml

from tests.kubernetes import discovery, selecting, wire_bodies
from tests.kubernetes.accounts import Account
from tests.kubernetes.kinds import KINDS, REVIEWS, Kind, Object, ended
from tests.kubernetes.problems import Refused, forbidden
from tests.kubernetes.store import Change

if TYPE_CHECKING:
    from tests.kubernetes.api_server import ApiServer

TEXTS = {200: "OK", 201: "Created"}
STEP = 0.25  # seconds after which a watch looks whether it has to end


@dataclass
class Request:
    """What a client asks."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes
    kind: Kind = KINDS["pods"]
    namespace: str = ""
    name: str = ""
    subresource: str = ""

    def object(self) -> Object:
        """The body; {} where there is none."""
        if self.headers.get("content-type") == wire_bodies.TYPE:
            return wire_bodies.read(self.body)
        if "yaml" in self.headers.get("content-type", ""):
            return dict(yaml.safe_load(self.body) or {})
        try:
            return dict(json.loads(self.body or b"{}"))
        except ValueError as error:
            raise Refused(400, f"error decoding the body: {error}") from None

    @property
    def watches(self) -> bool:
        return self.query.get("watch", "") in ("1", "true")

    @property
    def verb(self) -> str:
        if self.method == "GET":
            return "watch" if self.watches else "get" if self.name else "list"
        if self.method == "DELETE":
            return "delete" if self.name else "deletecollection"
        return {"POST": "create", "PUT": "update", "PATCH": "patch"}.get(self.method, "?")


def route(request: Request, missing: set[str]) -> None:
    """Find out which object a path is of. Raises Refused (404)."""
    words = [urllib.parse.unquote(word) for word in request.path.strip("/").split("/")]
    group, rest = ("", words[2:]) if words[0] == "api" else ("".join(words[1:2]), words[3:])
    version = words[1:2] if words[0] == "api" else words[2:3]
    if len(rest) > 2 and rest[0] == "namespaces" and rest[2] != "status":
        request.namespace, rest = rest[1], rest[2:]
    kind = KINDS.get(rest[0]) if rest else None
    if kind is None or kind.group != group or [kind.version] != version or group in missing:
        raise Refused(404, "the server could not find the requested resource")
    request.kind = kind
    request.name, request.subresource = [*rest[1:3], "", ""][:2]
    parts = ("log", "eviction", "binding") if kind.plural == "pods" else ()
    if request.subresource not in ("", *parts, *(["status"] if kind.status else [])):
        raise Refused(404, "the server could not find the requested resource")


def _body(stream: BinaryIO, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding") != "chunked":
        return stream.read(int(headers.get("content-length", "0")))
    parts = []
    while size := int(stream.readline(), 16):
        parts.append(stream.read(size))
        stream.readline()
    stream.readline()
    return b"".join(parts)


class Connection:
    """Serves the requests of one client."""

    def __init__(self, server: ApiServer, raw: socket.socket, tls: ssl.SSLContext) -> None:
        self._server, self._raw, self._tls = server, raw, tls
        self._socket: socket.socket = raw

    def serve(self) -> None:
        """Until the client or the server closes the connection."""
        self._raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = self._tls.wrap_socket(self._raw, server_side=True)
        with self._socket.makefile("rb") as stream:
            while line := stream.readline(65536):
                method, target, _ = line.decode().split()
                headers = {}
                while (line := stream.readline(65536).strip()) != b"":
                    key, _, value = line.decode().partition(":")
                    headers[key.lower()] = value.strip()
                body = _body(stream, headers)
                path, _, query = target.partition("?")
                asked = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
                self._answer(Request(method, path, asked, headers, body))

    def close(self) -> None:
        for each in (self._socket, self._raw):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._socket.close()

    def _send(self, code: int, answer: Object | bytes, extra: tuple[str, ...] = ()) -> None:
        text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        type = "text/plain" if isinstance(answer, bytes) else "application/json"
        head = [f"HTTP/1.1 {code} {TEXTS.get(code, 'Refused')}", f"Content-Type: {type}"]
        head += [f"Content-Length: {len(text)}", *extra, "", ""]
        self._socket.sendall("\r\n".join(head).encode() + text)

    def _answer(self, request: Request) -> None:
        try:
            account = self._account(request)
            if not account.system:
                asked = "&".join(f"{key}={value}" for key, value in request.query.items())
                told = f"{request.path}?{asked}" if asked else request.path
                self._server.requests.append((account.user, request.method, told))
                self._server.faults.strike(request.method, told)
            found = self._do(request, account)
            if not account.system and self._server.faults.loses(request.method):
                raise ConnectionAbortedError("the test wants this answer to be lost")
        except Refused as refused:
            extra: tuple[str, ...] = ()
            if refused.code in (429, 503):
                extra = (f"Retry-After: {refused.details.get('retryAfterSeconds', 1)}",)
            self._send(refused.code, refused.status(), extra)
        else:
            if found is not None:
                self._send(*found)

    def _account(self, request: Request) -> Account:
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        account = self._server.accounts.get(token)
        if account is None:
            raise Refused(401, "Unauthorized")
        return account

    def _do(
        self, request: Request, account: Account
    ) -> tuple[int, Object | bytes, tuple[str, ...]] | None:
        """Code, answer and headers; None where all has been sent."""
        if request.path.rpartition("/")[2] in REVIEWS:
            answer = account.review(request.path.rpartition("/")[2], request.object())
            return 201, answer, ()
        if request.path in ("/healthz", "/livez", "/readyz"):
            return 200, b"ok", ()
        if request.method == "GET":
            known = discovery.document(request.path, self._server.missing)
            if known is not None:
                return 200, known, ()
        route(request, self._server.missing)
        resource = "/".join(filter(None, (request.kind.plural, request.subresource)))
        if not account.may(request.verb, resource, request.namespace):
            why = account.why_not(
                request.verb, request.kind, request.subresource, request.namespace
            )
            raise forbidden(request.kind, request.name, why)
        if request.method == "GET":
            return self._read(request, account)
        return self._write(request)

    # reading

    def _read(
        self, request: Request, account: Account
    ) -> tuple[int, Object | bytes, tuple[str, ...]] | None:
        if request.watches:
            most = None if account.system else self._server.events_per_watch
            self._watch(request, most)
            return None
        if not request.name:
            return 200, self._list(request), ()
        registry = self._server.registry
        obj = registry.need(request.kind, request.namespace, request.name)
        if request.subresource == "log":
            self._log(request, obj)
            return None
        return 200, obj, ()

    def _matches(self, request: Request) -> selecting.Matches:
        labels = selecting.label_selector(request.query.get("labelSelector", ""))
        fields = selecting.field_selector(request.query.get("fieldSelector", ""))
        name, space = request.name, request.namespace

        def matches(obj: Object) -> bool:
            meta = obj["metadata"]
            here = space in ("", meta.get("namespace")) and name in ("", meta["name"])
            return here and labels(obj) and fields(obj)

        return matches

    def _list(self, request: Request) -> Object:
        store, kind, matches = self._server.store, request.kind, self._matches(request)
        limit = int(request.query.get("limit") or 0)
        after, version = None, store.version
        if token := request.query.get("continue"):
            asked, after = json.loads(base64.urlsafe_b64decode(token))
            try:
                store.check_age(kind, version := asked)
            except Refused:
                text = "The provided continue parameter is too old to display a consistent list"
                text += " result. You can start a new list without the continue parameter."
                raise Refused(410, text) from None
        with store.lock:
            version = version if after else store.version
            objects = store.objects[kind.plural]
            keys = sorted(objects) if limit or after else list(objects)
            found = [(key, objects[key]) for key in keys if after is None or list(key) > after]
        found = [each for each in found if matches(each[1])]
        meta: Object = {"resourceVersion": str(version)}
        if limit and len(found) > limit:
            meta["remainingItemCount"] = len(found) - limit
            found = found[:limit]
            words = json.dumps([version, found[-1][0]]).encode()
            meta["continue"] = base64.urlsafe_b64encode(words).decode()
        items = [obj for _, obj in found]
        answer = {"kind": f"{kind.kind}List", "apiVersion": kind.api_version}
        return {**answer, "metadata": meta, "items": items}

    def _chunk(self, text: bytes) -> None:
        self._socket.sendall(b"%x\r\n%s\r\n" % (len(text), text))

    def _start_chunks(self, type: str) -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {type}\r\nTransfer-Encoding: chunked\r\n\r\n"
        self._socket.sendall(head.encode())

    def _event(self, type: str, text: bytes) -> None:
        self._chunk(b'{"type":"%s","object":%s}\n' % (type.encode(), text))

    def _watch(self, request: Request, most: int | None) -> None:
        server, store, kind = self._server, self._server.store, request.kind
        matches, cuts = self._matches(request), server.cuts
        asked = request.query.get("resourceVersion", "")
        seconds = float(
            request.query.get("timeoutSeconds") or random.uniform(*server.watch_seconds)
        )
        end = time.monotonic() + seconds
        version = int(asked or 0)
        first: list[Object] = []
        with store.lock:
            if version:
                store.check_age(kind, version)
            else:
                version = store.version
                first = [obj for obj in store.objects[kind.plural].values() if matches(obj)]
        self._start_chunks("application/json")
        for obj in first:
            self._event("ADDED", json.dumps(obj).encode())
        bookmarks = request.query.get("allowWatchBookmarks") in ("1", "true")
        marked = time.monotonic()
        told = 0
        while server.cuts == cuts and told != most and (left := end - time.monotonic()) > 0:
            if bookmarks and time.monotonic() - marked > server.bookmark_seconds:
                marked = time.monotonic()
                self._bookmark(kind, version)
            try:
                changes = store.since(kind, version, min(left, STEP))
            except Refused as refused:
                self._event("ERROR", json.dumps(refused.status()).encode())
                break
            for change in changes:
                version = change.version
                told += self._tell(change, matches)
                if told == most:
                    break
        self._socket.sendall(b"0\r\n\r\n")

    def _bookmark(self, kind: Kind, version: int) -> None:
        meta = {"resourceVersion": str(version)}
        obj = {"kind": kind.kind, "apiVersion": kind.api_version, "metadata": meta}
        self._event("BOOKMARK", json.dumps(obj).encode())

    def _tell(self, change: Change, matches: selecting.Matches) -> bool:
        """One change, as a watch that sees only some objects sees it; whether it does."""
        is_seen = matches(change.object)
        was_seen = change.before is not None and matches(change.before)
        if change.type == "DELETED":
            if was_seen or is_seen:
                self._event("DELETED", change.text)
        elif is_seen:
            self._event("MODIFIED" if was_seen else "ADDED", change.text)
        elif was_seen:
            self._event("DELETED", change.text)
        return was_seen or is_seen

    def _log(self, request: Request, pod: Object) -> None:
        """What a pod has written; the kubelet of a node that is lost does not answer."""
        name, query = request.name, request.query
        node = pod["spec"].get("nodeName", "")
        container = query.get("container") or pod["spec"]["containers"][0]["name"]
        if node in self._server.unreachable:
            url = f"https://{node}:10250/containerLogs/{request.namespace}/{name}/{container}"
            raise Refused(500, f'Get "{url}": dial tcp {node}:10250: i/o timeout')
        path = self._server.logs / f"{pod['metadata']['uid']}.log"
        if not path.exists():
            text = f'container "{container}" in pod "{name}" is waiting to start'
            waiting = (pod["status"].get("containerStatuses") or [{}])[0].get("state", {})
            reason = waiting.get("waiting", {}).get("reason", "ContainerCreating")
            raise Refused(400, f"{text}: {reason}")
        written = path.read_bytes()
        where = len(written)
        if tail := query.get("tailLines"):
            lines = written.splitlines(keepends=True)
            written = b"".join(lines[-int(tail) :] if int(tail) else [])
        if most := query.get("limitBytes"):
            written = written[: int(most)]
        self._start_chunks("text/plain")
        if written:
            self._chunk(written)
        self._follow_log(request, pod, path, where)
        self._socket.sendall(b"0\r\n\r\n")

    def _follow_log(self, request: Request, pod: Object, path: Path, where: int) -> None:
        """What is written after that place, until the pod has ended."""
        store, node = self._server.store, pod["spec"].get("nodeName", "")
        while request.query.get("follow") in ("1", "true"):
            now = store.get(request.kind, request.namespace, request.name)
            over = now is None or ended(now) or now["metadata"]["uid"] != pod["metadata"]["uid"]
            with path.open("rb") as file:
                file.seek(where)
                more = file.read()
            if more:
                where += len(more)
                self._chunk(more)
            elif over or node in self._server.unreachable:
                break
            else:
                time.sleep(0.05)

    # writing

    def _write(self, request: Request) -> tuple[int, Object, tuple[str, ...]]:
        registry, kind = self._server.registry, request.kind
        place = (kind, request.namespace, request.name)
        query = request.query
        if request.method == "DELETE":
            return 200, self._delete(request), ()
        if request.method == "POST" and request.subresource in ("binding", "eviction"):
            return 201, self._post_part(request), ()
        agent = request.headers.get("user-agent", "unknown").partition("/")[0]
        strict, manager = query.get("fieldValidation", ""), query.get("fieldManager") or agent
        if query.get("dryRun"):
            raise Refused(400, "the stand-in does not know dryRun")
        code = 200
        if request.method == "POST":
            code = 201
            obj, unknown = registry.create(
                kind, request.namespace, request.object(), strict=strict, manager=manager
            )
        elif request.method == "PUT":
            new = request.object()
            obj, unknown = registry.change(
                *place,
                lambda _: new,
                subresource=request.subresource,
                strict=strict,
                manager=manager,
            )
        elif request.method == "PATCH":
            options: Object = {"strict": strict, "manager": manager}
            options |= {"subresource": request.subresource}
            options |= {"type": request.headers.get("content-type", "").partition(";")[0]}
            options |= {"force": query.get("force") == "true"}
            obj, unknown = registry.patch(*place, request.body, options)
        else:
            raise Refused(405, "the server does not allow this method on the requested resource")
        warnings = tuple(f'Warning: 299 - "unknown field \\"{each}\\""' for each in unknown)
        return code, obj, warnings

    def _post_part(self, request: Request) -> Object:
        registry, body = self._server.registry, request.object()
        if request.subresource == "binding":
            registry.bind(request.namespace, request.name, body["target"]["name"])
        else:
            registry.evict(request.namespace, request.name, body.get("deleteOptions") or {})
        return {"kind": "Status", "apiVersion": "v1", "status": "Success", "code": 201}

    def _delete(self, request: Request) -> Object:
        registry, kind, options = self._server.registry, request.kind, request.object()
        for key in ("propagationPolicy", "gracePeriodSeconds"):
            if key in request.query:
                value = request.query[key]
                options.setdefault(key, int(value) if value.isdigit() else value)
        if request.name:
            return registry.delete(kind, request.namespace, request.name, options)
        listed = self._list(request)
        for obj in listed["items"]:
            meta = obj["metadata"]
            with contextlib.suppress(Refused):  # it has gone meanwhile
                registry.delete(kind, meta.get("namespace", ""), meta["name"], options)
        return listed
