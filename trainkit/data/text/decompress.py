"""Compressed files as streams of bytes: bounded memory, and a file that is cut off, damaged or a
bomb is named, never taken for the whole."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import Protocol

import zstandard

from trainkit.base.errors import ConfigError, Exit, Problem, SourceLocation

# bytes of an uncompressed file read at once: what fits a core's cache is parsed faster
BLOCK = 2**18
GZIP_BLOCK = 2**16
# four bytes of zstandard can mean 128 KiB, and what a call returns cannot be bounded: 128 MiB at
# worst
ZSTD_BLOCK = 2**12
# refused: more than so many bytes that are so many times the compressed ones; text has 3 to 30,
# gzip's most is 1,030
BOMB_BYTES = 2**28
BOMB_RATIO = 500
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
XZ_MEMORY = 2**28  # bytes that xz may take: above what its highest level, -9, needs
AGAIN = "fetch or write it again"


class ByteStream(Protocol):
    """What is read from: a file, a download, a member of an archive."""

    def read(self, size: int, /) -> bytes: ...


def damaged_file(where: str, message: str, hint: str = AGAIN, line: int = 0) -> ConfigError:
    """The error (exit 6) for a file that cannot be read."""
    return ConfigError(
        [Problem(message, SourceLocation(where, line), hint)], exit=Exit.STAGE_FAILED
    )


def decompressed_blocks(name: str, stream: ByteStream, where: str) -> Iterator[bytes]:
    """The bytes of `stream`, decompressed as the ending of `name` says (.gz, .zst, .bz2, .xz,
    anything else: as they are), a few MiB at once.

    Files may hold several members (gzip) or frames (zstandard), as `cat` of files gives. `where`
    is what errors call it.

    Raises ConfigError (exit 6): truncated, damaged, not compressed at all, or a bomb.
    """
    if name.endswith(".zst"):
        return _zstandard(stream, where)
    if name.endswith(".gz"):
        return _gzip(stream, where)
    if name.endswith(".bz2"):
        return _streams(stream, where, "bzip2", bz2.BZ2Decompressor)
    if name.endswith(".xz"):
        return _streams(
            stream, where, "xz", lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY)
        )
    return _plain(stream)


def _plain(stream: ByteStream) -> Iterator[bytes]:
    while block := stream.read(BLOCK):
        yield block


def _bomb(where: str, produced: int, consumed: int) -> None:
    if produced > BOMB_BYTES and produced > BOMB_RATIO * consumed:
        raise damaged_file(
            where,
            f"{consumed:,} compressed bytes became {produced:,} so far, over {BOMB_RATIO} times as"
            " many: it is taken for a decompression bomb",
            "if it is text all the same, decompress it and name the result",
        )


def _zstandard(stream: ByteStream, where: str) -> Iterator[bytes]:
    """Frames by decompressobj: the library's stream_reader takes a frame that is cut off for the
    end."""
    frame = None
    consumed = 0
    produced = 0
    try:
        while block := stream.read(GZIP_BLOCK):
            for start in range(0, len(block), ZSTD_BLOCK):
                rest = block[start : start + ZSTD_BLOCK]
                consumed += len(rest)
                while rest:
                    frame = frame or zstandard.ZstdDecompressor().decompressobj()
                    data = frame.decompress(rest)
                    produced += len(data)
                    _bomb(where, produced, consumed)
                    if frame.eof:
                        rest = frame.unused_data
                        frame = None
                    else:
                        rest = b""
                    if data:
                        yield data
    except zstandard.ZstdError as error:
        if "too much memory" in str(error):
            raise damaged_file(
                where,
                f"needs a window above 128 MiB (zstd --long): {error}",
                "compress it again without --long",
            ) from None
        raise damaged_file(
            where, f"is not a zstandard file, or a damaged one, after {consumed:,} bytes: {error}"
        ) from None
    if not consumed:
        raise damaged_file(where, "is empty, which no zstandard file is")
    if frame is not None:
        raise damaged_file(
            where,
            f"is a truncated zstandard file: its last frame has no end after {consumed:,} bytes",
        )


def _gzip(stream: ByteStream, where: str) -> Iterator[bytes]:
    member = None
    consumed = 0
    produced = 0
    members = 0
    try:
        while rest := stream.read(GZIP_BLOCK):
            consumed += len(rest)
            data = b""
            # a full block: there may be more of it though all input is taken
            while rest or (member is not None and len(data) == BLOCK):
                if member is None and members and not rest.strip(b"\0"):
                    break  # zeros after the end, as tapes and some writers pad
                member = member or zlib.decompressobj(wbits=31)
                data = member.decompress(rest, BLOCK)
                produced += len(data)
                _bomb(where, produced, consumed)
                members += member.eof
                if member.eof:
                    rest = member.unused_data
                    member = None
                else:
                    rest = member.unconsumed_tail
                if data:
                    yield data
    except zlib.error as error:
        raise damaged_file(
            where, f"is not a gzip file, or a damaged one, after {consumed:,} bytes: {error}"
        ) from None
    if not consumed:
        raise damaged_file(where, "is empty, which no gzip file is")
    if member is not None:
        raise damaged_file(
            where, f"is a truncated gzip file: its last member has no end after {consumed:,} bytes"
        )


def _streams(
    stream: ByteStream,
    where: str,
    kind: str,
    make: Callable[[], bz2.BZ2Decompressor | lzma.LZMADecompressor],
) -> Iterator[bytes]:
    """Files of one stream or several, by decompressors of the standard library."""
    inner = make()
    consumed = 0
    produced = 0
    try:
        while rest := stream.read(GZIP_BLOCK):
            consumed += len(rest)
            while rest or not (inner.eof or inner.needs_input):
                if inner.eof:
                    inner = make()
                data = inner.decompress(rest, BLOCK)
                rest = inner.unused_data if inner.eof else b""
                produced += len(data)
                _bomb(where, produced, consumed)
                if data:
                    yield data
    except (OSError, lzma.LZMAError, EOFError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's
        raise damaged_file(
            where, f"is not a {kind} file, or a damaged one, after {consumed:,} bytes: {error}"
        ) from None
    if not inner.eof:
        raise damaged_file(
            where, f"is a truncated {kind} file: it has no end after {consumed:,} bytes"
        )


class BlockStream:
    """Blocks read as one stream. `zeros` says whether the last 512 bytes were zeros, as at the
    end of a tar; `content`: where the last byte that is not zero ends."""

    def __init__(self, source: Iterator[bytes]) -> None:
        self._source = source
        self._rest = b""
        self._tail = b""
        self._position = self.content = 0

    def read(self, size: int = -1, /) -> bytes:
        parts = []
        missing = size
        while missing > 0 or size < 0:
            if not self._rest:
                self._rest = next(self._source, b"")
                if not self._rest:
                    break
            part = self._rest if size < 0 else self._rest[:missing]
            self._rest = self._rest[len(part) :]
            missing -= len(part)
            parts.append(part)
        data = b"".join(parts)
        self._tail = (self._tail + data[-512:])[-512:]
        if there := len(data.rstrip(b"\0")):
            self.content = self._position + there
        self._position += len(data)
        return data

    @property
    def zeros(self) -> bool:
        return len(self._tail) == 512 and not self._tail.strip(b"\0")


def bounded_blocks(stream: ByteStream, where: str, compressed: int) -> Iterator[bytes]:
    """The bytes of an archive's member, under the same guard. `compressed`: its bytes in the
    archive."""
    produced = 0
    while block := stream.read(BLOCK):
        produced += len(block)
        _bomb(where, produced, compressed)
        yield block
