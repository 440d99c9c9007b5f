"""What is executed: one file an engine."""

from trainkit.engines.contract import Command, Engine
from trainkit.engines.native import Native

ENGINES: dict[str, Engine] = {"native": Native()}

__all__ = ["ENGINES", "Command", "Engine"]
