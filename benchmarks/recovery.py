"""Claim: a run makes steps again at most 2.0 s after the death of a rank, and at most the lease and
2.5 s after that of a host.

    python benchmarks/recovery.py [--hosts 1,2,4] [--kills 20] [--faults rank,agent,host]
    [--peer-kills N] [--lease 3] [--set KEY=VALUE ...] [--quick]

A tiny job, one rank a host, on the cluster of namespaces that tests/cluster uses (real sshd,
addresses of their own, one shared disk; all hosts share this machine's cores, so what every rank
does takes as many times as long as there are hosts). A rank and an agent are ended by SIGKILL, a
host's network is cut without a word; a spare host takes its place. Each kind so often.

torchrun: the same trainer on a run folder that is there already, started by one `torchrun
--max-restarts` a host; it starts all ranks again where one has died, and these go on from the
newest checkpoint as trainkit's do. Nobody starts a torchrun that was killed again, nor one on
another host: n/a; inf: it did not train again within 180 s. The sides take turns, five kills
each.

Seconds are from just before the kill to the moment when the first step that is made again can be
read in metrics.jsonl, looked for every 5 ms: all hosts have the clock of this machine. Lost: steps
whose rows were taken back. Step: the median time of a step. For trainkit also the medians of what
`report` says of it, stage by stage. Needs root and the packages that tests/cluster/cluster.sh
names.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))

from tests.cluster.machines import HEAD, Cluster, NoCluster  # noqa: E402
from trainkit.reports.faults import STAGES, FaultCost, build_faults  # noqa: E402
from trainkit.reports.ledger import STEPS  # noqa: E402
from trainkit.reports.read import read_run_times  # noqa: E402
from trainkit.runs.events import RankStarted, events_of, read_events  # noqa: E402
from trainkit.runs.folder import RunFolder  # noqa: E402
from trainkit.runs.metrics import newest_row, read_rows, taken_back_path  # noqa: E402
from trainkit.runs.phases import read_phases  # noqa: E402
from trainkit.runs.record import read_run_record  # noqa: E402

LONGEST = 180.0  # seconds until steps are made: no machine is so slow
AT_ONCE = 5  # kills before it is the other side's turn
BETWEEN = (10, 25)  # steps between two kills, drawn
JOBS = """
[clusters.hosts]
launcher = "ssh"
hostfile = "{path}/hostfile"
env = {{ OMP_NUM_THREADS = "1", OMP_WAIT_POLICY = "PASSIVE" }}
watch = {{ lease = {lease}, grace = 1 }}
quarantine_seconds = 0
spares = 1

[models.tiny]
num_layers = 2
hidden_size = 64
num_attention_heads = 2
seq_length = 128
vocab_size = 512

[jobs.tiny]
cluster = "hosts"
model = "tiny"
dataset = "mock"
nodes = {hosts}
training.micro_batch_size = 2
training.global_batch_size = 8
training.train_iters = 1_000_000
training.lr = 1e-3
training.eval_iters = 0
training.save_interval = 20
checkpoint.keep_last = 2
retry = {{ infra = 1_000_000, same_step = 1_000_000, shrink = false }}
"""
TORCHRUN = (
    "OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE exec {python} -m torch.distributed.run --nnodes"
    " {hosts} --nproc-per-node 1 --max-restarts 1000000 --rdzv-backend c10d --rdzv-endpoint"
    " 10.77.0.11:29511 --rdzv-id tiny --monitor-interval 0.1 {words}"
)


@dataclass(frozen=True)
class Recovery:
    """One kill: seconds to the first step made again, and steps that were lost."""

    seconds: float
    lost: int


@dataclass
class Measured:
    """What a side did in all its turns."""

    kills: list[Recovery] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    bills: list[FaultCost] = field(default_factory=list)


def wait_for(what: str, ready: Callable[[], bool]) -> float:
    """When it came true, by this machine's clock. Raises TimeoutError."""
    deadline = time.time() + LONGEST
    while (now := time.time()) < deadline:
        if ready():
            return time.time()
        time.sleep(0.005)
    raise TimeoutError(f"no {what} within {LONGEST:.0f} s ({time.time() - now:.1f} s for a look)")


def newest_step(run: RunFolder) -> int:
    row = newest_row(run.metrics)
    return row["step"] if row else 0


@dataclass
class Side:
    """A run that is under way on some hosts, and how it is hurt.

    Args:
        cluster: where.
        project: its folder.
        hosts: how many ranks it has.
    """

    cluster: Cluster
    project: Path
    hosts: int

    def begin(self) -> RunFolder:
        """Start a run."""
        raise NotImplementedError

    def end(self, run: RunFolder) -> None:
        """End it."""
        raise NotImplementedError

    def ranks(self, run: RunFolder) -> dict[str, int]:
        """{host: the pid of its rank, as `kill` takes it}."""
        raise NotImplementedError

    def recoveries(self, fault: str, count: int, dice: random.Random) -> Iterator[Recovery]:
        """Hurt a run so often; a host only once, for its run goes on without it."""
        while count > 0:
            run = self.begin()
            times = 1 if fault == "host" else min(count, AT_ONCE)
            count -= times
            try:
                for _ in range(times):
                    yield self._hurt(run, fault, dice)
            except TimeoutError:
                if isinstance(self, Trainkit):
                    raise
                yield Recovery(float("inf"), 0)
            finally:
                self.end(run)

    def _hurt(self, run: RunFolder, fault: str, dice: random.Random) -> Recovery:
        step = newest_step(run) + dice.randrange(*BETWEEN)
        wait_for(f"step {step}", lambda: newest_step(run) >= step)
        ranks = self.ranks(run)
        host = dice.choice(sorted(ranks))
        lost = len(read_rows(taken_back_path(run.metrics)))
        old = run.metrics.stat().st_ino
        if fault == "host":
            killed = time.time()
            self.cluster.cut(host)
        else:
            killed = self.kill(host, ranks[host], agent=fault == "agent")
        seen: list[tuple[float, int]] = []

        def again() -> bool:
            status = run.metrics.stat() if run.metrics.exists() else None
            if status is None or status.st_ino == old:
                return False
            step = newest_step(run)
            if not seen or seen[-1][1] != step:
                seen.append((time.time(), step))
            began = self.went_on_from(run, killed)
            return began is not None and step > began

        wait_for("first step made again", again)
        began = self.went_on_from(run, killed)
        assert began is not None
        at = next(at for at, step in seen if step > began)
        if fault == "host":
            self.cluster.heal(host)
        lost = len(read_rows(taken_back_path(run.metrics))) - lost
        return Recovery(at - killed, lost)

    def kill(self, host: str, pid: int, *, agent: bool) -> float:
        """SIGKILL to a rank, or to the agent that started it; when, by the clock of all."""
        raise NotImplementedError

    def went_on_from(self, run: RunFolder, killed: float) -> int | None:
        """The step that was trained from after the kill; None before."""
        attempt = run.attempts()[-1]
        phases = [each for each in read_phases(attempt) if each.time > killed]
        began = list(itertools.dropwhile(lambda each: each.phase != "load", phases))
        return next((each.step for each in began if each.phase in STEPS), None)


@dataclass
class Trainkit(Side):
    """`invoke train`, with a spare host."""

    options: Sequence[str] = ()

    def begin(self) -> RunFolder:
        known = set((self.project / "runs").glob("*/*"))
        self.cluster.on(
            HEAD,
            *(sys.executable, "-m", "invoke", "train", "tiny", "--detach"),
            *(word for each in self.options for word in ("--set", each)),
            cwd=self.project,
        )
        (path,) = set((self.project / "runs" / "tiny").iterdir()) - known
        run = RunFolder(path)
        wait_for("first step", lambda: newest_step(run) > 0)
        return run

    def end(self, run: RunFolder, *options: str) -> None:
        words = (sys.executable, "-m", "invoke", "cancel", run.id, *options)
        subprocess.run(
            self.cluster.command(HEAD, *words), cwd=self.project, capture_output=True, check=False
        )
        if left := self.cluster.processes_of(run.id):
            sys.exit(f"left: {left}")

    def ranks(self, run: RunFolder) -> dict[str, int]:
        started = events_of(read_events(run.attempts()[-1]), RankStarted)
        return {event.host: event.pid for event in started}

    def kill(self, host: str, pid: int, *, agent: bool) -> float:
        find = f"tr '\\0' '\\n' < /proc/{pid}/environ | sed -n 's/^TRAINKIT_PARENT_PID=//p'"
        victim = f"$({find})" if agent else str(pid)
        line = f"victim={victim}; echo $EPOCHREALTIME; kill -KILL $victim"
        return float(self.cluster.on(host, "bash", "-c", line).split()[0])


@dataclass
class Torchrun(Side):
    """One torchrun a host, on a run folder that trainkit has made."""

    started: subprocess.Popen[bytes] | None = None

    def begin(self) -> RunFolder:
        made = min((self.project / "runs" / "tiny").glob("2*"))
        path = made.with_name(f"by-hand-{time.monotonic_ns()}")
        path.mkdir()
        written = json.loads((made / "job.json").read_text())
        # trainkit's agents keep copies in memory; without one the trainer refuses to
        written["job"]["checkpoint"]["memory_interval"] = None
        (path / "job.json").write_text(json.dumps(written))
        (path / "code").symlink_to(os.readlink(made / "code"))
        words = f"{path}/code/trainkit/train/main.py {path} --attempt 1"
        line = TORCHRUN.format(python=sys.executable, hosts=self.hosts, words=words)
        calls = "".join(f"ssh -tt node{i + 1} '{line}' & " for i in range(self.hosts))
        with open(path / "torchrun.out", "wb") as output:
            self.started = subprocess.Popen(
                self.cluster.command(HEAD, "bash", "-c", f"{calls} wait"),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        run = RunFolder(path)
        wait_for("first step of torchrun's", lambda: self._ended() or newest_step(run) > 0)
        if self._ended():
            sys.exit(f"torchrun ended:\n{(path / 'torchrun.out').read_text()[-3000:]}")
        return run

    def _ended(self) -> bool:
        assert self.started is not None
        return self.started.poll() is not None

    def end(self, run: RunFolder) -> None:
        found = [p for p in self.cluster.processes() if any(run.id in word for word in p.argv)]
        self.cluster.kill(*found)
        assert self.started is not None
        self.started.wait(timeout=LONGEST)

    def ranks(self, run: RunFolder) -> dict[str, int]:
        return {
            process.host: process.pid
            for process in self.cluster.processes()
            if str(run.path) in process.argv and "torch.distributed.run" not in process.argv
        }

    def kill(self, host: str, pid: int, *, agent: bool) -> float:
        killed = time.time()
        os.kill(pid, signal.SIGKILL)
        return killed


def measure(side: Side, fault: str, count: int, dice: random.Random, into: Measured) -> None:
    """One turn of a side."""
    known = set((side.project / "runs" / "tiny").glob("*"))
    into.kills += side.recoveries(fault, count, dice)
    for path in set((side.project / "runs" / "tiny").glob("*")) - known:
        run = RunFolder(path)
        rows = [row for row in read_rows(run.metrics) if "eval" not in row]
        into.step_ms += [row["elapsed_ms"] for row in rows]
        if isinstance(side, Trainkit):
            into.bills += build_faults(read_run_times(read_run_record(run)))


def make_project(folder: Path, hosts: int, lease: float) -> Path:
    """A folder with the job for so many hosts, and a spare one."""
    project = folder / f"hosts-{hosts}"
    project.mkdir()
    (project / "tasks.py").write_text("from trainkit.cli.tasks import namespace\n")
    (project / "jobs.toml").write_text(JOBS.format(path=project, hosts=hosts, lease=lease))
    (project / "hostfile").write_text("".join(f"node{i + 1} slots=1\n" for i in range(hosts + 1)))
    return project


def show(hosts: int, fault: str, side: str, found: Measured) -> dict[str, Any]:
    """Print a row, and below it where trainkit's seconds went; the row as JSON."""
    seconds = [each.seconds for each in found.kills]
    middle = median(seconds)
    step = median(found.step_ms)
    lost = median(each.lost for each in found.kills)
    print(
        f"{hosts:>5}  {fault:<5}  {side:<8} {len(seconds):>5} {middle:>7.2f} {min(seconds):>7.2f}"
        f" {max(seconds):>8.2f} {lost:>6.0f} {max(each.lost for each in found.kills):>6}"
        f" {step:>8.1f}",
        flush=True,
    )
    stages = {}
    if found.bills:
        stages = {s: median(bill.seconds[s] for bill in found.bills) for s in STAGES}
        words = ", ".join(f"{stage} {value:.2f}" for stage, value in stages.items())
        print(f"{'':>14}of these: {words}", flush=True)
    names = {"hosts": hosts, "fault": fault, "side": side, "stages": stages}
    return {**names, "seconds": seconds, "lost": [each.lost for each in found.kills], "step": step}


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(description="Seconds from a death to the first step again.")
    parser.add_argument("--hosts", default="1,2,4")
    parser.add_argument("--faults", default="rank,agent,host")
    parser.add_argument("--kills", type=int, default=20, help="of each kind")
    parser.add_argument("--peer-kills", type=int, help="on torchrun's side; by default as many")
    parser.add_argument("--lease", type=float, default=3.0, help="seconds until a host is lost")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE of trainkit's job")
    parser.add_argument("--rows", help="a file for the rows as JSON")
    parser.add_argument("--quick", action="store_true", help="three kills")
    words = parser.parse_args()
    counts = [int(word) for word in words.hosts.split(",")]
    kills = 3 if words.quick else words.kills
    peers = min(kills, words.peer_kills or kills)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            cluster = Cluster(Path(folder) / "cluster", max(counts) + 1)
        except NoCluster as why:
            sys.exit(f"no cluster of namespaces here: {why}")
        print(f"load average of the last minute: {os.getloadavg()[0]:.1f}")
        print(f"seconds from the death to the first step made again; lease {words.lease:g} s")
        print(
            f"{'hosts':>5}  {'fault':<5}  {'side':<8} {'kills':>5} {'median':>7} {'least':>7}"
            f" {'most':>8} {'lost':>6} {'most':>6} {'step ms':>8}"
        )
        try:
            for hosts in counts:
                project = make_project(Path(folder), hosts, words.lease)
                for fault in words.faults.split(","):
                    sides: list[Side] = [Trainkit(cluster, project, hosts, words.set)]
                    if fault == "rank":
                        sides.append(Torchrun(cluster, project, hosts))
                    found = [Measured() for _ in sides]
                    dice = random.Random(hosts)
                    for begun in range(0, kills, AT_ONCE):
                        for side, into, most in zip(sides, found, (kills, peers), strict=False):
                            if begun < most:
                                measure(side, fault, min(AT_ONCE, most - begun), dice, into)
                    for side, into in zip(sides, found, strict=True):
                        rows.append(show(hosts, fault, type(side).__name__.lower(), into))
                    if fault != "rank":
                        print(f"{hosts:>5}  {fault:<5}  {'torchrun':<8} {'n/a':>5}", flush=True)
        finally:
            cluster.close()
    if words.rows:
        Path(words.rows).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
