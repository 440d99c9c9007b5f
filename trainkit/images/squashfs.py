"""Files that hold an image: whether a .sqsh is whole, and which image a file holds.

Format of the superblock: struct squashfs_super_block in the Linux kernel's
fs/squashfs/squashfs_fs.h (version 4, little endian, 96 bytes at the start of the file).
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path

from trainkit.base.lazy_dataclasses import dataclass

SUFFIXES = (".sqsh", ".squashfs")
MAGIC = b"hsqs"  # 0x73717368
# magic, inodes, mkfs_time, block_size, fragments; compression, block_log, flags, no_ids, s_major,
# s_minor; root_inode, bytes_used. What follows are places of tables.
_FIELDS = struct.Struct("<4s4I6H2Q")
SUPERBLOCK_BYTES = 96
BYTES_USED_AT = 40  # where bytes_used stands, for scripts
MAJOR = 4
COMPRESSIONS = {1: "gzip", 2: "lzma", 3: "lzo", 4: "xz", 5: "lz4", 6: "zstd"}
# What is hashed of a file to know it again: its superblock or header, and the tables at its end,
# which hold the size, the time and the place of every file in it
HEAD_BYTES = 4096
TAIL_BYTES = 65536
KNOWN_AGAIN = 12  # hex digits of that sum which stand in names of files


@dataclass(frozen=True)
class Superblock:
    """What a squashfs says of itself.

    Args:
        inodes: files and folders in it.
        made: when, in seconds since 1970.
        compression: its name, as mksquashfs takes it.
        bytes_used: of the file, without what fills up its last block.
    """

    inodes: int
    made: int
    compression: str
    bytes_used: int


def read_superblock(path: Path) -> Superblock | None:
    """The superblock; None where the file does not begin with one of squashfs 4. Raises OSError
    as reading does."""
    with open(path, "rb") as file:
        head = file.read(SUPERBLOCK_BYTES)
    if len(head) < SUPERBLOCK_BYTES:
        return None
    magic, inodes, made, _, _, compression, _, _, _, major, _, _, used = _FIELDS.unpack_from(head)
    if magic != MAGIC or major != MAJOR:
        return None
    return Superblock(inodes, made, COMPRESSIONS.get(compression, str(compression)), used)


def squashfs_problem(path: Path) -> str:
    """Why a file is not a whole squashfs image, as a sentence; "" where it is one."""
    try:
        size = path.stat().st_size
        superblock = read_superblock(path)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    if size == 0:
        return f"{path} is empty"
    if superblock is None:
        if size < SUPERBLOCK_BYTES:
            return f"{path} is truncated: {size} bytes hold no squashfs image"
        return f"{path} is not a squashfs image: it does not begin with {MAGIC.decode()!r}"
    if size < superblock.bytes_used:
        return (
            f"{path} is truncated: it has {size} bytes, and its superblock says"
            f" {superblock.bytes_used}"
        )
    return ""


def fingerprint(path: Path) -> str:
    """By what a file is known again without reading all of it: SHA-256 over its first 4 KiB and
    its last 64 KiB. Scripts of nodes compute the same (`head`, `tail`, `sha256sum`). Raises
    OSError as reading does."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        digest.update(file.read(HEAD_BYTES))
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        digest.update(file.read(TAIL_BYTES))
    return digest.hexdigest()
