"""The container around the agent of each node: one file a kind of runtime."""

from trainkit.launch.containers.contract import (
    NodeContainer,
    check_container,
    node_container,
    reusable_since,
)

__all__ = ["NodeContainer", "check_container", "node_container", "reusable_since"]
