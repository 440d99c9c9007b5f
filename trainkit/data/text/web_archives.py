"""Web archives as documents: the texts of a WET, and those of the HTML pages of a WARC.

What else an archive holds is passed over and counted by reason, as members of other archives are.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any

from trainkit.base.errors import Exit
from trainkit.base.extras import MissingExtra
from trainkit.data.text.decompress import BLOCK, COMPRESSED, BlockStream, damaged_file
from trainkit.data.text.documents import (
    BadLine,
    ParsedItem,
    ReadOptions,
    SkippedMember,
    TextDocument,
)
from trainkit.data.text.json_lines import shown_around, too_long
from trainkit.data.text.page_text import BROKEN, PageExtractor

# a .warc.gz has a gzip member a record; the end of the name says which are compressed
WEB_ARCHIVES = tuple(kind + packed for kind in (".warc", ".wet") for packed in ("", *COMPRESSED))
FIELDS = {
    "url": "WARC-Target-URI",
    "date": "WARC-Date",
    "id": "WARC-Record-ID",
    "language": "WARC-Identified-Content-Language",
}
# not brotli: what warcio's decoder makes of a few bytes of it has no bound
CODINGS = ("identity", "gzip", "deflate")
HTML = ("text/html", "application/xhtml+xml")


def lacking_for(names: Iterable[str]) -> MissingExtra | None:
    """What files of these names need and this Python does not have."""
    found = next((name for name in names if name.lower().endswith(WEB_ARCHIVES)), None)
    if found is None:
        return None
    for package in ("warcio", "trafilatura"):
        if importlib.util.find_spec(package) is None:
            message = f"{found} is read by {package}, which is not installed"
            return MissingExtra(message, "curate", exit=Exit.STAGE_FAILED)
    return None


def archived_documents(
    data: Iterator[bytes], reading: ReadOptions, where: str
) -> Iterator[ParsedItem]:
    """The documents of an archive whose plain bytes are `data`. `line` is the record's number,
    from 1; fields are those of `FIELDS` that the record has.

    Raises ConfigError (exit 6): damaged, cut off, a package is missing.
    """
    if lacking := lacking_for([where]):
        raise lacking
    from warcio.archiveiterator import ArchiveIterator
    from warcio.exceptions import ArchiveLoadFailed

    archive = ArchiveIterator(BlockStream(data), no_record_parse=True, block_size=BLOCK)
    number = 0
    with closing(PageExtractor()) as extract:
        try:
            for record in archive:
                if archive.err_count:  # of which it warns only
                    raise ArchiveLoadFailed("text stands between two records")
                number += 1
                yield _item(number, record, reading, where, extract)
            if archive.err_count or not number:
                raise ArchiveLoadFailed("its last record has no end" if number else "it is empty")
        except ArchiveLoadFailed as error:
            raise damaged_file(
                where, f"is not a web archive, or a damaged one: {error}", line=number
            ) from None


def _item(
    number: int, record: Any, reading: ReadOptions, where: str, extract: PageExtractor
) -> ParsedItem:
    most = reading.max_document_bytes
    block, size = _block(record, most, where, number)
    headers = record.rec_headers
    fields = {
        name: value
        for name, key in FIELDS.items()
        if (value := headers.get_header(key)) is not None
    }
    if record.rec_type == "conversion":
        if not (headers.get_header("Content-Type") or "text/plain").startswith("text/plain"):
            return SkippedMember(where, "a conversion that is not text")
        if size > most:
            return too_long(number, where, size, "", most)
        return _conversion(number, block, where, reading, fields)
    if record.rec_type != "response":
        return SkippedMember(where, f"a record of type {record.rec_type}")
    if size > most:
        return SkippedMember(where, f"a response above {most:,} bytes")
    page, reason = _page(record, block, most)
    if not reason:
        text, reason = extract(page)
    if reason:
        return SkippedMember(where, reason)
    return TextDocument(number, text, where, {reading.text_key: text, **fields})


def _block(record: Any, most: int, where: str, number: int) -> tuple[bytes, int]:
    """The bytes of a record's block, and their number; of more than `most` the first only."""
    length = (record.rec_headers.get_header("Content-Length") or "").strip()
    if record.format != "warc" or not record.rec_type or not length.isdecimal():
        raise damaged_file(where, "is a record without WARC-Type or Content-Length", line=number)
    block = _read(record.raw_stream, most)
    size = len(block) + sum(map(len, iter(lambda: record.raw_stream.read(BLOCK), b"")))
    if size != int(length):
        raise damaged_file(
            where,
            f"is a truncated record: {size:,} bytes, its Content-Length says {int(length):,}",
            line=number,
        )
    return block, size


def _read(stream: Any, most: int) -> bytes:
    """What a stream holds; of more than `most` bytes a little more than that."""
    pieces = []
    size = 0
    while size <= most and (piece := stream.read(BLOCK)):
        pieces.append(piece)
        size += len(piece)
    return b"".join(pieces)


def _conversion(
    number: int, block: bytes, where: str, reading: ReadOptions, fields: dict[str, str]
) -> ParsedItem:
    try:
        text = block.decode()
    except UnicodeDecodeError as error:
        return BadLine(
            number,
            where,
            "invalid UTF-8",
            f"holds invalid UTF-8: {error.reason} at byte {error.start}",
            shown_around(block, error.start),
        )
    return TextDocument(number, text, where, {reading.text_key: text, **fields})


def _page(record: Any, block: bytes, most: int) -> tuple[bytes, str]:
    """The HTML of a response, as its HTTP headers decode it; or b"" and why there is none."""
    from warcio.statusandheaders import StatusAndHeadersParser, StatusAndHeadersParserException

    stream = io.BytesIO(block)
    try:
        record.http_headers = StatusAndHeadersParser(["HTTP/"]).parse(stream)
    except (EOFError, StatusAndHeadersParserException):
        return b"", "a response that is not HTTP"
    kind = record.rec_headers.get_header("WARC-Identified-Payload-Type")
    kind = kind or record.http_headers.get_header("Content-Type") or ""
    if kind.partition(";")[0].strip().lower() not in HTML:
        return b"", "a response that is not HTML"
    if (record.http_headers.get_header("Content-Encoding") or "identity").lower() not in CODINGS:
        return b"", f"a response encoded as none of {', '.join(CODINGS)}"
    record.raw_stream = stream
    try:
        page = _read(record.content_stream(), most)
    except Exception:  # zlib, brotli and warcio have an error each for what cannot be decoded
        return b"", BROKEN
    return (b"", f"a response above {most:,} bytes") if len(page) > most else (page, "")
