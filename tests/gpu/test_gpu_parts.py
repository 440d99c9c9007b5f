"""What needs a GPU: the parts of the proof at small size, each in its own process, on CUDA."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.gpu
@pytest.mark.parametrize("part", ["device", "numerics", "attention", "loop", "resume"])
def test_a_part_of_the_proof_holds_on_a_gpu(part: str, tmp_path: Path) -> None:
    """Small sizes have the goals of large ones where they are of numbers, not of speed."""
    argv = [sys.executable, "-m", "benchmarks.gpu.run_part", part, "--device", "cuda"]
    argv += ["--size", "small", "--folder", str(tmp_path / "run")]
    argv += ["--findings", str(tmp_path / "findings.json")]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "findings.json").read_text())
    assert found and not [one for one in found if one["verdict"] == "fail"]
