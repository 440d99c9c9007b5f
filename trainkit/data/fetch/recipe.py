"""How a remote file is fetched: where it comes from and where it goes. It travels as JSON in the
specs of units, and holds no secret: the worker reads the token from the variable that is named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.base.records import Record
from trainkit.data.fetch.retry import RemoteFileInfo


@dataclass(frozen=True)
class FetchRecipe(Record):
    """How one file is fetched.

    Args:
        url: http(s):// or a scheme of fsspec's.
        path: where it goes.
        known: what the listing says of it; None: the server is asked when it is fetched, and a
            file that is there already is taken as it is.
        shown: its address as the dataset has it; "": the url.
        token: name of the environment variable with the access token.
        endpoint: another address of an object store.
        anonymous: of an object store, without credentials.
        keep: False: read as a stream, nothing is left below `path`.
        listing: deleted when the file turns out not to be the one that was listed, so that the
            next call lists the dataset again.
    """

    url: str
    path: Path
    known: RemoteFileInfo | None = None
    shown: str = ""
    token: str | None = None
    endpoint: str | None = None
    anonymous: bool = False
    keep: bool = True
    listing: Path | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shown", self.shown or self.url)


@dataclass(frozen=True)
class FetchSpec(Record):
    """The spec of a unit that fetches one file."""

    do: Literal["fetch"] = field(default="fetch", init=False)
    recipe: FetchRecipe


@dataclass(frozen=True)
class ListingSpec(Record):
    """The spec of the unit that writes down which files there are: `listing` (listing/1) goes to
    `path`."""

    do: Literal["listing"] = field(default="listing", init=False)
    path: Path
    listing: Mapping[str, Any]


def fetch_spec_from_json(value: Mapping[str, Any]) -> FetchSpec | ListingSpec:
    """The spec of either kind of unit, as its key "do" says."""
    if value["do"] == "listing":
        return ListingSpec.from_json(value)
    return FetchSpec.from_json(value)


@dataclass(frozen=True)
class FetchResult(Record):
    """What was fetched: its size, and SHA-256 in hex."""

    bytes: int
    sha256: str
