"""Projects whose runs are JobSets of the stand-in cluster."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.on_head import RANDOM, rank_python
from tests.cluster.slurm_project import COUNTING
from tests.conftest import HANGS, Project, wait_for
from tests.kubernetes.accounts import Rule
from tests.kubernetes.cluster import NAMESPACE, KubernetesCluster

JOBS = """
[clusters.pods]
launcher = "kubernetes"
python = "{python}"
ranks_per_node = 2
root = "{path}"
env = {{ OMP_NUM_THREADS = "1" }}
watch = {{ connect = 120, start = 600, lease = 4, grace = 1 }}

[clusters.pods.kubernetes]
namespace = "{namespace}"
image = "example.org/trainkit:1"
resources = {{ cpu = 1 }}
grace = 120
shm = "64Mi"
volumes = [{{ claim = "shared", mount = "{root}" }}]

[clusters.here]
ranks_per_node = 4
env = {{ OMP_NUM_THREADS = "1" }}
"""

# what docs/kubernetes.md gives the pod of a supervisor
RIGHTS_IN_POD = [
    Rule(("create", "get", "list", "delete"), ("jobsets",)),
    Rule(("get", "list", "patch", "delete"), ("pods",)),
    Rule(("get", "list"), ("jobs", "services", "workloads")),
    Rule(("get",), ("nodes",)),
]


@dataclass
class KubeProject(Project):
    """A project with a job for two pods, two ranks each, below the cluster's shared root; its
    ranks are the trainer's unless a test says otherwise."""

    cluster: KubernetesCluster = field(kw_only=True)

    def environment(self, **more: str) -> dict[str, str]:
        return super().environment(**{"KUBECONFIG": str(self.cluster.kubeconfig), **more})

    def ranks_do(self, code: str) -> None:
        """Have every rank run this Python (tests/cluster/rank.py) instead of training."""
        (self.path / "does.py").write_text(code)
        self.add_to_jobs(f'env = {{ RANK_DOES = "{self.path}/does.py" }}\n')

    def ranks_count(self, last: int) -> None:
        """Ranks without torch that count steps; see COUNTING."""
        self.ranks_do(COUNTING.format(folder=self.path, last=last))

    def may_end(self) -> None:
        """What the test has to do is done: ranks that count may do their last step."""
        (self.path / "may-end").touch()

    def count(self) -> int:
        """The step that all four ranks have counted to."""
        paths = [self.path / f"count-{rank}" for rank in range(4)]
        return min(int(path.read_text()) if path.exists() else 0 for path in paths)

    def wait_step(self, step: int) -> None:
        """Until all ranks have counted so far: they take signals then."""
        wait_for(lambda: self.count() >= step, f"step {step}", timeout=HANGS)

    def options(self, text: str) -> None:
        """More keys of [clusters.pods.kubernetes]."""
        self.edit_jobs("grace = 120\n", f"grace = 120\n{text}\n")

    def submit(self, *words: str) -> Path:
        """`train random --detach`: the run's folder."""
        self.invoke("train", "random", "--detach", *words)
        return self.runs()[-1]

    def jobset(self, run: Path) -> str:
        """The name of its newest JobSet."""
        return str(self.jobsets(run)[-1]["name"])

    def jobsets(self, run: Path) -> list[dict[str, Any]]:
        """Entries of launch/kubernetes.json."""
        entries = json.loads((run / "launch" / "kubernetes.json").read_text())["jobsets"]
        assert isinstance(entries, list)
        return entries

    def pod(self, run: Path, index: int) -> str:
        """The name of the pod of an index that runs now."""
        prefix = f"{self.jobset(run)}-w-0-{index}-"
        found: list[str] = []

        def there() -> bool:
            found[:] = [
                str(pod["metadata"]["name"])
                for pod in self.cluster.pods()
                if str(pod["metadata"]["name"]).startswith(prefix)
                and pod["status"].get("phase") == "Running"
                and "deletionTimestamp" not in pod["metadata"]
            ]
            return bool(found)

        wait_for(there, f"pod {prefix}", timeout=HANGS)
        return found[0]

    def node(self, pod: str) -> str:
        """Where a pod runs."""
        return str(self.cluster.pod(pod)["spec"]["nodeName"])

    def wait_state(self, run: Path, state: str, timeout: float = HANGS) -> dict[str, Any]:
        """`status` once the run is in this state."""
        value: dict[str, Any] = {}

        def reached() -> bool:
            value.update(json.loads(self.invoke("status", run.name, "--json").stdout))
            return bool(value["state"] == state)

        wait_for(reached, f"run {run.name} to be {state}", timeout=timeout)
        return value

    def events(self, run: Path, attempt: int) -> dict[str, dict[str, Any]]:
        """The last event of each kind of an attempt."""
        path = run / "attempts" / str(attempt) / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return {event["event"]: event for event in map(json.loads, lines)}


def make_kube_project(folder: Path, cluster: KubernetesCluster) -> KubeProject:
    """A project in a folder below the cluster's root."""
    folder.mkdir(parents=True)
    python = rank_python(folder)
    (folder / "tasks.py").write_text("from trainkit.cli.tasks import namespace\n")
    text = JOBS.format(path=folder, python=python, namespace=NAMESPACE, root=cluster.root)
    (folder / "jobs.toml").write_text(text + RANDOM.format(cluster="pods"))
    return KubeProject(folder, cluster=cluster)
