"""Documents as they were published, and as an earlier pass wrote them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import xxhash

from trainkit.base.errors import ConfigError, Exit
from trainkit.data.curate.contract import CrawledDocument
from trainkit.data.text.documents import ReadOptions, TextDocument, without_field
from trainkit.data.text.formats import open_documents

ID = "trainkit_id"  # 16 hexadecimal digits: CrawledDocument.key
ORIGIN = "trainkit_origin"  # FILE:LINE as it was read


def document_key(text: str, fields: Mapping[str, object]) -> int:
    """64 bits of a document as it was read, XXH3 of text and fields."""
    rest = json.dumps(fields, sort_keys=True, ensure_ascii=False, default=str)
    digest = xxhash.xxh3_64(text.encode())
    digest.update(b"\0" + rest.encode("utf-8", "surrogatepass"))
    return digest.intdigest()


def as_crawled(item: TextDocument, text: str, text_key: str) -> CrawledDocument:
    """A published document at the beginning of its way; `text`: as the dataset's filters left
    it."""
    fields = without_field(item.fields, text_key)
    key = document_key(text, fields)
    fields[ID] = f"{key:016x}"
    fields[ORIGIN] = f"{item.where}:{item.line}"
    return CrawledDocument(text, fields, key)


def read_shard(path: Path, text_key: str) -> Iterator[CrawledDocument]:
    """The documents of a shard that a pass wrote, in order. Raises ConfigError (exit 6) where it
    is damaged."""
    options = ReadOptions(text_key, max_document_bytes=2**40, fields=None)
    with open(path, "rb") as stream:
        for item in open_documents(path.name, stream, options, str(path)):
            if not isinstance(item, TextDocument) or ID not in item.fields:
                raise ConfigError(
                    f"{path} is not what curation wrote: {item!s:.200}",
                    exit=Exit.STAGE_FAILED,
                    hint="delete it: prep-data makes it again",
                )
            fields = dict(item.fields)
            fields.pop(text_key, None)
            yield CrawledDocument(str(item.text), fields, int(str(fields[ID]), 16))
