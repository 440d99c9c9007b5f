"""Small trees of foreign engines in real git repositories, and their stages brought up to date."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from trainkit.jobs.schema import Cluster, Dataset, EngineSource, Job, Model, Training
from trainkit.launch.stage_lines import StageLines
from trainkit.stages.contract import Need, Stage
from trainkit.stages.execute import stamps_folder, update_stage
from trainkit.stages.stamps import Freshness, check_freshness
from trainkit.stages.unit_process import execute_locally

AUTHOR = {
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@example.org",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@example.org",
    "GIT_CONFIG_GLOBAL": os.devnull,
}
MEGATRON = {
    "pretrain_gpt.py": "print('training')\n",
    "megatron/core/package_info.py": "MAJOR = 0\nMINOR = 12\nPATCH = 0\n",
    ".gitignore": "__pycache__\n*.so\nbuild\n",
}


def job_of(root: Path, source: dict[str, Any], **job: Any) -> Job:
    """A job below `root` whose engine is that of `source` ("engine", by default megatron-lm)."""
    engine = EngineSource(**{"name": source.get("engine", "megatron-lm"), **source})
    model = Model(
        name="m", num_layers=2, hidden_size=8, num_attention_heads=2, seq_length=8, vocab_size=9
    )
    values: dict[str, Any] = {"cluster": Cluster(name="c", root=str(root)), **job}
    return Job(
        name="j",
        engine=engine.kind,  # type: ignore[arg-type]
        engine_source=engine,
        model=model,
        dataset=Dataset(name="mock", source="mock"),
        training=Training(train_iters=1, lr=1.0),
        **values,
    )


def git(folder: Path, *words: str) -> str:
    """What git prints in `folder`."""
    return subprocess.run(
        ["git", "-C", str(folder), *words],
        env={**os.environ, **AUTHOR},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def write_files(folder: Path, files: dict[str, str]) -> None:
    """Write small files below `folder`."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def commit(folder: Path, files: dict[str, str], message: str = "c") -> str:
    """Commit files; returns the commit."""
    write_files(folder, files)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "--allow-empty", "-m", message)
    return git(folder, "rev-parse", "HEAD")


def repository(folder: Path, files: dict[str, str] | None = None) -> Path:
    """A repository with one commit on branch main."""
    folder.mkdir(parents=True)
    git(folder, "init", "-q", "--initial-branch=main")
    commit(folder, MEGATRON if files is None else files)
    return folder


class Bringer:
    """Brings a stage of a job up to date, and remembers what it said."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.lines: list[str] = []

    def stamps(self, job: Job) -> Path:
        return stamps_folder(Path(job.cluster.root or "."), self.stage.name)

    def need(self, job: Job) -> Need:
        """The only need."""
        (need,) = self.stage.needs(job, self.stamps(job))
        return need

    def verdict(self, job: Job) -> Freshness:
        """What is said before anything is made."""
        return check_freshness(self.need(job), self.stamps(job))

    def bring(self, job: Job, *, force: bool = False) -> Freshness:
        """Make it, and return what was found before."""
        root = Path(job.cluster.root or ".")
        reporter = StageLines(self.lines.append)
        need = self.need(job)
        return update_stage(need, root, execute_locally, reporter, force=force, workers=1)


def everything_below(folder: Path) -> str:
    """All that is written below a folder, in files and in names."""
    parts = []
    for path in sorted(folder.rglob("*")):
        parts.append(str(path))
        if path.is_file():
            parts.append(path.read_bytes().decode(errors="replace"))
    return "\n".join(parts)
