"""lfs setstripe on a folder, copy, rename; a program in place of lfs records its words."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.images.made_files import pretend_squashfs
from trainkit.base.errors import Exit, TrainkitError
from trainkit.images.stripe import setstripe_argv, stripe_commands, stripe_file
from trainkit.jobs.containers import Stripe

# Azure, storage_references/slurm/squashed_images
AZURE = "lfs setstripe -S 1M -E -1 -c -1 $STAGE_PATH/striped_directory"


@pytest.fixture
def lfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Records its words in a file; what it finds in `says` it says and fails with."""
    program = tmp_path / "bin/lfs"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/words\n[ ! -e {tmp_path}/says ] ||'
        f" {{ cat {tmp_path}/says >&2; exit 25; }}\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return tmp_path / "words"


def test_the_words_are_those_of_azure() -> None:
    assert setstripe_argv(Path("$STAGE_PATH/striped_directory"), Stripe()) == tuple(AZURE.split())
    four = setstripe_argv(Path("/d"), Stripe(size="4M", count=8))
    assert four == ("lfs", "setstripe", "-S", "4M", "-E", "-1", "-c", "8", "/d")


def test_a_file_is_spread(tmp_path: Path, lfs: Path) -> None:
    """The file is another one, with the same bytes, time and rights; the folder is gone."""
    path = pretend_squashfs(tmp_path / "images/box.sqsh")
    path.chmod(0o640)
    content = path.read_bytes()
    before = path.stat()
    stripe_file(path, Stripe())
    after = path.stat()
    assert path.read_bytes() == content and after.st_ino != before.st_ino
    assert (after.st_mtime_ns, after.st_mode) == (before.st_mtime_ns, before.st_mode)
    (words,) = lfs.read_text().splitlines()
    assert words.startswith(f"setstripe -S 1M -E -1 -c -1 {path.parent}/.box.sqsh.tmp-")
    assert list(path.parent.iterdir()) == [path]
    shown = [" ".join(argv) for argv in stripe_commands(path, Stripe())]
    assert shown[1] == f"lfs setstripe -S 1M -E -1 -c -1 {path.parent}/.box.sqsh.tmp-striped"
    assert [line.split()[0] for line in shown] == ["mkdir", "lfs", "cp", "mv"]


def refused(path: Path) -> TrainkitError:
    content = path.read_bytes()
    with pytest.raises(TrainkitError) as caught:
        stripe_file(path, Stripe())
    assert caught.value.exit == Exit.STAGE_FAILED
    assert path.read_bytes() == content and list(path.parent.iterdir()) == [path]
    return caught.value


def test_a_file_system_that_is_not_lustre(tmp_path: Path, lfs: Path) -> None:
    """The image is as it was."""
    path = pretend_squashfs(tmp_path / "images/box.sqsh")
    (tmp_path / "says").write_text("error: setstripe: Inappropriate ioctl for device (25)\n")
    error = refused(path)
    assert "lfs setstripe says: error: setstripe: Inappropriate ioctl" in error.message
    assert "stripe is for Lustre" in error.hint and str(path.parent) in error.hint


def test_no_lfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pretend_squashfs(tmp_path / "images/box.sqsh")
    monkeypatch.setenv("PATH", str(tmp_path))
    error = refused(path)
    assert "lfs, Lustre's own program, is not installed here" in error.message


def test_a_kill_in_the_middle_leaves_what_the_next_takes_away(tmp_path: Path, lfs: Path) -> None:
    path = pretend_squashfs(tmp_path / "images/box.sqsh")
    left = path.with_name(f".{path.name}.tmp-1-abc")
    left.mkdir()
    (left / path.name).write_bytes(b"half")
    stripe_file(path, Stripe())
    assert list(path.parent.iterdir()) == [path]
