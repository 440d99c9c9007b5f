"""What supervisor and agents say to each other: a class for each type of frame.

A class is read and written by its fields: names here are names on the wire. docs/dispatch.md says
when each is sent. Agents of an older run's snapshot talk with newer supervisors: a field that is
added needs a default, and no field is ever renamed.

Standard library only: the agent imports this on nodes that may have nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.base.records import OMIT_NONE, FieldError, read_fields, write_fields
from trainkit.launch.protocol.framing import BadFrame

if TYPE_CHECKING:
    from typing import Self


@dataclass(frozen=True)
class Frame:
    """One frame; TYPE is its "type" on the wire."""

    TYPE: ClassVar[str] = ""

    @classmethod
    def from_json(cls, value: Mapping[str, object]) -> Self:
        """Read a frame of this type.

        Raises:
            BadFrame: it is of another type, or a field is missing or wrong.
        """
        if value.get("type") != cls.TYPE:
            raise BadFrame(f"expected a frame {cls.TYPE!r}, got {str(value.get('type'))[:20]!r}")
        try:
            return read_fields(cls, value, f"frame {cls.TYPE!r}")
        except FieldError as error:
            raise BadFrame(str(error)) from None

    def to_json(self) -> dict[str, object]:
        """The object that is sent."""
        return {"type": self.TYPE, **write_fields(self)}


# Role "control": a command line to a supervisor.


@dataclass(frozen=True)
class CancelRun(Frame):
    """End the run. `save`: at the end of the step, with a checkpoint."""

    TYPE = "cancel"
    save: bool = False


@dataclass(frozen=True)
class Accepted(Frame):
    """The supervisor's answer to a control frame."""

    TYPE = "ok"


# Commands: supervisor to agent.


@dataclass(frozen=True)
class Ping(Frame):
    """The supervisor lives."""

    TYPE = "ping"


@dataclass(frozen=True)
class ReserveSlots(Frame):
    """Hold slots of the host.

    Args:
        run: the run's id.
        attempt: its number.
        slots: names; none where a session needs no slot but its processes have to die with it.
        share: leave those that are held to their holders, instead of failing.
        mark: of the node's processes.
    """

    TYPE = "reserve"
    run: str
    attempt: int
    slots: tuple[str, ...]
    share: bool = False
    mark: str = ""


@dataclass(frozen=True)
class Listen(Frame):
    """Listen on the first of these ports that is free."""

    TYPE = "listen"
    ports: tuple[int, ...]


@dataclass(frozen=True)
class StopListening(Frame):
    """Free that port for rank 0."""

    TYPE = "unlisten"


@dataclass(frozen=True)
class ConnectToPort(Frame):
    """Try to reach rank 0's port."""

    TYPE = "connect"
    address: str
    port: int


@dataclass(frozen=True)
class ProcessSpec:
    """One program to start on a node.

    Args:
        key: its name among the node's processes.
        argv: the command line.
        env: added to the agent's own environment; ${node:VAR} is filled in on the node.
        cwd: its working directory.
        log: where its output goes, None for nowhere.
        error: where it writes its failure; an agent reads it at the end.
        heartbeat: it writes a heartbeat file, whose path is in its environment.
        whole, output: no line of its output may be dropped; the supervisor gets it.
        forked: from the rank parent of its host, where there is one.
        memory: it keeps copies of its state in the host's memory: in a folder that it is given.
    """

    key: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    log: str | None = None
    error: str | None = None
    heartbeat: bool = False
    whole: bool = False
    output: bool = True
    forked: bool = False
    memory: bool = False


@dataclass(frozen=True)
class StartParent(Frame):
    """Start the process from which ranks are forked; one that lives and is the same stays.

    Args:
        argv: the command line.
        env: what all ranks of the node have in common, as in ProcessSpec.
        cwd: its working directory.
        late: variables that a rank may have otherwise: they are read after the fork.
        seconds: how long a rank waits for it to be ready; it is started without it then.
    """

    TYPE = "parent"
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    late: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class StartProcesses(Frame):
    """Start programs. `secret_names`: variables whose values are in the session's folder."""

    TYPE = "go"
    processes: tuple[ProcessSpec, ...]
    secret_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class SignalProcesses(Frame):
    """Send a signal ("USR1") to programs by key; None: to all."""

    TYPE = "signal"
    signal: str
    keys: tuple[str, ...] | None = None


@dataclass(frozen=True)
class StopProcesses(Frame):
    """End programs by key, None: everything.

    Args:
        grace: seconds from TERM to KILL.
        keys: of the programs.
        keep_parent: of everything, all but the rank parent: ranks are to follow.
    """

    TYPE = "stop"
    grace: float
    keys: tuple[str, ...] | None = None
    keep_parent: bool = False


@dataclass(frozen=True)
class DumpStacks(Frame):
    """Say where every program stands. `py_spy`: ask py-spy too, where it is installed."""

    TYPE = "stacks"
    py_spy: bool = False


@dataclass(frozen=True)
class SweepRun(Frame):
    """Say what is left here of a dead run. `kill`: end it. `forget`: and its copies in memory."""

    TYPE = "sweep"
    run: str
    kill: bool = False
    forget: bool = False


@dataclass(frozen=True)
class Goodbye(Frame):
    """Stop what is left and end. `run_ends`: copies in memory are not needed any more."""

    TYPE = "bye"
    run_ends: bool = False


# Reports: agent to supervisor.


@dataclass(frozen=True)
class HostFacts(Frame):
    """What an agent finds out about its host before anything is started; None: it could not.

    Args:
        node: the host's number in the session.
        host: what it calls itself.
        pid, identity: of the agent's process; boot and start time.
        address, interface: on the wanted network; address_error: why they are not on it.
        versions: of python, torch, kernel, driver.
        executable: the interpreter.
        snapshot: SHA-256 of the code that runs.
        extension: why the compiled part of the code cannot be loaded.
        nonce: the session's, as this host sees it.
        writable: why it cannot write into the session's folder.
        gpus: names by number.
        cpus: how many this process may use.
        disk_free, shared_memory: bytes on the root, and free in /dev/shm.
        open_files, locked_memory: hard limits, -1 for none.
        slots: those that are held, with what their holders say.
        errors: why a fact could not be found out, by its name.
        clock: seconds since the epoch.
        proof: how the host can prove that nothing is left of a run.
    """

    TYPE = "hello"
    node: int
    host: str = ""
    pid: int = 0
    identity: Mapping[str, object] = field(default_factory=dict)
    address: str | None = None
    address_error: str | None = None
    interface: str | None = None
    versions: Mapping[str, str | None] = field(default_factory=dict)
    executable: str | None = None
    snapshot: str | None = None
    extension: str | None = None
    nonce: str | None = None
    writable: str | None = None
    gpus: tuple[str, ...] = ()
    cpus: int | None = None
    disk_free: int | None = None
    shared_memory: int | None = None
    open_files: int | None = None
    locked_memory: int | None = None
    slots: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    clock: float | None = None
    proof: str | None = field(default=None, metadata=OMIT_NONE)


@dataclass(frozen=True)
class SlotsReserved(Frame):
    """The slots are held. `cleared`: what dead runs of this user had written there."""

    TYPE = "reserved"
    cleared: tuple[Mapping[str, object], ...] = ()


@dataclass(frozen=True)
class SlotsBusy(Frame):
    """A slot is held. `holder`: process and user by the kernel's word, the rest by this user's."""

    TYPE = "busy"
    slot: str
    holder: Mapping[str, object] | None = None


@dataclass(frozen=True)
class Listening(Frame):
    """The port that is listened on; None: none of them, and why."""

    TYPE = "listening"
    port: int | None
    error: str | None = field(default=None, metadata=OMIT_NONE)


@dataclass(frozen=True)
class ListeningStopped(Frame):
    """The port is free again."""

    TYPE = "unlistened"


@dataclass(frozen=True)
class PortChecked(Frame):
    """Whether rank 0's port was reached. `error`: why not."""

    TYPE = "connected"
    error: str | None = None


@dataclass(frozen=True)
class ProcessReport(Frame):
    """What is said of one program, named by its key."""

    key: str


@dataclass(frozen=True)
class ProcessStarted(ProcessReport):
    """A program runs."""

    TYPE = "started"
    pid: int


@dataclass(frozen=True)
class StartFailed(ProcessReport):
    """A program could not be started."""

    TYPE = "start_failed"
    error: str


@dataclass(frozen=True)
class HeartbeatReport(Frame):
    """The agent lives; what heartbeat files of programs say, by key, where they have changed."""

    TYPE = "heartbeat"
    beats: Mapping[str, object] = field(default_factory=dict)
    clock: float | None = None


@dataclass(frozen=True)
class ProcessOutput(ProcessReport):
    """Output of a program. `stream`: "out" or "err"; `dropped`: bytes left out before it."""

    TYPE = "output"
    stream: str
    text: str
    dropped: int = 0


@dataclass(frozen=True)
class ProcessEnded(ProcessReport):
    """How a program ended.

    Args:
        key: which.
        code: its exit code, negative for a signal.
        time: when, seconds since the epoch by the host's clock.
        done: it recorded success before its teardown.
        stopped: the agent ended it.
        error: what it wrote down about its failure, the form rank-error/1.
        last: its last lines.
        oom: the kernel killed it because memory ran out.
    """

    TYPE = "ended"
    code: int
    time: float
    done: bool = False
    stopped: bool = False
    error: Mapping[str, object] | None = None
    last: tuple[str, ...] = ()
    oom: bool = False


@dataclass(frozen=True)
class LeftProcess:
    """A process that did not die."""

    pid: int
    argv0: str


@dataclass(frozen=True)
class ReportedProcess:
    """A process of a run by its mark."""

    pid: int
    mark: str
    argv0: str


@dataclass(frozen=True)
class ProcessesStopped(Frame):
    """What is left after StopProcesses. `proof`: how it is known that nothing is."""

    TYPE = "stopped"
    left: tuple[LeftProcess, ...] = ()
    proof: str | None = None


@dataclass(frozen=True)
class StackReport(Frame):
    """Where programs stand, by key.

    Args:
        stacks: what faulthandler and py-spy said, "" for nothing; `silent` did not answer.
        states: as ps shows them (R, S, D, T, Z), with what they wait for in the kernel.
        waits: of who was asked, what train/metrics/collectives.py says in JSON; "": no answer.
    """

    TYPE = "stacks"
    stacks: Mapping[str, str] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
    states: Mapping[str, str] = field(default_factory=dict)
    waits: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SweepDone(Frame):
    """What was found of a run. `proof` that nothing is left: "cgroup"; None: it cannot be seen."""

    TYPE = "swept"
    left: tuple[ReportedProcess, ...] = ()
    killed: tuple[ReportedProcess, ...] = ()
    proof: str | None = None


@dataclass(frozen=True)
class CommandRefused(Frame):
    """A command could not be carried out. `frame`: its type."""

    TYPE = "refused"
    frame: str
    error: str


@dataclass(frozen=True)
class HostLeaves(Frame):
    """This host is about to end: its ranks must save now."""

    TYPE = "leaving"


_REPORTS: Mapping[str, type[Frame]] = {
    kind.TYPE: kind
    for kind in (
        HostFacts,
        SlotsReserved,
        SlotsBusy,
        Listening,
        ListeningStopped,
        PortChecked,
        ProcessStarted,
        StartFailed,
        HeartbeatReport,
        ProcessOutput,
        ProcessEnded,
        ProcessesStopped,
        StackReport,
        SweepDone,
        CommandRefused,
        HostLeaves,
    )
}


def read_report(value: Mapping[str, object]) -> Frame | None:
    """What an agent says; None for a type that this version does not know. Raises BadFrame."""
    kind = _REPORTS.get(str(value.get("type")))
    return kind.from_json(value) if kind else None
