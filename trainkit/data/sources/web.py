"""source = "web": files fetched from http(s)://, a hub (hf://), an object store (s3://, ...) or
file://."""

from __future__ import annotations

from pathlib import Path

from trainkit.base.errors import ConfigError, Exit
from trainkit.data.fetch.recipe import FetchRecipe, FetchSpec, ListingSpec
from trainkit.data.fetch.retry import DEFAULT_RETRY, FetchRetryPolicy, RemoteFileInfo
from trainkit.data.sources.address import local_names
from trainkit.data.sources.contract import FetchUnit, Shard, Source
from trainkit.data.sources.listing import LISTING, ListedFile, list_files, listing_document
from trainkit.data.text.formats import READABLE, READABLE_IN_WORDS
from trainkit.jobs.schema import Dataset

WORKER = "trainkit.data.fetch.worker"


class WebSource(Source):
    """Every file is a shard, in the order of `urls`. Files of file:// are read where they are."""

    def shards(
        self,
        dataset: Dataset,
        corpus: Path,
        *,
        refresh: bool = False,
        retry: FetchRetryPolicy = DEFAULT_RETRY,
    ) -> list[Shard]:
        found = as_shards(dataset, corpus, list_files(dataset, corpus, retry, refresh=refresh))
        for shard in found:
            if not shard.path.name.endswith(READABLE):
                raise ConfigError(
                    f"datasets.{dataset.name}.urls: {shard.path.name} is of no format that is read",
                    exit=Exit.STAGE_FAILED,
                    hint=f"read are {READABLE_IN_WORDS}; the name says the format",
                )
        return found


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
        recipe = FetchRecipe(
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
        shards.append(Shard(f"{i:05d}", path, size, recipe))
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
    if not any(shard.remote for shard in shards):
        return []
    path = corpus / LISTING
    listing = ListingSpec(path, listing_document(dataset, [_found(shard) for shard in shards]))
    units = [FetchUnit("listing", WORKER, listing.to_json(), (path,))]
    for shard in shards:
        if isinstance(shard.recipe, FetchRecipe) and shard.recipe.keep:
            spec = FetchSpec(shard.recipe).to_json()
            units.append(
                FetchUnit(f"fetch-{shard.name}", WORKER, spec, (shard.path,), size=shard.size)
            )
    return units


def _found(shard: Shard) -> ListedFile:
    """What `as_shards` made the shard of."""
    recipe = shard.recipe
    if not isinstance(recipe, FetchRecipe):
        return ListedFile(
            f"file://{shard.path}", f"file://{shard.path}", RemoteFileInfo(shard.size)
        )
    assert recipe.known is not None  # from a listing
    return ListedFile(recipe.shown, recipe.url, recipe.known)
