"""A run of very many pods, which are on paper: what is asked of the API does not grow with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kubernetes.cluster import KubernetesCluster
from tests.kubernetes.kube_project import make_kube_project
from trainkit.base.errors import Exit
from trainkit.launch.kubernetes.own_jobsets import OwnJobSets
from trainkit.runs.folder import RunFolder


@pytest.mark.usefixtures("kubectl")
@pytest.mark.parametrize("hosts", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_it_is_submitted_looked_at_and_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: int
) -> None:
    cluster = KubernetesCluster(tmp_path / "many", nodes=hosts, paper=True)
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    try:
        project = make_kube_project(cluster.root / "project", cluster)
        batch = f"training.global_batch_size={4 * hosts}"
        run = project.submit("--set", f"nodes={hosts}", "--set", batch)

        def all_run() -> bool:
            phases = [pod["status"].get("phase") for pod in cluster.pods()]
            return phases.count("Running") == hosts

        cluster.wait(all_run, "all pods")
        assert project.document("status", run.name)["state"] == "queued"
        before = len(cluster.server.requests)
        OwnJobSets.of(RunFolder(run)).replace_lost(project.jobset(run), pytest.fail)
        asked = [path for *_, path in cluster.server.requests[before:] if "/nodes/" in path]
        assert len(asked) == 20, "each is a call of kubectl"
        project.invoke("cancel", run.name, exit=Exit.CANCELLED)
        assert not cluster.pods()
    finally:
        cluster.close()
    assert not cluster.problems()
