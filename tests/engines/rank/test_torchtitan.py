"""Lines and checkpoints of torchtitan."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict_saver import save

from trainkit.engines.rank.readings import EvaluationLine, Iteration
from trainkit.engines.rank.torchtitan import found_checkpoints, read_line, tracked_step


def test_lines() -> None:
    line = '[trainkit] {"step": 3, "train_iters": 9, "loss": 6.5, "elapsed_ms": null}'
    assert read_line(line) == Iteration(3, train_iters=9, lm_loss=6.5)
    assert read_line('x [trainkit] {"step": 3, "loss": NaN}') is not None
    said = read_line('[trainkit] {"step": 5, "valid": 6.25}')
    assert said == EvaluationLine(5, "valid", 6.25)
    own = "[titan] 2026-11-27 04:18:44,162 - root - INFO - step:  4  loss:  6.69380"
    for other in (own, "[trainkit] {", '[trainkit] ["step"]', '[trainkit] {"step": "3"}', ""):
        assert read_line(other) is None


def test_a_checkpoint_that_was_cut_short_is_not_gone_on_from(tmp_path: Path) -> None:
    for step in (4, 8, 12):
        state = {"weight": torch.ones(1000)}
        save(state, checkpoint_id=tmp_path / f"step-{step}", no_dist=True)
    assert tracked_step(tmp_path) == 12
    (tmp_path / "step-12" / ".metadata").unlink()
    part = tmp_path / "step-8" / "__0_0.distcp"
    part.write_bytes(part.read_bytes()[:-100])
    assert tracked_step(tmp_path) == 4
    problems = {found.step: " ".join(found.problems) for found in found_checkpoints(tmp_path)}
    assert "did not end" in problems[12] and "cut off" in problems[8] and not problems[4]
    assert tracked_step(tmp_path / "nowhere") is None
