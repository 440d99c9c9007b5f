"""Who may do what: bearer tokens and a simple form of RBAC."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.kubernetes.kinds import Kind, Object


@dataclass(frozen=True)
class Rule:
    """Allows verbs on resources ("pods", "pods/log", "*"); in one namespace, or in all."""

    verbs: tuple[str, ...]
    resources: tuple[str, ...]
    namespace: str = ""

    def allows(self, verb: str, resource: str, namespace: str) -> bool:
        return (
            (verb in self.verbs or "*" in self.verbs)
            and (resource in self.resources or "*" in self.resources)
            and self.namespace in ("", namespace)
        )


ALL = Rule(("*",), ("*",))


@dataclass
class Account:
    """A user or a service account. `system`: faults that a test asks for leave it alone."""

    user: str
    rules: list[Rule] = field(default_factory=list)
    system: bool = False

    @property
    def groups(self) -> list[str]:
        words = self.user.split(":")
        if words[:2] == ["system", "serviceaccount"]:
            return ["system:serviceaccounts", f"system:serviceaccounts:{words[2]}"]
        return ["system:authenticated"]

    def may(self, verb: str, resource: str, namespace: str) -> bool:
        return any(rule.allows(verb, resource, namespace) for rule in self.rules)

    def why_not(self, verb: str, kind: Kind, subresource: str, namespace: str) -> str:
        """What a 403 says."""
        resource = f"{kind.plural}/{subresource}" if subresource else kind.plural
        where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
        what = f'resource "{resource}" in API group "{kind.group}"'
        return f'User "{self.user}" cannot {verb} {what} {where}'

    def review(self, plural: str, body: Object) -> Object:
        """The answer to what an account asks about itself."""
        if plural == "selfsubjectreviews":
            who = {"username": self.user, "groups": self.groups}
            return {**body, "status": {"userInfo": who}}
        if plural == "selfsubjectrulesreviews":
            namespace = body["spec"].get("namespace", "")
            rules = list(self._rules(namespace))
            status = {"resourceRules": rules, "nonResourceRules": [], "incomplete": False}
            return {**body, "status": status}
        asked = body["spec"].get("resourceAttributes")
        if asked is None:
            return {**body, "status": {"allowed": bool(self.rules)}}
        resource = asked.get("resource", "")
        if asked.get("subresource"):
            resource += f"/{asked['subresource']}"
        allowed = self.may(asked.get("verb", ""), resource, asked.get("namespace", ""))
        return {**body, "status": {"allowed": allowed}}

    def _rules(self, namespace: str) -> Iterator[Object]:
        for rule in self.rules:
            if rule.namespace in ("", namespace):
                resources, verbs = list(rule.resources), list(rule.verbs)
                yield {"verbs": verbs, "apiGroups": ["*"], "resources": resources}
