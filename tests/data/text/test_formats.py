"""Files of text as documents: every format, compressed and in archives; damaged ones are named,
and bad lines given out with their place."""

from __future__ import annotations

import gzip
import io
import json
import re
import tracemalloc
from collections.abc import Iterator

import pytest
import zstandard
from hypothesis import given, settings, strategies as st

from tests.data.text.text_files import (
    LINES,
    PLAIN,
    TEXTS,
    error_of,
    found,
    packed,
    tar,
    texts,
    the_bad,
    zipped,
)
from trainkit.base.errors import ConfigError
from trainkit.data.text import decompress
from trainkit.data.text.documents import (
    BadLine,
    ReadOptions,
    SkippedMember,
    TextDocument,
    get_field,
)
from trainkit.data.text.formats import open_documents
from trainkit.data.text.json_lines import json_lines


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
        assert isinstance(bad, BadLine) and "jq -c" in bad.hint


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
    assert [(r.line, r.fields["meta"]["n"]) for r in records if isinstance(r, TextDocument)] == [
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
        isinstance(bad, BadLine)
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
    first, second = json_lines(data(), ReadOptions(max_document_bytes=2**20), "x.jsonl")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 * 2**20, "3 MiB and a bit of a line, and a block"
    assert (
        isinstance(first, BadLine)
        and "has 104,857,600 bytes" in first.reason
        and isinstance(second, TextDocument)
        and second.text == "after"
    )


def test_a_line_of_50_mb_is_read() -> None:
    line = json.dumps({"text": "word " * 10_000_000}).encode()
    assert [len(t) for t in texts("x.jsonl", line)] == [50_000_000]


@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
def test_plain_text(packing: str) -> None:
    name = "x.txt" + packing
    assert texts(name, packed(name, PLAIN)) == [PLAIN.decode()]
    assert texts(name, packed(name, PLAIN), text_separator="<sep>") == ["one", "two\r\n", "three"]
    assert [
        r.line
        for r in found(name, packed(name, PLAIN), text_separator="<sep>")
        if isinstance(r, TextDocument)
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
        isinstance(two, BadLine)
        and two.line == 2
        and two.kind == "invalid UTF-8"
        and isinstance(one, TextDocument)
        and isinstance(three, TextDocument)
    )
    long, rest = found("x.txt", b"x" * 1000 + b"|c", text_separator="|", max_document_bytes=100)
    assert (
        isinstance(long, BadLine)
        and "has 1,000 bytes" in long.reason
        and isinstance(rest, TextDocument)
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
    assert [item.text for item in items if isinstance(item, TextDocument)] == [
        *TEXTS,
        "bee",
        *TEXTS,
    ]
    assert [item.where for item in items if isinstance(item, SkippedMember)] == [
        f"{name}!d/readme.md"
    ]
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
    assert [item.text for item in items if isinstance(item, TextDocument)] == [
        *TEXTS,
        "<xml>",
        "bee",
    ]
    assert [item.where for item in items if isinstance(item, SkippedMember)] == ["x.zip!x.csv"]

    class Download(io.BytesIO):
        def seekable(self) -> bool:
            return False

    with pytest.raises(ConfigError, match="read from its end"):
        list(open_documents("x.zip", Download(b""), ReadOptions()))


def test_parquet() -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [{"text": text, "meta": {"set": "B", "text": "deep"}} for text in TEXTS] + [
        {"text": None, "meta": {"set": "B", "text": "deep"}}
    ]
    out = io.BytesIO()
    parquet.write_table(arrow.Table.from_pylist(rows), out, row_group_size=2)
    items = found("x.parquet", out.getvalue(), fields=("meta.set",))
    assert [item.text for item in items if isinstance(item, TextDocument)] == TEXTS
    assert isinstance(items[0], TextDocument) and get_field(items[0].fields, "meta.set") == "B"
    assert isinstance(items[4], BadLine) and items[4].line == 5 and items[4].kind == "no text"
    assert texts("x.parquet", out.getvalue(), text_key="meta.text") == ["deep"] * 5
    error_of("x.parquet", out.getvalue(), "has no column 'txt'.*meta.set", text_key="txt")
    error_of("x.parquet", out.getvalue()[:-20], "not a parquet file, or a damaged one")
    error_of("x.parquet", b"", "not a parquet file, or a damaged one")


@pytest.mark.parametrize("make", ["new_stream", "new_file"])
def test_arrow(make: str) -> None:
    """As a stream, of which a part is one too but for its end, and as a file."""
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"text": TEXTS, "meta": [{"set": "B"}] * len(TEXTS)})
    out = io.BytesIO()
    with getattr(arrow.ipc, make)(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=1)
    data = out.getvalue()
    items = found("x.arrow", data)
    assert [item.text for item in items if isinstance(item, TextDocument)] == TEXTS
    assert isinstance(items[0], TextDocument) and get_field(items[0].fields, "meta.set") == "B"
    error_of("x.arrow", data, "has no column 'txt'.*meta.set", text_key="txt")
    for cut in range(0, len(data), 4):
        error_of("x.arrow", data[:cut], "not an Arrow file, or a damaged one|truncated Arrow")
