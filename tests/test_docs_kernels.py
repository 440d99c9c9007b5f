"""docs/kernels.md: its table and its Python run, its files and keys exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import tomli

from trainkit.cli.tasks import namespace
from trainkit.jobs.schema import Job

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs/kernels.md").read_text()


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def test_the_key() -> None:
    (table,) = blocks("toml")
    assert tomli.loads(table)["jobs"]["demo"]["kernels"] == Job.model_fields["kernels"].default
    values = re.findall(r"^\| `\"(\w+)\"`", TEXT, re.MULTILINE)
    assert sorted(values) == ["auto", "fused", "reference"]


def test_the_commands() -> None:
    for line in "".join(blocks("sh")).splitlines():
        program, task, *options = line.split()
        assert program == "./inv" and task in namespace.task_names
        assert set(options) <= {"--json"}


def test_the_operations_are_all_there_are() -> None:
    named = set(re.findall(r"`(\w+\.py)`", TEXT))
    ops = ROOT / "trainkit/ops"
    assert {path.name for path in ops.glob("*.py") if "bytes_moved(" in path.read_text()} <= named
    assert all((ops / name).is_file() for name in named)


def test_the_python() -> None:
    (code,) = blocks("python")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
