"""What goes around the agent of each node: one file a kind of runtime."""

from trainkit.launch.containers.contract import Around, around, kept_since, refuse_unmountable

__all__ = ["Around", "around", "kept_since", "refuse_unmountable"]
