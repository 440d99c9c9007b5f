"""WARC and WET: every record is a document, a bad line, or counted; a cut file is never whole."""

from __future__ import annotations

import gzip
import io
import sys
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from tests.data.text.text_files import error_of, found, packed
from trainkit.base.errors import ConfigError, Exit
from trainkit.base.extras import MissingExtra
from trainkit.data.text import page_text
from trainkit.data.text.documents import (
    BadLine,
    ParsedItem,
    ReadOptions,
    SkippedMember,
    TextDocument,
)
from trainkit.data.text.page_text import PageExtractor
from trainkit.data.text.web_archives import WEB_ARCHIVES, archived_documents, lacking_for

DATE = "2024-02-29T12:00:00Z"


class Archive:
    """A web archive that is being written."""

    def __init__(self, *, compressed: bool = False) -> None:
        self.out = io.BytesIO()
        self.writer = WARCWriter(self.out, gzip=compressed)
        self.writer.write_record(self.writer.create_warcinfo_record("x", {"software": "test"}))

    def add(
        self,
        kind: str,
        payload: bytes,
        http: dict[str, str] | None = None,
        *,
        uri: str = "https://example.org/a",
        **headers: str,
    ) -> Archive:
        record = self.writer.create_warc_record(
            uri,
            kind,
            payload=io.BytesIO(payload),
            http_headers=StatusAndHeaders("200 OK", list(http.items()), protocol="HTTP/1.1")
            if http is not None
            else None,
            warc_content_type="text/plain" if http is None else "application/http",
            warc_headers_dict={
                "WARC-Date": DATE,
                "WARC-Record-ID": "<urn:uuid:1>",
                **{f"WARC-{name.replace('_', '-')}": value for name, value in headers.items()},
            },
        )
        self.writer.write_record(record)
        return self

    def page(self, html: str | bytes, kind: str = "text/html", **http: str) -> Archive:
        data = html if isinstance(html, bytes) else html.encode()
        named = {name.replace("_", "-"): value for name, value in http.items()}
        return self.add("response", data, {"Content-Type": kind, **named})

    @property
    def data(self) -> bytes:
        return self.out.getvalue()


def page_of(sentence: str, charset: str = "utf-8") -> bytes:
    body = f"<article><h1>A title</h1><p>{sentence}</p></article>"
    head = f'<head><meta charset="{charset}"></head>'
    return f"<html>{head}<body>{body}</body></html>".encode(charset)


ENGLISH = "The river rose over night, and in the morning the bridge stood under water."
GERMAN = "Die Bäume blühen früh im März, und die Vögel fliegen über die Dächer der Häuser."
CHINESE = "人工智能是计算机科学的一个分支,它企图了解智能的实质,并生产出一种新的智能机器。"


def documents(items: list[ParsedItem]) -> list[TextDocument]:
    return [item for item in items if isinstance(item, TextDocument)]


def skipped(items: list[ParsedItem]) -> dict[str, int]:
    return Counter(item.reason for item in items if isinstance(item, SkippedMember))


@pytest.mark.parametrize("name", WEB_ARCHIVES)
def test_every_ending(name: str) -> None:
    data = Archive().add("conversion", "eins ä\n".encode()).data
    (document,) = documents(found(f"x{name}", packed(name, data)))
    assert document.text == "eins ä\n"


def test_a_wet_as_common_crawl_names_it() -> None:
    archive = Archive(compressed=True)
    archive.add("conversion", b"one\r\n\r\nWARC/1.0\r\n", Identified_Content_Language="eng,deu")
    archive.add("conversion", b"")
    items = found("CC-MAIN-1.warc.wet.gz", archive.data)
    fields = {"url": "https://example.org/a", "date": DATE, "id": "<urn:uuid:1>"}
    assert skipped(items) == {"a record of type warcinfo": 1}
    assert [(d.line, d.text, dict(d.fields)) for d in documents(items)] == [
        (
            2,
            "one\r\n\r\nWARC/1.0\r\n",
            {"text": "one\r\n\r\nWARC/1.0\r\n", **fields, "language": "eng,deu"},
        ),
        (3, "", {"text": "", **fields}),
    ]


def test_a_record_written_by_hand() -> None:
    data = (
        b"WARC/1.0\r\nwarc-type: conversion\r\nWARC-Target-URI: <http://x/ y>\r\n"
        b"Content-Type: text/plain; charset=utf-8\r\nContent-Length: 5\r\n\r\nhello\r\n\r\n"
    )
    (document,) = documents(found("x.wet", data * 2))[1:]
    assert (document.line, document.text) == (2, "hello")
    assert document.fields["url"] == "http://x/%20y"
    (document,) = documents(found("x.wet", data[:-4]))
    assert document.text == "hello"


def test_a_text_that_is_no_document_is_a_bad_line() -> None:
    archive = Archive().add("conversion", b"a\xff").add("conversion", b"x" * 2000)
    bad = [
        i for i in found("x.wet", archive.data, max_document_bytes=999) if isinstance(i, BadLine)
    ]
    assert [(b.line, b.kind) for b in bad] == [(2, "invalid UTF-8"), (3, "too long")]
    assert "max_document_bytes = 999" in bad[1].reason


@pytest.mark.parametrize(
    ("sentence", "charset"), [(GERMAN, "utf-8"), (GERMAN, "latin-1"), (CHINESE, "gbk")]
)
def test_the_text_of_a_page(sentence: str, charset: str) -> None:
    archive = Archive().page(page_of(sentence, charset), "Text/HTML; charset=unknown")
    (document,) = documents(found("x.warc", archive.data))
    assert isinstance(document.text, str) and sentence in document.text
    assert "<p>" not in document.text and document.line == 2
    assert document.fields["url"] == "https://example.org/a"


def test_what_gives_no_text_is_counted() -> None:
    page = page_of(ENGLISH)
    archive = (
        Archive().page(page).page("<html><body></body></html>").page(b"%PDF", "application/pdf")
    )
    archive.add("request", b"", {}).add("response", b"\0\1", uri="dns:x")
    archive.page(gzip.compress(page), Content_Encoding="gzip")
    archive.page(gzip.compress(page)[:50], Content_Encoding="gzip")
    archive.page(b"%x\r\n%b\r\n0\r\n\r\n" % (len(page), page), Transfer_Encoding="chunked")
    archive.page(b"\x0b", Content_Encoding="br")
    archive.page(gzip.compress(bytes(2**22)), Content_Encoding="gzip").page(b"x" * 2**20)
    archive.add("response", page, {"X": "y"}, Identified_Payload_Type="text/html")
    items = found("x.warc.gz", gzip.compress(archive.data), max_document_bytes=2**19)
    assert [d.line for d in documents(items)] == [2, 7, 9, 13]
    assert all(ENGLISH in d.text for d in documents(items))
    assert skipped(items) == {
        "a record of type warcinfo": 1,
        "a record of type request": 1,
        "HTML without text": 2,
        "a response that is not HTML": 1,
        "a response that is not HTTP": 1,
        "a response encoded as none of identity, gzip, deflate": 1,
        "a response above 524,288 bytes": 2,
    }


def test_a_page_that_takes_too_long_costs_that_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extraction takes the square of the number of paragraphs: minutes for these."""
    monkeypatch.setattr(page_text, "PAGE_SECONDS", 3)
    slow = "".join(
        f"<p>Paragraph number {i} is not like any other one.</p>" for i in range(200_000)
    )
    archive = Archive().page(page_of(ENGLISH)).page(f"<html><body>{slow}</body></html>")
    items = found("x.warc", archive.page(page_of(GERMAN)).data)
    assert [d.line for d in documents(items)] == [2, 4]
    assert skipped(items) == {"a record of type warcinfo": 1, "HTML that takes too long": 1}


def test_a_page_on_which_the_process_dies_costs_that_page() -> None:
    before = set(psutil.Process().children())
    with closing(PageExtractor()) as extract:
        assert ENGLISH in extract(page_of(ENGLISH))[0]
        (process,) = set(psutil.Process().children()) - before
        process.kill()
        assert extract(page_of(ENGLISH)) == ("", "HTML that cannot be extracted")
        assert ENGLISH in extract(page_of(ENGLISH))[0]
    assert set(psutil.Process().children()) == before


def test_without_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lacking_for(["a.jsonl", "b.warc.gz"]) is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert lacking_for(["a.jsonl"]) is None
    with pytest.raises(MissingExtra, match=r"x\.warc is read by warcio") as caught:
        found("x.warc", Archive().data)
    assert caught.value.extra == "curate" and caught.value.exit == Exit.STAGE_FAILED


def test_a_process_that_cannot_import_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ConfigError, match=r"trafilatura cannot be imported \(exit 1\)"):
        found("x.warc", Archive().page("<html>").data)


class TestDamage:
    texts = Archive().add("conversion", b"one").add("conversion", b"two" * 100).data

    def test_a_cut_gzip_member(self) -> None:
        archive = Archive(compressed=True).add("conversion", b"one").add("conversion", b"two" * 99)
        whole = archive.data
        ends = [at for at in range(1, len(whole)) if whole.startswith(b"\x1f\x8b\x08", at)]
        assert len(ends) == 2
        for cut in range(1, len(whole)):
            if cut in ends:  # a shorter file, and whole
                assert len(found("x.wet.gz", whole[:cut])) == 1 + ends.index(cut)
            else:
                error_of("x.wet.gz", whole[:cut], "truncated gzip file|not a gzip file")

    def test_a_cut_plain_file(self) -> None:
        """At the end of a record it is a shorter file."""
        whole = found("x.wet", self.texts)
        for cut in range(len(self.texts)):
            try:
                items = found("x.wet", self.texts[:cut])
            except ConfigError as error:
                assert error.exit == Exit.STAGE_FAILED
            else:
                assert items == whole[: len(items)]
                assert self.texts[:cut].rstrip().endswith((b"test", b"one", b"two" * 100))

    @pytest.mark.parametrize("length", [b"2", b"0", b"9", b"9999", b"", b"-1", b"x"])
    def test_a_wrong_length(self, length: bytes) -> None:
        damaged = self.texts.replace(b"Content-Length: 3\r", b"Content-Length: %b\r" % length)
        error_of("x.wet", damaged, "web archive|truncated record|without WARC-Type")

    def test_text_between_records_has_its_place(self) -> None:
        damaged = self.texts.replace(b"Content-Length: 3\r", b"Content-Length: 2\r")
        error = error_of("x.wet", damaged, "text stands between two records")
        assert "x.wet:2" in str(error)
        damaged = self.texts.replace(b"Content-Length: 300\r", b"Content-Length: 299\r")
        error_of("x.wet", damaged, "its last record has no end")

    @pytest.mark.parametrize(
        "data", [b"", b"hello\n" * 9, b"\n\n", b"\0" * 999, b'{"text": "a"}\n']
    )
    def test_another_format(self, data: bytes) -> None:
        error_of("x.warc", data, "x.warc")


def test_what_is_held_does_not_grow_with_the_file() -> None:
    """64 MB of records, and one of 32 MB that is passed over."""
    record = Archive().add("conversion", b"word " * 20_000).data
    large = Archive().page(b"x" * 2**25).data

    def blocks() -> Iterator[bytes]:
        for _ in range(640):
            yield record
        yield from (large[at : at + 2**16] for at in range(0, len(large), 2**16))

    tracemalloc.start()
    items = archived_documents(blocks(), ReadOptions(max_document_bytes=2**20), "x.warc")
    kinds = Counter(type(item) for item in items)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert kinds == {TextDocument: 640, SkippedMember: 642}
    assert peak < 2**23
