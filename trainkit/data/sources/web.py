"""source = "web": files fetched from http(s)://, a hub (hf://), an object store (s3://, ...) or
file://."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainkit.base.errors import ConfigError, Exit
from trainkit.data.fetch.retry import DEFAULT_RETRY, FetchRetryPolicy, RemoteFileInfo
from trainkit.data.fetch.worker import recipe
from trainkit.data.sources.address import local_names
from trainkit.data.sources.contract import FetchUnit, Shard
from trainkit.data.sources.listing import LISTING, ListedFile, list_files, listing_document
from trainkit.data.text.formats import READABLE
from trainkit.jobs.schema import Dataset


class WebSource:
    """Every file is a shard, in the order of `urls`. Files of file:// are read where they are."""

    def identity(self, dataset: Dataset) -> dict[str, str]:
        return {}

    def shards(
        self,
        dataset: Dataset,
        corpus: Path,
        *,
        anew: bool = False,
        patience: FetchRetryPolicy = DEFAULT_RETRY,
    ) -> list[Shard]:
        found = as_shards(dataset, corpus, list_files(dataset, corpus, patience, anew=anew))
        for shard in found:
            if not shard.path.name.endswith(READABLE):
                raise ConfigError(
                    f"datasets.{dataset.name}.urls: {shard.path.name} ends in none of"
                    f" {', '.join(READABLE)}",
                    exit=Exit.STAGE_FAILED,
                )
        return found

    def write(self, recipe: dict[str, Any], path: Path, text_key: str) -> dict[str, Any]:
        raise AssertionError("what is fetched is not written")


def as_shards(dataset: Dataset, corpus: Path, found: list[ListedFile]) -> list[Shard]:
    """A shard for every file of a listing, of whatever format."""
    names = iter(local_names([f.text for f in found if not f.text.startswith("file://")]))
    shards = []
    listing = corpus / LISTING
    for i, file in enumerate(found):
        size = file.known.size or 0
        if file.text.startswith("file://"):
            shards.append(Shard(f"{i:05d}", Path(file.text.removeprefix("file://")), size))
            continue
        path = corpus / next(names)
        about = recipe(
            file.url,
            path,
            file.known,
            shown=file.text,
            token=dataset.token,
            endpoint=dataset.endpoint if not file.url.startswith(("http://", "https://")) else None,
            anonymous=dataset.anonymous,
            keep=dataset.keep_download,
            listing=listing,
        )
        shards.append(Shard(f"{i:05d}", path, size, about))
    return shards


def fetch_units(dataset: Dataset, corpus: Path, shards: list[Shard]) -> list[FetchUnit]:
    """The units that bring remote shards here: one writes down the listing, and each file that
    is kept has one.

    None waits for the listing: a new one makes only what is different in it again, and what
    comes after that.

    Args:
        dataset: source = "web", or "indexed" with urls.
        corpus: its folder of text.
        shards: what its source has just given; files that are there already need no unit.
    """
    remote = [shard for shard in shards if shard.remote]
    if not remote:
        return []
    spec = {
        "do": "listing",
        "path": str(corpus / LISTING),
        "listing": listing_document(dataset, [_found(shard) for shard in shards]),
    }
    listing = FetchUnit("listing", "trainkit.data.fetch.worker", spec, (corpus / LISTING,))
    kept = [shard for shard in remote if shard.recipe["keep"]]
    units = [
        FetchUnit(
            f"fetch-{s.name}",
            "trainkit.data.fetch.worker",
            {"do": "fetch", "recipe": s.recipe},
            (s.path,),
            size=s.size,
        )
        for s in kept
    ]
    return [listing, *units]


def _found(shard: Shard) -> ListedFile:
    """What `as_shards` made the shard of."""
    if not shard.remote:
        return ListedFile(
            f"file://{shard.path}", f"file://{shard.path}", RemoteFileInfo(shard.size)
        )
    return ListedFile(
        shard.recipe["shown"], shard.recipe["url"], RemoteFileInfo(**shard.recipe["known"])
    )
