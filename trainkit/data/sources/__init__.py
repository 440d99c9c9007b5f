"""Where text comes from: one small contract, one file a source."""

from trainkit.data.sources.announce import Announcement, announce
from trainkit.data.sources.contract import Fetch, Shard, Source
from trainkit.data.sources.files import Files
from trainkit.data.sources.indexed import Indexed, fetched_prefixes
from trainkit.data.sources.stdlib import Stdlib
from trainkit.data.sources.tokenizers import tokenizer_fetches
from trainkit.data.sources.web import Web, fetches

SOURCES: dict[str, Source] = {
    "stdlib": Stdlib(),
    "files": Files(),
    "web": Web(),
    "indexed": Indexed(),
}

__all__ = [
    "SOURCES",
    "Announcement",
    "Fetch",
    "Shard",
    "Source",
    "announce",
    "fetched_prefixes",
    "fetches",
    "tokenizer_fetches",
]
