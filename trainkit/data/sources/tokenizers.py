"""The files a tokenizer is published as, fetched like text."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from trainkit.base.errors import ConfigError, Exit
from trainkit.data.fetch.hub import PUBLIC, SCHEME, parse_hub_address as parse_hub
from trainkit.data.fetch.recipe import FetchRecipe, FetchSpec
from trainkit.data.sources.contract import FetchUnit
from trainkit.jobs.datasets import Tokenizer

FILES = (("path", "url"), ("vocab_file", "vocab_url"), ("merge_file", "merge_url"))


def tokenizer_fetch_units(
    tokenizer: Tokenizer, token: str | None = None, endpoint: str | None = None
) -> list[FetchUnit]:
    """The units that bring a tokenizer's files here, one for each that says where it is
    published. A file that somebody put there is never replaced.

    Args:
        tokenizer: of whatever type.
        token: name of the environment variable with an access token, for those behind terms: the
            dataset's.
        endpoint: of the hub, for hf:// addresses: the dataset's.

    Raises ConfigError (exit 6): a url of a kind that cannot be fetched.
    """
    units = []
    for key, url_key in FILES:
        path = getattr(tokenizer, key)
        url = getattr(tokenizer, url_key)
        if path is None or url is None:
            continue
        address = _https(url, endpoint) if url.startswith(SCHEME) else url
        if not address.startswith(("http://", "https://", "s3://", "gs://")):
            raise ConfigError(
                f"tokenizers.{tokenizer.name}.{url_key} = {url!r} is not an address",
                exit=Exit.STAGE_FAILED,
                hint=(
                    f"https://, hf://OWNER/NAME/FILE or s3://; a file that is here goes into {key}"
                ),
            )
        recipe = FetchRecipe(
            address, Path(path), shown=url, token=token if address.startswith("http") else None
        )
        units.append(
            FetchUnit(
                f"fetch-{key.replace('_', '-')}",
                "trainkit.data.fetch.worker",
                FetchSpec(recipe).to_json(),
                (Path(path),),
            )
        )
    return units


def _https(address: str, endpoint: str | None) -> str:
    """The file's address on the hub, at the revision as it is when it is asked for."""
    where = parse_hub(address)
    kind = "datasets/" if where.kind == "dataset" else ""
    base = (endpoint or PUBLIC).rstrip("/")
    revision = quote(where.revision, safe="")
    return f"{base}/{kind}{where.name}/resolve/{revision}/{quote(where.path)}"
