"""Claim: from `invoke train` to the first step takes at most 1.2 times what torchrun takes that
is typed by hand on every host.

    python benchmarks/launch.py [--deepspeed PYTHON] [--repeats 3] [--agents 16,64,128] [--stubs
    10,100,1000] [--quick] python benchmarks/launch.py --slurm [--repeats 5] [--hosts 1,2,4]
    [--quick]

First table: the same trainer on the same tiny model, one rank a host, on 1, 2 and 4 hosts of the
cluster of namespaces that tests/cluster uses (real sshd, addresses of their own, one shared
disk; all hosts share this machine's cores, so importing torch N times takes its time on every
side). Seconds from the call to the first step in metrics.jsonl. trainkit: everything `invoke
train` does (reading the job, its plan, the code snapshot, the supervisor, agreement of all
hosts). torchrun: one ssh a host with torch.distributed.run, all at once, in a run folder that is
there already. deepspeed: its launcher over pdsh with that folder; PYTHON is an interpreter that
has DeepSpeed (DS_BUILD_OPS=0 pip install deepspeed) and torch. Cold: the machine's page cache
dropped, no compiled Python beside the run's code, and for trainkit a root without a snapshot.
Warm: the best of the repeats after it. The sides take turns; the machine should have nothing
else to do (its load before the table is printed). Needs root and the packages that
tests/cluster/cluster.sh names.

Second table: seconds from the start of so many agents to what follows, on this machine over
loopback: all agreed (proof, hello, code hashed, slots), one process started by each, all of them
stopped with the proof that nothing is left, all agents gone. Real agents are processes, two
each; stub agents are coroutines of one other process that speak the protocol, send heartbeats as
often as real ones and start nothing: they show what the supervisor itself costs.

With --slurm another table alone: the same trainer, model and interpreter through the Slurm of
that cluster. trainkit: from `invoke train` typed on its head to the first step in metrics.jsonl,
so everything above and the queue. torchrun: from `sbatch` typed to the same line, of a script as
people write it, in which srun starts torch.distributed.run on every node; its run folder is
there already. Before each start all nodes are idle: a job begins when slurmctld looks. The sides
take turns, and who begins changes from turn to turn; the first turn, which fills the page cache,
is not counted. Medians, lowest and highest of the turns; no limit is set for the ratio. Queue:
Slurm's own count of the seconds from submission to start, in whole seconds, the median too.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from multiprocessing import get_context
from pathlib import Path
from statistics import median

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))

from tests.cluster.machines import HEAD, Cluster, NoCluster  # noqa: E402
from tests.launch.stub_agents import StubAgent  # noqa: E402
from trainkit.base.process import raise_open_file_limit  # noqa: E402
from trainkit.jobs.clusters import Cluster as Description, WatchLimits  # noqa: E402
from trainkit.launch.hosts.hostfile import Host  # noqa: E402
from trainkit.launch.launchers.contract import Launcher, TransportExit, Transports  # noqa: E402
from trainkit.launch.launchers.local import local_argv, start_local_agent  # noqa: E402
from trainkit.launch.launchers.transports import TransportPerHost  # noqa: E402
from trainkit.launch.protocol.frames import (  # noqa: E402
    Frame,
    ProcessesStopped,
    ProcessSpec,
    ProcessStarted,
    StartProcesses,
    StopProcesses,
)
from trainkit.launch.protocol.framing import HEARTBEAT_SECONDS  # noqa: E402
from trainkit.launch.protocol.session_document import read_session  # noqa: E402
from trainkit.launch.session import Session  # noqa: E402
from trainkit.launch.supervise.orphan_sweep import open_agent_pool, wait_for_consistent_agents  # noqa: E402

LIMIT = 1.2  # trainkit's seconds over torchrun's
HOSTS = (1, 2, 4)
LONGEST = 180.0  # seconds to a first step
JOBS = """
[clusters.hosts]
{where}
env = {{ OMP_NUM_THREADS = "1" }}

[models.tiny]
num_layers = 2
hidden_size = 32
num_attention_heads = 2
seq_length = 16
vocab_size = 128

[jobs.tiny]
cluster = "hosts"
model = "tiny"
dataset = "mock"
nodes = {hosts}
training.micro_batch_size = 2
training.global_batch_size = 8
training.train_iters = 3
training.lr = 1e-2
training.eval_iters = 0
"""
BATCH = """#!/bin/bash
#SBATCH --nodes={hosts} --ntasks-per-node=1 --output={run}/batch.out
export OMP_NUM_THREADS=1
head=$(scontrol show hostnames | head -1)
srun bash -c "{python} -m torch.distributed.run --nnodes {hosts} --nproc-per-node 1 \\
    --master-addr $head --master-port 29511 --node-rank \\$SLURM_NODEID {words}"
"""
CACHES = Path("/proc/sys/vm/drop_caches")


def forget_files() -> bool:
    """Drop the machine's page cache; False where that is not allowed."""
    os.sync()
    try:
        CACHES.write_text("3\n")
    except OSError:
        return False
    return True


def forget_bytecode(code: Path) -> None:
    """Take compiled Python from beside the run's code."""
    for folder in code.rglob("__pycache__"):
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Sides:
    """A project on the head for each number of hosts, and how each side starts its trainer."""

    cluster: Cluster
    folder: Path
    deepspeed: str
    where = 'launcher = "ssh"\nhostfile = "{path}/hostfile"'  # below [clusters.hosts]

    def project(self, name: str, hosts: int) -> Path:
        """A folder with a job of three steps for so many hosts."""
        project = self.folder / name
        project.mkdir(exist_ok=True)
        (project / "tasks.py").write_text("from trainkit.cli.tasks import namespace\n")
        (project / "jobs.toml").write_text(
            JOBS.format(where=self.where.format(path=project), hosts=hosts)
        )
        (project / "hostfile").write_text("".join(f"node{i + 1} slots=1\n" for i in range(hosts)))
        return project

    def _until_first_step(
        self, project: Path, argv: Sequence[str], metrics: Callable[[], Path | None]
    ) -> float:
        """Start a program on the head and wait for the first step; then for its end."""
        began = time.monotonic()
        with open(project / "output", "wb") as output:
            process = subprocess.Popen(
                self.cluster.command(HEAD, *argv),
                cwd=project,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        while (
            (path := metrics()) is None or not path.exists() or '"step": 1,' not in path.read_text()
        ):
            if process.poll() is not None or time.monotonic() - began > LONGEST:
                process.kill()
                sys.exit(
                    f"no first step: {' '.join(argv)} ended with"
                    f" {process.wait()}\n{(project / 'output').read_text()[-3000:]}"
                )
            time.sleep(0.01)
        took = time.monotonic() - began
        process.wait(timeout=LONGEST)
        return took

    def trainkit(self, project: Path, hosts: int) -> float:
        """`invoke train` as a person types it."""
        known = set((project / "runs").glob("*/*"))

        def metrics() -> Path | None:
            return next(
                (
                    run / "metrics.jsonl"
                    for run in (project / "runs").glob("*/*")
                    if run not in known
                ),
                None,
            )

        return self._until_first_step(
            project, (sys.executable, "-m", "invoke", "train", "tiny"), metrics
        )

    def _given_run(self, project: Path) -> tuple[Path, str]:
        """A run folder with a job and its code and nothing else, and the words of the trainer on
        it."""
        made = min((project / "runs" / "tiny").iterdir())
        run = made.with_name(f"by-hand-{time.monotonic_ns()}")
        run.mkdir()
        shutil.copy(made / "job.json", run / "job.json")
        (run / "code").symlink_to(os.readlink(made / "code"))
        return run, f"{run}/code/trainkit/train/main.py {run} --attempt 1"

    def torchrun(self, project: Path, hosts: int) -> float:
        """One ssh a host, all at once."""
        run, words = self._given_run(project)
        place = "--master-addr 10.77.0.11 --master-port 29511"
        line = (
            f"OMP_NUM_THREADS=1 {sys.executable} -m torch.distributed.run --nnodes {hosts}"
            f" --nproc-per-node 1 {place} --node-rank"
        )
        calls = "".join(f"ssh node{i + 1} '{line} {i} {words}' & " for i in range(hosts))
        return self._until_first_step(
            project, ("bash", "-c", f"{calls} wait"), lambda: run / "metrics.jsonl"
        )

    def deepspeed_launcher(self, project: Path, hosts: int) -> float:
        """DeepSpeed's own launcher over pdsh."""
        run, words = self._given_run(project)
        options = (
            f"--hostfile {project}/hostfile --force_multi --launcher pdsh --no_ssh_check"
            " --no_local_rank --master_addr 10.77.0.11"
        )
        argv = (self.deepspeed, "-m", "deepspeed.launcher.runner", *options.split(), *words.split())
        return self._until_first_step(
            project, ("env", "OMP_NUM_THREADS=1", *argv), lambda: run / "metrics.jsonl"
        )

    def measure(self, hosts: int, repeats: int) -> dict[str, tuple[float, float]]:
        """{side: (cold, best warm)} in seconds."""
        sides = {"trainkit": self.trainkit, "torchrun": self.torchrun} | (
            {"deepspeed": self.deepspeed_launcher} if self.deepspeed else {}
        )
        project = self.project(f"hosts-{hosts}", hosts)
        self.trainkit(project, hosts)  # makes the run whose job and code the others take
        cold, warm = dict[str, float](), {side: list[float]() for side in sides}
        for side, start in sides.items():
            fresh = self.project(f"cold-{hosts}", hosts) if side == "trainkit" else project
            forget_bytecode(project / "code")
            forget_files()
            cold[side] = start(fresh, hosts)
        for _ in range(repeats):
            for side, start in sides.items():
                warm[side].append(start(project, hosts))
        return {side: (cold[side], min(warm[side])) for side in sides}


class Queued(Sides):
    """Both sides submit to Slurm."""

    where = 'launcher = "slurm"'

    def torchrun(self, project: Path, hosts: int) -> float:
        """A script as people write it."""
        run, words = self._given_run(project)
        script = run / "batch.sh"
        script.write_text(BATCH.format(hosts=hosts, run=run, python=sys.executable, words=words))
        # the rest is only there to see a job that ends too early: `sbatch --wait` asks so rarely
        # that it returns up to half a minute late
        line = (
            f"id=$(sbatch --parsable {script}) && while squeue --noheader --jobs=$id 2> /dev/null |"
            f" grep -q .; do sleep 3; done; tail {run}/batch.out"
        )
        return self._until_first_step(project, ("bash", "-c", line), lambda: run / "metrics.jsonl")

    def until_idle(self) -> None:
        """Wait for all nodes to be free again: the job before may still be completing."""
        began = time.monotonic()
        while time.monotonic() - began < LONGEST:
            if set(
                self.cluster.on(HEAD, "sinfo", "--noheader", "--Node", "--format=%T").split()
            ) == {"idle"}:
                return
            time.sleep(0.1)
        sys.exit("nodes of Slurm's do not become idle")

    def waited(self) -> float:
        """Seconds that the newest job waited, by Slurm's count."""
        text = self.cluster.on(
            HEAD, "squeue", "--noheader", "--states=all", "--sort=-i", "--format=%V|%S"
        ).splitlines()[0]
        submitted, started = (datetime.fromisoformat(word) for word in text.strip().split("|"))
        return (started - submitted).total_seconds()

    def turns(self, hosts: int, repeats: int) -> dict[str, list[tuple[float, float]]]:
        """{side: [(seconds to the first step, of these in the queue) of every turn that
        counts]}."""
        sides = {"trainkit": self.trainkit, "torchrun": self.torchrun}
        project = self.project(f"hosts-{hosts}", hosts)
        took: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
        for turn in range(repeats + 1):
            # trainkit first in the first turn: the others take the job and code of its run
            for side in list(sides)[:: -1 if turn % 2 else 1]:
                self.until_idle()
                seconds = sides[side](project, hosts)
                if turn:
                    took[side].append((seconds, self.waited()))
        return took


def slurm_steps(folder: Path, counts: Sequence[int], repeats: int) -> None:
    """The table of --slurm."""
    try:
        cluster = Cluster(folder / "cluster", max(counts), slurm=True)
    except NoCluster as why:
        sys.exit(f"no Slurm here: {why}")
    print(f"load average of the last minute: {os.getloadavg()[0]:.1f}")
    print(f"seconds from submission to the first step through Slurm, {repeats} turns")
    print(
        f"{'hosts':>5}  {'side':<10} {'median':>7} {'ratio':>7} {'lowest':>7} {'highest':>8}"
        f" {'queue':>6}"
    )
    try:
        for hosts in counts:
            took = Queued(cluster, folder, "").turns(hosts, repeats)
            peer = median(seconds for seconds, _ in took["torchrun"])
            for side, turns in took.items():
                seconds, waited = [each for each, _ in turns], [each for _, each in turns]
                middle = median(seconds)
                print(
                    f"{hosts:>5}  {side:<10} {middle:>7.1f} {middle / peer:>7.2f}"
                    f" {min(seconds):>7.1f} {max(seconds):>8.1f} {median(waited):>6.0f}",
                    flush=True,
                )
    finally:
        cluster.close()


def first_steps(folder: Path, deepspeed: str, counts: Sequence[int], repeats: int) -> bool:
    """The first table; whether the claim holds."""
    try:
        cluster = Cluster(folder / "cluster", max(counts))
    except NoCluster as why:
        print(f"the table of first steps is left out, no cluster of namespaces here: {why}")
        return True
    holds = True
    print(f"load average of the last minute: {os.getloadavg()[0]:.1f}")
    print(
        "seconds to the first step (cold:"
        f" page cache {'dropped' if forget_files() else 'kept, it may not be dropped here'})"
    )
    print(f"{'hosts':>5}  {'side':<10} {'cold':>7} {'ratio':>7} {'warm':>7} {'ratio':>7}")
    try:
        for hosts in counts:
            took = Sides(cluster, folder, deepspeed).measure(hosts, repeats)
            for side, (cold, warm) in took.items():
                ratios = cold / took["torchrun"][0], warm / took["torchrun"][1]
                holds = holds and (side != "trainkit" or ratios[1] <= LIMIT)
                print(
                    f"{hosts:>5}  {side:<10} {cold:>7.1f} {ratios[0]:>7.2f} {warm:>7.1f}"
                    f" {ratios[1]:>7.2f}",
                    flush=True,
                )
    finally:
        cluster.close()
    print(
        "limit of trainkit's ratio, warm:"
        f" {LIMIT}{'' if deepspeed else '; no --deepspeed PYTHON was given'}\n"
    )
    return holds


class Many:
    """A launcher whose hosts are all this machine."""

    name = "many"

    def commands(self, session: Session, nodes: Sequence[int]) -> list[tuple[str, ...]]:
        return [local_argv(session, node) for node in nodes]

    def start(self, session: Session, nodes: Sequence[int]) -> Transports:
        return TransportPerHost({node: start_local_agent(session, node) for node in nodes})


class Idle(StubAgent):
    """A stub that says it has started what it is asked to, with an agent's own heartbeats."""

    beat_seconds = HEARTBEAT_SECONDS

    async def on_go(self, frame: StartProcesses) -> None:
        for process in frame.processes:
            self.connection.send(ProcessStarted(process.key, os.getpid()))


async def run_stubs(session: Session, hosts: int) -> None:
    document = read_session(session.folder)
    agents = [Idle(session, node) for node in range(hosts)]
    for agent in agents:
        agent.document = document
    await asyncio.gather(*(agent.run() for agent in agents), return_exceptions=True)


class Stubs:
    """A launcher whose agents are stubs of one other process: as agents of other hosts, they
    take none of the supervisor's time."""

    name = "stubs"

    def commands(self, session: Session, nodes: Sequence[int]) -> list[tuple[str, ...]]:
        return []

    def start(self, session: Session, nodes: Sequence[int]) -> Transports:
        self.hosts = len(nodes)
        self.process = get_context("fork").Process(
            target=lambda: asyncio.run(run_stubs(session, self.hosts))
        )
        self.process.start()
        return self

    def poll(self) -> Mapping[int, TransportExit]:
        if (code := self.process.exitcode) is None:
            return {}
        return dict.fromkeys(range(self.hosts), TransportExit(code, ""))

    def close(self) -> None:
        self.process.kill()
        self.process.join()


async def session_of(agents: int, launcher: Launcher, root: Path) -> Mapping[str, float]:
    """{what has happened to all agents: seconds since the start}."""
    description = Description(
        name="bench", launcher="ssh", interface="lo", watch=WatchLimits(connect=300, lease=60)
    )
    hosts = [Host(f"host{i}", slots=(0,)) for i in range(agents)]
    began, marks = time.monotonic(), dict[str, float]()
    process = ProcessSpec("0", ("/bin/sleep", "1000"), cwd="/", output=False)
    steps: list[tuple[str, Frame | None, type[Frame]]] = [
        ("agreed", None, Frame),
        ("started", StartProcesses((process,)), ProcessStarted),
        ("stopped", StopProcesses(5.0), ProcessesStopped),
    ]
    async with open_agent_pool(description, hosts, root, "bench", launcher=launcher) as pool:
        for name, frame, answer in steps:
            if frame is None:
                await wait_for_consistent_agents(pool)
            else:
                got, silent = await pool.ask(dict.fromkeys(range(agents), frame), (answer,), 300)
                assert not silent and (
                    name != "stopped"
                    or not any(
                        isinstance(found, ProcessesStopped) and found.left for found in got.values()
                    )
                ), f"{name}: {silent}"
            marks[name] = time.monotonic() - began
    return marks | {"gone": time.monotonic() - began}


def growth(folder: Path, real: Sequence[int], stubs: Sequence[int]) -> None:
    """The second table."""
    raise_open_file_limit()
    print(
        f"{'agents':>7} {'kind':<5} {'agreed':>8} {'started':>8} {'stopped':>8} {'gone':>8}"
        f" {'ms an agent':>12} {'MiB':>5}"
    )
    for kind, counts in (("real", real), ("stub", stubs)):
        for agents in counts:
            launcher: Launcher = Many() if kind == "real" else Stubs()
            marks = asyncio.run(session_of(agents, launcher, folder))
            seconds = " ".join(f"{value:>8.2f}" for value in marks.values())
            each = marks["gone"] / agents * 1e3
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10  # so far
            print(f"{agents:>7} {kind:<5} {seconds} {each:>12.1f} {most:>5.0f}", flush=True)


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--deepspeed", default="", help="an interpreter that has DeepSpeed and torch"
    )
    parser.add_argument("--repeats", type=int, help="3; with --slurm 5")
    parser.add_argument("--hosts", type=numbers, default=list(HOSTS))
    parser.add_argument("--agents", type=numbers, default=[16, 64, 128])
    parser.add_argument("--stubs", type=numbers, default=[10, 100, 1000])
    parser.add_argument(
        "--slurm", action="store_true", help="the table of starts through Slurm, and no other"
    )
    parser.add_argument("--quick", action="store_true", help="two hosts once, 4 agents, 100 stubs")
    words = parser.parse_args()
    if words.quick:
        words.repeats, words.hosts, words.agents, words.stubs = 1, [2], [4], [100]
    repeats = words.repeats or (5 if words.slurm else 3)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # warm is what has been compiled
    with tempfile.TemporaryDirectory(prefix="trainkit-launch-") as folder:
        if words.slurm:
            slurm_steps(Path(folder), words.hosts, repeats)
            return
        growth(Path(folder) / "agents", words.agents, words.stubs)
        print()
        holds = (
            first_steps(Path(folder), words.deepspeed, words.hosts, repeats)
            if words.hosts
            else True
        )
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
