"""README.md and docs/quickstart.md are run: their shell blocks in order, in a fresh clone.

As a new user would, with `./inv` that installs into a new environment, and the whole demo: that
is slow, five minutes of two processors. Else jobs.local.toml ends the demo after 6 steps, and
the commands are typed to the environment that the tests run in; .ci/run has just installed that
in a fresh clone of its own.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import forkserver

ROOT = Path(__file__).resolve().parent.parent
TEST_COMMAND = "./inv test"


def commands() -> list[str]:
    """Lines of the ```sh blocks of README.md and docs/quickstart.md, comments cut off, without the
    test command and the clone itself."""
    text = "".join((ROOT / name).read_text() for name in ("README.md", "docs/quickstart.md"))
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [
        line
        for line in lines
        if line and not line.startswith(("#", "git clone", "cd ")) and line != TEST_COMMAND
    ]


def test_the_readme_names_both_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    assert commands()[0] == "./inv train demo" and f"\n{commands()[0]} " in readme
    assert f"\n{TEST_COMMAND} " in readme


def test_the_readme_is_one_screen() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 60


SHORTER = (
    "[jobs.demo.training]\nglobal_batch_size = 8\ntrain_iters = 6\nlr_warmup_iters = 1\n"
    "eval_interval = 3\neval_iters = 1\nsave_interval = 3\n"
)
Type = Callable[..., "subprocess.CompletedProcess[str]"]


def in_a_new_environment(line: str, clone: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """As somebody would who has just cloned it."""
    keep = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("VIRTUAL_ENV", "PYTEST", "COV", "PYTHON"))
    }
    # pip compiles no bytecode: Python does, of what it loads, which is a tenth
    environment = keep | {"TMPDIR": str(folder), "COLUMNS": "160", "PIP_COMPILE": "0"}
    return subprocess.run(
        ["bash", "-ec", line],
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def in_this_environment(line: str, clone: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """As `./inv` does when everything is installed."""
    program, *words = shlex.split(line)
    assert program == "./inv"
    argv = [sys.executable, "-P", "-m", "trainkit", "--search-root", str(clone), *words]
    environment = {**os.environ, "TMPDIR": str(folder), "COLUMNS": "160"}
    return forkserver.run(
        argv, cwd=clone, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


@pytest.mark.timeout(3600)
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a git checkout to clone")
@pytest.mark.parametrize(
    ("run_line", "more", "last", "losses"),
    [
        (in_this_environment, SHORTER, 3, 7.9),
        pytest.param(in_a_new_environment, "", 10, 5.0, marks=pytest.mark.slow),
    ],
    ids=["6 steps", "all steps, installed anew"],
)
def test_its_commands_work_in_a_fresh_clone(
    tmp_path: Path, run_line: Type, more: str, last: int, losses: float
) -> None:
    """So many of its last steps have losses below this on average."""
    clone = tmp_path / "trainkit"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    # forked agents are of the checkout: the run's snapshot must hold the package alone, without a
    # project
    if run_line is in_this_environment:
        shutil.rmtree(clone / ".git")
    # slots of its own: other tests run beside
    (clone / "jobs.local.toml").write_text(
        f'[clusters.here]\nnode_folder = "{tmp_path}/node"\n{more}'
    )
    for line in commands():
        done = run_line(line, clone, tmp_path)
        assert done.returncode == 0, (
            f"{line} ended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
    (run,) = clone.glob("runs/demo/*")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    training, validation = (
        [r["lm_loss"] for r in rows if ("eval" in r) == evaluated] for evaluated in (False, True)
    )
    assert training[0] > 8 and sum(training[-last:]) / last < losses
    assert validation[0] > 8 and validation[-1] < losses + 0.5
    again = run_line("./inv prep-data", clone, tmp_path)
    assert again.returncode == 0
    assert (
        "fresh because nothing changed since" in again.stdout
        and "fresh because the extension was compiled from this source" in again.stdout
    )
