"""Which commit an image is of, and the time of its files."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from trainkit.images.build import (
    WITHOUT_GIT,
    arguments_that_say,
    content_commit,
    labels_of,
    source_date_epoch,
)


def git(folder: Path, *words: str, time: int = 0) -> str:
    who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a"}
    env = {**who, "GIT_COMMITTER_EMAIL": "a@b", "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    env |= {"GIT_AUTHOR_DATE": f"{time} +0000", "GIT_COMMITTER_DATE": f"{time} +0000"}
    argv = ["git", "-C", str(folder), *words]
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout.strip()


def commit(folder: Path, name: str, text: str, time: int) -> str:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", name, time=time)
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    folder.mkdir()
    git(folder, "init", "-q")
    return folder


def test_the_newest_commit_that_changed_what_goes_in(repo: Path) -> None:
    first = commit(repo, "a file.py", "1", 1_600_000_000)
    commit(repo, "docs.md", "1", 1_700_000_000)
    files = [repo / "a file.py"]
    assert content_commit(repo, files).commit == first
    assert source_date_epoch(content_commit(repo, files)) == 1_600_000_000
    second = commit(repo, "a file.py", "2", 1_800_000_000)
    assert content_commit(repo, files).commit == second
    (repo / "docs.md").write_text("changed")
    assert content_commit(repo, files).commit == second
    (repo / "a file.py").write_text("changed")
    assert content_commit(repo, files).commit == f"{second}-dirty"
    git(repo, "checkout", "-q", "a file.py")
    (repo / "new.py").touch()  # which git does not know
    assert content_commit(repo, [*files, repo / "new.py"]).commit == f"{second}-dirty"


def test_a_context_within_a_repository(repo: Path) -> None:
    first = commit(repo, "sub/a.py", "1", 1_600_000_000)
    commit(repo, "a.py", "1", 1_700_000_000)
    assert content_commit(repo / "sub", [repo / "sub/a.py"]).commit == first


def test_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    content = content_commit(tmp_path, [tmp_path / "a"])
    assert content.commit == "" and source_date_epoch(content) == WITHOUT_GIT
    assert "org.opencontainers.image.revision" not in labels_of(content, "")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1234567890")
    assert source_date_epoch(content) == 1234567890
    labels = labels_of(content, "localhost/base:1")
    assert labels == {"org.opencontainers.image.base.name": "localhost/base:1"}
    assert arguments_that_say(content)["IMAGE_REVISION"] == "unknown"
