"""Damaged files of text are named: cut anywhere, bombs, random bytes, short archives."""

from __future__ import annotations

import io
import random
import tarfile
import zipfile
import zlib
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings, strategies as st

from tests.data.text.text_files import (
    LINES,
    error_of,
    found,
    packed,
    tar,
    texts,
    zipped,
)
from trainkit.base.errors import ConfigError
from trainkit.data.text import decompress
from trainkit.data.text.documents import BadLine, ReadOptions, SkippedMember, TextDocument
from trainkit.data.text.formats import open_documents


@pytest.mark.parametrize(
    "name",
    [
        "x.jsonl.gz",
        "x.jsonl.zst",
        "x.jsonl.bz2",
        "x.jsonl.xz",
        "x.tar",
        "x.tar.gz",
        "x.tar.zst",
        "x.tar.xz",
        "x.zip",
    ],
)
def test_cut_anywhere_it_is_never_taken_for_the_whole(name: str) -> None:
    lines = b"".join(b'{"text": "%d"}\n' % (i * i) for i in range(3000))
    data = (
        zipped({"a.jsonl": lines})
        if name.endswith(".zip")
        else (
            packed(name, tar({"a.jsonl": lines, "b.jsonl": lines}))
            if "tar" in name
            else packed(name, lines)
        )
    )
    assert len(texts(name, data)) in (3000, 6000)
    dice = random.Random(1)
    cuts = {
        1,
        5,
        len(data) // 2,
        len(data) - 1,
        len(data) - 5,
        *(dice.randrange(1, len(data)) for _ in range(15)),
    }
    if name == "x.tar":
        end = len(data.rstrip(b"\0")) // 512 * 512 + 512  # where the zeros that end it begin
        cuts = {cut for cut in cuts if cut <= end} | {end, 512}
    for cut in sorted(cuts):
        error_of(name, data[:cut], "truncated|damaged")


def test_what_is_not_compressed_at_all_is_named() -> None:
    for kind in ("jsonl.gz", "jsonl.zst", "jsonl.bz2", "jsonl.xz", "zip", "tar", "tar.gz"):
        error_of(f"x.{kind}", b"<html>404 not found</html>" * 100, "is not a ")


def test_bombs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decompress, "BOMB_BYTES", 2**22)
    monkeypatch.setattr(decompress, "GZIP_BLOCK", 2**12)
    for filler in (b"\n", b"x"):
        bomb = zlib.compressobj(wbits=31)
        data = b"".join(bomb.compress(filler * 2**20) for _ in range(16)) + bomb.flush()
        error_of("x.jsonl.gz", data, "taken for a decompression bomb", max_document_bytes=2**20)
    error_of("x.jsonl.zst", zstandard.compress(b"\n" * 2**26), "taken for a decompression bomb")
    error_of("x.zip", zipped({"a.jsonl": b"\n" * 2**23}), "taken for a decompression bomb")
    repeated = b'{"text": "the same again and again, as in a log"}\n' * 2**15
    # 300 times as small, but text
    assert len(texts("x.jsonl.gz", packed(".gz", repeated))) == 2**15


def test_what_a_block_can_become_is_bounded() -> None:
    """No piece of output is above a few MiB, though all of it is 64 MiB from some kilobytes."""
    for name in (".gz", ".zst"):
        data = packed(name, b'{"text": "' + b"x" * 2**26 + b'"}')
        sizes = [
            len(block) for block in decompress.decompressed_blocks(name, io.BytesIO(data), "x")
        ]
        assert (
            sum(sizes) == 2**26 + 12
            and max(sizes) <= 2**27
            and (name == ".zst" or max(sizes) <= decompress.BLOCK)
        )


@pytest.mark.parametrize("name", ["x.csv", "x", "x.jsonl.lz4", "jsonl"])
def test_another_ending_is_refused(name: str) -> None:
    error_of(name, b"", r"no format that is known by its name")


@given(
    st.binary(max_size=200),
    st.sampled_from(
        ["x.jsonl", "x.jsonl.gz", "x.jsonl.zst", "x.tar", "x.zip", "x.txt", "x.tar.gz"]
    ),
)
@settings(deadline=None)
def test_fuzz_only_config_errors(data: bytes, name: str) -> None:
    try:
        for item in open_documents(name, io.BytesIO(data), ReadOptions(text_separator="\0")):
            assert isinstance(item, TextDocument | BadLine | SkippedMember)
    except ConfigError:
        pass


@given(st.binary(max_size=60), st.integers(0, 200))
@settings(deadline=None)
def test_fuzz_lines(noise: bytes, at: int) -> None:
    """Bytes put into good lines: each line is a document or a bad line, and numbers stay right."""
    data = LINES[:at] + noise + LINES[at:]
    items = found("x.jsonl", data)
    assert sorted(item.line for item in items if not isinstance(item, SkippedMember)) == [
        n for n, line in enumerate(data.split(b"\n"), 1) if line.strip()
    ]


def test_read_documents_raises_with_file_and_line(tmp_path: Path) -> None:
    from tests.data.text.text_files import read_documents

    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": 1}\n')
    documents = read_documents(path, "text")
    assert next(documents).text == "a"
    with pytest.raises(ConfigError, match=rf"{path}:2: has no text under the key 'text'"):
        next(documents)


def _tar_of(names: list[str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in names:
            info = tarfile.TarInfo(name)
            content = b'{"text": "a"}\n' * 100
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


@pytest.mark.parametrize("damage", ["header", "joined"])
def test_a_tar_that_tarfile_ends_too_early_is_damaged(damage: str) -> None:
    """tarfile takes a header it cannot read for the end: no document behind it may be lost in
    silence."""
    whole = bytearray(_tar_of(["a.jsonl", "b.jsonl", "c.jsonl"]))
    assert len(list(open_documents("x.tar", io.BytesIO(bytes(whole)), ReadOptions()))) == 300
    if damage == "header":
        whole[whole.index(b"b.jsonl") + 100] ^= 0xFF
    else:
        whole += _tar_of(["d.jsonl"])
    with pytest.raises(ConfigError, match="neither a header nor its end"):
        list(open_documents("x.tar", io.BytesIO(bytes(whole)), ReadOptions()))


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_damaged_member_of_a_zip_is_named(method: int) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr(
            "a.jsonl", b"".join(b'{"text": "%d"}\n' % (i * 7919 % 10007) for i in range(3000))
        )
    data = bytearray(buffer.getvalue())
    data[200:230] = bytes(range(30))
    with pytest.raises(ConfigError, match=r"x\.zip: is not a zip file, or a damaged one"):
        list(open_documents("x.zip", io.BytesIO(bytes(data)), ReadOptions(), "x.zip"))
