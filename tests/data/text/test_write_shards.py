"""Shards that are written are read back with all their metadata, by this program and others."""

from __future__ import annotations

import datetime
import json
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pytest
import zstandard
from hypothesis import example, given, strategies as st
from pyarrow import parquet

from trainkit.base.errors import ConfigError
from trainkit.data.text import write_shards
from trainkit.data.text.documents import ReadOptions, TextDocument
from trainkit.data.text.formats import open_documents
from trainkit.data.text.tables import OTHER_FIELDS
from trainkit.data.text.write_shards import WRITABLE, DocumentWriter

Documents = list[tuple[str, dict[str, Any]]]

ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=2**62, max_value=2**70),
    st.floats(allow_nan=False),
    ANY_TEXT,
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(["url", "score", "a.b", OTHER_FIELDS, ""]) | ANY_TEXT
KEYS = st.sampled_from(["text", "a.b", "url"])
DOCUMENTS = st.lists(st.tuples(ANY_TEXT, st.dictionaries(NAMES, VALUES, max_size=4)), max_size=8)


def write(path: Path, documents: Documents, text_key: str = "text") -> bytes:
    with DocumentWriter(path, text_key) as writer:
        for text, fields in documents:
            writer.add(text, fields)
    assert writer.documents == len(documents)
    assert writer.text_bytes == sum(len(text.encode()) for text, _ in documents)
    return path.read_bytes()


def read(path: Path, text_key: str = "text") -> Documents:
    """What is there, without fields that are None and the text among the fields."""
    with open(path, "rb") as file:
        items = list(open_documents(path.name, file, ReadOptions(text_key, fields=None)))
    found = []
    for number, item in enumerate(items, 1):
        assert isinstance(item, TextDocument) and isinstance(item.text, str), item
        assert item.line == number
        found.append((item.text, present(item.fields, text_key)))
    return found


def present(fields: Mapping[str, Any], text_key: str = "text") -> dict[str, Any]:
    return {name: v for name, v in fields.items() if v is not None and name != text_key}


@pytest.mark.parametrize("ending", WRITABLE)
@given(documents=DOCUMENTS, group=st.sampled_from([1, 1200, 2**26]), text_key=KEYS)
@example(
    documents=[("a", {"score": 1}), ("b", {"score": 0.5}), ("c", {"score": "high"})],
    group=1,
    text_key="text",
)
@example(
    documents=[("a", {"n": 2**70 + 1}), ("b", {"n": -1}), ("c", {"n": True})],
    group=2**26,
    text_key="text",
)
@example(
    documents=[("a", {"n": 1}), ("b", {"n": 2**63}), ("c", {"new": [{"x": None}]})],
    group=1,
    text_key="text",
)
@example(
    documents=[("a", {"n": 0.5, "half": "\ud800", "\udfff": 1}), ("b", {"n": 2**60})],
    group=1,
    text_key="text",
)
@example(documents=[("a", {"long": 10**400})], group=1, text_key="text")
def test_what_is_written_is_read(
    ending: str,
    documents: Documents,
    group: int,
    text_key: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("shard") / f"a{ending}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_shards, "ROW_GROUP", group)
        first = write(path, documents, text_key)
        assert write(path, documents, text_key) == first
    assert read(path, text_key) == [(text, present(f, text_key)) for text, f in documents]


FINEWEB: Documents = [
    (f"text {i}", {"url": f"https://x/{i}", "language_score": i / 7, "token_count": i, "id": None})
    for i in range(5)
]


def test_other_programs_read_the_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    nested = [(text, {**fields, "meta": {"set": "B"}}) for text, fields in FINEWEB]
    write(path, nested)
    table = parquet.read_table(path)
    assert {field.name: str(field.type) for field in table.schema} == {
        "text": "string",
        "url": "string",
        "language_score": "double",
        "token_count": "int64",
        "meta": "string",
        OTHER_FIELDS: "string",
    }
    assert table["token_count"].to_pylist() == [0, 1, 2, 3, 4]
    assert json.loads(table["meta"][0].as_py()) == {"set": "B"}
    assert table[OTHER_FIELDS].null_count == 5


def test_lines_are_json_with_the_text_first(tmp_path: Path) -> None:
    data = write(tmp_path / "a.jsonl.zst", [("ä", {"n": 1, "body": "old"})], "body")
    assert zstandard.decompress(data, 2**20) == '{"body": "ä", "n": 1}\n'.encode()
    assert zstandard.get_frame_parameters(data).has_checksum


@pytest.mark.parametrize("ending", WRITABLE)
def test_values_that_json_does_not_have(ending: str, tmp_path: Path) -> None:
    day = datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.UTC)
    write(tmp_path / f"a{ending}", [("a", {"day": day, "deep": {"raw": b"\xff\xc3\xa4"}})])
    fields = {"day": "2024-02-29T12:00:00+00:00", "deep": {"raw": "\\xffä"}}
    assert read(tmp_path / f"a{ending}") == [("a", fields)]


def test_fields_of_filters_are_found_in_columns_of_json(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write(path, [("a", {"meta": {"set": "B"}, "url": "u"}), ("b", {"url": "v"})])
    with open(path, "rb") as file:
        reading = ReadOptions(fields=("meta.set",))
        items = list(open_documents("a.parquet", file, reading))
    assert [dict(item.fields) for item in items if isinstance(item, TextDocument)] == [
        {"text": "a", "meta": {"set": "B"}},
        {"text": "b", "meta": None},
    ]


@pytest.mark.parametrize("ending", WRITABLE)
def test_whole_or_not_at_all(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{ending}"
    before = write(path, FINEWEB)
    with pytest.raises(UnicodeEncodeError), DocumentWriter(path) as writer:
        writer.add("a" * 2**20, {})
        writer.add("\ud800", {})
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_flipped_byte_of_the_texts_changes_none(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    documents: Documents = [(f"{i} words " * 50, {"n": i * 7919}) for i in range(20)]
    data = write(path, documents)
    column = parquet.ParquetFile(path).metadata.row_group(0).column(0)
    refused = 0
    for at in range(start := column.dictionary_page_offset, start + column.total_compressed_size):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        try:
            assert read(path) == documents
        except ConfigError as error:
            assert "damaged" in str(error)
            refused += 1
    assert refused > 200, "all but what says how a page was written"


def test_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a\.csv ends in none of \.jsonl\.zst, \.parquet"):
        DocumentWriter(tmp_path / "a.csv")


def test_keys_that_are_ids_do_not_become_columns_each(tmp_path: Path) -> None:
    documents: Documents = [("a", {f"key-{i}": i}) for i in range(1000)]
    write(tmp_path / "a.parquet", documents)
    assert len(parquet.read_schema(tmp_path / "a.parquet").names) == write_shards.COLUMNS + 2
    assert read(tmp_path / "a.parquet") == documents


def test_row_groups_bound_what_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_shards, "ROW_GROUP", 2**20)
    text = "many words " * 1000
    before = arrow.total_allocated_bytes()
    tracemalloc.start()
    with DocumentWriter(tmp_path / "a.parquet") as writer:
        for number in range(2000):  # 22 MB
            writer.add(text, {"n": number})
            assert arrow.total_allocated_bytes() - before < 2**22
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**23
    assert parquet.ParquetFile(tmp_path / "a.parquet").num_row_groups == 22
