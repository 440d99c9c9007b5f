"""Where a run comes from: what is kept of the project and the environment, and what never is."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from trainkit.base.files import read_json
from trainkit.runs import origin
from trainkit.runs.folder import RunFolder
from trainkit.runs.origin import EngineTree, package_versions, printable_environment, write_origin


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "root" / "runs" / "job" / "id")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "jobs.toml").write_text("a = 1\n")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


def test_secrets_of_the_environment_have_names_only() -> None:
    given = {"B": "1", "A": "2", "HF_TOKEN": "x", "my_api_key": "y", "NAMED": "z"}
    found = printable_environment(given, ["NAMED"])
    assert found == {"A": "2", "B": "1", "HF_TOKEN": None, "NAMED": None, "my_api_key": None}
    assert list(found) == sorted(given)


def test_versions() -> None:
    found = package_versions()
    assert "pytest" in found and list(found) == sorted(found)
    for name in ("numpy", "pytest", "torch"):
        assert found[name] == importlib.metadata.version(name)


def test_versions_of_broken_and_old_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file that a hand left behind stops a run."""
    files = {
        "new-1.dist-info/METADATA": (
            "Metadata-Version: 2.1\nSummary: x\n  Version: 7\nName: New.Name \nVersion: 1+a\n"
            "\nVersion: 9\nName: other\n"
        ),
        "old-2.egg-info/PKG-INFO": "Metadata-Version: 1.0\r\nName: old\r\nVersion: 2\r\n",
        "nothing-3.dist-info/RECORD": "",
        "half-4.dist-info/METADATA": "Version: 4\n\nName: half\n",
        "behind/old-1.dist-info/METADATA": "Name: old\nVersion: 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(text.encode())
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "behind")])
    assert package_versions() == {"New.Name": "1+a", "old": "2"}


def test_a_clean_checkout(run: RunFolder, checkout: Path) -> None:
    (checkout / "new.txt").write_text("")
    write_origin(run, checkout, "abc", {})
    found = read_json(run.origin)
    assert found["schema"] == "origin/1" and len(found["git_commit"]) == 40
    assert found["git_diff"] is None and found["git_diff_bytes"] == 0
    assert found["git_untracked"] == ["new.txt"] and found["code_sha256"] == "abc"
    assert not run.diff.exists() and run.origin.stat().st_mode & 0o077 == 0


def test_changes_are_kept_without_secrets(
    run: RunFolder, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout / "jobs.toml").write_text("a = 'hunter22'\n")
    monkeypatch.setenv("PLAIN", "has hunter22 in it")
    write_origin(run, checkout, "abc", {"NAMED": "hunter22"}, [{"path": "big.bin"}])
    found = read_json(run.origin)
    assert found["git_diff"] == "origin.diff" and "+a = '***'" in run.diff.read_text()
    assert found["environment"]["PLAIN"] == "has *** in it"
    assert found["code_left_out"] == [{"path": "big.bin"}]
    assert "hunter22" not in run.origin.read_text() + run.diff.read_text()


def test_a_diff_that_is_data_is_counted_only(
    run: RunFolder, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origin, "DIFF_LIMIT", 100)
    (checkout / "jobs.toml").write_text("b = 1\n" * 100)
    write_origin(run, checkout, "abc", {})
    found = read_json(run.origin)
    assert found["git_diff"] is None and found["git_diff_bytes"] > 100 and not run.diff.exists()


def test_no_git_that_can_be_run(
    run: RunFolder, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = checkout / "bin" / "git"
    program.parent.mkdir()
    program.write_text("no program\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    write_origin(run, checkout, "", {})
    assert read_json(run.origin)["git_commit"] is None


def test_no_repository(run: RunFolder, tmp_path: Path) -> None:
    write_origin(run, tmp_path, "abc", {})
    found = read_json(run.origin)
    assert (found["git_commit"], found["git_diff_bytes"], found["git_untracked"]) == (None,) * 3


def test_the_tree_of_another_engine(run: RunFolder, checkout: Path, tmp_path: Path) -> None:
    engine = EngineTree("megatron-lm", "https://example.org/tree", "main", checkout)
    write_origin(run, tmp_path, "abc", {}, engine=engine)
    found = read_json(run.origin)["engine"]
    assert len(found["commit"]) == 40 and found["changed"] == [] and found["diff"] is None
    assert (found["source"], found["revision"]) == ("https://example.org/tree", "main")
    assert found["tree"] == str(checkout) and not run.engine_diff.exists()
    (checkout / "jobs.toml").write_text("a = 'hunter22'\n")
    (checkout / "helpers.so").write_text("")
    write_origin(run, tmp_path, "abc", {"NAMED": "hunter22"}, engine=engine)
    found = read_json(run.origin)["engine"]
    assert found["changed"] == ["jobs.toml"] and found["diff"] == "engine.diff"
    assert "+a = '***'" in run.engine_diff.read_text()


def test_an_engines_tree_that_git_does_not_know(run: RunFolder, tmp_path: Path) -> None:
    for tree in (tmp_path, tmp_path / "in the image"):
        write_origin(run, tmp_path, "abc", {}, engine=EngineTree("x", str(tree), None, tree))
        found = read_json(run.origin)["engine"]
        assert found["commit"] is None and found["tree"] == str(tree)
