"""Files of text as documents: every format, compressed and in archives; damaged ones are named,
and bad lines given out with their place."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
import re
import tarfile
import time
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from trainkit.base.errors import ConfigError, Exit
from trainkit.data.text import decompress, formats
from trainkit.data.text.formats import Bad, Found, Passed, Reading, Record, open_documents

TEXTS = ["one", "zwei: äöü \U0001f600\n", "", "three " * 50]
LINES = "".join(
    json.dumps({"text": text, "meta": {"set": "A", "n": number}}) + "\n"
    for number, text in enumerate(TEXTS)
).encode()
PLAIN = b"one<sep>two\r\n<sep>\n<sep>three"


def found(name: str, data: bytes, **reading: Any) -> list[Found]:
    return list(open_documents(name, io.BytesIO(data), Reading(**reading)))


def texts(name: str, data: bytes, **reading: Any) -> list[str | list[str]]:
    """The texts, where all of it is documents."""
    all_found = found(name, data, **reading)
    assert all(isinstance(item, Record) for item in all_found), all_found
    return [item.text for item in all_found if isinstance(item, Record)]


def the_bad(line: bytes, **reading: Any) -> Bad:
    """What is said of a bad second line of three; the others must come through."""
    first, second, third = found(
        "x.jsonl", b'{"text": "a"}\n' + line + b'\n{"text": "b"}', **reading
    )
    assert isinstance(first, Record) and isinstance(second, Bad) and isinstance(third, Record)
    assert (first.line, second.line, third.line) == (1, 2, 3)
    assert second.where == "x.jsonl"
    return second


def packed(name: str, data: bytes) -> bytes:
    """`data` as the ending of `name` says."""
    ways: dict[str, Callable[[bytes], bytes]] = {
        ".zst": zstandard.compress,
        ".gz": gzip.compress,
        ".bz2": bz2.compress,
        ".xz": lzma.compress,
    }
    return next((pack(data) for ending, pack in ways.items() if name.endswith(ending)), data)


def tar(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def zipped(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return out.getvalue()


def error_of(name: str, data: bytes, words: str, **reading: Any) -> ConfigError:
    with pytest.raises(ConfigError, match=words) as caught:
        found(name, data, **reading)
    assert caught.value.exit == Exit.STAGE_FAILED
    assert name in str(caught.value)
    return caught.value


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.jsonl.zst", "x.jsonl.bz2", "x.jsonl.xz"])
def test_of_no_byte_no_compressed_file_is_made(name: str) -> None:
    error_of(name, b"", "is empty|is a truncated")
    assert texts(name, packed(name, b"")) == []


def test_several_streams_one_after_another() -> None:
    for ending in (".bz2", ".xz"):
        data = b"".join(packed(ending, b'{"text": "%d"}\n' % i) for i in range(3))
        assert texts(f"x.jsonl{ending}", data) == ["0", "1", "2"]


def test_a_json_array_is_called_one() -> None:
    for data in (b'[{"text": "a"}, {"text": "b"}]', b'[\n  {"text": "a"}\n]'):
        bad, *_ = found("x.json", data)
        assert isinstance(bad, Bad) and "jq -c" in bad.hint


def test_a_key_with_a_dot_of_its_own() -> None:
    line = b'{"meta.text": "own", "meta": {"text": "deep"}}\n{"meta": {"text": "deep"}}\n'
    assert texts("x.jsonl", line, text_key="meta.text") == ["own", "deep"]


@pytest.mark.parametrize("packing", ["", ".gz", ".zst", ".bz2", ".xz"])
@pytest.mark.parametrize("kind", [".jsonl", ".json"])
def test_json_lines(kind: str, packing: str) -> None:
    name = "a" + kind + packing
    assert texts(name, packed(name, LINES)) == TEXTS
    assert texts(name.upper(), packed(name, LINES)) == TEXTS
    records = found(name, packed(name, LINES[:-1]))
    assert [(r.line, r.fields["meta"]["n"]) for r in records if isinstance(r, Record)] == [
        (1, 0),
        (2, 1),
        (3, 2),
        (4, 3),
    ]


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=12),
    st.integers(1, 40),
    st.sampled_from(["", ".gz", ".zst"]),
    st.booleans(),
)
@settings(deadline=None)
def test_blocks_of_any_size_give_the_same_lines(
    some: list[str], block: int, packing: str, newline: bool
) -> None:
    data = "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in some).encode() + (
        b"\n" if newline else b""
    )
    with pytest.MonkeyPatch.context() as patch:
        for constant in ("BLOCK", "GZIP_BLOCK", "ZSTD_BLOCK"):
            patch.setattr(decompress, constant, block)
        assert texts("x.jsonl" + packing, packed(packing, data)) == some


def test_several_frames_and_members_are_one_file() -> None:
    half = len(LINES) // 2
    for name in ("x.jsonl.gz", "x.jsonl.zst"):
        assert texts(name, packed(name, LINES[:half]) + packed(name, LINES[half:])) == TEXTS
    assert texts("x.jsonl.gz", packed(".gz", LINES) + bytes(1000)) == TEXTS  # padded with zeros


def test_blank_lines_and_carriage_returns() -> None:
    assert texts("x.jsonl", b'\n{"text": "a"}\r\n  \t\n\r\n{"text": ""}\n\n') == ["a", ""]
    assert texts("x.jsonl", b"") == [] == texts("x.jsonl", b"\n\n")


def test_nested_keys_and_lists_of_sequences() -> None:
    line = json.dumps({"a": {"b": {"text": "deep"}}, "a.b": 1, "parts": ["x", "", "y"]}).encode()
    assert texts("x.jsonl", line, text_key="a.b.text") == ["deep"]
    assert texts("x.jsonl", line, text_key="parts") == [["x", "", "y"]]
    (bad,) = found("x.jsonl", line, text_key="a.c.text")
    assert (
        isinstance(bad, Bad)
        and "under the key 'a.c.text' (found keys 'a', 'a.b', 'parts')" in bad.reason
    )


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        (b'{"text": "cut', "not JSON", "is not JSON: Unterminated string starting at at byte 9"),
        (b'{"text": 1,}', "not JSON", "is not JSON"),
        (b"{}", "no text", r"has no text under the key 'text' \(found keys \)"),
        (b'{"text": null}', "no text", r"\(found keys 'text'\)"),
        (b'{"text": ["a", 1]}', "no text", "has no text"),
        (b'["text"]', "no text", r"\(found list\)"),
        (b'"text"', "no text", r"\(found str\)"),
        (b'{"text": "\\ud800"}', "lone surrogate", "holds a lone surrogate"),
        (b'{"text": "a \\udc00\\ud800 b"}', "lone surrogate", "at character 2 of its text"),
        (b'{"text": "\xff"}', "invalid UTF-8", "invalid UTF-8: invalid start byte at byte 10"),
        (b'{"text": "\xed\xa0\x80"}', "invalid UTF-8", "invalid UTF-8"),
        (b"[" * 100_000, "not JSON", "not JSON"),
        (b'{"text": ' + b"1" * 5000 + b"}", "no text", "no text|not JSON"),
    ],
)
def test_a_bad_line_is_given_out_with_its_place(line: bytes, kind: str, words: str) -> None:
    bad = the_bad(line)
    assert bad.kind == kind or b"1111" in line
    assert re.search(words, bad.reason), bad.reason
    assert bad.hint


def test_the_bytes_around_are_shown() -> None:
    bad = the_bad(b'{"text": "' + b"x" * 1000 + b"before\xffbehind" + b"y" * 1000 + b'"}')
    assert (
        bad.around.startswith("...xxx")
        and bad.around.endswith("yyy...")
        and "before\\xffbehind" in bad.around
    )
    assert len(bad.around) < 120


def test_what_pythons_json_reads_is_read() -> None:
    """orjson is stricter: NaN, a BOM at the start, half a character in a key that nobody asked
    for."""
    data = (
        b'\xef\xbb\xbf{"text": "a", "score": NaN}\n{"text": "b", "other": "\\ud800"}\n{"text":'
        b' "\\ud83d\\ude00"}'
    )
    assert texts("x.jsonl", data) == ["a", "b", "\U0001f600"]


def test_a_document_above_the_limit_is_bad_and_the_next_comes_through() -> None:
    assert the_bad(b'{"text": "' + b"x" * 101 + b'"}', max_document_bytes=100).reason.startswith(
        "has 101 bytes, more than max_document_bytes = 100"
    )
    assert (
        the_bad(b'{"text": "' + "ä".encode() * 51 + b'"}', max_document_bytes=100).kind
        == "too long"
    )
    assert texts("x.jsonl", b'{"text": "' + b"x" * 100 + b'"}', max_document_bytes=100) == [
        "x" * 100
    ]
    assert texts("x.jsonl", json.dumps({"text": "ä" * 50}).encode(), max_document_bytes=100) == [
        "ä" * 50
    ]


def test_an_endless_line_is_not_held() -> None:
    """A line without an end is counted, not kept: at most the limit is held."""

    def data() -> Iterator[bytes]:
        for _ in range(400):
            yield bytes(2**18)
        yield b'\n{"text": "after"}'

    tracemalloc.start()
    first, second = formats._json_lines(data(), Reading(max_document_bytes=2**20), "x.jsonl")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 * 2**20, "3 MiB and a bit of a line, and a block"
    assert (
        isinstance(first, Bad)
        and "has 104,857,600 bytes" in first.reason
        and isinstance(second, Record)
        and second.text == "after"
    )


def test_a_line_of_50_mb_is_read() -> None:
    began = time.process_time()
    line = json.dumps({"text": "word " * 10_000_000}).encode()
    assert [len(t) for t in texts("x.jsonl", line)] == [50_000_000]
    assert time.process_time() - began < 10


@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
def test_plain_text(packing: str) -> None:
    name = "x.txt" + packing
    assert texts(name, packed(name, PLAIN)) == [PLAIN.decode()]
    assert texts(name, packed(name, PLAIN), text_separator="<sep>") == ["one", "two\r\n", "three"]
    assert [
        r.line
        for r in found(name, packed(name, PLAIN), text_separator="<sep>")
        if isinstance(r, Record)
    ] == [1, 2, 4]


@given(
    st.lists(st.text("ab|", max_size=8), max_size=8),
    st.integers(1, 9),
    st.sampled_from(["||", "a", "|b|"]),
)
@settings(deadline=None)
def test_separators_across_blocks(pieces: list[str], block: int, separator: str) -> None:
    data = separator.join(pieces)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decompress, "BLOCK", block)
        assert texts("x.txt", data.encode(), text_separator=separator) == [
            piece for piece in data.split(separator) if piece.strip()
        ]


def test_bad_plain_text() -> None:
    one, two, three = found("x.txt", b"a|\xff|c", text_separator="|")
    assert (
        isinstance(two, Bad)
        and two.line == 2
        and two.kind == "invalid UTF-8"
        and isinstance(one, Record)
        and isinstance(three, Record)
    )
    long, rest = found("x.txt", b"x" * 1000 + b"|c", text_separator="|", max_document_bytes=100)
    assert (
        isinstance(long, Bad)
        and "has 1,000 bytes" in long.reason
        and isinstance(rest, Record)
        and rest.text == "c"
    )


@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz", "x.tar.zst", "x.tgz", "x.jsonl.zst.tar"])
def test_tar(name: str) -> None:
    data = tar(
        {
            "d/a.jsonl.zst": zstandard.compress(LINES),
            "d/b.txt": b"bee",
            "d/c.jsonl": LINES,
            "d/readme.md": b"?",
        }
    )
    data = (
        gzip.compress(data)
        if name.endswith("gz")
        else zstandard.compress(data)
        if name.endswith(".zst")
        else data
    )
    items = found(name, data)
    assert [item.text for item in items if isinstance(item, Record)] == [*TEXTS, "bee", *TEXTS]
    assert [item.where for item in items if isinstance(item, Passed)] == [f"{name}!d/readme.md"]
    assert items[0].where == f"{name}!d/a.jsonl.zst"


@pytest.mark.parametrize(
    "member", ["../a.jsonl", "/etc/a.jsonl", "d/../../a.jsonl", "..\\a.jsonl", "C:\\a.jsonl"]
)
def test_members_that_lead_out_are_refused(member: str) -> None:
    error_of("x.tar", tar({member: LINES}), "leads out of the archive")
    error_of("x.zip", zipped({member: LINES}), "leads out of the archive")


def test_archives_without_text_are_refused() -> None:
    error_of("x.tar", tar({"a.csv": b"1"}), "holds no member that can be read")
    error_of("x.zip", zipped({"a.csv": b"1"}), "holds no member that can be read")


def test_zip() -> None:
    items = found(
        "x.zip", zipped({"a.jsonl": LINES, "enwik8": b"<xml>", "d/b.txt": b"bee", "x.csv": b""})
    )
    assert [item.text for item in items if isinstance(item, Record)] == [*TEXTS, "<xml>", "bee"]
    assert [item.where for item in items if isinstance(item, Passed)] == ["x.zip!x.csv"]

    class Download(io.BytesIO):
        def seekable(self) -> bool:
            return False

    with pytest.raises(ConfigError, match="read from its end"):
        list(open_documents("x.zip", Download(b""), Reading()))


def test_parquet() -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [{"text": text, "meta": {"set": "B", "text": "deep"}} for text in TEXTS] + [
        {"text": None, "meta": {"set": "B", "text": "deep"}}
    ]
    out = io.BytesIO()
    parquet.write_table(arrow.Table.from_pylist(rows), out, row_group_size=2)
    items = found("x.parquet", out.getvalue(), fields=("meta.set",))
    assert [item.text for item in items if isinstance(item, Record)] == TEXTS
    assert isinstance(items[0], Record) and formats.field(items[0].fields, "meta.set") == "B"
    assert isinstance(items[4], Bad) and items[4].line == 5 and items[4].kind == "no text"
    assert texts("x.parquet", out.getvalue(), text_key="meta.text") == ["deep"] * 5
    error_of("x.parquet", out.getvalue(), "has no column 'txt'.*meta.set", text_key="txt")
    error_of("x.parquet", out.getvalue()[:-20], "no parquet file, or a damaged one")
    error_of("x.parquet", b"", "no parquet file, or a damaged one")


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
    for name in ("x.jsonl.gz", "x.jsonl.zst", "x.zip", "x.tar", "x.tar.gz"):
        error_of(name, b"<html>404 not found</html>" * 100, "is no ")


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
        sizes = [len(block) for block in decompress.blocks(name, io.BytesIO(data), "x")]
        assert (
            sum(sizes) == 2**26 + 12
            and max(sizes) <= 2**27
            and (name == ".zst" or max(sizes) <= decompress.BLOCK)
        )


@pytest.mark.parametrize("name", ["x.csv", "x", "x.jsonl.lz4", "jsonl"])
def test_another_ending_is_refused(name: str) -> None:
    error_of(name, b"", r"ends in none of \.jsonl, \.jsonl\.gz")


@given(
    st.binary(max_size=200),
    st.sampled_from(
        ["x.jsonl", "x.jsonl.gz", "x.jsonl.zst", "x.tar", "x.zip", "x.txt", "x.tar.gz"]
    ),
)
@settings(deadline=None)
def test_fuzz_only_config_errors(data: bytes, name: str) -> None:
    try:
        for item in open_documents(name, io.BytesIO(data), Reading(text_separator="\0")):
            assert isinstance(item, Record | Bad | Passed)
    except ConfigError:
        pass


@given(st.binary(max_size=60), st.integers(0, 200))
@settings(deadline=None)
def test_fuzz_lines(noise: bytes, at: int) -> None:
    """Bytes put into good lines: each line is a document or a bad line, and numbers stay right."""
    data = LINES[:at] + noise + LINES[at:]
    items = found("x.jsonl", data)
    assert sorted(item.line for item in items if not isinstance(item, Passed)) == [
        n for n, line in enumerate(data.split(b"\n"), 1) if line.strip()
    ]


def test_read_documents_raises_with_file_and_line(tmp_path: Path) -> None:
    from trainkit.data.text.corpus import read_documents

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
    assert len(list(open_documents("x.tar", io.BytesIO(bytes(whole)), Reading()))) == 300
    if damage == "header":
        whole[whole.index(b"b.jsonl") + 100] ^= 0xFF
    else:
        whole += _tar_of(["d.jsonl"])
    with pytest.raises(ConfigError, match="neither a header nor its end"):
        list(open_documents("x.tar", io.BytesIO(bytes(whole)), Reading()))


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_damaged_member_of_a_zip_is_named(method: int) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr(
            "a.jsonl", b"".join(b'{"text": "%d"}\n' % (i * 7919 % 10007) for i in range(3000))
        )
    data = bytearray(buffer.getvalue())
    data[200:230] = bytes(range(30))
    with pytest.raises(ConfigError, match=r"x\.zip: is no zip file, or a damaged one"):
        list(open_documents("x.zip", io.BytesIO(bytes(data)), Reading(), "x.zip"))
