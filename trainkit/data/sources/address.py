"""The addresses of a dataset's `urls`: what kind each is, and what its file is called below
corpus/."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal
from urllib.parse import unquote, urlsplit

from trainkit.base.errors import ConfigError, Exit
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.data.fetch.hub import parse_hub_address as parse_hub
from trainkit.data.fetch.ranges import expand
from trainkit.data.fetch.worker import STATE
from trainkit.jobs.schema import Dataset

Kind = Literal["http", "hub", "file", "store"]


@dataclass(frozen=True)
class Address:
    """One address, without ranges. `wanted`: the sum published for it."""

    text: str
    kind: Kind
    wanted: str | None = None

    @property
    def scheme(self) -> str:
        return self.text.partition("://")[0]

    @property
    def is_pattern(self) -> bool:
        return self.kind != "http" and "*" in self.text


def addresses_of(dataset: Dataset) -> list[Address]:
    """Every address that `urls` stands for, in order.

    Raises ConfigError (exit 6): one is not an address, holds a password, comes twice, or has a sum
    though it stands for several files.
    """
    found: dict[str, Address] = {}
    sums = dataset.sha256 or [None] * len(dataset.urls)
    for given, wanted in zip(dataset.urls, sums, strict=True):
        texts = expand(given)
        if wanted is not None and (len(texts) > 1 or "*" in given):
            raise _wrong(
                dataset,
                f"{given} stands for several files, so it cannot have one sha256",
                "give each file its own entry of urls, or leave sha256 out",
            )
        if wanted is not None and (
            len(wanted) != 64 or set(wanted.lower()) - set("0123456789abcdef")
        ):
            raise _wrong(
                dataset, f"sha256 {wanted!r} of {given} is not a SHA-256", "64 hexadecimal digits"
            )
        for text in texts:
            if text in found:
                raise _wrong(dataset, f"{text} is named twice", "name every file once")
            found[text] = Address(text, _kind(dataset, text), wanted and wanted.lower())
    return list(found.values())


def _kind(dataset: Dataset, text: str) -> Kind:
    scheme, colon, rest = text.partition("://")
    if not colon or not rest or not scheme.isascii():
        raise _wrong(
            dataset,
            f"{text!r} is not an address",
            "https://, hf://datasets/OWNER/NAME/PATH, s3://BUCKET/KEY or file:///PATH",
        )
    if scheme in ("http", "https"):
        parts = urlsplit(text)
        if parts.username or parts.password or not parts.hostname:
            raise _wrong(
                dataset,
                f"{scheme}://...{parts.path} holds a user's name or names no host",
                "name the variable of an access token: token = ...",
            )
        return "http"
    if scheme == "hf":
        parse_hub(text)
        return "hub"
    if scheme == "file":
        if not rest.startswith("/"):
            raise _wrong(
                dataset, f"{text} is relative", "file:///PATH; or source = 'files' with paths"
            )
        return "file"
    return "store"


def local_names(texts: Sequence[str]) -> list[str]:
    """Relative names for files of these addresses: what follows the folder that all have in
    common. The query is left out.

    Raises ConfigError (exit 6): two would be one file, or a part of a name cannot be a file's.
    """
    parts = [_parts(text) for text in texts]
    common = 0
    folders = [p[:-1] for p in parts]
    while (
        folders and all(len(f) > common for f in folders) and len({f[common] for f in folders}) == 1
    ):
        common += 1
    names: dict[str, str] = {}
    for text, part in zip(texts, parts, strict=True):
        name = "/".join(part[common:])
        if name in names:
            raise ConfigError(
                f"{text} and {names[name]} would both be kept as {name}",
                exit=Exit.STAGE_FAILED,
                hint="name one of them only",
            )
        names[name] = text
    return list(names)


def _parts(text: str) -> list[str]:
    scheme, _, rest = text.partition("://")
    if scheme in ("http", "https"):
        rest = rest.partition("?")[0].partition("#")[0]
    parts = [scheme]
    for part in rest.split("/"):
        name = unquote(part) if scheme in ("http", "https") and "/" not in unquote(part) else part
        if not name:
            continue
        if name in (".", "..", STATE) or "\0" in name or len(name.encode()) > 200:
            raise ConfigError(
                f"{text}: {name[:40]!r} cannot be the name of a file here", exit=Exit.STAGE_FAILED
            )
        parts.append(name)
    return parts


def _wrong(dataset: Dataset, message: str, hint: str) -> ConfigError:
    return ConfigError(
        f"datasets.{dataset.name}.urls: {message}", exit=Exit.STAGE_FAILED, hint=hint
    )
