"""launch/world.json, the form world/1: which rank of an attempt runs where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainkit.base.documents import document, read_document
from trainkit.base.files import write_json
from trainkit.base.lazy_dataclasses import asdict, dataclass, field
from trainkit.runs.folder import RunFolder

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
# the hosts once more, for a program that starts the ranks of all of them itself
HOSTFILE = "launch/hostfile"


@dataclass(frozen=True)
class WorldNode:
    """One host and the ranks on it.

    Args:
        host: its name in the hostfile.
        address: by which other nodes reach it.
        node_rank: its number, from 0.
        ranks: in order of local rank.
        interface: the network interface that has the address.
        visible: CUDA_VISIBLE_DEVICES of its ranks; None: as it is on the host.
    """

    host: str
    address: str
    node_rank: int
    ranks: tuple[int, ...]
    interface: str | None = None
    visible: str | None = None


@dataclass(frozen=True)
class RunWorld:
    """All ranks of an attempt.

    Args:
        run: the run's id.
        attempt: its number.
        master_addr: where rank 0 listens.
        master_port: where rank 0 listens.
        network: the cluster names the network that ranks talk over.
        nodes: in order of ranks.
        command: what the ranks run, as Command.to_json() gives it.
        inherited: what local ranks had of their caller's environment; only older versions wrote it.
    """

    run: str
    attempt: int
    master_addr: str
    master_port: int
    network: bool
    nodes: tuple[WorldNode, ...]
    command: Mapping[str, Any]
    inherited: Mapping[str, str] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Ranks of all nodes."""
        return sum(len(node.ranks) for node in self.nodes)

    @property
    def hostfile(self) -> str:
        """Its hosts in DeepSpeed's form: `host slots=N`, no other lines."""
        return "".join(f"{node.host} slots={len(node.ranks)}\n" for node in self.nodes)

    @property
    def environment(self) -> dict[str, str]:
        """What the command adds to its ranks' environment."""
        return dict(self.command["env"])

    def node_of(self, rank: int) -> WorldNode | None:
        """Where a rank runs; None for a rank that is not there."""
        return next((node for node in self.nodes if rank in node.ranks), None)

    def visible_devices(self, node: WorldNode) -> str | None:
        """CUDA_VISIBLE_DEVICES of a node's ranks; None: as it is on the host."""
        values = dict(self.inherited)
        if node.visible is not None:
            values[VISIBLE_DEVICES] = node.visible
        return {**values, **self.environment}.get(VISIBLE_DEVICES)

    def to_json(self) -> dict[str, object]:
        """The document."""
        return document(
            "world/1",
            run=self.run,
            attempt=self.attempt,
            world_size=self.world_size,
            master_addr=self.master_addr,
            master_port=self.master_port,
            network=self.network,
            nodes=[asdict(node) for node in self.nodes],
            command=dict(self.command),
        )

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RunWorld:
        """Read the document; older versions wrote less of it."""
        nodes = tuple(
            WorldNode(
                host=node.get("host", ""),
                address=node.get("address", ""),
                node_rank=node.get("node_rank", number),
                ranks=tuple(node["ranks"]),
                interface=node.get("interface"),
                visible=node.get("visible"),
            )
            for number, node in enumerate(value["nodes"])
        )
        return cls(
            run=value.get("run", ""),
            attempt=value.get("attempt", 0),
            master_addr=value.get("master_addr", ""),
            master_port=value.get("master_port", 0),
            network=value.get("network", False),
            nodes=nodes,
            command=value["command"],
            inherited=value.get("passed_on", {}),
        )


def write_world(run: RunFolder, world: RunWorld) -> None:
    """Write launch/world.json."""
    write_json(run.world, world.to_json())


def read_world(run: RunFolder) -> RunWorld:
    """Read launch/world.json. Raises ConfigError for a file of another form."""
    return RunWorld.from_json(read_document(run.world, "world/1"))
