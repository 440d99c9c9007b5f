"""kubectl: the one way to a cluster. A process per question, with documents on its standard input:
so every login that kubectl knows works, and nothing is asked for when nobody asks."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from urllib.parse import urlencode

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.jobs.schema import Cluster
from trainkit.launch.kubernetes.documents import (
    Document,
    Documents,
    name_of,
    rows_at,
    table_at,
    text_at,
    uid_of,
)
from trainkit.launch.kubernetes.line_stream import stream_lines
from trainkit.launch.kubernetes.manifest import RUN_LABEL

# the API that serves a kind, by its plural
APIS = {
    **dict.fromkeys(
        ("pods", "services", "events", "persistentvolumeclaims", "secrets", "serviceaccounts"), "v1"
    ),
    **dict.fromkeys(("nodes", "namespaces"), "v1"),
    "jobs": "batch/v1",
    "jobsets": "jobset.x-k8s.io/v1alpha2",
    **dict.fromkeys(
        ("workloads", "localqueues", "clusterqueues", "workloadpriorityclasses"),
        "kueue.x-k8s.io/v1beta2",
    ),
    "priorityclasses": "scheduling.k8s.io/v1",
    "customresourcedefinitions": "apiextensions.k8s.io/v1",
    **dict.fromkeys(
        ("selfsubjectaccessreviews", "selfsubjectrulesreviews"), "authorization.k8s.io/v1"
    ),
}
WITHOUT_NAMESPACE = frozenset(
    {
        *("nodes", "namespaces", "clusterqueues", "workloadpriorityclasses", "priorityclasses"),
        *("customresourcedefinitions", "selfsubjectaccessreviews", "selfsubjectrulesreviews"),
    }
)
ANSWER_SECONDS = 20.0  # of one question
PATIENCE_SECONDS = 60.0  # as long questions are asked again that the cluster cannot answer now
WATCH_SECONDS = 300  # after which the server ends a watch, and we begin the next
FIRST_PAUSE = 0.1  # between two streams of a watch; twice as long while they bring nothing
PAGE = 500  # objects of one answer
# the cluster's own trouble, which may pass
PASSING = frozenset(
    {
        *("TooManyRequests", "InternalError", "ServiceUnavailable", "ServerTimeout", "Timeout"),
        *("BadGateway", "Unreachable"),
    }
)
EXPIRED = frozenset({"Expired", "Gone"})
_SAID = re.compile(r"^Error from server(?: \((\w+)\))?: (.*)", re.DOTALL | re.MULTILINE)
_LOGIN = re.compile(
    r"Unauthorized|must be logged in|getting credentials|x509|certificate|exec plugin|token",
    re.IGNORECASE,
)
_UNREACHED = re.compile(
    r"was refused|Unable to connect|timeout|timed out|deadline exceeded|EOF|reset by peer"
    r"|connection (lost|refused)|no such host|no route|network is unreachable",
    re.IGNORECASE,
)
_FORBIDDEN = re.compile(
    r'(?:User "(?P<user>[^"]+)" )?cannot (?P<verb>\w+) resource "(?P<resource>[^"]+)" in API group'
    r' "(?P<group>[^"]*)"(?P<namespaced> in the namespace)?'
)


class KubectlError(TrainkitError):
    """What the cluster, or kubectl, refused (exit 8).

    Args:
        reason: Kubernetes' word: NotFound, Conflict, Forbidden, Invalid, ...; "Unreachable" where
            no answer came, "Login" where there is no valid one, "" for others.
        message: kubectl's own words.
        hint: the way out.
    """

    def __init__(self, reason: str, message: str, hint: str = "") -> None:
        super().__init__(message, exit=Exit.START, hint=hint)
        self.reason = reason


@dataclass(frozen=True)
class WatchEvent:
    """A change of an object.

    Args:
        type: ADDED, MODIFIED or DELETED; an object that vanished unseen is DELETED too.
        object: as it is now, or was when it was last seen.
    """

    type: str
    object: Document


@dataclass(frozen=True)
class Kubectl:
    """A namespace of a cluster. Every method raises KubectlError (exit 8) where it is refused, or
    gets no answer within `patience` seconds.

    Args:
        namespace: where everything is.
        context: of kubectl's configuration; "": the current one, in a pod its service account.
        patience: as long a question is asked again while the cluster cannot answer.
        in_pod: the server and the login are those of the pod that this process is in.
    """

    namespace: str
    context: str = ""
    patience: float = PATIENCE_SECONDS
    in_pod: bool = False

    @classmethod
    def of(cls, cluster: Cluster) -> Kubectl:
        """That of a cluster with launcher 'kubernetes', for where people type."""
        assert cluster.kubernetes is not None
        return cls(cluster.kubernetes.namespace, cluster.kubernetes.context or "")

    def path(self, kind: str, name: str = "", **query: object) -> str:
        """Where the API has objects of a kind, given as its plural, or one of them."""
        api = APIS[kind]
        words = ["/apis" if "/" in api else "/api", api]
        words += [] if kind in WITHOUT_NAMESPACE else ["namespaces", self.namespace]
        words += [kind, name] if name else [kind]
        asked = {key: str(value) for key, value in query.items() if value}
        return "/".join(words) + (f"?{urlencode(asked)}" if asked else "")

    def create(self, document: Mapping[str, object]) -> Document:
        """Make an object; as the server has it. One that a former call has made, whose answer was
        lost, is returned: it has the same name and the same label of its run."""
        kind = f"{text_at(document, 'kind').lower()}s"
        path = self.path(kind, fieldManager="trainkit", fieldValidation="Strict")
        try:
            return _parsed(self._ask(["create", "--raw", path, "-f", "-"], document))
        except KubectlError as error:
            if error.reason != "AlreadyExists":
                raise
            found = self.get(kind, name_of(document))
            ours = text_at(document, "metadata", "labels", RUN_LABEL)
            if found is None or not ours or text_at(found, "metadata", "labels", RUN_LABEL) != ours:
                raise
            return found

    def get(self, kind: str, name: str) -> Document | None:
        """An object; None where there is none of that name."""
        return self.raw(self.path(kind, name))

    def raw(self, path: str) -> Document | None:
        """What the API has at a path; None where that is not there."""
        try:
            return _parsed(self._ask(["get", "--raw", path]))
        except KubectlError as error:
            if error.reason == "NotFound":
                return None
            raise

    def list(self, kind: str, selector: str = "", field_selector: str = "") -> Documents:
        """All objects of a kind that labels and fields select."""
        return self._listed(kind, selector, field_selector)[0]

    def delete(self, kind: str, name: str, *, uid: str, force: bool = False) -> bool:
        """Delete an object and what it owns; False where that object is gone.

        Args:
            kind: its plural.
            name: its name.
            uid: which of that name.
            force: do not wait for the node of a pod, which is gone. Needs the right to patch it.
        """
        options: Document = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "propagationPolicy": "Background",
            "preconditions": {"uid": uid},
            **({"gracePeriodSeconds": 0} if force else {}),
        }
        try:
            self._ask(["delete", "--raw", self.path(kind, name), "-f", "-"], options)
            if force:  # its Job keeps it until its end is seen, and makes no other before
                self.patch(kind, name, {"metadata": {"uid": uid, "finalizers": None}})
        except KubectlError as error:
            if error.reason not in ("NotFound", "Conflict"):
                raise
            return False
        return True

    def patch(self, kind: str, name: str, change: Mapping[str, object]) -> Document:
        """Lay a merge patch (RFC 7386) over an object; as it is then."""
        group, _, version = APIS[kind].rpartition("/")
        which = f"{kind}.{version}.{group}" if group else kind
        argv = ["patch", which, name, f"--namespace={self.namespace}", "--type=merge"]
        more = ["--patch-file=/dev/stdin", "--field-manager=trainkit", "--output=json"]
        return _parsed(self._ask([*argv, *more], change))

    def log(self, pod: str, *, lines: int = 200) -> str:
        """The last lines that a pod printed."""
        return self._ask(["get", "--raw", self.path("pods", f"{pod}/log", tailLines=lines)])

    def events(self, uid: str) -> Documents:
        """What happened to an object within the last hour, oldest first."""
        found = self.list("events", field_selector=f"involvedObject.uid={uid}")
        return sorted(found, key=lambda event: text_at(event, "lastTimestamp"))

    def can_i(self, verb: str, kind: str) -> bool:
        """Whether the caller may do this with objects of a kind; with "pods/log" as well."""
        resource, _, part = kind.partition("/")
        attributes = {
            "verb": verb,
            "group": group_of(kind),
            "resource": resource,
            **({"subresource": part} if part else {}),
            **({} if resource in WITHOUT_NAMESPACE else {"namespace": self.namespace}),
        }
        asked = {"resourceAttributes": attributes}
        return table_at(self._review("Access", asked), "status").get("allowed") is True

    def rights(self) -> Documents:
        """Rules of RBAC that let the caller do things in the namespace; a cluster may have other
        ways of letting them."""
        return rows_at(
            self._review("Rules", {"namespace": self.namespace}), "status", "resourceRules"
        )

    def _review(self, what: str, spec: Mapping[str, object]) -> Document:
        kind = f"SelfSubject{what}Review"
        return self.create({"apiVersion": "authorization.k8s.io/v1", "kind": kind, "spec": spec})

    def watch(
        self, kind: str, selector: str = "", tick: float = 5.0
    ) -> Generator[WatchEvent | None, None, None]:
        """Every change of the objects that labels select, those that are there first, without
        end; None after each `tick` seconds without one. What happens while a stream is cut, the
        server is down or has forgotten where we were, is found by asking again: what has vanished
        meanwhile is DELETED.

        Close it to end its process.
        """
        known = dict[str, Document]()
        pause = FIRST_PAUSE
        while True:
            items, version = self._listed(kind, selector, "")
            found = {name_of(item): item for item in items}
            gone = [old for name, old in known.items() if name not in found]
            for name in map(name_of, gone):
                yield WatchEvent("DELETED", known.pop(name))
            for item in items:
                yield from _changed(known, item)
            before = dict(known)
            yield from self._streamed(kind, selector, version, tick, known)
            pause = FIRST_PAUSE if known != before else min(5.0, pause * 2)
            time.sleep(pause)

    def _streamed(
        self, kind: str, selector: str, version: str, tick: float, known: dict[str, Document]
    ) -> Iterator[WatchEvent | None]:
        """The changes that one stream brings, until it ends; `known` follows them."""
        path = self.path(
            kind,
            watch="true",
            labelSelector=selector,
            resourceVersion=version,
            allowWatchBookmarks="true",
            timeoutSeconds=WATCH_SECONDS,
        )
        argv = self.argv(["get", "--raw", path], WATCH_SECONDS + 30)
        lines = stream_lines(argv, tick)
        try:
            while True:
                line = next(lines)
                event = _event(line) if line is not None else None
                if line is None:
                    yield None
                elif event is None:
                    continue
                elif event.type == "ERROR":
                    if text_at(event.object, "reason") not in PASSING | EXPIRED:
                        raise self.refusal(text_at(event.object, "message"))
                    return
                elif event.type != "DELETED":
                    yield from _changed(known, event.object)
                elif uid_of(known.get(name_of(event.object))) == uid_of(event.object):
                    del known[name_of(event.object)]
                    yield event
        except StopIteration as end:
            code, said = end.value
            refused = self.refusal(said or f"exit code {code}")
            if code and refused.reason not in PASSING | EXPIRED:
                raise refused from None
        except FileNotFoundError:
            raise no_kubectl() from None
        finally:
            lines.close()

    def version(self) -> tuple[int, int]:
        """Major and minor version of kubectl."""
        text = self._once(["version", "--client", "--output=json"], "")
        found = re.search(r'"gitVersion": *"v?(\d+)\.(\d+)', text)
        return (int(found[1]), int(found[2])) if found else (0, 0)

    def argv(self, words: Sequence[str], seconds: float = ANSWER_SECONDS) -> Sequence[str]:
        """The command line of a question."""
        context = [f"--context={self.context}"] if self.context else []
        # with any such flag kubectl looks for a server of its own configuration, not for the pod's
        limit = [] if self.in_pod else [f"--request-timeout={seconds:.0f}s"]
        return ["kubectl", *context, *limit, *words]

    def _listed(self, kind: str, selector: str, fields: str) -> tuple[Documents, str]:
        """(objects, the version of the list)."""
        items: Documents = []
        after = ""
        while True:
            path = self.path(
                kind,
                labelSelector=selector,
                fieldSelector=fields,
                limit=PAGE,
                **{"continue": after},
            )
            try:
                page = _parsed(self._ask(["get", "--raw", path]))
            except KubectlError as error:
                if error.reason not in EXPIRED or not after:
                    raise
                items = []  # the server has forgotten the list: from the start
                after = ""
                continue
            items += rows_at(page, "items")
            after = text_at(page, "metadata", "continue")
            if not after:
                return items, text_at(page, "metadata", "resourceVersion")

    def _ask(self, words: Sequence[str], document: Mapping[str, object] | None = None) -> str:
        """What kubectl prints; the question is asked again while the trouble is the cluster's."""
        given = "" if document is None else json.dumps(document)
        last = time.monotonic() + self.patience
        pause = 0.5
        while True:
            try:
                return self._once(words, given)
            except KubectlError as error:
                if error.reason not in PASSING or time.monotonic() + pause > last:
                    raise
            time.sleep(pause)
            pause = min(8.0, pause * 2)

    def _once(self, words: Sequence[str], given: str) -> str:
        try:
            done = subprocess.run(
                self.argv(words),
                input=given,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=ANSWER_SECONDS + 10,
                check=False,
            )
        except FileNotFoundError:
            raise no_kubectl() from None
        except subprocess.TimeoutExpired:
            raise KubectlError("Unreachable", "kubectl did not answer within 30 s") from None
        if done.returncode != 0:
            raise self.refusal(done.stderr or done.stdout or f"exit code {done.returncode}")
        return done.stdout

    def refusal(self, said: str) -> KubectlError:
        """kubectl's words as an error."""
        words = " ".join(said.split())
        found = _SAID.search(said)
        reason = (found[1] or "") if found else ""
        if found and reason == "Forbidden" and (right := _FORBIDDEN.search(words)):
            return KubectlError(reason, f"kubectl: {found[2].strip()}", self._ask_for(right))
        if "is invalid:" in words:
            reason = reason or "Invalid"
        if not found and _LOGIN.search(words):
            reason = "Login"
        elif not found and _UNREACHED.search(words):
            reason = "Unreachable"
        elif found and not reason and re.search(r"\b(429|500|502|503|504)\b", words):
            reason = "ServiceUnavailable"
        context = f" --context={self.context}" if self.context else ""
        hints = {
            **dict.fromkeys(
                ("Login", "Unauthorized"), f"log in again, then try `kubectl{context} get pods`"
            ),
            "Unreachable": f"`kubectl{context} cluster-info` asks the same server",
        }
        if "exceeded quota" in words:
            hints[reason] = f"`kubectl{context} describe quota --namespace={self.namespace}`"
        if "context" in words and "does not exist" in words:
            hints[""] = "`kubectl config get-contexts` lists those there are"
        return KubectlError(reason, f"kubectl: {words}", hints.get(reason, ""))

    def _ask_for(self, right: re.Match[str]) -> str:
        """The lines that give the right that was missing."""
        resource = right["resource"] + (f".{right['group']}" if right["group"] else "")
        kind = "role" if right["namespaced"] else "clusterrole"
        name = f"trainkit-{right['verb']}-{right['resource'].replace('/', '-')}"
        there = [f"--namespace={self.namespace}"] if right["namespaced"] else []
        role = [
            "kubectl",
            "create",
            kind,
            name,
            f"--verb={right['verb']}",
            f"--resource={resource}",
        ]
        who = right["user"] or "USER"
        bind = ["kubectl", "create", f"{kind}binding", name, f"--{kind}={name}", f"--user={who}"]
        return (
            f"the cluster's administrator can give it: {shlex.join([*role, *there])};"
            f" {shlex.join([*bind, *there])}"
        )


def group_of(kind: str) -> str:
    """The group of the API that serves a kind; "" for the core."""
    return APIS[kind.partition("/")[0]].rpartition("/")[0]


def no_kubectl() -> KubectlError:
    """There is no kubectl."""
    return KubectlError(
        "", "there is no kubectl here", "install it, 1.28 or newer, where you type `invoke train`"
    )


def _parsed(text: str) -> Document:
    try:
        found = json.loads(text)
    except ValueError:
        raise KubectlError("", f"kubectl printed no JSON: {text[:200]!r}") from None
    if not isinstance(found, dict):
        raise KubectlError("", f"kubectl printed no object: {text[:200]!r}")
    return found


def _event(line: str) -> WatchEvent | None:
    """A line of a watch; None for a bookmark, and for half a line of a stream that was cut."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    event = WatchEvent(text_at(found, "type"), table_at(found, "object"))
    return None if event.type in ("BOOKMARK", "") else event


def _changed(known: dict[str, Document], item: Document) -> Iterator[WatchEvent]:
    """What is new of an object that is there; one of the same name and another uid is gone."""
    name = name_of(item)
    old = known.get(name)
    known[name] = item
    if old is not None and uid_of(old) != uid_of(item):
        yield WatchEvent("DELETED", old)
        old = None
    if old is None:
        yield WatchEvent("ADDED", item)
    elif _version(old) != _version(item):
        yield WatchEvent("MODIFIED", item)


def _version(item: Document) -> str:
    return text_at(item, "metadata", "resourceVersion")
