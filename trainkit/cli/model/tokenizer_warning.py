"""A warning for tasks that read or write text with a run's tokenizer."""

from __future__ import annotations

import sys
from pathlib import Path

from trainkit.base.documents import read_document
from trainkit.runs.folder import RunFolder
from trainkit.stages.stamps import file_identity


def warn_of_changed_tokenizer(run: RunFolder) -> None:
    """Warn on stderr if the run's tokenizer.json is not the file that the run began with: its ids
    may stand for other text now."""
    inputs = run.inputs
    if not inputs.is_file():  # a run folder made by hand
        return
    for identity in read_document(inputs, "inputs/1")["files"]:
        path = Path(identity[0])
        if path.name == "tokenizer.json" and path.is_file() and file_identity(path) != identity:
            print(
                f"WARNING: {path} has changed since run {run.id} began; if its ids stand for other"
                " text now, what follows is nonsense",
                file=sys.stderr,
            )
