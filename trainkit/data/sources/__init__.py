"""Where text comes from: one small contract, one file a source."""

from trainkit.data.sources.announce import DownloadNotice, download_notice
from trainkit.data.sources.contract import FetchUnit, Shard, Source
from trainkit.data.sources.files import FilesSource
from trainkit.data.sources.indexed import IndexedSource, fetched_prefixes
from trainkit.data.sources.stdlib import StdlibSource
from trainkit.data.sources.tokenizers import tokenizer_fetch_units
from trainkit.data.sources.web import WebSource, fetch_units

SOURCES: dict[str, Source] = {
    "stdlib": StdlibSource(),
    "files": FilesSource(),
    "web": WebSource(),
    "indexed": IndexedSource(),
}

__all__ = [
    "SOURCES",
    "DownloadNotice",
    "FetchUnit",
    "Shard",
    "Source",
    "download_notice",
    "fetch_units",
    "fetched_prefixes",
    "tokenizer_fetch_units",
]
