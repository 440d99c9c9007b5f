"""The image of container/Dockerfile.cpu, built as a user builds it, once a test run."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import Project, make_corpus
from tests.images.lab import TORCH, Lab
from trainkit.base.locks import locked

ROOT = Path(__file__).resolve().parent.parent.parent
CONTEXT = ("container", "csrc", "jobs", "trainkit")
FILES = (
    ".dockerignore",
    "LICENSE",
    "README.md",
    "constraints.txt",
    "jobs.toml",
    "pyproject.toml",
    "setup.py",
    "tasks.py",
)
# the demo, on some lines of text in place of a hundred megabytes
LOCAL = """
[clusters.here]
node_folder = "{folder}/node"

[tokenizers.small]
type = "bpe"
vocab_size = 300

[datasets.lines]
source = "files"
paths = ["corpus/*.jsonl"]
tokenizer = "small"
split = "80,20,0"

[jobs.demo]
container = "cpu"
dataset = "lines"

[containers.cpu]
runtime = "enroot"
dockerfile = "container/Dockerfile.cpu"
base = "{base}"
build_args = {{ TORCH = "base" }}
builder = "buildah"
tag = "localhost/trainkit-test/cpu:1"
squashfs = {{ compression = "lz4" }}
"""


@dataclass
class CpuProject(Project):
    """A copy of this checkout, with the image built."""

    lab: Lab

    def environment(self, **more: str) -> dict[str, str]:
        """With the lab's store."""
        return super().environment(**{**self.lab.variables, **more})

    @property
    def image(self) -> Path:
        """The .sqsh file."""
        return self.path / "images" / "cpu.sqsh"


def built_cpu_image(lab: Lab) -> CpuProject:
    """The project; the first that asks builds."""
    folder = lab.folder / "cpu"
    project = CpuProject(folder, lab)
    with locked(lab.folder / "cpu.lock", {}):
        if not (folder / "built.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            copy_checkout(folder)
            make_corpus(folder)
            text = LOCAL.format(folder=folder, base=TORCH)
            (folder / "jobs.local.toml").write_text(text)
            said = project.document("build-container", "demo")
            (folder / "built.json").write_text(json.dumps(said))
    return project


def copy_checkout(folder: Path) -> None:
    """What the Dockerfiles copy, as git has it or would: not what is ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *CONTEXT, *FILES],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
