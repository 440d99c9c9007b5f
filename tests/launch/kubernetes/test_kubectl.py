"""The one seam to the cluster: real kubectl, and a server that answers as it is told."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tests.launch.kubernetes.api_stub import ApiStub, write_kubeconfig
from trainkit.launch.kubernetes.kubectl import Kubectl, KubectlError, WatchEvent

PODS = "/api/v1/namespaces/team/pods"
JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/team/jobsets"
HERE = Kubectl("team", "stub", patience=0.0)


def pod(name: str, uid: str, version: int) -> dict[str, object]:
    return {"metadata": {"name": name, "uid": uid, "resourceVersion": str(version)}}


def jobset(run: str) -> dict[str, object]:
    return {"kind": "JobSet", "metadata": {"name": "a", "labels": {"trainkit/run": run}}}


def pods(*items: object, after: str = "") -> dict[str, object]:
    meta = {"resourceVersion": "9", "continue": after}
    return {"kind": "PodList", "metadata": meta, "items": list(items)}


def test_what_is_made(stub: ApiStub) -> None:
    stub.answers = {f"POST {JOBSETS}": [{"kind": "JobSet", "metadata": {"uid": "1"}}]}
    assert HERE.create(jobset("r"))["metadata"] == {"uid": "1"}
    (asked,) = stub.asked
    assert asked.query == {
        "timeout": "20s",
        "fieldManager": "trainkit",
        "fieldValidation": "Strict",
    }
    assert json.loads(asked.body) == jobset("r")


@pytest.mark.parametrize(("theirs", "taken"), [("r", True), ("other", False)])
def test_an_answer_that_was_lost(theirs: str, taken: bool, stub: ApiStub) -> None:
    there = {"metadata": {"name": "a", "uid": "7", "labels": {"trainkit/run": theirs}}}
    stub.answers = {f"POST {JOBSETS}": [(409, 'jobsets "a" already exists')]}
    stub.answers[f"GET {JOBSETS}/a"] = [there]
    if taken:
        assert HERE.create(jobset("r")) == there
        return
    with pytest.raises(KubectlError, match="already exists"):
        HERE.create(jobset("r"))


def test_get_and_delete(stub: ApiStub) -> None:
    assert HERE.get("pods", "a") is None and HERE.delete("pods", "a", uid="1") is False
    stub.answers = {
        f"GET {PODS}/a": [pod("a", "1", 5)],
        f"DELETE {PODS}/a": [{"kind": "Status"}, (409, "the object has been modified: uid")],
    }
    assert HERE.get("pods", "a") == pod("a", "1", 5)
    assert HERE.delete("pods", "a", uid="1")
    sent = json.loads(stub.asked[-1].body)
    assert sent["preconditions"] == {"uid": "1"} and "gracePeriodSeconds" not in sent
    assert HERE.delete("pods", "a", uid="1", force=True) is False, "and nothing is patched then"
    assert json.loads(stub.asked[-1].body)["gracePeriodSeconds"] == 0


def test_long_lists_are_read_by_pages(stub: ApiStub) -> None:
    stub.answers = {
        f"GET {PODS}": [
            pods(pod("a", "1", 1), after="c1"),
            (410, "The provided continue parameter is too old"),
            pods(pod("a", "1", 2), after="c2"),
            pods(pod("b", "2", 3)),
        ]
    }
    assert HERE.list("pods", "x=y") == [pod("a", "1", 2), pod("b", "2", 3)]
    assert [asked.query.get("continue") for asked in stub.asked] == [None, "c1", None, "c2"]
    assert {asked.query["labelSelector"] for asked in stub.asked} == {"x=y"}


def test_a_busy_cluster_is_asked_again(stub: ApiStub) -> None:
    stub.answers = {f"GET {PODS}/a": [(503, "etcd is away"), (500, "oh"), pod("a", "1", 5)]}
    assert Kubectl("team", "stub", patience=10).get("pods", "a") == pod("a", "1", 5)
    stub.answers = {f"GET {PODS}/a": [(503, "etcd is away")]}
    with pytest.raises(KubectlError, match="etcd is away") as caught:
        HERE.get("pods", "a")
    assert (caught.value.exit, caught.value.reason) == (8, "ServiceUnavailable")


FORBIDDEN = 'jobsets.jobset.x-k8s.io is forbidden: User "me" cannot create resource "jobsets" in'


@pytest.mark.parametrize(
    ("code", "message", "said", "hint"),
    [
        (
            403,
            f'{FORBIDDEN} API group "jobset.x-k8s.io" in the namespace "team"',
            'cannot create resource "jobsets"',
            "kubectl create role trainkit-create-jobsets --verb=create"
            " --resource=jobsets.jobset.x-k8s.io --namespace=team;"
            " kubectl create rolebinding trainkit-create-jobsets --role=trainkit-create-jobsets"
            " --user=me --namespace=team",
        ),
        (403, 'pods "a" is forbidden: exceeded quota: gpus, used: 8', "exceeded quota", "quota"),
        (401, "Unauthorized", "Unauthorized", "log in again"),
        (422, 'JobSet.jobset.x-k8s.io "a" is invalid: spec: wrong', "spec: wrong", ""),
        (429, "too many requests", "too many requests", ""),
    ],
)
def test_refusals(code: int, message: str, said: str, hint: str, stub: ApiStub) -> None:
    stub.answers = {f"POST {JOBSETS}": [(code, message)]}
    with pytest.raises(KubectlError) as caught:
        HERE.create(jobset("r"))
    assert said in caught.value.message and hint in caught.value.hint
    assert caught.value.reason and caught.value.exit == 8


def test_no_way_to_the_cluster(
    stub: ApiStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KubectlError, match="does not exist") as caught:
        Kubectl("team", "nowhere").get("pods", "a")
    assert "kubectl config get-contexts" in caught.value.hint
    config = tmp_path / "kubeconfig"
    write_kubeconfig(config, 9)
    with pytest.raises(KubectlError, match="refused") as caught:
        HERE.get("pods", "a")
    assert caught.value.reason == "Unreachable"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KubectlError, match="there is no kubectl here"):
        HERE.get("pods", "a")


def test_rights_patches_logs_and_events(stub: ApiStub) -> None:
    review = "POST /apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    stub.answers = {review: [{"status": {"allowed": True}}, {"status": {"allowed": False}}]}
    assert HERE.can_i("get", "pods/log") and not HERE.can_i("create", "jobsets")
    sent = [json.loads(asked.body)["spec"]["resourceAttributes"] for asked in stub.asked]
    assert sent == [
        {
            "verb": "get",
            "group": "",
            "resource": "pods",
            "subresource": "log",
            "namespace": "team",
        },
        {
            "verb": "create",
            "group": "jobset.x-k8s.io",
            "resource": "jobsets",
            "namespace": "team",
        },
    ]
    events = [{"lastTimestamp": "2"}, {"lastTimestamp": "1"}]
    stub.answers = {"GET /api/v1/namespaces/team/events": [pods(*events)]}
    assert HERE.events("7") == events[::-1]
    assert stub.asked[-1].query["fieldSelector"] == "involvedObject.uid=7"
    assert HERE.version() >= (1, 20)


def test_a_patch(stub: ApiStub) -> None:
    group = "jobset.x-k8s.io"
    version = {"groupVersion": f"{group}/v1alpha2", "version": "v1alpha2"}
    resource = {"name": "jobsets", "kind": "JobSet", "namespaced": True, "verbs": ["patch"]}
    made = {"apiVersion": f"{group}/v1alpha2", "kind": "JobSet", "metadata": {"name": "a"}}
    stub.answers = {
        "GET /api": [{"kind": "APIVersions", "versions": []}],
        "GET /apis": [{"kind": "APIGroupList", "groups": [{"name": group, "versions": [version]}]}],
        f"GET /apis/{group}/v1alpha2": [{"kind": "APIResourceList", "resources": [resource]}],
        f"GET {JOBSETS}/a": [made],
        f"PATCH {JOBSETS}/a": [{**made, "spec": {"suspend": True}}],
    }
    assert HERE.patch("jobsets", "a", {"spec": {"suspend": True}})["spec"] == {"suspend": True}
    assert json.loads(stub.asked[-1].body) == {"spec": {"suspend": True}}


def seen(stub: ApiStub, count: int) -> list[tuple[str, str, str]]:
    """The first changes of pods: what, name, uid."""
    stream = (event for event in HERE.watch("pods", "x=y", tick=0.5) if event is not None)
    found: list[WatchEvent] = list(itertools.islice(stream, count))
    return [
        (event.type, str(event.object["metadata"]["name"]), str(event.object["metadata"]["uid"]))  # type: ignore[index]
        for event in found
    ]


def test_a_watch_loses_nothing(stub: ApiStub) -> None:
    expired = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
    stub.answers = {
        f"GET {PODS}": [
            pods(pod("a", "1", 1), pod("b", "2", 2)),
            pods(pod("a", "1", 3), pod("c", "3", 4)),
            pods(pod("a", "9", 7), pod("c", "3", 4)),
            (503, "down"),
            pods(pod("a", "9", 8)),
        ],
        f"GET {PODS} watch": [
            [
                {"type": "MODIFIED", "object": pod("a", "1", 3)},
                {"type": "BOOKMARK", "object": pod("", "", 3)},
                '{"type": "ADDED", "obj',
            ],
            [
                {"type": "DELETED", "object": pod("c", "0", 2)},
                {"type": "MODIFIED", "object": pod("a", "8", 5)},
                {"type": "ERROR", "object": expired},
            ],
            [],
        ],
    }
    patient = [
        ("ADDED", "a", "1"),
        ("ADDED", "b", "2"),
        ("MODIFIED", "a", "1"),
        ("DELETED", "b", "2"),  # unseen, between two streams
        ("ADDED", "c", "3"),
        ("DELETED", "a", "1"),  # made anew under the same name, seen as a change
        ("ADDED", "a", "8"),
        ("DELETED", "a", "8"),  # the same, unseen
        ("ADDED", "a", "9"),
    ]
    assert seen(stub, len(patient)) == patient


def test_a_watch_ticks_and_ends(stub: ApiStub) -> None:
    stub.answers = {f"GET {PODS}": [pods()], f"GET {PODS} watch": [[], (403, FORBIDDEN)]}
    stream = HERE.watch("pods")
    with pytest.raises(KubectlError, match="cannot create"):
        list(stream)
