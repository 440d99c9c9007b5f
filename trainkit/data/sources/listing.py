"""What the servers have of a dataset's addresses: found once, checked against what was
published, and kept as corpus/.fetch/listing.json (listing/1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError, Exit
from trainkit.base.files import read_json
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.base.records import Record
from trainkit.data.fetch.http import HttpFile, http_client
from trainkit.data.fetch.hub import Hub, parse_hub_address as parse_hub
from trainkit.data.fetch.object_store import StoredFile, file_system, glob_store
from trainkit.data.fetch.retry import (
    DEFAULT_RETRY,
    FetchRetryPolicy,
    RemoteFile,
    RemoteFileInfo,
    RetryCounter,
    ServerGate,
    TransientError,
    look,
)
from trainkit.data.fetch.worker import STATE, read_token
from trainkit.data.indexed.published import check_published
from trainkit.data.sources.address import Address, addresses_of
from trainkit.jobs.schema import Dataset

SCHEMA = "listing/1"
LISTING = f"{STATE}/listing.json"
# questions under way; a server that finds that too many says 429, and is left alone as long as it
# asks
AT_ONCE = 32
# what a listing depends on
ASKED = {"urls", "sha256", "endpoint", "anonymous", "files", "missing_files", "download_bytes"}
NAMED = 5  # missing files in a message


@dataclass(frozen=True)
class ListedFile(Record):
    """One file that is there.

    Args:
        text: its address as the dataset has it; of a pattern, of the file that matches.
        url: where its bytes come from: for a hub the https:// address at a commit.
        known: what the server says of it.
    """

    text: str
    url: str
    known: RemoteFileInfo


def list_files(
    dataset: Dataset,
    corpus: Path,
    retry: FetchRetryPolicy = DEFAULT_RETRY,
    *,
    refresh: bool = False,
) -> list[ListedFile]:
    """All files of `urls`, in order, from corpus/.fetch/listing.json if that is of these very
    keys, else, or `refresh`, from the servers. Writes nothing.

    Raises ConfigError or TrainkitError (exit 6): a file is missing, their number or size is not
    what was published, a server refuses.
    """
    kept = None if refresh else read_listing(dataset, corpus)
    if kept is not None:
        return kept
    addresses = addresses_of(dataset)
    answers = _ask(dataset, addresses, retry)
    found = []
    missing = []
    for address in addresses:
        there = answers[address.text]
        found += [_with_sum(dataset, address, file) for file in there]
        if not there:
            missing.append(address.text)
    _check(dataset, found, missing)
    return found


def listing_document(dataset: Dataset, found: Sequence[ListedFile]) -> dict[str, object]:
    """What listing.json holds."""
    return document(
        SCHEMA,
        of=_asked(dataset),
        files=[file.to_json() for file in found],
    )


def _asked(dataset: Dataset) -> dict[str, object]:
    return dataset.model_dump(mode="json", include=ASKED)


def read_listing(dataset: Dataset, corpus: Path) -> list[ListedFile] | None:
    """What was listed before with these very keys, or None."""
    try:
        value = read_json(corpus / LISTING)
        if value["schema"] != SCHEMA or value["of"] != _asked(dataset):
            return None
        return [ListedFile.from_json(file) for file in value["files"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # there is none, or none that can be used: the servers are asked


def _ask(
    dataset: Dataset, addresses: Sequence[Address], retry: FetchRetryPolicy
) -> dict[str, list[ListedFile]]:
    """The files of each address, none where the server says there is no such file."""
    answers: dict[str, list[ListedFile]] = {}
    kinds = {
        kind: [a for a in addresses if a.kind == kind] for kind in ("http", "hub", "file", "store")
    }
    if (kinds["file"] or kinds["store"]) and dataset.token is not None:
        raise ConfigError(
            f"datasets.{dataset.name}.token = {dataset.token!r} is for https:// and hf://",
            exit=Exit.STAGE_FAILED,
            hint=(
                "object stores take credentials where their library looks for them, such as"
                " AWS_PROFILE"
            ),
        )
    token = read_token(dataset.token)
    if kinds["http"]:
        with http_client(retry, AT_ONCE) as pool:
            remotes = {a.text: HttpFile(a.text, pool, token, dataset.token) for a in kinds["http"]}
            answers |= {
                text: [ListedFile(text, text, seen)] if seen else []
                for text, seen in _look_at_all(remotes, retry).items()
            }
    if kinds["hub"]:
        paths = {a.text: parse_hub(a.text) for a in kinds["hub"]}
        there = Hub(dataset.endpoint, token, dataset.token, retry).files(list(paths.values()))
        for text, path in paths.items():
            front = text.removesuffix(path.path)
            answers[text] = [
                ListedFile(f"{front}{name}", url, known) for name, url, known in there[path]
            ]
    for address in kinds["file"]:
        answers[address.text] = _local(address)
    for scheme in dict.fromkeys(a.scheme for a in kinds["store"]):
        answers |= _stored(dataset, [a for a in kinds["store"] if a.scheme == scheme], retry)
    return answers


def _local(address: Address) -> list[ListedFile]:
    path = Path(address.text.removeprefix("file://"))
    names = sorted(path.parent.glob(path.name)) if address.is_pattern else [path]
    return [
        ListedFile(f"file://{p}", f"file://{p}", RemoteFileInfo(p.stat().st_size))
        for p in names
        if p.is_file()
    ]


def _stored(
    dataset: Dataset, addresses: Sequence[Address], retry: FetchRetryPolicy
) -> dict[str, list[ListedFile]]:
    files = file_system(addresses[0].scheme, dataset.endpoint, dataset.anonymous, retry)
    urls: dict[str, list[str]] = {}
    for address in addresses:
        if address.is_pattern:
            urls[address.text] = _matches(files, address.text, retry)
        else:
            urls[address.text] = [address.text]
    seen = _look_at_all(
        {url: StoredFile(files, url) for found in urls.values() for url in found}, retry
    )
    return {
        text: [ListedFile(url, url, known) for url in found if (known := seen[url]) is not None]
        for text, found in urls.items()
    }


def _matches(files: Any, url: str, retry: FetchRetryPolicy) -> list[str]:
    tries = RetryCounter(url, retry)
    while True:
        try:
            return glob_store(files, url, url)
        except TransientError as error:
            tries.failed(error)


def _look_at_all(
    remotes: Mapping[str, RemoteFile], retry: FetchRetryPolicy
) -> dict[str, RemoteFileInfo | None]:
    """Ask for many files, AT_ONCE at a time. The first failure ends it."""
    gate = ServerGate()

    def task(remote: RemoteFile) -> RemoteFileInfo | None:
        return look(remote, retry, gate)

    with ThreadPoolExecutor(min(AT_ONCE, max(1, len(remotes)))) as pool:
        questions = {text: pool.submit(task, remote) for text, remote in remotes.items()}
        try:
            done, _ = wait(questions.values(), return_when=FIRST_EXCEPTION)
            for question in done:  # the one that failed, not those it sent home
                if question.exception() is not None:
                    raise question.exception()  # type: ignore[misc]
        except BaseException:
            gate.close()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return {text: question.result() for text, question in questions.items()}


def _with_sum(dataset: Dataset, address: Address, file: ListedFile) -> ListedFile:
    """The file with the sum that jobs.toml gives for it."""
    if address.wanted is None or address.wanted == file.known.sha256:
        return file
    if file.known.sha256 is not None:
        raise ConfigError(
            f"datasets.{dataset.name}: {file.text} has the SHA-256 {file.known.sha256}, sha256 says"
            f" {address.wanted}",
            exit=Exit.STAGE_FAILED,
            hint="it is another file than the one that was meant: look at urls and sha256",
        )
    return ListedFile(
        file.text,
        file.url,
        RemoteFileInfo(file.known.size, file.known.etag, file.known.modified, address.wanted),
    )


def _check(dataset: Dataset, found: Sequence[ListedFile], missing: Sequence[str]) -> None:
    """Refuse what is not complete. Raises ConfigError (exit 6) that names what is missing."""
    named = ", ".join(missing[:NAMED]) + (
        f" and {len(missing) - NAMED:,} more" if len(missing) > NAMED else ""
    )
    if missing and dataset.missing_files == "refuse":
        of = len(found) + len(missing)
        message = (
            f"datasets.{dataset.name}: {len(missing):,} of {of:,} files are not there: {named}"
        )
        hint = (
            "look at urls; where some numbers of a range never existed, say how many files there"
            " are: missing_files = 'allow', files = N"
        )
        if missing[0].startswith("hf://") and "." not in missing[0].rpartition("/")[2]:
            hint = f"the files of a folder are named by a pattern: {missing[0]}/*.parquet"
        raise ConfigError(message, exit=Exit.STAGE_FAILED, hint=hint)
    if not found:
        raise ConfigError(f"datasets.{dataset.name}: urls name no file", exit=Exit.STAGE_FAILED)
    if dataset.files is not None and len(found) != dataset.files:
        lost = f"; not there: {named}" if missing else ""
        raise ConfigError(
            f"datasets.{dataset.name}: {len(found):,} files are there, files = {dataset.files:,}"
            f" were published{lost}",
            exit=Exit.STAGE_FAILED,
            hint="some were taken away or not uploaded yet; or correct `files`",
        )
    sizes = [file.known.size for file in found]
    if None not in sizes:
        check_published(dataset, {"download_bytes": sum(size or 0 for size in sizes)})
