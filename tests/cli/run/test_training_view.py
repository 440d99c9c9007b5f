"""The lines of a run that is followed."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from trainkit.cli.run.progress import TrainingView
from trainkit.runs.folder import RunFolder


def test_a_row_without_a_speed_is_shown(tmp_path: Path) -> None:
    """Other engines measure their first iteration only by the second."""
    run = RunFolder(tmp_path)
    printed = io.StringIO()
    view = TrainingView(Console(file=printed, width=200), 1)
    view.begin(run)
    run.metrics.write_text(json.dumps({"step": 1, "lm_loss": 18.2}) + "\n")
    view.tick()
    view.end()
    assert "step 1/1  loss 18.2000\n" in printed.getvalue()
