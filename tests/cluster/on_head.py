"""Projects whose tasks are typed on the head of the cluster."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

from tests import forkserver
from tests.cluster.machines import HEAD, HERE, Cluster
from tests.conftest import Project

JOBS = """
[clusters.pair]
launcher = "ssh"
hostfile = "{path}/hostfile"
python = "{python}"
env = {{ OMP_NUM_THREADS = "1" }}
watch = {{ connect = 120, start = 600, lease = 8, grace = 1 }}

[models.tiny]
num_layers = 2
hidden_size = 32
num_attention_heads = 2
seq_length = 16
vocab_size = 128

[jobs.random]
cluster = "pair"
model = "tiny"
dataset = "mock"
nodes = 2
training = {{ micro_batch_size = 2, global_batch_size = 8, train_iters = 30, lr = 1e-2, eval_iters = 1, eval_interval = 10, save_interval = 5 }}
"""


@dataclass
class ClusterProject(Project):
    """A project whose tasks are typed on the head; its folder is one that all hosts share."""

    cluster: Cluster = field(kw_only=True)

    def start(self, *words: str, **more: str) -> subprocess.Popen[str]:
        """Start `invoke WORDS...` on the head, in a session of its own; the pid is that of `invoke` itself."""
        argv, pipe, env, head = [sys.executable, "-m", "invoke", *words], subprocess.PIPE, self.environment(**more), self.cluster.pid(HEAD)
        return forkserver.Popen(
            argv, inside=head, cwd=self.path, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )

    def hosts(self, *lines: str) -> None:
        """Write the hostfile."""
        (self.path / "hostfile").write_text("".join(f"{line}\n" for line in lines))

    def ranks_do(self, code: str) -> None:
        """Have every rank run this Python (see rank.py) instead of training."""
        (self.path / "does.py").write_text(textwrap.dedent(code))
        with open(self.path / "jobs.toml", "a") as file:
            file.write(f'env = {{ RANK_DOES = "{self.path}/does.py" }}\n')


def make_project(folder: Path, cluster: Cluster) -> ClusterProject:
    """A project with a job on random tokens for two of the nodes, two ranks each.

    The nodes' interpreter is a script that starts rank.py in the place of the trainer where the job's environment says RANK_DOES: a rank
    without torch begins in a tenth of the time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    python = folder / "python"
    python.write_text(
        f"""#!/bin/bash
if [ -n "$RANK_DOES" ] && [[ " $* " == *"/trainkit/train/main.py "* ]]; then exec {sys.executable} -I {HERE / "rank.py"} "$@"; fi
exec {sys.executable} "$@"
"""
    )
    python.chmod(0o755)
    (folder / "tasks.py").write_text("from trainkit.cli.tasks import namespace\n")
    (folder / "jobs.toml").write_text(JOBS.format(path=folder, python=python))
    project = ClusterProject(folder, cluster=cluster)
    project.hosts("node1 slots=2", "node2 slots=2")
    return project
