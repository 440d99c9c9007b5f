"""Data that changed since a run began, or does not fit together, is refused."""

from __future__ import annotations

import json
import signal

from tests.conftest import Project
from tests.launch.live_runs import rank_pids, wait_for_step


def test_data_that_changed_is_no_ground_to_resume_on(project: Project) -> None:
    project.edit_jobs("train_iters = 20", "train_iters = 4000")
    process = project.start("train", "text")
    rank_pids(project)
    wait_for_step(project, 1)
    process.send_signal(signal.SIGINT)
    process.communicate()
    (project.path / "data/lines/bpe/lines_text_document.bin").touch()
    refused = project.invoke("resume", "last", exit=5)
    assert "lines_text_document.bin has changed since run" in refused.stderr


def test_a_bin_that_does_not_fit_its_idx(project: Project) -> None:
    project.invoke("prep-data")
    data = project.path / "data/lines/bpe/lines_text_document.bin"
    stamp = project.path / "stamps/prep-data/lines--bpe.json"
    data.write_bytes(data.read_bytes()[:-2])
    value = json.loads(stamp.read_text())  # as if the disk had eaten the end: the stamp still fits
    status = data.stat()
    value["outputs"] = [
        [str(data), status.st_size, status.st_mtime_ns] if o[0] == str(data) else o
        for o in value["outputs"]
    ]
    stamp.write_text(json.dumps(value))
    failed = project.invoke("train", "text", exit=6)
    # said before any rank starts
    assert "lines_text_document" in failed.stderr and project.runs() == []
