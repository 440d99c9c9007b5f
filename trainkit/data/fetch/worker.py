"""Brings a remote file here, or reads it as a stream: `python -m trainkit.data.fetch.worker
SPEC.json` is the unit `fetch-NAME`.

A file appears under its name only when all of it is there and is what it should be. What belongs
to its download lies beside it in .fetch/: NAME.part and NAME.part.json while it comes, NAME.json
afterwards (the form fetched/1), NAME.lock while somebody is at it.

Where a file comes from and goes to is a `FetchRecipe` (trainkit/data/fetch/recipe.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from trainkit.base.documents import utc_now
from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.files import fsync_folder, names_full_file, read_json, write_json
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.base.locks import locked
from trainkit.base.records import Record
from trainkit.base.worker import DISK_HINTS, ProgressCallback, run_unit
from trainkit.data.fetch.http import HttpFile, http_client
from trainkit.data.fetch.object_store import StoredFile, file_system
from trainkit.data.fetch.recipe import (
    FetchRecipe,
    FetchResult,
    ListingSpec,
    fetch_spec_from_json,
)
from trainkit.data.fetch.retry import (
    DEFAULT_RETRY,
    FetchRetryPolicy,
    RemoteFile,
    RemoteFileChanged,
    RemoteFileInfo,
    look,
    read_with_retries,
)

STATE = ".fetch"
BLOCK = 2**20
# formats whose table of contents is at the end: they cannot be read as a stream
RANDOM_ACCESS = (".zip", ".parquet")


def read_token(name: str | None) -> str | None:
    """The value of the variable that a dataset's `token` names. Raises ConfigError (exit 6)
    where it is not set."""
    if name is None:
        return None
    value = os.environ.get(name)
    if not value:
        raise ConfigError(
            f"token = {name!r}: there is no such environment variable here",
            exit=Exit.STAGE_FAILED,
            hint=f"export {name}=...",
        )
    return value


@contextlib.contextmanager
def open_remote_file(recipe: FetchRecipe, retry: FetchRetryPolicy) -> Iterator[RemoteFile]:
    """The file a recipe speaks of, with a connection for the block."""
    url = recipe.url
    if url.startswith(("http://", "https://")):
        with http_client(retry) as pool:
            yield HttpFile(url, pool, read_token(recipe.token), recipe.token)
    else:
        yield StoredFile(
            file_system(url.partition("://")[0], recipe.endpoint, recipe.anonymous, retry),
            url,
        )


class _FetchPaths:
    """A file's path and what lies in .fetch/ beside it."""

    def __init__(self, path: Path) -> None:
        state = path.parent / STATE
        self.path = path
        self.part = state / f"{path.name}.part"
        self.about = state / f"{path.name}.part.json"
        self.stamp = state / f"{path.name}.json"
        self.lock = state / f"{path.name}.lock"

    def forget_part(self) -> None:
        self.part.unlink(missing_ok=True)
        self.about.unlink(missing_ok=True)


@dataclass(frozen=True)
class _FetchStamp(Record):
    """NAME.json (fetched/1): what was fetched, and the file as it was then.

    Args:
        url: where it came from.
        known: what the server said of it, with the size and sum that were found.
        file: size and mtime in ns.
        result: of the fetch.
        made: when.
    """

    SCHEMA = "fetched/1"
    url: str
    known: RemoteFileInfo
    file: tuple[int, int]
    result: FetchResult
    made: str


def _read_stamp(path: Path) -> _FetchStamp | None:
    """None where there is none that can be read."""
    try:
        return _FetchStamp.from_file(path)
    except ConfigError:
        return None


def _size_and_time(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _already_fetched(
    paths: _FetchPaths, recipe: FetchRecipe, known: RemoteFileInfo | None
) -> FetchResult | None:
    """The result of an earlier fetch of the same version, if nobody has touched the file since."""
    stamp = _read_stamp(paths.stamp)
    if not paths.path.is_file() or stamp is None or stamp.file != _size_and_time(paths.path):
        return None
    # what has the same sum is the same, whatever its address is now
    if known is not None and known.sha256:
        same = known.sha256 == stamp.known.sha256
    else:
        same = stamp.url == recipe.url and (known is None or known.difference(stamp.known) is None)
    return stamp.result if same else None


def _put_there_by_hand(
    paths: _FetchPaths, recipe: FetchRecipe, known: RemoteFileInfo | None
) -> FetchResult | None:
    """The result for a file that somebody else put there, if size and published sum say it is
    the one; one that was not listed is taken as it is."""
    if not paths.path.is_file():
        return None
    now = _size_and_time(paths.path)
    stamp = _read_stamp(paths.stamp)
    ours = stamp is not None and stamp.file == now
    if ours or (known is not None and known.size not in (None, now[0])):
        return None  # ours, of another version; or another file
    with open(paths.path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if known is not None and known.sha256 not in (None, found):
        return None
    return _stamp(paths, recipe, known or RemoteFileInfo(), now, FetchResult(now[0], found))


def _stamp(
    paths: _FetchPaths,
    recipe: FetchRecipe,
    known: RemoteFileInfo,
    file: tuple[int, int],
    result: FetchResult,
) -> FetchResult:
    known = RemoteFileInfo(result.bytes, known.etag, known.modified, result.sha256)
    stamp = _FetchStamp(recipe.url, known, file, result, utc_now())
    write_json(paths.stamp, stamp.to_json())
    return result


def _read_part_info(path: Path) -> object:
    """What a partial download is of; None where nothing says it."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return None


def fetch(
    recipe: FetchRecipe,
    progress: ProgressCallback,
    retry: FetchRetryPolicy = DEFAULT_RETRY,
) -> FetchResult:
    """Bring one file here; nothing is asked of the server where it is here already. Two at once:
    the second waits and finds it.

    Args:
        recipe: where it comes from and goes to.
        progress: called with the bytes done and to do.
        retry: with the server.

    Raises TrainkitError (exit 6): it is not to be had, is not what
    was listed or published, or cannot be written.
    """
    paths = _FetchPaths(recipe.path)
    known = recipe.known
    result = _already_fetched(paths, recipe, known)
    if result is None:
        with _disk_errors(paths.path), locked(paths.lock, {"fetch": recipe.shown}, remove=True):
            result = (
                _already_fetched(paths, recipe, known)
                or _put_there_by_hand(paths, recipe, known)
                or _fetched(paths, recipe, known, progress, retry)
            )
    progress(result.bytes, result.bytes)
    return result


def _fetched(
    paths: _FetchPaths,
    recipe: FetchRecipe,
    known: RemoteFileInfo | None,
    progress: ProgressCallback,
    retry: FetchRetryPolicy,
) -> FetchResult:
    with open_remote_file(recipe, retry) as remote:
        if known is None:
            known = look(remote, retry)
        if known is None:
            raise _missing(remote)
        try:
            result = _download(remote, known, paths, progress, retry)
        except RemoteFileChanged as change:
            _refuse_contradiction(remote, known, change, paths, retry)
            raise _not_as_listed(remote.shown, change, recipe, paths) from None
    return _stamp(paths, recipe, known, _size_and_time(paths.path), result)


def _refuse_contradiction(
    remote: RemoteFile,
    known: RemoteFileInfo,
    change: RemoteFileChanged,
    paths: _FetchPaths,
    retry: FetchRetryPolicy,
) -> None:
    """Raise TrainkitError (exit 6) where the server, asked again, still names the file that was
    listed, and sends another: listing it again would not help."""
    again = look(remote, retry)
    if again is None or known.difference(again) is not None:
        return
    paths.forget_part()
    raise TrainkitError(
        f"{remote.shown}: the server contradicts itself: asked about the file (HEAD) it still names"
        f" the listed one, and what it sends has {change}",
        exit=Exit.STAGE_FAILED,
        hint=(
            "it is the server's fault: take the file from another, or fetch it by hand"
            f" to {paths.path}"
            " and give its path instead of the address"
        ),
    )


def _missing(remote: RemoteFile) -> TrainkitError:
    return TrainkitError(
        f"{remote.shown}: the server says there is no such file (404)",
        exit=Exit.STAGE_FAILED,
        hint="look at the address",
    )


def _download(
    remote: RemoteFile,
    known: RemoteFileInfo,
    paths: _FetchPaths,
    progress: ProgressCallback,
    retry: FetchRetryPolicy,
) -> FetchResult:
    """Add to NAME.part until it is whole, check it, and give it its name."""
    goes_on = (
        paths.part.is_file()
        and known.identifiable
        and _read_part_info(paths.about) == {"url": remote.shown, **known.to_json()}
    )
    if not goes_on:
        paths.forget_part()
        write_json(paths.about, {"url": remote.shown, **known.to_json()})
    digest = hashlib.sha256()
    size = 0
    with names_full_file(paths.part), open(paths.part, "a+b") as file:
        file.seek(0)
        while block := file.read(BLOCK):  # a sum cannot be taken up in the middle
            digest.update(block)
            size += len(block)
        if known.size is not None and size > known.size:
            file.truncate(0)
            digest = hashlib.sha256()
            size = 0
        _check_space(paths.part, (known.size or 0) - size)
        for block in read_with_retries(remote, size, known, retry):
            file.write(block)
            digest.update(block)
            size += len(block)
            progress(min(size, (known.size or size + 1) - 1), known.size or size + 1)
        file.flush()
        os.fsync(file.fileno())
    _check_sum(remote.shown, digest.hexdigest(), known, paths)
    os.replace(paths.part, paths.path)
    fsync_folder(paths.path.parent)
    paths.forget_part()
    return FetchResult(size, digest.hexdigest())


def _check_sum(shown: str, found: str, known: RemoteFileInfo, paths: _FetchPaths | None) -> None:
    if known.sha256 in (None, found):
        return
    if paths is not None:
        paths.forget_part()
    raise TrainkitError(
        f"{shown}: SHA-256 is {found}, published is {known.sha256}",
        exit=Exit.STAGE_FAILED,
        hint="what came was thrown away; run it again, or look at the sum in jobs.toml",
    )


def _check_space(path: Path, missing: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if missing > free:
        raise TrainkitError(
            f"{path.parent}: {missing:,} bytes are still to come, {free:,} are free there",
            exit=Exit.STAGE_FAILED,
            hint="make room, set clusters.X.root to a larger disk, or keep_download = false",
        )


def _not_as_listed(
    shown: str, change: RemoteFileChanged, recipe: FetchRecipe, paths: _FetchPaths | None
) -> TrainkitError:
    if paths is not None:
        paths.forget_part()
    if recipe.listing is not None:
        recipe.listing.unlink(missing_ok=True)
    hint = (
        "the file changed on the server: the next call lists the dataset again and makes again what"
        " depends on it"
    )
    return TrainkitError(
        f"{shown} is no longer the file that was listed: it has {change}",
        exit=Exit.STAGE_FAILED,
        hint=hint,
    )


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """The disk's errors in words; those of the network never come this far."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise TrainkitError(
            f"{error.filename or path}: {os.strerror(error.errno)}",
            exit=Exit.STAGE_FAILED,
            hint=DISK_HINTS.get(error.errno, "it is needed for what is fetched"),
        ) from None


class _Stream(io.RawIOBase):
    """A remote file as a stream of bytes, verified at its end."""

    def __init__(
        self,
        remote: RemoteFile,
        recipe: FetchRecipe,
        known: RemoteFileInfo,
        retry: FetchRetryPolicy,
    ) -> None:
        self.remote = remote
        self.recipe = recipe
        self.known = known
        self.blocks = read_with_retries(remote, 0, known, retry)
        self.rest = memoryview(b"")
        self.digest = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.blocks.close()  # the connection, before its pool
        super().close()

    def readinto(self, buffer: Any) -> int:
        if not self.rest:
            try:
                block = next(self.blocks, b"")
            except RemoteFileChanged as change:
                raise _not_as_listed(self.remote.shown, change, self.recipe, None) from None
            self.digest.update(block)
            if not block:
                _check_sum(self.remote.shown, self.digest.hexdigest(), self.known, None)
            self.rest = memoryview(block)
        count = min(len(buffer), len(self.rest))
        buffer[:count] = self.rest[:count]
        self.rest = self.rest[count:]
        return count


@contextlib.contextmanager
def open_stream(
    what: Path | FetchRecipe, retry: FetchRetryPolicy = DEFAULT_RETRY
) -> Iterator[IO[bytes]]:
    """The bytes of a file, as they lie there: of a local one, or of a recipe's.

    A recipe that keeps is fetched first, if its unit has not done so. One that does not is read
    from the server as a stream, and verified when its end is read; formats that need to be read
    from the end are fetched, and deleted after a block that ends well.

    Raises TrainkitError (exit 6) as `fetch` does, when opened and from `read`; ConfigError (exit
    6) where a local file is not there.
    """
    if isinstance(what, Path):
        with _opened(what) as file:
            yield file
        return
    path = what.path
    if what.keep or path.name.endswith(RANDOM_ACCESS):
        fetch(what, lambda done, total: None, retry)
        with _opened(path) as file:
            yield file
        if not what.keep:
            path.unlink(missing_ok=True)
            _FetchPaths(path).stamp.unlink(missing_ok=True)
        return
    with open_remote_file(what, retry) as remote:
        known = what.known or look(remote, retry)
        if known is None:
            raise _missing(remote)
        with io.BufferedReader(_Stream(remote, what, known, retry), BLOCK) as stream:
            yield stream


def _opened(path: Path) -> IO[bytes]:
    try:
        return open(path, "rb")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", exit=Exit.STAGE_FAILED) from None


def work(value: Mapping[str, Any], progress: ProgressCallback) -> dict[str, object]:
    """Fetch one file, or write down a listing, as the unit's spec says."""
    spec = fetch_spec_from_json(value)
    if isinstance(spec, ListingSpec):
        write_json(spec.path, dict(spec.listing))
        return {"files": len(spec.listing["files"])}
    return fetch(spec.recipe, progress).to_json()


if __name__ == "__main__":
    run_unit(work)
