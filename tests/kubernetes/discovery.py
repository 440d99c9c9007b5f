"""What the API server says of itself: versions, groups, resources, and as much of its OpenAPI as
kubectl asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.kubernetes.kinds import CUSTOM, KINDS, REVIEWS, VERBS, Kind, Object

VERSION = {"major": "1", "minor": "33", "gitVersion": "v1.33.6", "gitCommit": "0" * 40}
VERSION |= {"gitTreeState": "clean", "buildDate": "2025-11-11T00:00:00Z", "goVersion": "go1.24.9"}
VERSION |= {"compiler": "gc", "platform": "linux/amd64"}
SUBRESOURCES = {
    "pods": (("log", "Pod", "get"), ("eviction", "Eviction", "create"), ("binding", "B", "create"))
}


def groups(missing: set[str]) -> dict[str, str]:
    """Version by group, the core's left out."""
    found = {kind.group: kind.version for kind in KINDS.values() if kind.group}
    found |= {group: version for group, version, _ in REVIEWS.values()}
    return {group: version for group, version in found.items() if group not in missing}


def _group(name: str, version: str) -> Object:
    one = {"groupVersion": f"{name}/{version}", "version": version}
    return {"name": name, "versions": [one], "preferredVersion": one}


def _resources(group: str, version: str) -> Object:
    found: list[Object] = []
    for kind in KINDS.values():
        if kind.group != group:
            continue
        found.append(
            {
                "name": kind.plural,
                "singularName": kind.kind.lower(),
                "namespaced": kind.namespaced,
                "kind": kind.kind,
                "verbs": VERBS,
                "shortNames": list(kind.short),
                "categories": ["all"] if kind.plural in ("pods", "services", "jobs") else [],
            }
        )
        parts = [("status", kind.kind, "get patch update")] if kind.status else []
        for name, what, verbs in (*parts, *SUBRESOURCES.get(kind.plural, ())):
            part = {"name": f"{kind.plural}/{name}", "singularName": "", "kind": what}
            found.append({**part, "namespaced": kind.namespaced, "verbs": verbs.split()})
            if name == "eviction":  # else kubectl's drain deletes pods, and does not evict them
                found[-1] |= {"group": "policy", "version": "v1"}
    for plural, (of, _, name) in REVIEWS.items():
        if of == group:
            one = {"name": plural, "singularName": name.lower(), "namespaced": False}
            found.append({**one, "kind": name, "verbs": ["create"]})
    full = f"{group}/{version}" if group else version
    head = {"kind": "APIResourceList", "apiVersion": "v1"}
    return {**head, "groupVersion": full, "resources": found}


def _openapi(group: str, version: str) -> Object:
    """Enough of a group's OpenAPI for kubectl to see that fieldValidation is known."""
    paths: Object = {}
    schemas: Object = {}
    parameters = [
        {"name": name, "in": "query", "schema": {"type": "string", "uniqueItems": True}}
        for name in ("fieldManager", "fieldValidation", "dryRun")
    ]
    for kind in KINDS.values():
        if kind.group != group:
            continue
        names = {"group": group, "version": version, "kind": kind.kind}
        done = {"responses": {"200": {"description": "OK"}}, "parameters": parameters}
        of = {"x-kubernetes-group-version-kind": names, **done}
        place = kind.path("{namespace}", "{name}")
        paths[place] = {"patch": {"x-kubernetes-action": "patch", **of}}
        paths[kind.path("{namespace}")] = {"post": {"x-kubernetes-action": "post", **of}}
        schemas[f"{group}.{version}.{kind.kind}"] = {
            "type": "object",
            "x-kubernetes-group-version-kind": [names],
            "x-kubernetes-preserve-unknown-fields": True,
        }
    info = {"title": "Kubernetes", "version": VERSION["gitVersion"]}
    api = {"openapi": "3.0.0", "info": info, "paths": paths}
    return {**api, "components": {"schemas": schemas}}


def document(path: str, missing: set[str]) -> Object | None:
    """What stands at a path; None where nothing of these does."""
    known = groups(missing)
    if path == "/version":
        return VERSION
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        all = [_group(*each) for each in known.items()]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": all}
    if path == "/openapi/v3":
        places = ["api/v1", *(f"apis/{group}/{version}" for group, version in known.items())]
        urls = {place: {"serverRelativeURL": f"/openapi/v3/{place}?hash=1"} for place in places}
        return {"paths": urls}
    make: Callable[[str, str], Object] = _resources
    if path.startswith("/openapi/v3/"):
        make, path = _openapi, path.removeprefix("/openapi/v3")
    words = path.strip("/").split("/")
    if words == ["api", "v1"]:
        return make("", "v1")
    if len(words) == 2 and words[0] == "apis" and words[1] in known:
        return {"kind": "APIGroup", "apiVersion": "v1", **_group(words[1], known[words[1]])}
    if len(words) == 3 and words[0] == "apis" and known.get(words[1]) == words[2]:
        return make(words[1], words[2])
    return None


def custom_definitions() -> Iterator[Object]:
    """The CustomResourceDefinitions of what somebody has installed."""
    for kind in KINDS.values():
        if kind.group in CUSTOM:
            yield _definition(kind)


def _definition(kind: Kind) -> Object:
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version: Object = {"name": kind.version, "served": True, "storage": True}
    version |= {"schema": {"openAPIV3Schema": schema}}
    version |= {"subresources": {"status": {}}} if kind.status else {}
    names = {"plural": kind.plural, "singular": kind.kind.lower(), "kind": kind.kind}
    scope = "Namespaced" if kind.namespaced else "Cluster"
    spec = {"group": kind.group, "names": {**names, "listKind": f"{kind.kind}List"}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": kind.qualified},
        "spec": {**spec, "scope": scope, "versions": [version]},
    }
