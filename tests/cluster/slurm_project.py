"""Projects whose tasks are typed on the head of a cluster with Slurm."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.machines import HEAD, Cluster
from tests.cluster.on_head import ClusterProject, Person, make_project
from tests.conftest import HANGS, wait_for

# One thread a rank everywhere: another number, which follows from the cores of a machine, adds up
# in another order, and losses are compared bit by bit.
CLUSTER = """
[clusters.queue]
launcher = "slurm"
python = "{path}/python"
ranks_per_node = 2
env = {{ OMP_NUM_THREADS = "1" }}
watch = {{ connect = 300, start = 1800, lease = 30, grace = 1 }}

[clusters.here]
ranks_per_node = 4
env = {{ OMP_NUM_THREADS = "1" }}
"""
# Ranks that count steps in a file each, 0.1 s a step, as a trainer that saves at every step would;
# the run is over at step `last`, which none does before
# the test lets it.
COUNTING = """
import os, signal, time
path = f"{folder}/count-{{rank}}"
step = int(open(path).read()) if os.path.exists(path) else 0
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM, signal.SIGUSR1}})
while step < {last}:
    time.sleep(0.1)
    if signal.sigpending():
        os._exit(12)
    if step == {last} - 1 and not os.path.exists("{folder}/may-end"):
        continue
    step += 1
    open(path + ".new", "w").write(str(step)); os.replace(path + ".new", path)
    beat(step)
done()
"""


@dataclass
class SlurmProject(ClusterProject):
    """A project with a job for two nodes of Slurm's, two ranks each; its ranks are the trainer's
    unless told otherwise."""

    def slurm(self, **options: str | int | bool) -> None:
        """Options of sbatch for the job."""
        text = (self.path / "jobs.toml").read_text()
        values = "".join(
            f"{name.replace('_', '-')} = {json.dumps(value)}\n" for name, value in options.items()
        )
        (self.path / "jobs.toml").write_text(f"{text}\n[jobs.random.slurm]\n{values}")

    def ranks_count(self, last: int) -> None:
        """Ranks without torch that count steps; see COUNTING."""
        self.ranks_do(COUNTING.format(folder=self.path, last=last))

    def may_end(self) -> None:
        """What the test has to do is done: ranks that count may do their last step."""
        (self.path / "may-end").touch()

    def count(self) -> int:
        """The step that rank 0 has counted to."""
        path = self.path / "count-0"
        return int(path.read_text() or 0) if path.exists() else 0  # it may be half written

    def jobs(self) -> list[str]:
        """Slurm's jobs that are not over."""
        return self.cluster.on(HEAD, "squeue", "--noheader", "--format=%i").split()

    def wait_over(self) -> None:
        """Until no job is left: one is over somewhat later than its run, or its task."""
        wait_for(lambda: not self.jobs(), "Slurm's jobs to be over")

    def job_state(self, id: str) -> str:
        """Slurm's word about one."""
        return self.cluster.on(
            HEAD, "squeue", "--noheader", "--states=all", f"--jobs={id}", "--format=%T"
        ).strip()

    def job_nodes(self, id: str) -> str:
        """Its node list."""
        return self.cluster.on(
            HEAD, "squeue", "--noheader", "--states=all", f"--jobs={id}", "--format=%N"
        ).strip()

    def node_state(self, host: str) -> str:
        """Slurm's word about a node."""
        return self.cluster.on(
            HEAD,
            "sinfo",
            "--noheader",
            "--Node",
            "--partition=main",
            f"--nodes={host}",
            "--format=%T",
        ).strip()

    def idle(self) -> int:
        """How many nodes have nothing to do."""
        return len(
            self.cluster.on(
                HEAD,
                "sinfo",
                "--noheader",
                "--Node",
                "--partition=main",
                "--states=idle",
                "--format=%N",
            ).split()
        )

    def submit(self, *words: str) -> tuple[Path, str]:
        """`train random --detach`: (run folder, Slurm's number)."""
        self.invoke("train", "random", "--detach", *words)
        run = self.runs()[-1]
        return run, self.slurm_jobs(run)[-1]["id"]

    def slurm_jobs(self, run: Path) -> list[dict[str, Any]]:
        """Entries of launch/slurm.json."""
        entries = json.loads((run / "launch" / "slurm.json").read_text())["jobs"]
        assert isinstance(entries, list)
        return entries

    def events(self, run: Path, attempt: int) -> dict[str, dict[str, Any]]:
        """The last event of each kind of an attempt."""
        path = run / "attempts" / str(attempt) / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return {event["event"]: event for event in map(json.loads, lines)}

    def wait_state(self, run: Path, state: str, timeout: float = HANGS) -> dict[str, Any]:
        """`status` once the run is in this state."""
        value: dict[str, Any] = {}

        def reached() -> bool:
            value.update(json.loads(self.invoke("status", run.name, "--json").stdout))
            return bool(value["state"] == state)

        wait_for(reached, f"run {run.name} to be {state}", timeout=timeout)
        return value

    def wait_step(self, step: int, timeout: float = HANGS) -> None:
        """Until rank 0 has counted so far."""
        wait_for(lambda: self.count() >= step, f"step {step}", timeout=timeout)


def make_slurm_project(
    folder: Path, cluster: Cluster, person: Person | None = None
) -> SlurmProject:
    """The project of make_project with a cluster `queue`, which its job runs on."""
    make_project(folder, cluster, person)
    text = (folder / "jobs.toml").read_text().replace('cluster = "pair"', 'cluster = "queue"')
    (folder / "jobs.toml").write_text(CLUSTER.format(path=folder) + text)
    return SlurmProject(folder, cluster=cluster, person=person)
