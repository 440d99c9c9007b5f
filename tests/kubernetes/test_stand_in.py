"""The stand-in of a Kubernetes cluster does what a real one does, as the real kubectl sees it."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from tests.kubernetes.accounts import Rule
from tests.kubernetes.cluster import NAMESPACE, KubernetesCluster
from tests.kubernetes.kinds import Object, condition, is_true
from tests.kubernetes.manifests import (
    SAVES,
    create,
    events,
    jobset,
    name_of,
    running,
    wait_end,
    wait_running,
)
from tests.limits import HANGS


def test_a_jobset_of_three_hosts_completes(kubernetes: KubernetesCluster) -> None:
    create(kubernetes, jobset(command=["sh", "-c", "hostname; echo $JOB_COMPLETION_INDEX"]))
    done = wait_end(kubernetes, "Completed")
    assert done["status"]["terminalState"] == "Completed"
    job = kubernetes.get("jobs", "run-w-0")
    types = [each["type"] for each in job["status"]["conditions"]]
    assert types == ["SuccessCriteriaMet", "Complete"]
    assert job["status"]["completedIndexes"] == "0-2" and job["status"]["succeeded"] == 3
    assert len({pod["spec"]["nodeName"] for pod in kubernetes.pods()}) == 3
    for index, pod in enumerate(kubernetes.pods()):
        assert pod["metadata"]["labels"]["jobset.sigs.k8s.io/restart-attempt"] == "0"
        assert kubernetes.kubectl("logs", name_of(pod)) == f"run-w-0-{index}\n{index}\n"
    assert kubernetes.get("services", "run")["spec"]["clusterIP"] == "None"
    kubernetes.kubectl("delete", "jobset", "run")


@pytest.mark.slow
def test_an_exit_code_fails_the_job_and_the_jobset(kubernetes: KubernetesCluster) -> None:
    """Failed comes only when the slowest pod has ended; FailureTarget at once."""
    go = kubernetes.root / "go"
    slow = (
        f"trap 'until [ -e {go} ]; do sleep 0.05; done; exit 0' TERM; while :; do sleep 0.05; done"
    )
    command = f"[ $JOB_COMPLETION_INDEX != 1 ] || {{ sleep 0.5; exit 42; }}; {slow}"
    root = str(kubernetes.root)
    volumes = [{"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}}]
    more: Object = {"volumes": volumes, "terminationGracePeriodSeconds": 600}
    more["volumeMounts"] = [{"name": "shared", "mountPath": root}]
    create(kubernetes, jobset(command=["bash", "-c", command], **more))
    kubernetes.wait(
        lambda: is_true(kubernetes.get("jobs", "run-w-0"), "FailureTarget"), "FailureTarget"
    )
    assert not is_true(kubernetes.get("jobs", "run-w-0"), "Failed")
    go.touch()
    wait_end(kubernetes, "Failed")
    go.unlink()
    failed = condition(wait_end(kubernetes, "Failed"), "Failed")
    assert failed["reason"] == "ReachedMaxRestarts"
    assert failed["message"].endswith("(first failed job: run-w-0)")
    why = condition(kubernetes.get("jobs", "run-w-0"), "Failed")
    assert why["reason"] == "PodFailurePolicy"
    assert "failed with exit code 42 matching FailJob rule at index 1" in why["message"]
    kubernetes.kubectl("delete", "jobset", "run")


def test_a_killed_pod_is_replaced_and_counts(kubernetes: KubernetesCluster) -> None:
    create(kubernetes, jobset(backoff=1))
    first = wait_running(kubernetes)
    kubernetes.kill_pod(name_of(first[1]))
    kubernetes.wait(lambda: len(kubernetes.pods()) == 4, "a replacement")
    again = wait_running(kubernetes)
    assert {name_of(pod) for pod in again} & {name_of(pod) for pod in first} == {
        name_of(first[0]),
        name_of(first[2]),
    }
    dead = kubernetes.pod(name_of(first[1]))
    state = dead["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (state["exitCode"], state["reason"]) == (137, "Error")
    kubernetes.mark_oom(name_of(again[0]))
    why = condition(wait_end(kubernetes, "Failed"), "Failed")
    assert why["reason"] == "ReachedMaxRestarts"
    reason = condition(kubernetes.get("jobs", "run-w-0"), "Failed")["reason"]
    assert reason == "BackoffLimitExceeded"
    state = kubernetes.pod(name_of(again[0]))["status"]["containerStatuses"][0]["state"]
    assert state["terminated"]["reason"] == "OOMKilled"
    kubernetes.kubectl("delete", "jobset", "run")


@pytest.mark.slow
def test_an_evicted_pod_is_replaced_when_it_has_ended_and_costs_nothing(
    kubernetes: KubernetesCluster,
) -> None:
    create(kubernetes, jobset(command=["bash", "-c", SAVES], backoff=0))
    pods = wait_running(kubernetes)
    kubernetes.wait(lambda: "up" in kubernetes.kubectl("logs", name_of(pods[2])), "up")
    log = subprocess.Popen(
        ["kubectl", f"--kubeconfig={kubernetes.kubeconfig}", "logs", "-f", name_of(pods[2])],
        stdout=subprocess.PIPE,
        text=True,
    )
    follows = f"/{name_of(pods[2])}/log?"
    kubernetes.wait(
        lambda: any(
            follows in path and "follow=true" in path for *_, path in kubernetes.server.requests
        ),
        "kubectl logs",
    )
    kubernetes.kubectl("drain", str(pods[2]["spec"]["nodeName"]))
    kubernetes.wait(lambda: len(running(kubernetes)) == 2, "the eviction")
    assert log.communicate(timeout=HANGS)[0].endswith("saved\n")

    def pending() -> list[Object]:
        return [pod for pod in kubernetes.pods() if pod["status"]["phase"] == "Pending"]

    kubernetes.wait(pending, "the replacement")
    waits = pending()[0]
    kubernetes.wait(lambda: condition(kubernetes.pod(name_of(waits)), "PodScheduled"), "why")
    why = condition(kubernetes.pod(name_of(waits)), "PodScheduled")
    assert why["reason"] == "Unschedulable"
    text = "0/3 nodes are available: 1 node(s) were unschedulable, 2 Insufficient nvidia.com/gpu."
    assert why["message"].startswith(text)
    assert ("FailedScheduling", why["message"]) in events(kubernetes, name_of(waits))
    kubernetes.kubectl("uncordon", str(pods[2]["spec"]["nodeName"]))
    wait_running(kubernetes)
    assert kubernetes.get("jobs", "run-w-0")["status"].get("failed", 0) == 0
    kubernetes.kubectl("delete", "jobset", "run")


@pytest.mark.slow
def test_a_pod_that_leaves_with_0_has_completed_its_index(kubernetes: KubernetesCluster) -> None:
    """However it came to leave."""
    command = SAVES.replace("exit 3", "exit 0")
    create(kubernetes, jobset(command=["bash", "-c", command], hosts=2))
    pods = wait_running(kubernetes, 2)
    kubernetes.wait(lambda: "up" in kubernetes.kubectl("logs", name_of(pods[1])), "up")
    kubernetes.drain(pods[1]["spec"]["nodeName"])
    kubernetes.wait(
        lambda: kubernetes.get("jobs", "run-w-0")["status"].get("completedIndexes") == "1", "it"
    )
    assert len(kubernetes.pods()) <= 2
    kubernetes.kubectl("delete", "jobset", "run")


@pytest.mark.slow
def test_kueue_admits_preempts_and_admits_again(kubernetes: KubernetesCluster) -> None:
    labels = {"kueue.x-k8s.io/queue-name": "queue"}
    create(kubernetes, jobset(command=["bash", "-c", SAVES], labels=labels))
    first = wait_running(kubernetes)
    workload = json.loads(kubernetes.kubectl("get", "workloads", "-o", "json"))["items"][0]
    assert name_of(workload).startswith("jobset-run-") and is_true(workload, "Admitted")
    kubernetes.preempt("run", seconds=0.5)
    kubernetes.wait(lambda: not kubernetes.pods(), "the end of all pods")
    workload = kubernetes.get("workloads", name_of(workload))
    assert condition(workload, "Evicted")["reason"] == "Preempted"
    assert is_true(kubernetes.get("jobsets", "run"), "Suspended")
    again = wait_running(kubernetes)
    assert not {name_of(pod) for pod in first} & {name_of(pod) for pod in again}
    job = kubernetes.get("jobs", "run-w-0")
    assert job["status"].get("failed", 0) == 0
    assert kubernetes.get("jobsets", "run")["status"]["restarts"] == 0
    kubernetes.kubectl("delete", "jobset", "run")


def test_kueue_says_why_a_jobset_waits(paper: KubernetesCluster) -> None:
    paper.priority_class("high", 100)
    queue = {"kueue.x-k8s.io/queue-name": "queue"}

    def why(name: str) -> str:
        found = [
            each
            for each in paper.client.all("workloads")
            if each["metadata"]["ownerReferences"][0]["name"] == name
        ]
        return str(condition(found[0], "QuotaReserved").get("reason")) if found else ""

    create(paper, jobset("first", labels=queue))
    wait_running(paper)
    create(paper, jobset("second", labels=queue))
    paper.wait(lambda: why("second") == "WaitingForQuota", "a reason")
    create(paper, jobset("huge", hosts=4, labels=queue))
    paper.wait(lambda: why("huge") == "ExceedsMaxQuota", "a reason")
    create(paper, jobset("lost", labels={"kueue.x-k8s.io/queue-name": "nowhere"}))
    paper.wait(lambda: why("lost") == "Misconfigured", "a reason")
    create(paper, jobset("vip", labels={**queue, "kueue.x-k8s.io/priority-class": "high"}))
    paper.wait(lambda: len([p for p in running(paper) if name_of(p).startswith("vip")]) == 3, "vip")
    assert not [pod for pod in running(paper) if name_of(pod).startswith("first")]
    assert why("first") == "WaitingForQuota"


@pytest.mark.slow
def test_pods_of_a_lost_node_stay_until_somebody_lets_go_of_them(
    kubernetes: KubernetesCluster,
) -> None:
    """A forced deletion alone is not enough where only failed pods are replaced: the Job waits
    for a phase that nobody writes."""
    create(kubernetes, jobset(hosts=2))
    pods = wait_running(kubernetes, 2)
    node = pods[1]["spec"]["nodeName"]
    kubernetes.lose_node(node, frozen=True)
    kubernetes.wait(
        lambda: "deletionTimestamp" in kubernetes.pod(name_of(pods[1]))["metadata"], "deletion"
    )
    gone = kubernetes.pod(name_of(pods[1]))
    assert condition(gone, "DisruptionTarget")["reason"] == "DeletionByTaintManager"
    assert condition(kubernetes.get("nodes", node), "Ready")["status"] == "Unknown"
    failed = kubernetes.try_kubectl("logs", name_of(gone))
    assert failed.returncode != 0 and "i/o timeout" in failed.stderr
    force = ("--grace-period=0", "--force", "--wait=false")
    kubernetes.kubectl("delete", "pod", name_of(gone), *force)
    time.sleep(0.5)
    assert kubernetes.pod(name_of(gone)) and len(kubernetes.pods()) == 2
    failed_phase = json.dumps({"status": {"phase": "Failed"}})
    words = ("patch", "pod", name_of(gone), "--subresource=status", "--type=merge")
    kubernetes.kubectl(*words, "-p", failed_phase)
    again = wait_running(kubernetes, 2)
    assert node not in {pod["spec"]["nodeName"] for pod in again}
    assert kubernetes.get("jobs", "run-w-0")["status"].get("failed", 0) == 0
    assert [each.node for each in kubernetes.strangers()].count(node) > 0
    kubernetes.return_node(node)
    kubernetes.wait(
        lambda: node not in {each.node for each in kubernetes.strangers()}, "its pod's end"
    )
    kubernetes.kubectl("delete", "jobset", "run")


@pytest.mark.slow
def test_a_node_that_returns_ends_its_terminating_pods(kubernetes: KubernetesCluster) -> None:
    create(kubernetes, jobset(hosts=2))
    pods = wait_running(kubernetes, 2)
    kubernetes.lose_node(pods[0]["spec"]["nodeName"], frozen=True)
    kubernetes.wait(
        lambda: "deletionTimestamp" in kubernetes.pod(name_of(pods[0]))["metadata"], "deletion"
    )
    kubernetes.return_node(pods[0]["spec"]["nodeName"])
    again = wait_running(kubernetes, 2)
    assert name_of(pods[0]) not in {name_of(pod) for pod in again}
    kubernetes.kubectl("delete", "jobset", "run")


@pytest.mark.slow
def test_a_pod_sees_its_volumes_variables_and_the_api(kubernetes: KubernetesCluster) -> None:
    kubernetes.secret("keys", wandb="abc")
    kubernetes.service_account("trainer", [Rule(("get", "list"), ("pods",), NAMESPACE)])

    def field(name: str, path: str) -> Object:
        return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}

    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    env = [field("IP", "status.podIP"), field("NODE", "spec.nodeName"), field("INDEX", index)]
    secret = {"secretKeyRef": {"name": "keys", "key": "wandb"}}
    env.append({"name": "KEY", "valueFrom": secret})
    root = str(kubernetes.root)
    script = f"""set -e
        echo "$IP $NODE $INDEX $KEY" > {root}/$HOSTNAME.txt
        ip -4 -o addr show dev eth0 | grep -q " $IP/"
        df -k /dev/shm | tail -1 | awk '{{print $2}}' >> {root}/$HOSTNAME.txt
        kubectl get pods -o name | wc -l >> {root}/$HOSTNAME.txt
        kubectl delete pod --all 2>> {root}/$HOSTNAME.txt || true
        echo $$ >> {root}/$HOSTNAME.txt"""
    volumes = [
        {"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
    ]
    mounts = [{"name": "shared", "mountPath": root}, {"name": "shm", "mountPath": "/dev/shm"}]
    spec: Object = {"volumes": volumes, "volumeMounts": mounts, "env": env}
    spec["serviceAccountName"] = "trainer"
    create(kubernetes, jobset(command=["bash", "-c", script], hosts=1, **spec))
    wait_end(kubernetes, "Completed")
    pod = kubernetes.pods()[0]
    lines = (kubernetes.root / "run-w-0-0.txt").read_text().splitlines()
    assert lines[0] == f"{pod['status']['podIP']} {pod['spec']['nodeName']} 0 abc"
    assert lines[1:3] == [str(1 << 20), "1"]
    user = f"system:serviceaccount:{NAMESPACE}:trainer"
    assert f'User "{user}" cannot list resource' in lines[3] or "cannot delete" in lines[3]
    assert lines[-1] == "1"
    kubernetes.kubectl("delete", "jobset", "run")


@pytest.mark.slow
def test_events_say_why_a_pod_does_not_start(kubernetes: KubernetesCluster) -> None:
    kubernetes.kubelet.missing_images.add("image")
    secret = {"secretKeyRef": {"name": "none", "key": "k"}}
    create(kubernetes, jobset(hosts=1, env=[{"name": "KEY", "valueFrom": secret}]))
    kubernetes.wait(kubernetes.pods, "a pod")
    name = name_of(kubernetes.pods()[0])

    def reason() -> object:
        statuses = kubernetes.pod(name)["status"].get("containerStatuses") or [{"state": {}}]
        return statuses[0]["state"].get("waiting", {}).get("reason")

    kubernetes.wait(lambda: reason() == "ImagePullBackOff", "ImagePullBackOff")
    kubernetes.kubelet.missing_images.clear()
    kubernetes.wait(lambda: reason() == "CreateContainerConfigError", "the secret's error")
    assert ("Failed", 'Error: secret "none" not found') in events(kubernetes, name)
    assert "ImagePullBackOff" not in kubernetes.kubectl("events", "--for", f"pod/{name}")[:40]
    kubernetes.secret("none", k="1")
    wait_running(kubernetes, 1)
    kubernetes.kubectl("delete", "jobset", "run")


@pytest.mark.slow
def test_folders_of_nodes_and_secrets_are_mounted(
    kubernetes: KubernetesCluster, tmp_path: Path
) -> None:
    """A folder that is not there is said as kubelets say it, and looked for again."""
    kubernetes.secret("keys", token="abc")
    place, data, keys = (tmp_path / name for name in ("place", "data", "keys"))
    data.mkdir()
    keys.mkdir()
    volumes: list[Object] = [
        {"name": "data", "hostPath": {"path": str(place), "type": "Directory"}},
        {"name": "keys", "secret": {"secretName": "keys"}},
    ]
    mounts = [{"name": "data", "mountPath": str(data), "subPath": "part"}]
    mounts.append({"name": "keys", "mountPath": str(keys)})
    script = f"cat {keys}/token > {data}/copy; echo x > {keys}/token || exit 0; exit 1"
    create(
        kubernetes,
        jobset(command=["sh", "-c", script], hosts=1, volumes=volumes, volumeMounts=mounts),
    )
    kubernetes.wait(kubernetes.pods, "a pod")
    name = name_of(kubernetes.pods()[0])
    text = f"hostPath type check failed: {place} is not a directory"
    said = ("FailedMount", f'MountVolume.SetUp failed for volume "data" : {text}')
    kubernetes.wait(lambda: said in events(kubernetes, name), "the event")
    (place / "part").mkdir(parents=True)
    wait_end(kubernetes, "Completed")
    assert (place / "part/copy").read_text() == "abc" and not list(data.iterdir())
    kubernetes.kubectl("delete", "jobset", "run")


@pytest.mark.slow
def test_a_claim_of_one_node_is_not_for_a_second(
    kubernetes: KubernetesCluster, tmp_path: Path
) -> None:
    kubernetes.claim("disk", tmp_path, "ReadWriteOnce")
    volumes = [{"name": "disk", "persistentVolumeClaim": {"claimName": "disk"}}]
    mounts = [{"name": "disk", "mountPath": str(tmp_path)}]
    create(kubernetes, jobset(hosts=2, volumes=volumes, volumeMounts=mounts))
    wait_running(kubernetes, 1)

    def said() -> list[str]:
        pending = [pod for pod in kubernetes.pods() if pod["status"]["phase"] == "Pending"]
        return [text for pod in pending for _, text in events(kubernetes, name_of(pod))]

    kubernetes.wait(lambda: any("Multi-Attach error" in text for text in said()), "the error")
    kubernetes.kubectl("delete", "jobset", "run")


def test_a_quota_is_said_on_the_job(paper: KubernetesCluster) -> None:
    paper.quota("few", **{"requests.nvidia.com/gpu": "16"})
    create(paper, jobset())
    paper.wait(
        lambda: any("exceeded quota: few" in text for _, text in events(paper, "run-w-0")),
        "the event",
    )
    assert len(paper.pods()) == 2
    message = next(text for reason, text in events(paper, "run-w-0") if reason == "FailedCreate")
    assert "requested: requests.nvidia.com/gpu=8, used: requests.nvidia.com/gpu=16" in message
