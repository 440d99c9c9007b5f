"""launcher = "kubernetes": agents are started by the pods of the run's JobSet, which wait for the
supervisor's call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trainkit.launch.launchers.contract import TransportExit, Transports
from trainkit.launch.launchers.transports import last_line
from trainkit.launch.protocol.pod_call import (
    WORKERS,
    PodCall,
    exit_path,
    jobset_folder,
    read_call,
    write_call,
)
from trainkit.launch.session import Session, transport_log


def pod_host(jobset: str, index: int) -> str:
    """The host that the pod of an index is, by its name in the cluster: the same for one that
    takes its place."""
    return f"{jobset}-{WORKERS}-0-{index}"


def host_index(host: str) -> int:
    """The index of such a host."""
    return int(host.rpartition("-")[2])


class Kubernetes:
    """Pods that are there, or on their way."""

    name = "kubernetes"

    def commands(self, session: Session, nodes: Sequence[int]) -> list[tuple[str, ...]]:
        return [("/bin/bash", str(session.script), str(node)) for node in nodes]

    def start(self, session: Session, nodes: Sequence[int]) -> Transports:
        jobset = session.hosts[nodes[0]].name.rpartition(f"-{WORKERS}-0-")[0]
        # the folder of a session is RUN/launch/attempt-N
        folder = jobset_folder(session.folder.parents[1], jobset)
        call = read_call(folder)
        if call.script != str(session.script):
            call = PodCall(str(session.script), str(session.logs))
        indexes = {node: str(host_index(session.hosts[node].name)) for node in nodes}
        logs = {node: transport_log(session, node) for node in nodes}
        write_call(
            folder,
            replace(
                call,
                nodes={**call.nodes, **{index: node for node, index in indexes.items()}},
                outputs={**call.outputs, **{indexes[node]: logs[node].name for node in nodes}},
            ),
        )
        return _CalledPods(session.logs, logs)


class _CalledPods:
    def __init__(self, folder: Path, logs: Mapping[int, Path]) -> None:
        self.folder = folder
        self.logs = logs
        self._ended: dict[int, TransportExit] = {}

    def poll(self) -> Mapping[int, TransportExit]:
        for node, log in self.logs.items():
            if node not in self._ended and (path := exit_path(self.folder, node)).is_file():
                self._ended[node] = TransportExit(int(path.read_text()), last_line(log))
        return self._ended

    def close(self) -> None:
        """Agents end by the supervisor's word, or for want of one."""
