"""What the API server keeps: objects, and all that happened to them, under one rising
resourceVersion."""

from __future__ import annotations

import bisect
import json
import threading
from collections import defaultdict
from dataclasses import dataclass

from tests.kubernetes.kinds import KINDS, Kind, Object
from tests.kubernetes.problems import expired

KEPT = 20_000  # changes of one kind; a watch from before them is too old
Key = tuple[str, str]  # namespace and name


@dataclass(frozen=True)
class Change:
    """One change: ADDED, MODIFIED or DELETED."""

    version: int
    type: str
    object: Object
    before: Object | None
    text: bytes  # the object as JSON


class Store:
    """Objects are never changed in place: whoever changes one puts a new one."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.version = 1
        self.objects: dict[str, dict[Key, Object]] = {plural: {} for plural in KINDS}
        self._changes: dict[str, list[Change]] = defaultdict(list)
        self._oldest: dict[str, int] = defaultdict(int)
        self.changed = {plural: threading.Condition(self.lock) for plural in KINDS}

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        return self.objects[kind.plural].get((namespace if kind.namespaced else "", name))

    def put(self, kind: Kind, obj: Object) -> Object:
        """Keep a new object, or a new state of one."""
        with self.lock:
            self.version += 1
            obj = {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(self.version)}}
            key = self._key(obj)
            before = self.objects[kind.plural].get(key)
            self.objects[kind.plural][key] = obj
            self._tell(kind, "MODIFIED" if before else "ADDED", obj, before)
            return obj

    def remove(self, kind: Kind, obj: Object) -> Object:
        """Forget an object."""
        with self.lock:
            self.version += 1
            obj = {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(self.version)}}
            before = self.objects[kind.plural].pop(self._key(obj))
            self._tell(kind, "DELETED", obj, before)
            return obj

    def _key(self, obj: Object) -> Key:
        return obj["metadata"].get("namespace", ""), obj["metadata"]["name"]

    def _tell(self, kind: Kind, type: str, obj: Object, before: Object | None) -> None:
        changes = self._changes[kind.plural]
        text = json.dumps(obj, separators=(",", ":")).encode()
        changes.append(Change(self.version, type, obj, before, text))
        if len(changes) > KEPT:
            self._oldest[kind.plural] = changes[KEPT // 2].version
            del changes[: KEPT // 2 + 1]
        self.changed[kind.plural].notify_all()

    def expire(self) -> None:
        """Forget what happened until now: who asks for it gets 410."""
        with self.lock:
            self.version += 1
            for plural in KINDS:
                self._oldest[plural] = self.version
                self._changes[plural].clear()
                self.changed[plural].notify_all()

    def check_age(self, kind: Kind, version: int) -> None:
        """Raise Refused with 410 where a version is too old to go on from."""
        if version < self._oldest[kind.plural]:
            raise expired(version, self._oldest[kind.plural])

    def since(self, kind: Kind, version: int, seconds: float) -> list[Change]:
        """What changed after a version; waits for it that long, then gives nothing. Raises
        Refused with 410."""
        with self.lock:
            changes = self._changes[kind.plural]
            self.check_age(kind, version)
            if not changes or changes[-1].version <= version:
                self.changed[kind.plural].wait(seconds)
                self.check_age(kind, version)
            start = bisect.bisect_right(changes, version, key=lambda each: each.version)
            return changes[start:]
