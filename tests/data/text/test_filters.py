"""Which documents are left out, and what becomes of bad lines."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from trainkit.base.errors import ConfigError, Exit
from trainkit.data.text.documents import BadLine, TextDocument
from trainkit.data.text.filters import DocumentFilter, FilterSettings
from trainkit.data.text.rejects import Rejects
from trainkit.jobs.schema import Dataset


def record(text: str | list[str] = "text", **fields: object) -> TextDocument:
    return TextDocument(1, text, "x.jsonl", fields)


def bad(line: int, kind: str = "not JSON") -> BadLine:
    return BadLine(line, "x.jsonl", kind, "is not JSON: at byte 3", "{ab")


def test_drop_by_field_as_slimpajama_drops_its_books() -> None:
    keep = DocumentFilter(
        FilterSettings(
            {"meta.redpajama_set_name": ("RedPajamaBook", "RedPajamaArXiv"), "flag": ("true", "3")}
        )
    )
    assert keep(record(meta={"redpajama_set_name": "RedPajamaC4"})) == [b"text"]
    assert keep(record(meta={"redpajama_set_name": "RedPajamaBook"})) is None
    assert keep(record(meta={"redpajama_set_name": "RedPajamaArXiv"})) is None
    assert (
        keep(record(flag=True)) is None
        and keep(record(flag=3)) is None
        and keep(record(flag="true")) is None
    )
    for other in (
        record(),
        record(meta=None),
        record(meta="RedPajamaBook"),
        record(flag=False),
        record(flag=None),
        record(flag=[True]),
    ):
        assert keep(other) == [b"text"]
    expected = {
        "meta.redpajama_set_name = RedPajamaBook": 1,
        "meta.redpajama_set_name = RedPajamaArXiv": 1,
        "flag = true": 2,
        "flag = 3": 1,
    }
    assert keep.dropped == expected


def test_length_counts_bytes() -> None:
    keep = DocumentFilter(FilterSettings(min_document_bytes=4))
    assert (
        keep(record("ääx")) == ["ääx".encode()]
        and keep(record("äx")) is None
        and keep(record("")) is None
    )
    assert keep(record(["ab", "cd"])) == [b"ab", b"cd"]
    assert keep.dropped == {"below 4 bytes": 2}
    assert (
        DocumentFilter(FilterSettings())(record("")) == [b""]
        and DocumentFilter(FilterSettings())(record([])) == []
    )


def test_mojibake_is_repaired_before_its_length_counts() -> None:
    pytest.importorskip("ftfy")
    assert DocumentFilter(FilterSettings(fix_text=True))(record("schÃ¶n")) == ["schön".encode()]
    assert (
        DocumentFilter(FilterSettings(fix_text=True, min_document_bytes=7))(record("schÃ¶n"))
        is None
    )
    assert DocumentFilter(FilterSettings())(record("schÃ¶n")) == ["schÃ¶n".encode()]


def test_without_ftfy_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ftfy", None)
    with pytest.raises(ConfigError, match="needs ftfy") as caught:
        DocumentFilter(FilterSettings(fix_text=True))
    assert caught.value.exit == Exit.STAGE_FAILED


def test_stop_raises_with_place_and_bytes(tmp_path: Path) -> None:
    path = tmp_path / "rejects.jsonl"
    path.write_text("former")
    with (
        pytest.raises(ConfigError, match=r"x\.jsonl:7: is not JSON: at byte 3: \{ab") as caught,
        Rejects(path, skip=False, max_fraction=1) as rejects,
    ):
        rejects.add(bad(7))
    assert caught.value.exit == Exit.STAGE_FAILED and caught.value.problems()[0]["line"] == 7
    assert list(tmp_path.iterdir()) == []


def test_skip_writes_what_was_wrong(tmp_path: Path) -> None:
    path = tmp_path / "rejects" / "00000.jsonl"
    with Rejects(path, skip=True, max_fraction=0.5) as rejects:
        for line, kind in ((2, "not JSON"), (5, "no text"), (9, "not JSON")):
            rejects.add(bad(line, kind))
        rejects.check(6)
        assert not path.exists()
    assert rejects.counts == {"not JSON": 2, "no text": 1} and rejects.total == 3
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["line"] for row in rows] == [2, 5, 9]
    assert rows[0] == {
        "file": "x.jsonl",
        "line": 2,
        "kind": "not JSON",
        "reason": "is not JSON: at byte 3",
        "around": "{ab",
    }


def test_no_bad_line_no_file(tmp_path: Path) -> None:
    path = tmp_path / "rejects.jsonl"
    path.write_text("former")
    with Rejects(path, skip=True, max_fraction=0) as rejects:
        rejects.check(0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("fraction", "lines", "stops"),
    [(0.1, 20, False), (0.1, 19, True), (0, 10**9, True), (1, 2, False)],
)
def test_too_many_stop_all_the_same(
    fraction: float, lines: int, stops: bool, tmp_path: Path
) -> None:
    path = tmp_path / "rejects.jsonl"

    def go() -> None:
        with Rejects(path, skip=True, max_fraction=fraction) as rejects:
            rejects.add(bad(1))
            rejects.add(bad(2))
            rejects.check(lines)

    if not stops:
        go()
        assert path.is_file()
        return
    with pytest.raises(
        ConfigError,
        match=(
            rf"x\.jsonl:2: 2 of {lines:,} lines are bad \(2 not JSON\), more than"
            rf" max_reject_fraction = {fraction:g}"
        ),
    ):
        go()
    assert list(tmp_path.iterdir()) == []


def test_every_filter_is_a_key_of_datasets() -> None:
    """With its default, so that a dataset that asks for none counts as it was published."""
    for each in fields(FilterSettings):
        assert each.name in Dataset.model_fields
    plain = Dataset.model_construct(source="files").model_dump(mode="json")
    assert FilterSettings.from_json(plain) == FilterSettings()
