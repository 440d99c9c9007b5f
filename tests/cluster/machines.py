"""The private cluster that cluster.sh makes. (Needs no pytest: benchmarks/launch.py has one
too.)"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.limits import HANGS

HERE = Path(__file__).resolve().parent
HEAD = "head"


class NoCluster(Exception):
    """Why there can be no cluster on this machine."""


@dataclass(frozen=True)
class Process:
    """A process on a host of the cluster; `pid` is the machine's number of it, so that a test
    can send it a signal."""

    host: str
    pid: int
    argv: tuple[str, ...]
    mark: str  # its TRAINKIT_RUN

    @property
    def started(self) -> bool:
        """Whether an agent started it: it carries a mark, and is neither agent nor keeper."""
        return bool(self.mark) and "/agents/" not in self.mark

    def belongs_to(self, run: str) -> bool:
        """Whether a run started it: by its mark, or because its command line names the run
        (supervisor, agents, ssh and pdsh)."""
        return self.mark.startswith(f"{run}/") or any(run in word for word in self.argv)


class Cluster:
    """A head and some nodes, up from the construction to `close`.

    Args:
        folder: must not exist; gone after `close`. nodes: how many, named node1 and so on; at
        most 9. slurm: whether Slurm runs on them. accounting: slurmdbd too, with a database of
        its own; slurmctld then forgets jobs after seconds. unified: nodes have cgroup v2, where
        the machine has it to give. cgroup: Slurm tracks processes by cgroup, where the machine
        has what that takes; otherwise by parents (linuxproc).

    Raises NoCluster where this machine cannot have one.
    """

    def __init__(
        self,
        folder: Path,
        nodes: int = 3,
        *,
        slurm: bool = False,
        accounting: bool = False,
        cgroup: bool = True,
        unified: bool = True,
    ) -> None:
        self.folder, self.nodes = folder, tuple(f"node{i + 1}" for i in range(nodes))
        for own in ("/dev/shm", "/run", "/srv"):
            if folder.is_relative_to(own):
                raise NoCluster(f"TMPDIR is below {own}, of which each host has one of its own")
        python = Path(sys.executable)
        env = {
            **os.environ,
            "TK_OPEN": " ".join(
                map(str, [*reversed(python.parents), *reversed(python.resolve().parents)])
            ),
            "TK_SLURM": str(int(slurm)),
            "TK_SACCT": str(int(accounting)),
            "TK_CGROUP": str(int(cgroup)),
            "TK_CGROUP2": str(int(unified)),
        }
        argv, pipe = ["bash", str(HERE / "cluster.sh"), str(folder), str(nodes)], subprocess.PIPE
        # a session of its own: Ctrl-C in the tests' terminal ends the tests, whose end closes
        # stdin, which takes the cluster down in good order
        self._shell = subprocess.Popen(
            argv, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        assert (
            self._shell.stdin is not None
            and self._shell.stdout is not None
            and self._shell.stderr is not None
        )
        self._in, self._out, self._err = self._shell.stdin, self._shell.stdout, self._shell.stderr
        if not self._out.readline().startswith("up: "):
            said = self._err.read().strip()
            self.close()
            raise NoCluster(said.removeprefix("cluster: "))

    def close(self) -> None:
        """Take it down; everything of it is gone afterwards."""
        self._in.close()
        self._shell.wait(timeout=600)
        self._out.close()
        self._err.close()

    def _tell(self, verb: str, host: str) -> None:
        self._in.write(f"{verb} {host}\n")
        self._in.flush()
        answer = self._out.readline().strip()
        assert answer == "ok", f"{verb} {host}: {answer or self._err.read()}"

    def cut(self, host: str) -> None:
        """Pull a node's network cable: nothing is said to anybody."""
        self._tell("cut", host)

    def heal(self, host: str) -> None:
        """Plug it in again."""
        self._tell("heal", host)

    def crash(self, host: str) -> None:
        """SIGKILL everything on a host, as a power failure does; its peers' connections are
        reset."""
        self._tell("crash", host)

    def boot(self, host: str) -> None:
        """Start a crashed host."""
        self._tell("boot", host)

    def command(self, host: str, *argv: str) -> list[str]:
        """The words that run `argv` on `host`; on the head the process is that very program."""
        return [str(self.folder / "on"), host, *argv]

    def pid(self, host: str) -> int:
        """Of the process that keeps its namespaces."""
        return int((self.folder / "hosts" / host / "pid").read_text())

    def on(self, host: str, *argv: str, cwd: Path | None = None, timeout: float = HANGS) -> str:
        """What `argv` prints on `host`; fails unless it exits with 0."""
        done = subprocess.run(
            self.command(host, *argv),
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, (
            f"{argv} on {host} exited with {done.returncode}\n{done.stdout}{done.stderr}"
        )
        return done.stdout

    def processes(self) -> list[Process]:
        """All processes of all hosts, as seen from outside (so that it does not depend on
        trainkit's own way of finding them); zombies left out."""
        hosts = {
            self._uts(folder): folder.name
            for folder in (self.folder / "hosts").iterdir()
            if (folder / "ns").exists()
        }
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                host = hosts.get(os.readlink(entry / "ns" / "uts"))
                if (
                    host is None
                    or (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                ):
                    continue
                words = (
                    (entry / "cmdline")
                    .read_bytes()
                    .decode(errors="replace")
                    .rstrip("\0")
                    .split("\0")
                )
                variables = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue  # it has ended meanwhile
            if words[:1] == ["nsenter"]:
                continue  # the test's own way into the host
            mark = next(
                (v.partition("=")[2] for v in variables if v.startswith("TRAINKIT_RUN=")), ""
            )
            found.append(Process(host, int(entry.name), tuple(words), mark))
        return found

    def _uts(self, folder: Path) -> str:
        return (folder / "ns").read_text().split()[1]

    def processes_of(self, run: str) -> list[Process]:
        """What there is of a run on any host."""
        return [p for p in self.processes() if p.belongs_to(run)]

    def strangers(self) -> list[Process]:
        """What runs on the nodes besides what booted with them, and on the head below trainkit's
        name: nothing, between two tests."""
        booted = ("host.sh", "sleep 86400", "sshd: /usr/sbin/sshd -E", "/usr/sbin/sshd -E")
        words = {p: " ".join(p.argv) for p in self.processes()}
        return [
            p
            for p, text in words.items()
            if not any(w in text for w in booted)
            and (p.host != HEAD or p.mark or "trainkit" in text or "run-keeper" in text)
        ]

    def kill(self, *processes: Process, number: int = signal.SIGKILL) -> None:
        """Send a signal to processes of the hosts; one that has ended meanwhile is fine."""
        for process in processes:
            try:
                os.kill(process.pid, number)
            except ProcessLookupError:
                continue
