"""What is packed is enough on Python 3.12: needs an index with the wheels, and that interpreter."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.gpu import pack, packed
from tests.interpreters import found_or_skip
from trainkit.base.errors import TrainkitError

ROOT = Path(__file__).resolve().parents[2]
PREPARE = """
import sys
from pathlib import Path
from benchmarks.gpu.packed import prepare_python, read_pack
folder, target, root = map(Path, sys.argv[1:])
print(prepare_python(read_pack(folder), target, root=root))
"""
WITHOUT_TORCH = (
    "import trainkit._index, trainkit.jobs.load, trainkit.plan.planner, trainkit.data.order.native,"
    " trainkit.cli.tasks, trainkit.launch.main; print(trainkit.__file__)"
)


def run(argv: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv,
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,  # that of -m comes first on the import path
        env={**os.environ, **environment},
    )


@pytest.mark.slow
def test_the_packed_folder_is_enough_on_python_3_12(tmp_path: Path) -> None:
    """All but torch, which is there on such a machine; with a torch for 3.12, the CPU part."""
    python = found_or_skip("3.12")
    folder = tmp_path / "pack"
    try:
        made = pack.pack(folder, "3.12", python)
    except TrainkitError as error:
        pytest.skip(f"no wheels for Python 3.12: {error}")
    assert int(str(made["bytes"])) <= pack.MOST_BYTES
    root = tmp_path / "checkout"
    for name in ("trainkit", "benchmarks", "csrc", "docs"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("*.so"))
    for name in ("setup.py", "pyproject.toml", "README.md", "CONTRIBUTING.md", "constraints.txt"):
        shutil.copy2(ROOT / name, root)
    words = [python, "-c", PREPARE, str(folder), str(tmp_path / "python"), str(root)]
    done = run(words, root, PYTHONPATH=str(root))
    assert done.returncode == 0, done.stderr
    own = done.stdout.strip().splitlines()[-1]
    seen = run([own, "-I", "-c", WITHOUT_TORCH], root)
    assert seen.stdout.strip() == str(root / "trainkit" / "__init__.py"), seen.stderr
    assert not list(packed.missing_wheels([], {}))
    if run([own, "-I", "-c", "import torch"], root).returncode:
        pytest.skip("Python 3.12 has no torch here: all but the parts that need it was shown")
    argv = [own, "-m", "benchmarks.gpu.prove", "--device", "cpu", "--parts", "numerics,resume"]
    proved = run([*argv, "--results", str(tmp_path / "proof")], root, PYTHONPATH=str(root))
    assert proved.returncode == 0, proved.stdout + proved.stderr
