"""The kinds of patches: merge, JSON, strategic merge, and server-side apply."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from tests.kubernetes.kinds import Object
from tests.kubernetes.problems import Refused

# lists that are merged element by element, and by which key
MERGED = {
    "conditions": "type",
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "ownerReferences": "uid",
    "taints": "key",
    "replicatedJobs": "name",
}


def merge(target: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge(result.get(key), value)
    return result


def json_patch(target: Any, operations: list[Object]) -> Any:
    """RFC 6902 (add, replace, remove, test)."""
    target = copy.deepcopy(target)
    for each in operations:
        words = [w.replace("~1", "/").replace("~0", "~") for w in each["path"].split("/")[1:]]
        place: Any = target
        try:
            for word in words[:-1]:
                place = place[int(word) if isinstance(place, list) else word]
            _operate(place, words[-1], each)
        except (KeyError, IndexError, ValueError) as error:
            text = f"the server rejected our request due to an error in our request: {error!r}"
            raise Refused(422, text, "Invalid") from None
    return target


def _operate(place: Any, word: str, operation: Object) -> None:
    kind = operation["op"]
    if isinstance(place, list):
        index = len(place) if word == "-" else int(word)
        if kind == "add":
            place.insert(index, operation["value"])
            return
        key: Any = index
    else:
        key = word
        if kind == "add":
            place[key] = operation["value"]
            return
    if kind == "remove":
        del place[key]
    elif kind == "replace":
        place[key] = (place[key], operation["value"])[1]  # KeyError where there is none
    elif place[key] != operation["value"]:
        raise ValueError(f"test of {operation['path']} failed")


def strategic(target: Any, patch: Any, name: str = "") -> Any:
    """A strategic merge patch: lists of MERGED by key, others replaced."""
    if isinstance(patch, list):
        if name == "finalizers":
            return [*dict.fromkeys([*(target or []), *patch])]
        return _merged_list(target or [], patch, MERGED[name]) if name in MERGED else patch
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if key.startswith("$deleteFromPrimitiveList/"):
            there = key.partition("/")[2]
            result[there] = [each for each in result.get(there) or [] if each not in value]
        elif key in ("$patch", "$retainKeys") or key.startswith("$setElementOrder/"):
            continue
        elif value is None:
            result.pop(key, None)
        else:
            result[key] = strategic(result.get(key), value, key)
    return result


def _merged_list(target: list[Object], patch: list[Object], by: str) -> list[Object]:
    result = {each.get(by): each for each in target}
    for each in patch:
        if each.get("$patch") == "delete":
            result.pop(each[by], None)
        else:
            result[each.get(by)] = strategic(result.get(each.get(by)), each)
    return list(result.values())


Path = tuple[str, ...]


def leaves(value: Any, path: Path = ()) -> Iterator[Path]:
    """Paths of what an applied configuration sets; a list that is not of MERGED is one leaf."""
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from leaves(each, (*path, key))
    elif isinstance(value, list) and path and path[-1] in MERGED:
        by = MERGED[path[-1]]
        for each in value:
            yield from leaves(each, (*path, f"{by}={each.get(by)}"))
    else:
        yield path


def at(value: Any, path: Path) -> Any:
    """What stands at such a path; None where nothing does."""
    for word in path:
        if isinstance(value, list):
            by, _, name = word.partition("=")
            value = next((each for each in value if str(each.get(by)) == name), None)
        else:
            value = value.get(word) if isinstance(value, dict) else None
    return value


def without(value: Any, path: Path) -> Any:
    """A copy without what stands at such a path."""
    if isinstance(value, list):
        by, _, name = path[0].partition("=")
        return [
            without(each, path[1:]) if str(each.get(by)) == name and path[1:] else each
            for each in value
        ]
    if not isinstance(value, dict) or path[0] not in value:
        return value
    rest = {key: each for key, each in value.items() if key != path[0]}
    if path[1:]:
        rest[path[0]] = without(value[path[0]], path[1:])
    return rest


class Owners:
    """Who set which field by server-side apply, and who changed it since."""

    def __init__(self) -> None:
        self._of: dict[str, dict[str, set[Path]]] = {}  # uid: manager: paths

    def changed(self, before: Object, after: Object, manager: str) -> None:
        """Another way of writing takes what it changes."""
        owners = self._of.setdefault(after["metadata"]["uid"], {})
        changed = {path for path in leaves(after) if at(before, path) != at(after, path)}
        for paths in owners.values():
            paths -= {path for path in paths if at(before, path) != at(after, path)}
        mine = {path for path in changed if path[0] not in ("status", "metadata")}
        owners.setdefault(manager, set()).update(mine)

    def apply(self, old: Object, config: Object, manager: str, force: bool) -> Object:
        """The object after an apply. Raises Refused (409) where another manager owns a field and
        wants it otherwise."""
        owners = self._of.setdefault(old["metadata"]["uid"], {})
        paths = {
            path
            for path in leaves(config)
            if path[0] not in ("apiVersion", "kind", "status")
            and path[:2] not in {("metadata", "name"), ("metadata", "namespace")}
        }
        conflicts = [
            (other, path)
            for other, theirs in owners.items()
            for path in paths & theirs
            if other != manager and at(old, path) != at(config, path)
        ]
        if conflicts and not force:
            said = ", ".join(f'conflict with "{who}": .{".".join(p)}' for who, p in conflicts)
            number = f"{len(conflicts)} conflict" + "s" * (len(conflicts) > 1)
            causes = [
                {"reason": "FieldManagerConflict", "field": ".".join(path), "message": who}
                for who, path in conflicts
            ]
            text = f"Apply failed with {number}: {said}"
            raise Refused(409, text, "Conflict", {"causes": causes})
        new = strategic(old, config)
        for path in owners.get(manager, set()) - paths:  # no longer wanted, and nobody else's
            if not any(path in theirs for who, theirs in owners.items() if who != manager):
                new = without(new, path)
        for other, path in conflicts:
            owners[other].discard(path)
        owners[manager] = paths
        return dict(new)
