"""The documents that Kubernetes gets."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.launch.kubernetes.pod_jobs import TABLES, pod_job, run_of
from trainkit.base.errors import Exit
from trainkit.jobs.schema import Job
from trainkit.launch.kubernetes.documents import rows_at, table_at, text_at, value_at
from trainkit.launch.kubernetes.manifest import (
    LONGEST_NAME,
    array_manifest,
    jobset_manifest,
    jobset_name,
)

CHECKER = Path(__file__).parent / "check_manifests.py"


def written(job: Job, **how: list[str]) -> dict[str, object]:
    run = run_of(job)
    return jobset_manifest(job, run, jobset_name(job, run, 1), left_out=how.get("left_out", ()))


def parts(document: dict[str, object], at: int = 0) -> tuple[dict[str, object], ...]:
    """(the Job, its pods, their container) of a replicated job."""
    job = table_at(rows_at(document, "spec", "replicatedJobs")[at], "template", "spec")
    pod = table_at(job, "template", "spec")
    return job, pod, rows_at(pod, "containers")[0]


@pytest.mark.parametrize(
    ("job", "number", "name"),
    [
        ("small", 1, "small-20261120-104500-3fa9-1"),
        ("7b_cool_", 12, "j-7b-cool-20261120-104500-3fa9-12"),
        ("a-very-long-name-of-a-job-indeed", 1, "a-very-long-name-of-a-job-20261120-104500-3fa9-1"),
    ],
)
def test_names_fit_into_those_of_pods(job: str, number: int, name: str, tmp_path: Path) -> None:
    made = pod_job(tmp_path, name=job)
    found = jobset_name(made, run_of(made), number)
    assert len(found) <= LONGEST_NAME and re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])", found)
    assert len(f"{found}-w-0-99999-abcde") <= 63
    assert found == name[: len(name)] if len(name) <= LONGEST_NAME else found.endswith("-3fa9-1")


def test_a_pod_a_host(tmp_path: Path) -> None:
    made = pod_job(tmp_path, "few-gpus")
    document = written(made, left_out=["n2", "n1"])
    job, pod, container = parts(document)
    assert (job["completions"], job["parallelism"], job["backoffLimit"]) == (2, 2, 0)
    assert (job["completionMode"], job["podReplacementPolicy"]) == ("Indexed", "Failed")
    assert pod["restartPolicy"] == "Never" and table_at(document, "spec")["suspend"] is True
    run = run_of(made)
    assert container["command"] == [
        *("python3", "-I", "-S", f"{run.code}/trainkit/launch/kubernetes/pod.py"),
        *(str(run.path), "demo-20261120-104500-3fa9-1", "--agent"),
    ]
    asked = {"nvidia.com/gpu": "2"}
    assert container["resources"] == {"requests": asked, "limits": asked}
    assert '"NotIn", "values": ["n1", "n2"]' in json.dumps(pod["affinity"])
    assert "kueue.x-k8s.io/podset-preferred-topology" in json.dumps(job)
    labels = table_at(document, "metadata", "labels")
    assert labels["trainkit/run"] == run.id and labels["kueue.x-k8s.io/queue-name"] == "q"
    # the supervisor has its own pod, which alone may ask the API, and goes where it likes
    small, alone, supervisor = parts(document, 1)
    assert (small["completions"], small["backoffLimit"]) == (1, 0)
    assert alone["automountServiceAccountToken"] and not pod["automountServiceAccountToken"]
    assert supervisor["resources"] == {"requests": {}, "limits": {}} and "affinity" not in alone
    assert supervisor["command"] == [*container["command"][:-1], "--supervise"]


def test_a_lost_pod_is_replaced_and_an_ended_run_is_not(tmp_path: Path) -> None:
    job, _, _ = parts(written(pod_job(tmp_path)))
    first, second = rows_at(job, "podFailurePolicy", "rules")
    assert first["action"] == "Ignore" and rows_at(first, "onPodConditions")[0] == {
        "type": "DisruptionTarget",
        "status": "True",
    }
    codes = value_at(second, "onExitCodes", "values")
    assert second["action"] == "FailJob" and isinstance(codes, list) and codes == sorted(codes)
    assert {int(Exit.RANK_USER), int(Exit.CANCELLED), int(Exit.PREEMPTED)} < set(codes)
    assert not {0, 137, 143} & set(codes)
    assert job["backoffLimit"] == 3


def test_what_jobs_toml_asks_for(tmp_path: Path) -> None:
    document = written(pod_job(tmp_path, "gpus"))
    _, pod, container = parts(document)
    assert text_at(container, "resources", "limits", "nvidia.com/gpu") == "8"
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert pod["securityContext"] == {"runAsUser": 1000, "runAsGroup": 1000}
    assert pod["dnsPolicy"] == "ClusterFirstWithHostNet" and pod["hostNetwork"] is True
    assert pod["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "a", "operator": "Equal", "value": "b"},
        {"operator": "Exists"},
    ]
    env = {str(each["name"]): table_at(each, "valueFrom") for each in rows_at(container, "env")}
    assert env["HF_TOKEN"] == {"secretKeyRef": {"name": "hub", "key": "token", "optional": False}}
    assert value_at(env["WANDB_API_KEY"], "secretKeyRef", "optional") is True
    assert env["TRAINKIT_POD_UID"] == {"fieldRef": {"fieldPath": "metadata.uid"}}
    assert "priorityClassName" not in pod
    assert table_at(document, "metadata", "labels")["kueue.x-k8s.io/priority-class"] == "high"
    mounts = {
        str(each["mountPath"]): each.get("readOnly") for each in rows_at(container, "volumeMounts")
    }
    assert mounts == {"/dev/shm": None, "/shared": False, "/r": True}
    assert rows_at(pod, "volumes")[0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    _, alone, supervisor = parts(document, 1)
    assert (
        text_at(supervisor, "resources", "requests", "cpu") == "1" and "nodeSelector" not in alone
    )


def test_units_of_a_stage(tmp_path: Path) -> None:
    job = pod_job(tmp_path, "gpus")
    made = array_manifest(job, "prep", ["sh", "-c", "echo $(A)"], 9, 3, run="x", seconds=60)
    spec = table_at(made, "spec")
    assert (spec["completions"], spec["parallelism"], spec["backoffLimitPerIndex"]) == (9, 3, 2)
    assert rows_at(spec, "podFailurePolicy", "rules")[1]["action"] == "FailIndex"
    container = rows_at(spec, "template", "spec", "containers")[0]
    assert container["command"] == ["sh", "-c", "echo $$(A)"]
    assert value_at(container, "resources", "limits") == {"cpu": "96", "memory": "1.5Ti"}
    assert value_at(spec, "template", "spec", "activeDeadlineSeconds") == 60


@pytest.mark.slow
@pytest.mark.parametrize("which", TABLES)
def test_the_published_schemas_take_them(which: str, tmp_path: Path) -> None:
    """JobSet's definition (TRAINKIT_JOBSET_CRD: config/components/crd/bases of a release) and
    batch/v1 (TRAINKIT_KUBERNETES_VALIDATE_PYTHON: a Python with kubernetes-validate)."""
    crd, python = (
        os.environ.get(f"TRAINKIT_{name}", "")
        for name in ("JOBSET_CRD", "KUBERNETES_VALIDATE_PYTHON")
    )
    if not crd or not python:
        pytest.skip("needs TRAINKIT_JOBSET_CRD and TRAINKIT_KUBERNETES_VALIDATE_PYTHON")
    job = pod_job(tmp_path / "job", which)
    documents = [
        written(job, left_out=["n1", "n2"]),
        array_manifest(job, "prep", ["true"], 3, 2, run="x", resources={"nvidia.com/gpu": 1}),
    ]
    spoiled = json.loads(json.dumps(documents[0]).replace('"parallelism"', '"paralelism"'))
    for found, code in ((documents, 0), ([spoiled], 1)):
        done = subprocess.run(
            [python, str(CHECKER), crd],
            input=json.dumps(found),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
