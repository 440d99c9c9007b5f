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
from tests.programs import put_program

JOBS = """
[clusters.pair]
launcher = "ssh"
hostfile = "{path}/hostfile"
python = "{python}"
env = {{ OMP_NUM_THREADS = "1" }}
watch = {{ connect = 120, start = 600, lease = 8, grace = 1 }}
"""
# a job for two nodes, two ranks each, on random tokens
RANDOM = """
[models.tiny]
num_layers = 2
hidden_size = 32
num_attention_heads = 2
seq_length = 16
vocab_size = 128

[jobs.random]
cluster = "{cluster}"
model = "tiny"
dataset = "mock"
nodes = 2
training.micro_batch_size = 2
training.global_batch_size = 8
training.train_iters = 30
training.lr = 1e-2
training.eval_iters = 1
training.eval_interval = 10
training.save_interval = 5
"""


@dataclass(frozen=True)
class Person:
    """An ordinary user of the cluster's.

    Args:
        name: ann or ben.
        umask: on the head and on the nodes.
    """

    name: str
    umask: int

    def words(self, *argv: str) -> list[str]:
        """The words that run `argv` as that user, in place: the pid stays."""
        return ["setpriv", "--reuid", self.name, "--regid", self.name, "--init-groups", *argv]

    def cannot_run(self, cluster: Cluster) -> str:
        """Why that user cannot run a job of this checkout's; "" where it can."""
        argv = self.words(
            sys.executable, "-c", "import sys; open(sys.argv[1]).close()", str(HERE / "rank.py")
        )
        done = subprocess.run(
            cluster.command(HEAD, *argv), cwd="/", capture_output=True, text=True, check=False
        )
        return done.stderr.strip()


@dataclass
class ClusterProject(Project):
    """A project whose tasks are typed on the head, by root or by a person; its folder is one
    that all hosts share."""

    cluster: Cluster = field(kw_only=True)
    person: Person | None = field(default=None, kw_only=True)

    def start(self, *words: str, **more: str) -> subprocess.Popen[str]:
        """Start `invoke WORDS...` on the head, in a session of its own; the pid is that of
        `invoke` itself."""
        argv, pipe = [sys.executable, "-m", "invoke", *words], subprocess.PIPE
        if self.person is not None:
            own = {
                "HOME": str(self.path.parent),
                "USER": self.person.name,
                "LOGNAME": self.person.name,
                "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            }
            return subprocess.Popen(
                self.cluster.command(HEAD, *self.person.words(*argv)),
                cwd=self.path,
                env={**own, "COLUMNS": "200", **more},
                stdin=subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                text=True,
                start_new_session=True,
                umask=self.person.umask,
            )
        env, head = self.environment(**more), self.cluster.pid(HEAD)
        return forkserver.Popen(
            argv,
            inside=head,
            cwd=self.path,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
            start_new_session=True,
        )

    def hosts(self, *lines: str) -> None:
        """Write the hostfile."""
        (self.path / "hostfile").write_text("".join(f"{line}\n" for line in lines))

    def give(self) -> None:
        """All of it to the person whose project it is."""
        if self.person is not None:
            self.cluster.on(
                HEAD, "chown", "-R", f"{self.person.name}:{self.person.name}", str(self.path)
            )

    def ranks_do(self, code: str) -> None:
        """Have every rank run this Python (see rank.py) instead of training."""
        (self.path / "does.py").write_text(textwrap.dedent(code))
        with open(self.path / "jobs.toml", "a") as file:
            file.write(f'env = {{ RANK_DOES = "{self.path}/does.py" }}\n')


def rank_python(folder: Path) -> Path:
    """An interpreter that starts rank.py in the place of the trainer where the job's environment
    says RANK_DOES: a rank without torch begins in a tenth of the time."""
    return put_program(
        folder,
        "python",
        f"""#!/bin/bash
if [ -n "$RANK_DOES" ] && [[ " $* " == *"/trainkit/train/main.py "* ]]; then
    exec {sys.executable} -I {HERE / "rank.py"} "$@"
fi
exec {sys.executable} "$@"
""",
    )


def make_project(folder: Path, cluster: Cluster, person: Person | None = None) -> ClusterProject:
    """A project with a job on random tokens for two of the nodes, two ranks each; a person's
    lies in the home. The nodes' interpreter is a `rank_python`.
    """
    python = rank_python(folder)
    (folder / "tasks.py").write_text("from trainkit.cli.tasks import namespace\n")
    (folder / "jobs.toml").write_text(
        JOBS.format(path=folder, python=python) + RANDOM.format(cluster="pair")
    )
    project = ClusterProject(folder, cluster=cluster, person=person)
    project.hosts("node1 slots=2", "node2 slots=2")
    if person is not None:
        (folder.parent / ".bashrc").write_text(f"umask {person.umask:03o}\n")
        project.give()
    return project
