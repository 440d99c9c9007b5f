"""How the supervisor of a run calls its pods. In launch/kubernetes/JOBSET/call.json it says which
agent the pod of each index is to be, and at the end with which code all pods end; a pod says
beside it, in pods/INDEX.json, which it is. What became of an agent stands in the attempt's folder
of transports: NODE.claim says which pod is it, NODE.exit how it ended.

Standard library only: pods import this.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trainkit.base.errors import ConfigError
from trainkit.base.files import read_json, write_json
from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.base.records import Record

# in the folder of a JobSet: a person wants the run to end, and not to go on
CANCELLED = "cancelled"
STOP = "stop"  # likewise: its supervisor is to "save" first, or not
WORKERS = "w"  # the replicated job whose pods are the run's hosts
SUPERVISOR = "s"  # that of the supervisor, where it has a pod of its own
JOBSET_VARIABLE = "TRAINKIT_JOBSET"


@dataclass(frozen=True)
class PodCall(Record):
    """call.json.

    Args:
        script: what a pod runs with its number in the session: its agent; "": there is no session.
        logs: the folder of transports.
        nodes: the number of the newest agent that the pod of each index is to be.
        outputs: names of files there, by index.
        exit: the code that all pods end with; None while the run goes on.
    """

    SCHEMA = "call/1"
    script: str = ""
    logs: str = ""
    nodes: Mapping[str, int] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    exit: int | None = None


def jobset_folder(run: Path, name: str) -> Path:
    """Where the pods of a JobSet and the supervisor of their run leave word for each other."""
    return run / "launch" / "kubernetes" / name


def read_call(folder: Path) -> PodCall:
    """What the pods of a JobSet are called to; nothing where no supervisor has called yet."""
    path = folder / "call.json"
    return PodCall.from_file(path) if path.is_file() else PodCall()


def write_call(folder: Path, call: PodCall) -> None:
    """Call the pods of a JobSet."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "call.json", call.to_json())


@dataclass(frozen=True)
class PodNote(Record):
    """pods/INDEX.json: the newest pod of an index, as it says itself.

    Args:
        uid: Kubernetes' own name of it.
        name: its name.
        node: the node that it runs on.
        address: its address.
    """

    SCHEMA = "pod/1"
    uid: str
    name: str
    node: str
    address: str


def note_path(folder: Path, index: int) -> Path:
    """Where the pod of an index notes itself."""
    return folder / "pods" / f"{index}.json"


def read_note(folder: Path, index: int) -> PodNote | None:
    """The newest pod of an index; None where none has come."""
    path = note_path(folder, index)
    return PodNote.from_file(path) if path.is_file() else None


def claim_path(logs: Path, node: int) -> Path:
    """{"uid": of the pod that is this agent, "index", "jobset"}."""
    return logs / f"{node}.claim"


def exit_path(logs: Path, node: int) -> Path:
    """The agent's exit code. Nothing that it has started is left then."""
    return logs / f"{node}.exit"


def indexes_that_may_run(folders: Path, logs: Path) -> set[int]:
    """Indexes whose pods may still run something of a session: an agent has begun there, its end
    is not known, and no other pod has taken the place. Kubernetes starts that only when the one
    before is over (podReplacementPolicy: Failed).

    Args:
        folders: that of the run's JobSets.
        logs: the session's folder of transports.
    """
    found = set()
    for claim in logs.glob("*.claim"):
        if claim.with_suffix(".exit").exists():
            continue
        try:
            words = read_json(claim)
            note = read_note(folders / words["jobset"], words["index"])
        except (ValueError, KeyError, ConfigError):
            continue  # it is being written, by a pod that is about to begin
        if note is None or note.uid == words["uid"]:
            found.add(int(words["index"]))
    return found
