"""Documents as an earlier pass wrote them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainkit.base.errors import ConfigError, Exit
from trainkit.data.curate.contract import CrawledDocument
from trainkit.data.text.documents import ReadOptions, TextDocument
from trainkit.data.text.formats import open_documents

ID = "trainkit_id"  # 16 hexadecimal digits: CrawledDocument.key
ORIGIN = "trainkit_origin"  # FILE:LINE as it was read


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
