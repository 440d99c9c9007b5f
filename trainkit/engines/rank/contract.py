"""What the program beside a rank knows of an engine: one module an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Callable, List, Protocol, Union

from trainkit.engines.rank.readings import EvaluationLine, FoundCheckpoint, Iteration

Reading = Union[Iteration, EvaluationLine]
# reads one line after the other
LineReader = Callable[[str], List[Reading]]


class EngineReader(Protocol):
    """How an engine says how far it is, and where its checkpoints lie."""

    def read_line(self, text: str) -> Iteration | EvaluationLine | None:
        """What one line of the engine's output says."""

    def tracked_step(self, folder: Path) -> int | None:
        """The iteration that the engine would go on from; None where there is no checkpoint."""

    def found_checkpoints(self, folder: Path) -> list[FoundCheckpoint]:
        """All checkpoints in the folder, judged by the engine's own rules, oldest first."""
