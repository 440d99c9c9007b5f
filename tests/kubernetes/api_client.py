"""A client of the API for the stand-in's controllers and kubelets: it works with any server."""

from __future__ import annotations

import contextlib
import copy
import http.client
import json
import ssl
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tests.kubernetes.kinds import KINDS, OF_KIND, Kind, Object, now
from tests.kubernetes.problems import Refused

MERGE = "application/merge-patch+json"
Key = tuple[str, str]


class Client:
    """Requests, each thread over a connection of its own, and a cache of all objects that
    watches keep up to date. Objects from the cache are not to be changed.

    Args:
        url: of the server. certificate: of who signed its own.
    """

    def __init__(self, url: str, token: str, certificate: Path) -> None:
        place = urllib.parse.urlsplit(url)
        self._host, self._port = place.hostname or "", place.port or 443
        self._tls = ssl.create_default_context(cafile=str(certificate))
        self._headers = {"Authorization": f"Bearer {token}", "User-Agent": "controllers"}
        self._mine = threading.local()
        self.closed = False
        self.changed = threading.Condition()
        self.counts: Counter[str] = Counter()  # of changes, by kind
        self._objects: dict[str, dict[Key, Object]] = {plural: {} for plural in KINDS}
        self._gone: set[str] = set()  # uids
        self._events: dict[tuple[str, str, str], tuple[str, int]] = {}

    def start(self, plurals: Iterable[str]) -> None:
        """Fill the cache with these kinds, and keep it so."""
        ready = []
        for plural in plurals:
            ready.append(threading.Event())
            args = (KINDS[plural], ready[-1])
            threading.Thread(target=self._follow, args=args, daemon=True).start()
        for each in ready:
            each.wait(30)

    def close(self) -> None:
        self.closed = True
        with self.changed:
            self.changed.notify_all()

    def _connect(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(self._host, self._port, context=self._tls)

    def request(
        self, method: str, path: str, body: Object | None = None, type: str = "application/json"
    ) -> Object:
        """The answer; goes on trying while there is no server. Raises Refused."""
        text = None if body is None else json.dumps(body)
        headers = {**self._headers, "Content-Type": type}
        while True:
            connection = getattr(self._mine, "connection", None) or self._connect()
            try:
                connection.request(method, path, text, headers)
                answer = connection.getresponse()
                content = answer.read()
            except (OSError, http.client.HTTPException):
                connection.close()
                self._mine.connection = None
                if self.closed:
                    raise Refused(503, "the client is closed") from None
                time.sleep(0.02)
                continue
            self._mine.connection = connection
            found: Object = json.loads(content)
            if answer.status >= 400:
                raise Refused(found["code"], found["message"], found.get("reason", ""))
            return found

    # the cache

    def all(self, plural: str, namespace: str = "") -> list[Object]:
        """The objects of a kind."""
        with self.changed:
            found = list(self._objects[plural].items())
        return [obj for (space, _), obj in found if namespace in ("", space)]

    def find(self, plural: str, namespace: str, name: str) -> Object | None:
        return self._objects[plural].get((namespace, name))

    def wait(self, plurals: Iterable[str], seen: int, seconds: float) -> int:
        """Wait until something of these kinds has changed; how many changes there were. seen:
        what this returned the last time."""
        with self.changed:
            self.changed.wait_for(
                lambda: self.closed or sum(self.counts[each] for each in plurals) != seen, seconds
            )
            return sum(self.counts[each] for each in plurals)

    def _put(self, obj: Object) -> Object:
        """Take a state that the server has told; the cache is never older than own writes."""
        kind, meta = OF_KIND[obj["kind"]], obj["metadata"]
        key = (meta.get("namespace", ""), meta["name"])
        leaves = meta.get("deletionTimestamp") and not meta.get("finalizers")
        if leaves and not (kind.plural == "pods" and meta.get("deletionGracePeriodSeconds")):
            return self._drop(kind, obj)
        with self.changed:
            old = self._objects[kind.plural].get(key)
            version = int(meta["resourceVersion"])
            if meta["uid"] in self._gone or (
                old is not None and int(old["metadata"]["resourceVersion"]) >= version
            ):
                return obj
            self._objects[kind.plural][key] = obj
            self.counts[kind.plural] += 1
            self.changed.notify_all()
        return obj

    def _drop(self, kind: Kind, obj: Object) -> Object:
        meta = obj["metadata"]
        key = (meta.get("namespace", ""), meta["name"])
        with self.changed:
            self._gone.add(meta["uid"])
            old = self._objects[kind.plural].get(key)
            if old is not None and old["metadata"]["uid"] == meta["uid"]:
                del self._objects[kind.plural][key]
                self.counts[kind.plural] += 1
                self.changed.notify_all()
        return obj

    def _follow(self, kind: Kind, ready: threading.Event) -> None:
        while not self.closed:
            with contextlib.suppress(Refused, OSError, ValueError, http.client.HTTPException):
                version = self._relist(kind)
                ready.set()
                for change in self._watch(kind, version):
                    if change["type"] == "ERROR":
                        break
                    if change["type"] == "DELETED":
                        self._drop(kind, change["object"])
                    elif change["type"] != "BOOKMARK":
                        self._put(change["object"])
            time.sleep(0.02)

    def _relist(self, kind: Kind) -> str:
        answer = self.request("GET", kind.path())
        items = answer["items"]
        there = {obj["metadata"]["uid"] for obj in items}
        for obj in items:
            self._put({"apiVersion": kind.api_version, "kind": kind.kind, **obj})
        for obj in self.all(kind.plural):
            older = int(obj["metadata"]["resourceVersion"]) <= int(
                answer["metadata"]["resourceVersion"]
            )
            if obj["metadata"]["uid"] not in there and older:
                self._drop(kind, obj)
        return str(answer["metadata"]["resourceVersion"])

    def _watch(self, kind: Kind, version: str) -> Iterator[Object]:
        connection = self._connect()
        try:
            query = f"watch=true&allowWatchBookmarks=true&resourceVersion={version}"
            connection.request("GET", f"{kind.path()}?{query}", headers=self._headers)
            with connection.getresponse() as answer:
                if answer.status >= 400:
                    return
                while line := answer.readline():
                    yield json.loads(line)
                    if self.closed:
                        return
        finally:
            connection.close()

    # verbs

    def create(self, obj: Object, subresource: str = "", name: str = "") -> Object:
        """Raises Refused."""
        if subresource:
            namespace = obj["metadata"].get("namespace", "")
            return self.request("POST", KINDS["pods"].path(namespace, name, subresource), obj)
        kind = OF_KIND[obj["kind"]]
        path = kind.path(obj["metadata"].get("namespace", ""))
        return self._put(self.request("POST", path, {"apiVersion": kind.api_version, **obj}))

    def _path(self, obj: Object, subresource: str = "") -> str:
        meta = obj["metadata"]
        kind = OF_KIND[obj["kind"]]
        return kind.path(meta.get("namespace", ""), meta["name"], subresource)

    def update(
        self, obj: Object, change: Callable[[Object], None], subresource: str = ""
    ) -> Object | None:
        """Change a copy of an object in place and write it, again where another was faster; None
        where it has gone or is another one of that name. Writes nothing where nothing changes."""
        old = self._objects[OF_KIND[obj["kind"]].plural].get(
            (obj["metadata"].get("namespace", ""), obj["metadata"]["name"]), obj
        )
        while old["metadata"]["uid"] == obj["metadata"]["uid"]:
            new = copy.deepcopy(old)
            change(new)
            if new == old:
                return old
            try:
                return self._put(self.request("PUT", self._path(obj, subresource), new))
            except Refused as refused:
                if refused.code == 404:
                    return None
                if refused.code != 409:
                    raise
            try:
                old = self.request("GET", self._path(obj))
            except Refused:
                return None
        return None

    def update_status(self, obj: Object, change: Callable[[Object], None]) -> Object | None:
        """The same for the status alone, of which `change` gets a copy."""

        def inside(new: Object) -> None:
            change(new.setdefault("status", {}))

        return self.update(obj, inside, "status")

    def patch(self, obj: Object, patch: Object, subresource: str = "") -> None:
        """A merge patch; an object that has gone is fine."""
        with contextlib.suppress(Refused):
            self._put(self.request("PATCH", self._path(obj, subresource), patch, MERGE))

    def delete(self, obj: Object, *, grace: int | None = None, policy: str = "") -> None:
        """Delete this very object; one that has gone is fine."""
        options: Object = {"preconditions": {"uid": obj["metadata"]["uid"]}}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        if policy:
            options["propagationPolicy"] = policy
        try:
            answer = self.request("DELETE", self._path(obj), options)
        except Refused:
            return
        if answer["kind"] == "Status" or "deletionTimestamp" not in answer["metadata"]:
            self._drop(OF_KIND[obj["kind"]], obj)
        else:
            self._put(answer)

    def drop_finalizer(self, obj: Object, name: str) -> None:
        def change(new: Object) -> None:
            there = new["metadata"].get("finalizers") or []
            new["metadata"]["finalizers"] = [each for each in there if each != name]

        self.update(obj, change)

    def event(self, obj: Object, type: str, reason: str, message: str, source: str) -> None:
        """Tell something about an object; the same thing again only raises the count."""
        meta, time_now = obj["metadata"], now()
        key = (meta["uid"], reason, message)
        name, count = self._events.get(key, ("", 0))
        namespace = meta.get("namespace", "default")
        if name:
            path = KINDS["events"].path(namespace, name)
            patch = {"count": count + 1, "lastTimestamp": time_now}
            with contextlib.suppress(Refused):
                self.request("PATCH", path, patch, MERGE)
        else:
            name = f"{meta['name']}.{time.time_ns():x}"
            involved = {"kind": obj["kind"], "apiVersion": obj["apiVersion"]}
            involved |= {"name": meta["name"], "namespace": namespace, "uid": meta["uid"]}
            event: Object = {"kind": "Event", "metadata": {"name": name, "namespace": namespace}}
            event |= {"involvedObject": involved, "type": type, "reason": reason}
            event |= {"message": message, "source": {"component": source}, "count": 1}
            event |= {"firstTimestamp": time_now, "lastTimestamp": time_now}
            event |= {"reportingComponent": source, "reportingInstance": ""}
            with contextlib.suppress(Refused):
                self.request("POST", KINDS["events"].path(namespace), event)
        self._events[key] = (name, count + 1)


class Loop(threading.Thread):
    """A controller: looks at everything again whenever something of its kinds changes.

    Sub-classes give `kinds` and `sync`."""

    kinds: tuple[str, ...] = ()

    def __init__(self, client: Client) -> None:
        super().__init__(daemon=True, name=type(self).__name__)
        self.client = client
        self.problems: list[str] = []  # what went wrong: nothing, in a good test

    def sync(self) -> float | None:
        """Bring the cluster nearer to what it should be; seconds after which to look again even
        where nothing has changed."""
        raise NotImplementedError

    def run(self) -> None:
        seen = -1
        while not self.client.closed:
            before = self.client.wait(self.kinds, seen, 0)
            again: float | None = None
            try:
                again = self.sync()
            except Refused as refused:
                self.problems.append(f"{self.name}: {refused}")
                again = 0.05
            except Exception as error:
                self.problems.append(f"{self.name}: {error!r}")
                again = 0.05
            seen = before
            self.client.wait(self.kinds, seen, 1.0 if again is None else min(again, 1.0))
