"""Whether a .sqsh file is whole, and which image it is."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.images.made_files import pretend_squashfs, real_squashfs
from trainkit.images.squashfs import fingerprint, read_superblock, squashfs_problem


@pytest.mark.parametrize("compression", ["gzip", "zstd", "lzo", "xz", "lz4"])
def test_the_superblock_is_what_unsquashfs_reads(tmp_path: Path, compression: str) -> None:
    path = real_squashfs(tmp_path / "a.sqsh", "-comp", compression, "-mkfs-time", "1700000000")
    found = read_superblock(path)
    assert found is not None and squashfs_problem(path) == ""
    argv = ["unsquashfs", "-s", str(path)]
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert f"Compression {found.compression}\n" in said and found.compression == compression
    assert f"Number of inodes {found.inodes}\n" in said and found.made == 1700000000
    assert f"Filesystem size {found.bytes_used} bytes" in said


def test_what_is_not_whole_says_why(tmp_path: Path) -> None:
    path = real_squashfs(tmp_path / "a.sqsh")
    found = read_superblock(path)
    assert found is not None
    # mksquashfs fills up the last block: without that the image is as whole as before
    os.truncate(path, found.bytes_used)
    assert squashfs_problem(path) == ""
    os.truncate(path, found.bytes_used - 1)
    assert squashfs_problem(path) == (
        f"{path} is truncated: it has {found.bytes_used - 1} bytes, and its superblock says"
        f" {found.bytes_used}"
    )
    os.truncate(path, 95)
    assert "is truncated: 95 bytes hold no squashfs image" in squashfs_problem(path)
    os.truncate(path, 0)
    assert squashfs_problem(path) == f"{path} is empty"
    path.write_bytes(b"PK\3\4" + bytes(200))
    assert "is not a squashfs image: it does not begin with 'hsqs'" in squashfs_problem(path)
    path.unlink()
    assert squashfs_problem(path) == f"{path} cannot be read: No such file or directory"
    assert "cannot be read: Is a directory" in squashfs_problem(tmp_path)


def test_an_older_format_is_no_image(tmp_path: Path) -> None:
    path = pretend_squashfs(tmp_path / "a.sqsh")
    content = bytearray(path.read_bytes())
    content[28] = 3  # s_major
    path.write_bytes(content)
    assert read_superblock(path) is None and "is not a squashfs image" in squashfs_problem(path)


def test_a_file_is_known_again(tmp_path: Path) -> None:
    """By its head and its tables, whatever its name; not by its times."""
    first = real_squashfs(tmp_path / "a.sqsh", "-mkfs-time", "1", "-all-time", "1")
    same = tmp_path / "b.sqsh"
    same.write_bytes(first.read_bytes())
    assert fingerprint(same) == fingerprint(first)
    other = real_squashfs(tmp_path / "c.sqsh", "-mkfs-time", "1", "-all-time", "1")
    assert fingerprint(other) != fingerprint(first)
