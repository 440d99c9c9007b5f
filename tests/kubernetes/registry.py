"""What the verbs of the API do to objects: names and uids, versions, finalizers, graceful
deletion, patches, admission."""

from __future__ import annotations

import copy
import json
import uuid
from collections.abc import Callable

import yaml

from tests.kubernetes import defaults, patches, problems
from tests.kubernetes.checks import check_changed, check_new, check_quota
from tests.kubernetes.kinds import KINDS, Kind, Object, ended, now, set_condition
from tests.kubernetes.problems import Refused
from tests.kubernetes.schema import pruned
from tests.kubernetes.store import Store

FINALIZER = {"Foreground": "foregroundDeletion", "Orphan": "orphan"}
Change = Callable[[Object], Object]


class Registry:
    """The verbs that write; who reads goes to the store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.owners = patches.Owners()

    def need(self, kind: Kind, namespace: str, name: str) -> Object:
        """The object. Raises Refused (404)."""
        found = self.store.get(kind, namespace, name)
        if found is None:
            raise problems.not_found(kind, name)
        return found

    def create(
        self, kind: Kind, namespace: str, obj: Object, *, strict: str = "", manager: str = ""
    ) -> tuple[Object, list[str]]:
        """Keep a new object; it and the unknown fields that were dropped."""
        obj, unknown = self._known(kind, copy.deepcopy(obj), strict)
        meta = obj.setdefault("metadata", {})
        if meta.get("resourceVersion"):
            raise Refused(400, "resourceVersion should not be set on objects to be created")
        if meta.get("namespace", namespace) != namespace and kind.namespaced:
            text = "the namespace of the provided object does not match the namespace sent on the"
            raise Refused(400, f"{text} request")
        if not meta.get("name"):
            if not meta.get("generateName"):
                text = "Required value: name or generateName is required"
                raise problems.invalid(kind, "", [("metadata.name", text)])
            meta["name"] = meta["generateName"][:58] + defaults.random_name()
        with self.store.lock:
            if kind.namespaced:
                meta["namespace"] = namespace
                home = self.need(KINDS["namespaces"], "", namespace)
                if home["metadata"].get("deletionTimestamp"):
                    text = f"unable to create new content in namespace {namespace} because it is"
                    raise problems.forbidden(kind, meta["name"], f"{text} being terminated")
            if self.store.get(kind, namespace, meta["name"]) is not None:
                raise problems.exists(kind, meta["name"])
            meta |= {"uid": str(uuid.uuid4()), "creationTimestamp": now(), "generation": 1}
            obj |= {"apiVersion": kind.api_version, "kind": kind.kind}
            if kind.status:
                obj.pop("status", None)
            defaults.fill(kind, obj)
            check_new(kind, obj)
            self._admit(kind, namespace, obj)
            stored = self.store.put(kind, obj)
        if manager:
            self.owners.changed({}, stored, manager)
        return stored, unknown

    def _known(self, kind: Kind, obj: Object, strict: str) -> tuple[Object, list[str]]:
        if obj.get("kind", kind.kind) != kind.kind:
            text = f"the kind in the data ({obj['kind']}) does not match the one expected"
            raise Refused(400, f"{text} ({kind.kind})")
        obj, unknown = pruned(kind, obj)
        if unknown and strict == "Strict":
            said = ", ".join(f'unknown field "{each}"' for each in unknown)
            text = f'{kind.kind} in version "{kind.version}" cannot be handled as a {kind.kind}'
            raise Refused(400, f"{text}: strict decoding error: {said}")
        return obj, unknown

    def _admit(self, kind: Kind, namespace: str, obj: Object) -> None:
        """What admission plugins do that look at other objects."""
        if kind.plural != "pods":
            return
        quotas = self._all("resourcequotas", namespace)
        if quotas:
            check_quota(kind, obj, self._all("pods", namespace), quotas)
        account = obj["spec"]["serviceAccountName"]
        if self.store.get(KINDS["serviceaccounts"], namespace, account) is None:
            text = "error looking up service account"
            why = f'{text} {namespace}/{account}: serviceaccount "{account}" not found'
            raise problems.forbidden(kind, obj["metadata"]["name"], why)

    def _all(self, plural: str, namespace: str) -> list[Object]:
        objects = self.store.objects[plural]
        return [obj for (space, _), obj in objects.items() if space == namespace]

    def change(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        make: Change,
        *,
        subresource: str = "",
        strict: str = "",
        manager: str = "",
    ) -> tuple[Object, list[str]]:
        """Put what `make` makes of the object; it and the unknown fields that were dropped."""
        with self.store.lock:
            old = self.need(kind, namespace, name)
            new, unknown = self._known(kind, make(old), strict)
            before, meta = old["metadata"], new.setdefault("metadata", {})
            self._same(kind, name, before, meta)
            kept = ("uid", "creationTimestamp", "namespace", "name", "deletionTimestamp")
            meta |= {key: before[key] for key in kept if key in before}
            meta["resourceVersion"] = before["resourceVersion"]
            meta["generation"] = before["generation"]
            if "deletionGracePeriodSeconds" in before:
                meta["deletionGracePeriodSeconds"] = before["deletionGracePeriodSeconds"]
            new |= {"apiVersion": kind.api_version, "kind": kind.kind}
            if subresource == "status":
                new = {**old, "status": new.get("status", {})}
            elif kind.status:
                new["status"] = old.get("status", {})
            if kind.plural == "jobsets":
                defaults.fill_by_schema(new["spec"])
            if new.get("spec") != old.get("spec"):
                check_changed(kind, old, new)
                new["metadata"]["generation"] += 1
            if new == old:
                return old, unknown
            if manager and subresource != "status" and kind.plural != "pods":
                self.owners.changed(old, new, manager)
            return self._put_or_finish(kind, new), unknown

    def _same(self, kind: Kind, name: str, before: Object, meta: Object) -> None:
        """Raise Refused (409) where an update was made from another object or an older state."""
        if meta.get("uid", before["uid"]) != before["uid"]:
            uids = f"UID in precondition: {meta['uid']}, UID in object meta: {before['uid']}"
            raise problems.conflict(kind, name, f"Precondition failed: {uids}")
        if meta.get("resourceVersion") not in (None, "", before["resourceVersion"]):
            raise problems.conflict(kind, name)

    def _put_or_finish(self, kind: Kind, new: Object) -> Object:
        meta = new["metadata"]
        graceful = kind.plural == "pods" and meta.get("deletionGracePeriodSeconds")
        if meta.get("deletionTimestamp") and not meta.get("finalizers") and not graceful:
            return self.store.remove(kind, new)
        return self.store.put(kind, new)

    def patch(
        self, kind: Kind, namespace: str, name: str, body: bytes, options: Object
    ) -> tuple[Object, list[str]]:
        """Options: `type` (the content type), `subresource`, `strict`, `manager`, `force`."""
        type = options["type"]
        if type == "application/apply-patch+yaml":
            return self._apply(kind, namespace, name, yaml.safe_load(body), options)
        if type == "application/strategic-merge-patch+json" and "." in kind.group:
            accepted = "application/json-patch+json, application/merge-patch+json,"
            text = "the body of the request was in an unknown format - accepted media types"
            raise Refused(415, f"{text} include: {accepted} application/apply-patch+yaml")
        patch = json.loads(body)

        def make(old: Object) -> Object:
            if type == "application/json-patch+json":
                return dict(patches.json_patch(old, patch))
            change = patches.strategic if "strategic" in type else patches.merge
            result = change(old, patch)
            version = (patch.get("metadata") or {}).get("resourceVersion")
            result["metadata"] = {**result["metadata"], "resourceVersion": version}
            return dict(result)

        return self.change(
            kind,
            namespace,
            name,
            lambda old: copy.deepcopy(make(old)),
            subresource=options["subresource"],
            strict=options["strict"],
            manager=options["manager"],
        )

    def _apply(
        self, kind: Kind, namespace: str, name: str, config: Object, options: Object
    ) -> tuple[Object, list[str]]:
        config, unknown = self._known(kind, config, options["strict"])
        manager, force = options["manager"], options["force"]
        with self.store.lock:
            old = self.store.get(kind, namespace, name)
            if old is None:
                created, _ = self.create(kind, namespace, config)
                self.owners.apply(created, config, manager, True)
                return created, unknown
            new = copy.deepcopy(self.owners.apply(old, config, manager, force))
            new["metadata"]["resourceVersion"] = None
            return self.change(kind, namespace, name, lambda _: new)[0], unknown

    def delete(self, kind: Kind, namespace: str, name: str, options: Object) -> Object:
        """Delete an object, or mark it as being deleted. options: a DeleteOptions."""
        with self.store.lock:
            old = self.need(kind, namespace, name)
            meta = copy.deepcopy(old["metadata"])
            wanted: Object = options.get("preconditions") or {}
            if wanted.get("uid") not in (None, meta["uid"]):
                uids = f"UID in precondition: {wanted['uid']}, UID in object meta: {meta['uid']}"
                raise problems.conflict(kind, name, f"Precondition failed: {uids}")
            if wanted.get("resourceVersion") not in (None, meta["resourceVersion"]):
                raise problems.conflict(kind, name)
            policy = options.get("propagationPolicy") or (
                "Orphan" if kind.plural == "jobs" else "Background"
            )
            if policy in FINALIZER and FINALIZER[policy] not in meta.get("finalizers", []):
                meta.setdefault("finalizers", []).append(FINALIZER[policy])
            grace = self._grace(kind, old, options.get("gracePeriodSeconds"))
            if kind.plural == "pods" or meta.get("finalizers"):
                before = meta.get("deletionGracePeriodSeconds")
                if "deletionTimestamp" not in meta or (before is not None and grace < before):
                    meta["deletionTimestamp"] = now(grace)
                    meta["deletionGracePeriodSeconds"] = grace
                elif meta == old["metadata"]:
                    return old
                return self._put_or_finish(kind, {**old, "metadata": meta})
            return self.store.remove(kind, old)

    def _grace(self, kind: Kind, obj: Object, asked: int | None) -> int:
        """Seconds; 0 where nothing has to end first."""
        if kind.plural != "pods" or ended(obj) or not obj["spec"].get("nodeName"):
            return 0
        return int(obj["spec"]["terminationGracePeriodSeconds"] if asked is None else asked)

    def bind(self, namespace: str, name: str, node: str) -> None:
        """Give a pod its node."""
        kind = KINDS["pods"]
        with self.store.lock:
            new = copy.deepcopy(self.need(kind, namespace, name))
            if new["spec"].get("nodeName"):
                text = f"pod {name} is already assigned to node"
                raise problems.conflict(kind, name, f'{text} "{new["spec"]["nodeName"]}"')
            new["spec"]["nodeName"] = node
            set_condition(new["status"], "PodScheduled", "True", "", "")
            self.store.put(kind, new)

    def evict(self, namespace: str, name: str, options: Object) -> None:
        """Delete a pod as one that is disturbed, not one that failed."""
        kind = KINDS["pods"]
        with self.store.lock:
            new = copy.deepcopy(self.need(kind, namespace, name))
            reason = ("EvictionByEvictionAPI", "Eviction API: evicting")
            if set_condition(new["status"], "DisruptionTarget", "True", *reason):
                self.store.put(kind, new)
            self.delete(kind, namespace, name, options)
