"""A small script that prints Megatron-LM's lines and writes its folders, and the document that has
the program beside a rank run it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import trainkit.engines.rank.main
from trainkit.engines.rank.spec import RankSpec

MAIN = Path(trainkit.engines.rank.main.__file__)
# what it runs with: as in the images of others, where such a Python is named
PYTHON = os.environ.get("TRAINKIT_OLD_PYTHON") or sys.executable
ENGINE = """
import os, pathlib, signal, sys, time, zipfile
folder = pathlib.Path(sys.argv[1])
def line(step, of=4):
    print(f" [2026-11-22 03:40:46] iteration {step:8d}/{of:8d} | consumed samples: {step * 4} |",
          "elapsed time per iteration (ms): 250.0 | learning rate: 1.000000E-04 |",
          "global batch size:     4 | lm loss: 1.078138E+01 | loss scale: 1.0 | grad norm: 1.590 |",
          "num zeros: 0.0 | number of skipped iterations:   0 | number of nan iterations:   0 |",
          flush=True)
def save(step):
    rank = folder / f"iter_{step:07d}" / "mp_rank_00"
    rank.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(rank / "model_optim_rng.pt", "w") as file:
        file.writestr("archive/data.pkl", b"x" * 64)
        file.writestr("archive/version", b"3\\n")
    (folder / "latest_checkpointed_iteration.txt").write_text(str(step))
"""


def spec_of(tmp_path: Path, body: str, **changes: Any) -> Path:
    """A spec whose engine is ENGINE followed by `body`."""
    tree = tmp_path / "tree"
    tree.mkdir(exist_ok=True)
    (tree / "pretrain_gpt.py").write_text(ENGINE + body)
    values: dict[str, Any] = {
        "engine": "megatron-lm",
        "argv": (sys.executable, "pretrain_gpt.py", str(tmp_path / "checkpoints")),
        "cwd": str(tree),
        "checkpoints": str(tmp_path / "checkpoints"),
        "metrics": str(tmp_path / "metrics.jsonl"),
        "train_iters": 4,
        "log_interval": 1,
        "global_batch_size": 4,
        "seq_length": 8,
        "world_size": 1,
        "model_flops": 6e6,
        "hardware_flops": 8e6,
        "peak_tflops": None,
        "peak": None,
        "saves_on_term": True,
        "modules": (),
        "reads": (),
        "seen_seconds": 0.0,
    }
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(RankSpec(**{**values, **changes}).to_json()))
    return path


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": "0",
        "LOCAL_RANK": "0",
        "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json"),
        "TRAINKIT_HEARTBEAT_FILE": str(tmp_path / "beat.json"),
        **more,
    }
