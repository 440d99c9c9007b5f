"""The code of a run: named by its content, with the user's own repository, and never changed
again."""

from __future__ import annotations

import json
import os
import py_compile
import subprocess
import sys
import time
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from tests.programs import put_program
from trainkit.base.snapshot_files import snapshot_hash
from trainkit.launch.supervise import code_snapshot as snapshot
from trainkit.launch.supervise.code_snapshot import link_code, take_snapshot


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Something like the trainkit package, installed elsewhere."""
    package = tmp_path / "site-packages" / "trainkit"
    (package / "sub" / "__pycache__").mkdir(parents=True)
    (package / "a.py").write_text("1")
    (package / "failures.toml").write_text("")
    (package / "sub" / "b.so").write_bytes(b"\0")
    (package / "sub" / "__pycache__" / "b.pyc").write_bytes(b"\0")
    (package / "sub" / "__pycache__" / "c.py").write_text("")
    (package / ".#a.py").symlink_to("somebody@somewhere.1234")  # Emacs edits a.py
    return package


def git(folder: Path, *words: str) -> None:
    who = [
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@example.org",
        "-c",
        "protocol.file.allow=always",
    ]
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A user's repository with everything in it that git can have."""
    library, repository = tmp_path / "library", tmp_path / "mine"
    for folder in (library, repository):
        folder.mkdir()
        git(folder, "init", "-q")
    (library / "inner.py").write_text("inner")
    git(library, "add", "-A")
    git(library, "commit", "-qm", "x")
    (repository / ".gitignore").write_text("*.log\n")
    (repository / "train.py").write_text("committed")
    (repository / "gone.py").write_text("gone")
    put_program(repository, "run me.sh", "#!/bin/sh\n")
    os.symlink("train.py", repository / "link.py")
    os.symlink("/nowhere", repository / "dangling")
    git(repository, "submodule", "add", "-q", str(library), "library")
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "x")
    (repository / "train.py").write_text("edited")
    (repository / "gone.py").unlink()
    (repository / "new\nödd.py").write_text("new")
    (repository / "secret.log").write_text("ignored")
    for own in ("runs/x", "data", "code/abc", "stamps"):
        (repository / own).mkdir(parents=True)
        (repository / own / "big.json").write_text("ours")
    return repository


def names(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def test_named_by_its_content_and_taken_once(tmp_path: Path, package: Path) -> None:
    taken = take_snapshot(package, tmp_path / "code")
    assert names(taken.folder) == {
        "trainkit/a.py",
        "trainkit/failures.toml",
        "trainkit/sub/b.so",
        "complete",
        "origin.json",
    }
    # what every agent checks
    assert taken.folder.name == taken.sha256 == snapshot_hash(taken.folder)
    assert take_snapshot(package, tmp_path / "code") == taken
    (package / "a.py").write_text("2")
    assert (
        take_snapshot(package, tmp_path / "code").sha256 != taken.sha256
        and (taken.folder / "trainkit" / "a.py").read_text() == "1"
    )
    assert not list((tmp_path / "code").glob("*.tmp-*"))


def bytecode(code: Path, name: str = "a") -> Path:
    return Path(cache_from_source(code / f"trainkit/{name}.py"))


def printed(code: Path) -> str:
    words = f"import sys; sys.path[:0] = [{str(code)!r}]; import trainkit.a"
    return subprocess.check_output([sys.executable, "-I", "-c", words], text=True)


def compile_later(source: Path, mode: py_compile.PycInvalidationMode | None = None) -> None:
    """Compile a module, some time after it was written."""
    compiled = Path(py_compile.compile(str(source), invalidation_mode=mode) or "")
    later = time.time() + 60
    os.utime(compiled, (later, later))


def test_bytecode_comes_along(tmp_path: Path, package: Path) -> None:
    """Of modules that are compiled, unless everybody may write it."""
    for name in ("a", "b"):
        (package / f"{name}.py").write_text(f"print('{name}')\n")
        os.utime(package / f"{name}.py", (10**9, 10**9))
        compile_later(package / f"{name}.py")
    os.chmod(cache_from_source(package / "b.py"), 0o666)
    taken = take_snapshot(package, tmp_path / "code").folder
    assert snapshot_hash(taken) == taken.name
    assert not bytecode(taken, "b").exists()
    assert printed(taken) == "a\n"
    # it was good: Python replaces what is not
    assert bytecode(taken).samefile(cache_from_source(package / "a.py"))


@pytest.mark.parametrize("mode", list(py_compile.PycInvalidationMode))
def test_bytecode_of_another_source_is_left(
    tmp_path: Path, package: Path, mode: py_compile.PycInvalidationMode
) -> None:
    """Of an edit in the same second and to the same length, or whose time was set back, Python
    itself knows nothing; of some bytecode it is never to look at the source."""
    source = package / "a.py"
    source.write_text("print('a')\n")
    compiled = Path(py_compile.compile(str(source), invalidation_mode=mode) or "")
    old = source.stat().st_mtime_ns
    source.write_text("print('b')\n")
    os.utime(source, ns=(old, old))
    taken = take_snapshot(package, tmp_path / "code").folder
    assert not bytecode(taken).exists()
    assert printed(taken) == "b\n"
    assert not bytecode(taken).samefile(compiled)


def test_bytecode_in_a_repository_is_nobodys(package: Path, repository: Path) -> None:
    """It may be tracked, or not ignored: that of the user stays as it is."""
    for name in ("A", "b"):
        (repository / f"{name}.py").write_text("")
        compile_later(repository / f"{name}.py")
    before = {path: path.read_bytes() for path in repository.glob("__pycache__/*")}
    taken = take_snapshot(package, repository / "code", repository)
    assert {path: path.read_bytes() for path in repository.glob("__pycache__/*")} == before
    assert len(before) == 2
    assert not [name for name in names(taken.folder / "project") if "__pycache__" in name]


def test_a_users_repository_as_it_is_now(package: Path, repository: Path) -> None:
    (repository / "experiments").mkdir()
    taken = take_snapshot(package, repository / "code", repository / "experiments")
    project = taken.folder / "project"
    assert names(project) == {
        ".gitignore",
        ".gitmodules",
        "train.py",
        "run me.sh",
        "link.py",
        "library/inner.py",
        "new\nödd.py",
    }
    assert (project / "train.py").read_text() == (
        project / "link.py"
    ).read_text() == "edited" and os.access(project / "run me.sh", os.X_OK)
    assert [(each.path, each.why) for each in taken.left_out] == [
        ("dangling", "a link that leads to no file")
    ]
    assert snapshot_hash(taken.folder) == taken.sha256
    assert json.loads((taken.folder / "origin.json").read_text())["project"] == str(repository)
    again = take_snapshot(package, repository / "code", repository)
    assert again == taken  # the snapshot itself, and runs, are not part of it


def test_data_in_a_repository_is_left_out_and_named(
    package: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(repository / "weights.bin", "wb") as file:
        file.truncate(10 * 2**20 + 1)
    (repository / "small.bin").write_bytes(b"0" * 500)
    monkeypatch.setattr(snapshot, "WHOLE", 400)
    taken = take_snapshot(package, repository / "code", repository)
    why = {each.path: each.why for each in taken.left_out}
    assert (
        why["weights.bin"] == "over 10 MB"
        and why["small.bin"] == "all files together are over 0 MB"
    )
    assert "project/train.py" in names(taken.folder) and "project/small.bin" not in names(
        taken.folder
    )
    told = json.loads((taken.folder / "origin.json").read_text())["left_out"]
    assert {"path": "weights.bin", "bytes": 10 * 2**20 + 1, "why": "over 10 MB"} in told


def test_trainkits_own_checkout_and_no_repository_are_only_the_package(
    tmp_path: Path, package: Path
) -> None:
    checkout = package.parent
    alone = take_snapshot(package, tmp_path / "code", tmp_path)
    git(checkout, "init", "-q")
    (checkout / "jobs.toml").write_text("")
    assert take_snapshot(package, tmp_path / "code", checkout) == alone


def test_the_link_can_lead_elsewhere(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / "code" / name).mkdir(parents=True)
        (tmp_path / "run").mkdir(exist_ok=True)
        link_code(tmp_path / "code" / name, tmp_path / "run" / "code")
        assert os.readlink(tmp_path / "run" / "code") == f"../code/{name}"
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["code"]
