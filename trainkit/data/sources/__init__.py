"""Where text comes from: one small contract, one file a source."""

from trainkit.data.sources.contract import Shard, Source
from trainkit.data.sources.files import Files
from trainkit.data.sources.stdlib import Stdlib

SOURCES: dict[str, Source] = {"stdlib": Stdlib(), "files": Files()}

__all__ = ["SOURCES", "Shard", "Source"]
