"""README.md is run: its shell blocks in order, in a fresh clone, as a new user would. The full demo takes five minutes of two processors: it is slow; else
jobs.local.toml ends it after 10 steps, and nothing else differs."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEST_COMMAND = "./inv test"


def commands() -> list[str]:
    """Lines of README's ```sh blocks, comments cut off, without the test command and the clone itself."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith(("#", "git clone", "cd ")) and line != TEST_COMMAND]


def test_the_readme_names_both_commands() -> None:
    assert "./inv train demo" in commands()
    assert TEST_COMMAND in (ROOT / "README.md").read_text()


SHORTER = "[jobs.demo.training]\ntrain_iters = 10\nlr_warmup_iters = 2\neval_interval = 5\neval_iters = 2\nsave_interval = 5\n"


@pytest.mark.timeout(3600)
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a git checkout to clone")
@pytest.mark.parametrize(("more", "last", "losses"), [(SHORTER, 3, 7.9), pytest.param("", 10, 5.0, marks=pytest.mark.slow)], ids=["10 steps", "all steps"])
def test_its_commands_work_in_a_fresh_clone(tmp_path: Path, more: str, last: int, losses: float) -> None:
    """So many of its last steps have losses below this on average."""
    clone = tmp_path / "trainkit"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("VIRTUAL_ENV", "PYTEST", "COV", "PYTHON"))}
    # pip compiles no bytecode: Python does, of what it loads, which is a tenth
    environment = keep | {"TMPDIR": str(tmp_path), "COLUMNS": "160", "PIP_COMPILE": "0"}
    (clone / "jobs.local.toml").write_text(f'[clusters.here]\nnode_folder = "{tmp_path}/node"\n{more}')  # slots of its own: other tests run beside
    for line in commands():
        done = subprocess.run(["bash", "-ec", line], cwd=clone, env=environment, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, f"{line} ended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    (run,) = clone.glob("runs/demo/*")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    training, validation = ([r["lm_loss"] for r in rows if ("eval" in r) == evaluated] for evaluated in (False, True))
    assert training[0] > 8 and sum(training[-last:]) / last < losses
    assert validation[0] > 8 and validation[-1] < losses + 0.5
    again = subprocess.run(["./inv", "prep-data"], cwd=clone, env=environment, capture_output=True, text=True, check=True)
    assert "fresh because nothing changed since" in again.stdout and "fresh because the extension was compiled from this source" in again.stdout
