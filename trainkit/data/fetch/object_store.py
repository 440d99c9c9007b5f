"""Files of object stores, by fsspec: s3:// with s3fs, gs:// with gcsfs, and whatever scheme is
installed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.extras import MissingExtra
from trainkit.data.fetch.retry import (
    FetchRetryPolicy,
    RemoteFileChanged,
    RemoteFileInfo,
    TransientError,
    Unreachable,
)

BLOCK = 2**23  # bytes of one request
ANONYMOUS: dict[str, dict[str, object]] = {
    "s3": {"anon": True},
    "s3a": {"anon": True},
    "gs": {"token": "anon"},
    "gcs": {"token": "anon"},
    "abfs": {"anon": True},
}
ENDPOINT = {"s3", "s3a", "gs", "gcs"}  # whose libraries take endpoint_url
_FINAL = (
    "NoCredentials",
    "PartialCredentials",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "NoSuchBucket",
    "InvalidBucketName",
    "Invalid endpoint",
)


def file_system(scheme: str, endpoint: str | None, anonymous: bool, retry: FetchRetryPolicy) -> Any:
    """The fsspec file system of a scheme. Credentials are found where its library looks for them.

    Raises ConfigError (exit 6): its package is not installed, or it knows no endpoint or no
    anonymous access.
    """
    import fsspec

    if endpoint and scheme not in ENDPOINT:
        raise ConfigError(
            f"endpoint = {endpoint!r} means nothing to {scheme}://",
            exit=Exit.STAGE_FAILED,
            hint="take it away",
        )
    if anonymous and scheme not in ANONYMOUS:
        raise ConfigError(
            f"anonymous = true means nothing to {scheme}://",
            exit=Exit.STAGE_FAILED,
            hint="take it away",
        )
    options = dict(ANONYMOUS[scheme]) if anonymous else {}
    if endpoint:
        options["endpoint_url"] = endpoint
    if scheme in ("s3", "s3a"):
        options["config_kwargs"] = {
            "connect_timeout": retry.timeout,
            "read_timeout": retry.timeout,
        }
    try:
        return fsspec.filesystem(
            scheme, use_listings_cache=False, skip_instance_cache=True, **options
        )
    except (ImportError, ValueError) as error:
        message = f"{scheme}:// cannot be read here: {error}"
        if scheme in ("s3", "s3a"):
            raise MissingExtra(message, "data", exit=Exit.STAGE_FAILED) from None
        raise Unreachable(
            message, f"install the package that it names: {sys.executable} -m pip install NAME"
        ) from None


def glob_store(files: Any, url: str, shown: str) -> list[str]:
    """Addresses of the files that a pattern with `*` stands for, sorted. One attempt; raises
    Transient."""
    scheme = url.partition("://")[0]
    with store_errors(shown):
        found = files.glob(url)
    return [f"{scheme}://{path}" for path in sorted(found)]


class StoredFile:
    """One object."""

    def __init__(self, files: Any, url: str) -> None:
        self.files, self.url, self.shown = files, url, url

    def look(self) -> RemoteFileInfo | None:
        with store_errors(self.shown):
            try:
                about = self.files.info(self.url)
            except (FileNotFoundError, IsADirectoryError):
                return None
        if about.get("type") == "directory":
            return None
        etag = about.get("ETag") or about.get("etag")
        if etag is not None:
            # it decides alone: dates here are whole seconds
            return RemoteFileInfo(about.get("size"), str(etag))
        modified = next(
            (
                about[key]
                for key in ("LastModified", "updated", "last_modified", "mtime")
                if about.get(key)
            ),
            None,
        )
        return RemoteFileInfo(
            about.get("size"), modified=None if modified is None else str(modified)
        )

    def blocks(self, start: int, known: RemoteFileInfo) -> Iterator[bytes]:
        self._compare(known)
        at = start
        while known.size is not None and at < known.size:
            try:
                with store_errors(self.shown):
                    block = self.files.cat_file(self.url, start=at, end=min(at + BLOCK, known.size))
            except FileNotFoundError:
                raise RemoteFileChanged("no file any more") from None
            if not block:
                raise RemoteFileChanged(f"fewer than {known.size:,} bytes")
            yield block
            at += len(block)
            if at >= known.size:
                # each block is a request of its own: all of them were of one version only if it is
                # still that
                self._compare(known)

    def _compare(self, known: RemoteFileInfo) -> None:
        now = self.look()
        if known.size is None:
            raise TrainkitError(
                f"{self.shown}: the store does not say how long the file is", exit=Exit.STAGE_FAILED
            )
        if change := "no file any more" if now is None else known.difference(now):
            raise RemoteFileChanged(change)


@contextlib.contextmanager
def store_errors(shown: str) -> Iterator[None]:
    """The libraries' errors are of many types, some of them no OSError: what can be helped by
    waiting is Transient."""
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, TransientError, RemoteFileChanged, TrainkitError):
        raise
    except PermissionError as error:
        raise TrainkitError(
            f"{shown}: access is refused: {_words(error)}",
            exit=Exit.STAGE_FAILED,
            hint=(
                "public data: anonymous = true; else export the credentials that the"
                " store's library"
                " reads, such as AWS_PROFILE"
            ),
        ) from None
    except Exception as error:
        why = f"{type(error).__name__}: {_words(error)}"
        if any(word in why for word in _FINAL):
            raise TrainkitError(
                f"{shown}: {why}",
                exit=Exit.STAGE_FAILED,
                hint=(
                    "public data: anonymous = true; else export the credentials that the store's"
                    " library reads, such as AWS_PROFILE"
                ),
            ) from None
        raise TransientError(why) from None


def _words(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
