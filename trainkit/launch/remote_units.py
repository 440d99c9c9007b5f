"""Runs the units of a stage over hosts: the same units, in the same order and with the same
words as `execute_locally`, on the agents of clusters.X.stages.STAGE. With a container around the
agents, of the job's image, this machine may be the one host.

Units that wait for the network stay on this machine: it has the credentials and the way out,
which compute nodes often have not.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.base.process import stop_children
from trainkit.jobs.schema import Job
from trainkit.launch.containers import NodeContainer
from trainkit.launch.containers.stages import DOWNLOADS, StageBox, stage_box
from trainkit.launch.hosts.hostfile import Host, find_hostfile
from trainkit.launch.hosts.quarantine import read_quarantine
from trainkit.launch.hosts.selection import load_hosts
from trainkit.launch.protocol.frames import (
    Frame,
    ProcessEnded,
    ProcessesStopped,
    ProcessOutput,
    ProcessReport,
    ProcessSpec,
    StartFailed,
    StartProcesses,
    StopProcesses,
)
from trainkit.launch.supervise.agent_pool import AgentLost, AgentPool
from trainkit.launch.supervise.orphan_sweep import open_agent_pool, wait_for_consistent_agents
from trainkit.stages.contract import Need, Unit
from trainkit.stages.execute import StageWork
from trainkit.stages.unit_process import (
    GRACE_SECONDS,
    POLL_SECONDS,
    LocalUnitProcess,
    UnitProcess,
    UnitTracker,
    process_limits,
)

GONE_SECONDS = 5.0  # beyond the grace, until an agent has nothing left of what it stopped
# for what a host has written to be seen here: network file systems remember for a while that a file
# is not there
SEEN_SECONDS = 60.0
TRIES = 3  # hosts that a unit may lose: then it is suspected of being the reason
ALWAYS_LOCAL = ("build",)  # it compiles for the interpreter that asks
# Like `python -m MODULE`, but from the code snapshot whatever else is installed on the node.
RUN_MODULE = (
    "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); runpy.run_module(sys.argv.pop(1),"
    " run_name='__main__', alter_sys=True)"
)


@dataclass(frozen=True)
class StageHosts:
    """The hosts that run the units of a stage, but for those that wait for the network.

    Args:
        job: whose stage it is; its cluster says how hosts are reached, and the limits of waiting.
        hosts: those of the hostfile that the stage may use.
        tasks: units side by side on a host.
        root: the folder that all hosts share.
        on_notice: called with a line for people.
        box: what units run in; None: outside of any container.
    """

    job: Job
    hosts: tuple[Host, ...]
    tasks: int
    root: Path
    on_notice: Callable[[str], None] = lambda text: None
    box: StageBox | None = None

    on_this_machine: ClassVar[bool] = False

    def run(self, work: StageWork) -> None:
        """Run units over the hosts. The first failure, or Ctrl-C, stops the others and leaves
        finished ones stamped; of a host that is lost, what it had not finished is done by others,
        once the host has stopped itself.

        Raises TrainkitError: a unit's own; 8 if agents did not come, 7 if they disagree, 13 if all
        hosts are lost.
        """
        former = signal.getsignal(signal.SIGTERM)
        try:
            asyncio.run(_execute(self, UnitTracker(work)))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            with contextlib.suppress(ValueError):  # not in the main thread: nothing was changed
                signal.signal(signal.SIGTERM, former)

    def describe(self, need: Need, units: Sequence[Unit], folder: Path) -> list[str]:
        """Lines that say what would run."""
        where = f" on one of {', '.join(host.name for host in self.hosts)}"
        if self.box:
            where += f", in {self.box.label}"
        return [
            f"would run {shlex.join(unit.argv)} {unit.name}.spec.json"
            f"{'' if self.keeps_here(unit) else where}"
            for unit in units
        ]

    def keeps_here(self, unit: Unit) -> bool:
        """Whether this machine runs a unit itself."""
        return unit.network or (unit.here and self.box is not None)


def stage_hosts(job: Job, stage: str, on_notice: Callable[[str], None]) -> StageHosts | None:
    """The hosts that run the units of a stage of `job`; None: this machine, as always without
    clusters.X.stages.STAGE, or where the launcher is not ssh or pdsh.

    Args:
        job: whose stage it is.
        stage: its name.
        on_notice: see StageHosts.

    Raises:
        ConfigError: the hostfile has fewer hosts than the stage asks for.
    """
    cluster = job.cluster
    asked = cluster.stages.get(stage)
    if asked is None or not cluster.launcher_traits.hostfile or stage in ALWAYS_LOCAL:
        return None
    path = find_hostfile(cluster)
    root = cluster.root_folder
    bad = read_quarantine(root)
    hosts = tuple(host for host in load_hosts(path) if host.name.lower() not in bad)
    if len(hosts) < asked.nodes:
        if bad:
            left_out = f", without {', '.join(sorted(bad))}, left out as suspected of failures"
        else:
            left_out = ""
        message = (
            f"clusters.{cluster.name}.stages.{stage}.nodes = {asked.nodes}, and {path} has"
            f" {len(hosts)} hosts{left_out}"
        )
        raise ConfigError(message, hint=f"--set cluster.stages.{stage}.nodes={max(1, len(hosts))}")
    return StageHosts(
        job, hosts[: asked.nodes], asked.tasks_per_node, root, on_notice, stage_box(job, stage)
    )


def this_machine_in_image(
    job: Job, stage: str, on_notice: Callable[[str], None]
) -> StageHosts | None:
    """This machine, where the units of a stage of `job` are to run in the job's image on it; as
    one host of a session. None: they run as its processes.

    Args:
        job: whose stage it is.
        stage: its name.
        on_notice: see StageHosts.

    Raises:
        ConfigError: the image can be entered only by Slurm, and this is not a node of a job.
    """
    box = stage_box(job, stage)
    if box is None or stage in DOWNLOADS:
        return None
    host = Host("localhost", slots=(0,))
    tasks = len(os.sched_getaffinity(0))
    root = job.cluster.root_folder
    if not box.by_srun:
        # its own agent, as of launcher = "local"; how other hosts are reached does not matter
        cluster = job.cluster.model_copy(update={"launcher": "local", "interface": None})
        job = job.model_copy(update={"cluster": cluster})
        return StageHosts(job, (host,), tasks, root, on_notice, StageBox(job, stage))
    node = os.environ.get("SLURMD_NODENAME")
    if node is None or not job.cluster.launcher_traits.pyxis:
        raise ConfigError(
            f"{stage} is to run in {box.label}, which only Slurm enters, and this machine is no"
            " node of a job",
            hint=f"give it to Slurm: [clusters.{job.cluster.name}.stages.{stage}]; or remove"
            " stages_in_container",
        )
    return StageHosts(job, (Host(node),), tasks, root, on_notice, box)


async def _execute(where: StageHosts, ledger: UnitTracker) -> None:
    task = asyncio.current_task()
    assert task is not None
    with contextlib.suppress(ValueError, RuntimeError):  # not in the main thread
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    need = ledger.work.need
    async with open_agent_pool(
        where.job.cluster,
        where.hosts,
        where.root,
        f"{need.stage}-{need.name}",
        container=_around(where, need),
    ) as pool:
        await wait_for_consistent_agents(pool)
        execution = _RemoteExecution(where, ledger, pool)
        try:
            await execution.run()
        finally:
            await execution.stop()


def _around(where: StageHosts, need: Need) -> Callable[[Path, str], NodeContainer] | None:
    box = where.box
    if box is None:
        return None
    return lambda folder, name: box.around(folder, name, need.inputs)


def remote_argv(argv: Sequence[str], python: str, code: Path) -> list[str]:
    """A unit's words on a node: its interpreter, and the modules of the code snapshot."""
    words = list(argv)
    if words[0] == sys.executable:
        words[0] = python
    if words[1:3] == ["-I", "-m"]:
        words[1:3] = ["-I", "-c", RUN_MODULE, str(code)]
    return words


class _RemoteUnitProcess(UnitProcess):
    """A batch whose process is a host's."""

    def __init__(
        self, units: Sequence[Unit], folder: Path, node: int, host: str, box: StageBox | None
    ) -> None:
        super().__init__(units, folder, host)
        self.node = node
        self.box = box
        self.unseen_since = 0.0
        for unit in units:
            self.log(unit).unlink(missing_ok=True)

    def process(self, key: str, pool: AgentPool) -> ProcessSpec:
        """What the agent is sent."""
        session = pool.session
        python = self.box.python if self.box else session.python
        env = self.box.env if self.box else session.cluster.env
        argv = remote_argv(self.units[0].argv, python, session.code)
        return ProcessSpec(
            key,
            (*argv, *map(str, self.specs)),
            env=dict(env),
            cwd=str(self.folder),
            whole=True,
        )

    def unseen(self) -> Path | None:
        """An output of a unit that has succeeded and cannot be seen from here yet. Raises
        TrainkitError after SEEN_SECONDS of that."""
        path = next(
            (path for unit, _ in self.results for path in unit.outputs if not path.exists()), None
        )
        if path is None:
            self.unseen_since = 0.0
            return None
        with contextlib.suppress(OSError):
            os.scandir(path.parent).close()  # has NFS ask its server about the folder again
        self.unseen_since = self.unseen_since or time.monotonic()
        if time.monotonic() - self.unseen_since > SEEN_SECONDS:
            hint = "is it on a file system that all hosts share?"
            raise TrainkitError(
                f"{self.host} has made {path}, which cannot be seen here after {SEEN_SECONDS:g} s",
                exit=Exit.STAGE_FAILED,
                hint=hint,
            )
        return path

    def say(self, data: bytes) -> None:
        """Take in what the process has said to people."""
        with open(self.log(self.units[0]), "ab") as log:
            if not log.tell():
                log.write(f"on {self.host}:\n".encode())
            log.write(data)


class _RemoteExecution:
    """Units on their way over the hosts of a pool."""

    def __init__(self, where: StageHosts, ledger: UnitTracker, pool: AgentPool) -> None:
        self.where = where
        self.ledger = ledger
        self.pool = pool
        self.tasks = ledger.work.workers or where.tasks
        self.remote: dict[str, _RemoteUnitProcess] = {}
        self.ended: list[_RemoteUnitProcess] = []  # whose outputs are not all seen here yet
        self.local: list[LocalUnitProcess] = []
        # what lost hosts had not finished, and when they have surely stopped
        self.again: list[tuple[float, Unit]] = []
        self.lost_hosts: dict[str, list[str]] = {}  # by unit
        self.begun = 0

    async def run(self) -> None:
        """Until all is done. Raises TrainkitError at the first failure."""
        queue = self.ledger.queue
        while queue or self.remote or self.ended or self.local or self.again:
            self._begin()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    self._take(*await self.pool.received.get())
            while not self.pool.received.empty():
                self._take(*self.pool.received.get_nowait())
            self._stamp_finished()
            self._read_local()
            for batch in (*self.remote.values(), *self.local):
                self.ledger.report(batch)
        self.ledger.close()

    def _begin(self) -> None:
        now = time.monotonic()
        queue = self.ledger.queue
        for unit in [unit for when, unit in self.again if when <= now]:
            queue.offer(unit)
        self.again = [(when, unit) for when, unit in self.again if when > now]
        free = dict.fromkeys(self.pool.present, self.tasks)
        for batch in self.remote.values():
            free[batch.node] -= 1
        if not free and (queue or self.again):
            lost = sorted(self.pool.lost.items())
            losses = "; ".join(f"{self.pool.host(node)}: {each.why}" for node, each in lost)
            raise TrainkitError(
                f"all {len(self.where.hosts)} hosts are lost: {losses}",
                exit=Exit.CONTACT_LOST,
                hint="what is finished is kept",
            )
        most = {False: self.tasks * len(free), True: process_limits(None)[True]}
        fetching = sum(batch.units[0].network for batch in self.local)
        computing = sum(free.values()) - (len(self.local) - fetching)
        for begun in list(queue.take({False: computing, True: most[True] - fetching}, most)):
            if self.where.keeps_here(begun[0]):
                self.local.append(LocalUnitProcess(begun, self.ledger.folder))
                continue
            node = max(free, key=lambda n: free[n])
            free[node] -= 1
            self.begun += 1
            key = str(self.begun)
            self.remote[key] = batch = _RemoteUnitProcess(
                begun, self.ledger.folder, node, self.pool.host(node), self.where.box
            )
            self.pool.send(node, StartProcesses((batch.process(key, self.pool),)))

    def _take(self, node: int, frame: Frame) -> None:
        """Take in what an agent says."""
        if isinstance(frame, AgentLost):
            self._lose(node, frame.why)
            return
        if not isinstance(frame, ProcessReport):
            return
        batch = self.remote.get(frame.key)
        if batch is None or batch.node != node:
            return
        match frame:
            case ProcessOutput():
                data = frame.text.encode("utf-8", "surrogateescape")
                if frame.stream == "out":
                    batch.feed(data)
                else:
                    batch.say(data)
            case StartFailed():
                raise TrainkitError(
                    f"{batch.units[0].name} could not be started on {batch.host}: {frame.error}",
                    exit=Exit.STAGE_FAILED,
                )
            case ProcessEnded():
                self.ended.append(self.remote.pop(frame.key))
                if batch.unseen() is None:
                    self.ledger.take_results(batch)  # before what it failed at ends all of it
                batch.end(frame.code)

    def _lose(self, node: int, why: str) -> None:
        """Let others do what a lost host had not finished; not before it has stopped itself, so
        that nobody writes the same files meanwhile."""
        watch = self.where.job.cluster.watch
        host = self.pool.host(node)
        when = time.monotonic() + watch.lease + watch.grace + GONE_SECONDS
        left = [key for key, batch in self.remote.items() if batch.node == node]
        batches = [self.remote.pop(key) for key in left]
        self.ended += batches  # what they have finished counts
        units = [unit for batch in batches for unit in batch.waiting]
        self.where.on_notice(
            f"{host} is lost ({why}): its {len(units)} unfinished units go to the other"
            f" {len(self.pool.present)} hosts"
        )
        for unit in units:
            hosts = self.lost_hosts.setdefault(unit.name, [])
            hosts.append(host)
            if len(hosts) >= TRIES:
                raise TrainkitError(
                    f"{unit.name} was on {', '.join(hosts)} when they were lost, one after another",
                    exit=Exit.STAGE_FAILED,
                )
            self.again.append((when, unit))

    def _stamp_finished(self) -> None:
        """Stamp what hosts have finished, once it is seen here."""
        for batch in (*self.remote.values(), *self.ended):
            if batch.results and batch.unseen() is None:
                self.ledger.take_results(batch)
        self.ended = [batch for batch in self.ended if batch.results]

    def _read_local(self) -> None:
        """Take in what this machine's own processes say."""
        for batch in list(self.local):
            goes_on = batch.read()
            self.ledger.take_results(batch)
            if not goes_on:
                self.local.remove(batch)
                batch.collect()

    async def stop(self) -> None:
        """End what still runs, here and on every host; bounded."""
        nodes = {batch.node for batch in self.remote.values()}
        frames = {node: StopProcesses(GRACE_SECONDS) for node in nodes}
        children = [batch.child for batch in self.local]
        await asyncio.gather(
            self.pool.ask(frames, (ProcessesStopped,), GRACE_SECONDS + GONE_SECONDS),
            asyncio.to_thread(stop_children, children, GRACE_SECONDS),
        )
