"""Files of text as a stream of documents: JSON lines, columns, plain text, alone or in archives,
compressed or not. Nothing is extracted to disk.

    .jsonl, .json     one JSON object a line
    .txt              one document, or what stands between `text_separator`
    .gz .zst .bz2 .xz behind one of these: compressed
    .tar, .tgz, .zip  of all of those; also members without an ending, read as .txt (enwik8)
    .parquet, .arrow  one document a row
    .warc, .wet       and compressed: an HTML page, or a text, a document (web_archives.py)

.zip, .parquet and .arrow are read from their end, so not while they are fetched.

A text may be a list of strings: several sequences of one document, as in Megatron's
preprocess_data.py. What is not a document is not raised but yielded as `BadLine`, so that the
caller decides (on_error); a file that cannot be read at all is raised.
"""

from __future__ import annotations

import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import IO, Any, cast

from trainkit.data.text.decompress import (
    COMPRESSED,
    BlockStream,
    ByteStream,
    bounded_blocks,
    damaged_file,
    decompressed_blocks,
)
from trainkit.data.text.documents import (
    BadLine,
    ParsedItem,
    ReadOptions,
    SkippedMember,
    TextDocument,
)
from trainkit.data.text.json_lines import json_lines, shown_around, too_long
from trainkit.data.text.tables import TABLES, table_rows
from trainkit.data.text.web_archives import WEB_ARCHIVES, archived_documents

LINES = (".jsonl", ".json")
TEXT = (".txt",)
SINGLE = tuple(kind + packed for kind in (*LINES, *TEXT) for packed in ("", *COMPRESSED))
TAR = (".tar", *(f".tar{packed}" for packed in COMPRESSED), ".tgz")
FROM_END = (".zip", *TABLES)
READABLE = (*SINGLE, *TAR, *FROM_END, *WEB_ARCHIVES)
READABLE_IN_WORDS = (
    f"{', '.join((*LINES, *TEXT))}, .warc, .wet, each also with {', '.join(COMPRESSED[:-1])} or"
    f" {COMPRESSED[-1]} behind it, .tar, .tgz, .zip, .parquet and .arrow"
)


def open_documents(
    name: str, stream: ByteStream, reading: ReadOptions, where: str | None = None
) -> Iterator[ParsedItem]:
    """The documents of a file, in order, with bounded memory.

    Args:
        name: its name, whose ending says the format.
        stream: its bytes as they are stored; those of `FROM_END` need seek and tell too.
        where: what errors call it; by default `name`.

    Raises ConfigError (exit 6): an ending not known, a file cut off or damaged, a bomb, a
    member's name that leaves the archive.
    """
    where = where or name
    lower = name.lower()
    if lower.endswith(TAR):
        return _tar(lower.replace(".tgz", ".tar.gz"), stream, reading, where)
    if lower.endswith(FROM_END):
        if not (hasattr(stream, "seek") and getattr(stream, "seekable", lambda: True)()):
            raise damaged_file(
                where,
                "is read from its end, which cannot be done while it is fetched",
                "set datasets.X.keep_download = true",
            )
        if lower.endswith(".zip"):
            return _zip(stream, reading, where)
        return table_rows(lower, stream, reading, where)
    if lower.endswith(WEB_ARCHIVES):
        return archived_documents(decompressed_blocks(lower, stream, where), reading, where)
    if lower.endswith(SINGLE):
        return _single(lower, decompressed_blocks(lower, stream, where), reading, where)
    raise damaged_file(
        where,
        "is of no format that is known by its name",
        f"read are {READABLE_IN_WORDS}; rename it, or leave it out",
    )


def _single(
    name: str, data: Iterator[bytes], reading: ReadOptions, where: str
) -> Iterator[ParsedItem]:
    kind = name.removesuffix(next((packed for packed in COMPRESSED if name.endswith(packed)), ""))
    if kind.endswith(LINES):
        return json_lines(data, reading, where)
    return _pieces(data, reading, where)


# ---- plain text


def _pieces(data: Iterator[bytes], reading: ReadOptions, where: str) -> Iterator[ParsedItem]:
    """Documents of a .txt, numbered from 1. Two separators in a row hold none between them."""
    separator = (reading.text_separator or "").encode()
    most = reading.max_document_bytes
    # `dropped`: bytes of a piece above the limit that are not held
    buffer = bytearray()
    number = 0
    dropped = 0
    for block in data:
        unseen = max(0, len(buffer) - len(separator) + 1)
        buffer += block
        if separator and buffer.find(separator, unseen) >= 0:
            *pieces, buffer = buffer.split(separator)
            for piece in pieces:
                number += 1
                if found := _piece(piece, number, where, dropped, reading):
                    yield found
                dropped = 0
        if len(buffer) > most + len(separator):
            unheld = len(buffer) - max(0, len(separator) - 1)  # the rest may begin a separator
            dropped += unheld
            del buffer[:unheld]
    if found := _piece(buffer, number + 1, where, dropped, reading):
        yield found


def _piece(
    piece: bytearray, number: int, where: str, dropped: int, reading: ReadOptions
) -> ParsedItem | None:
    if dropped or len(piece) > reading.max_document_bytes:
        return too_long(
            number,
            where,
            dropped + len(piece),
            "" if dropped else shown_around(piece, 0),
            reading.max_document_bytes,
        )
    if not piece.strip():
        return None
    try:
        return TextDocument(number, piece.decode(), where, {})
    except UnicodeDecodeError as error:
        return BadLine(
            number,
            where,
            "invalid UTF-8",
            f"holds invalid UTF-8: {error.reason} at byte {error.start}",
            shown_around(piece, error.start),
        )


# ---- archives


def _member_name(name: str, where: str) -> str:
    parts = PurePosixPath(name.replace("\\", "/"))
    if parts.is_absolute() or ".." in parts.parts or re.match(r"[A-Za-z]:", name):
        raise damaged_file(
            where,
            f"has a member named {name!r}, which leads out of the archive",
            "such archives are made to do harm: fetch it elsewhere",
        )
    return f"{where}!{name}"


def _tar(name: str, stream: ByteStream, reading: ReadOptions, where: str) -> Iterator[ParsedItem]:
    joined = BlockStream(decompressed_blocks(name, stream, where))
    readable = 0
    try:
        with tarfile.open(fileobj=cast(IO[bytes], joined), mode="r|") as archive:
            for member in archive:
                at = _member_name(member.name, where)
                if member.isdir():
                    continue
                if not member.isfile() or not member.name.lower().endswith(SINGLE):
                    yield SkippedMember(
                        at, "a link or device" if not member.isfile() else "no text by its ending"
                    )
                    continue
                file = archive.extractfile(member)
                assert file is not None
                readable += 1
                lower = member.name.lower()
                yield from _single(lower, decompressed_blocks(lower, file, at), reading, at)
            # where tarfile saw no header: it takes a damaged one for the end, too
            end = archive.offset
        while joined.read(2**20):
            pass  # what follows the end: it belongs to the file, whose own end must be there
    except (tarfile.TarError, EOFError) as error:
        raise damaged_file(where, f"is not a tar file, or a truncated one: {error}") from None
    if joined.content > end:
        raise damaged_file(
            where,
            f"is a damaged tar file: at byte {end:,} of it stands neither a header nor its end",
            "fetch or write it again; of several tar files joined into one, give each by itself",
        )
    if not joined.zeros:
        raise damaged_file(
            where, "is a truncated tar file: the block of zeros at its end is not there"
        )
    if not readable:
        raise damaged_file(
            where, f"holds no member that can be read: none ends in {', '.join(SINGLE)}"
        )


def _zip(stream: Any, reading: ReadOptions, where: str) -> Iterator[ParsedItem]:
    readable = 0
    try:
        with zipfile.ZipFile(stream) as archive:
            for info in archive.infolist():
                at = _member_name(info.filename, where)
                if info.is_dir():
                    continue
                lower = info.filename.lower()
                bare = "." not in PurePosixPath(lower).name
                if not bare and not lower.endswith(SINGLE):
                    yield SkippedMember(at, "no text by its ending")
                    continue
                readable += 1
                with archive.open(info) as file:
                    plain = BlockStream(bounded_blocks(file, at, info.compress_size))
                    yield from _single(
                        ".txt" if bare else lower,
                        decompressed_blocks(lower, plain, at),
                        reading,
                        at,
                    )
    except (
        zipfile.BadZipFile,
        zlib.error,
        lzma.LZMAError,
        EOFError,
        NotImplementedError,
        RuntimeError,
        OSError,
    ) as error:
        # NotImplementedError, RuntimeError: a method not known, a password; OSError without a
        # number: bzip2's word for damage
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise damaged_file(where, f"is not a zip file, or a damaged one: {error}") from None
    if not readable:
        raise damaged_file(
            where, f"holds no member that can be read: none ends in {', '.join(SINGLE)}"
        )
