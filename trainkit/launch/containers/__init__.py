"""The container around the agent of each node: one file a kind of runtime."""

from trainkit.launch.containers.contract import (
    NodeContainer,
    check_mounts,
    node_container,
    reusable_since,
)

__all__ = ["NodeContainer", "check_mounts", "node_container", "reusable_since"]
