"""What goes around the agent of each node: one file a kind of runtime."""

from trainkit.launch.containers.contract import Around, around

__all__ = ["Around", "around"]
