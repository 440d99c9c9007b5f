"""Files of a Hugging Face hub: hf://datasets/OWNER/NAME[@REVISION]/PATH, or hf://OWNER/NAME...
of a model.

The hub is asked once for commit, sizes and sums; each file then comes from its https:// address
at that commit like any other.
"""

from __future__ import annotations

import contextlib
import fnmatch
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.base.redact import Redactor
from trainkit.data.fetch.retry import (
    FetchRetryPolicy,
    RemoteFileInfo,
    RetryCounter,
    ServerGate,
    TransientError,
)

SCHEME = "hf://"
PUBLIC = "https://huggingface.co"
_PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_ADDRESS = re.compile(
    rf"hf://(?P<datasets>datasets/)?+(?P<name>{_PART}/{_PART})(@(?P<revision>refs/(?:pr|convert)/[^/@]+|[^/@]+))?/(?P<path>[^/].*)"
)
PASSING = {408, 429, 500, 502, 503, 504}


@dataclass(frozen=True)
class HubPath:
    """A path of the hub, or a pattern with `*` in its last part."""

    kind: str
    name: str
    revision: str
    path: str

    @property
    def repository(self) -> tuple[str, str, str]:
        return self.kind, self.name, self.revision

    @property
    def folder(self) -> str:
        return self.path.rpartition("/")[0]


def parse_hub_address(address: str) -> HubPath:
    """Take an address apart. Raises ConfigError where it names no file of a hub."""
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise ConfigError(
            f"{address!r} names no file of a hub",
            exit=Exit.STAGE_FAILED,
            hint=(
                "hf://datasets/OWNER/NAME[@REVISION]/PATH/TO/FILE, or hf://OWNER/NAME/FILE"
                " of a model"
            ),
        )
    return HubPath(
        "dataset" if found["datasets"] else "model",
        found["name"],
        found["revision"] or "main",
        found["path"],
    )


class Hub:
    """One hub. Every failure is a TrainkitError (exit 6) that says what to do."""

    def __init__(
        self,
        endpoint: str | None,
        token: str | None,
        token_name: str | None,
        retry: FetchRetryPolicy,
    ) -> None:
        from huggingface_hub import HfApi

        self.endpoint = (endpoint or PUBLIC).rstrip("/")
        # False: never a token that lies around
        self.api = HfApi(endpoint=self.endpoint, token=token or False, library_name="trainkit")
        self.token_name = token_name
        self.retry = retry
        self.redactor = Redactor([token] if token else [])

    def files(self, paths: list[HubPath]) -> dict[HubPath, list[tuple[str, str, RemoteFileInfo]]]:
        """What the hub has of each path: (its path there, its https:// address at the commit,
        what is known of it); a pattern may match several.

        Asks once for the commit of each repository, and a page for every thousand files of each
        folder.
        """
        found: dict[HubPath, list[tuple[str, str, RemoteFileInfo]]] = {}
        for repository in dict.fromkeys(path.repository for path in paths):
            wanted = [path for path in paths if path.repository == repository]
            commit = self._commit(*repository)
            for folder in dict.fromkeys(path.folder for path in wanted):
                there = self._folder(repository, commit, folder)
                for path in (path for path in wanted if path.folder == folder):
                    if "*" in path.path:
                        names = sorted(n for n in there if fnmatch.fnmatchcase(n, path.path))
                    elif path.path in there:
                        names = [path.path]
                    else:
                        names = []
                    found[path] = [
                        (name, self._address(repository, commit, name), there[name])
                        for name in names
                    ]
        return found

    def _commit(self, kind: str, name: str, revision: str) -> str:
        about: Any = self._ask(
            kind,
            name,
            revision,
            lambda: self.api.repo_info(name, revision=revision, repo_type=kind),
        )
        if not about.sha:
            raise TrainkitError(
                f"the hub names no commit for {name}@{revision}", exit=Exit.STAGE_FAILED
            )
        return str(about.sha)

    def _folder(
        self, repository: tuple[str, str, str], commit: str, folder: str
    ) -> Mapping[str, RemoteFileInfo]:
        from huggingface_hub import errors
        from huggingface_hub.hf_api import RepoFile

        kind, name, revision = repository

        def entries() -> list[Any]:
            try:
                return list(
                    self.api.list_repo_tree(name, folder or None, revision=commit, repo_type=kind)
                )
            except errors.EntryNotFoundError:
                return []  # no such folder: none of its files is there

        listed = self._ask(kind, name, revision, entries)
        return {
            f.path: RemoteFileInfo(f.size, sha256=f.lfs.sha256 if f.lfs else None)
            for f in listed
            if isinstance(f, RepoFile)
        }

    def _address(self, repository: tuple[str, str, str], commit: str, path: str) -> str:
        kind, name, _ = repository
        folder = "datasets/" if kind == "dataset" else ""
        return f"{self.endpoint}/{folder}{name}/resolve/{commit}/{quote(path)}"

    def _ask(self, kind: str, name: str, revision: str, question: Any) -> Any:
        shown = f"{SCHEME}{'datasets/' if kind == 'dataset' else ''}{name}@{revision}"
        tries = RetryCounter(f"{shown} at {self.endpoint}", self.retry, ServerGate())
        while True:
            try:
                with self._errors(f"{shown} at {self.endpoint}", kind):
                    return question()
            except TransientError as error:
                tries.failed(error)

    @contextlib.contextmanager
    def _errors(self, at: str, kind: str) -> Iterator[None]:
        import httpx2
        from huggingface_hub import errors

        if self.token_name:
            secret = f"the token in {self.token_name} was not enough"
        else:
            secret = 'name the variable that holds a token: token = "HF_TOKEN"'
        try:
            yield
        except errors.GatedRepoError:
            raise TrainkitError(
                f"{at} is gated: it is given only to who accepted its terms",
                exit=Exit.STAGE_FAILED,
                hint=f"accept the terms on its page; {secret}",
            ) from None
        except errors.RevisionNotFoundError:
            raise TrainkitError(
                f"{at}: the {kind} has no such revision",
                exit=Exit.STAGE_FAILED,
                hint="it is a branch, a tag or a commit",
            ) from None
        except errors.RepositoryNotFoundError:
            raise TrainkitError(
                f"{at}: the hub knows no such {kind}, or does not show it",
                exit=Exit.STAGE_FAILED,
                hint=f"look at its spelling; if it is private, {secret}",
            ) from None
        except errors.HfHubHTTPError as error:
            why = self.redactor.text(str(error).strip().partition("\n")[0])
            if error.response is not None and error.response.status_code in PASSING:
                after = error.response.headers.get("retry-after", "")
                raise TransientError(why, float(after) if after.isdigit() else None) from None
            raise TrainkitError(f"{at}: {why}", exit=Exit.STAGE_FAILED) from None
        except (httpx2.TransportError, errors.OfflineModeIsEnabled) as error:
            why = (
                f"{type(error).__name__}:"
                f" {self.redactor.text(str(error).strip().partition(chr(10))[0])}"
            )
            if isinstance(error, errors.OfflineModeIsEnabled):
                raise TrainkitError(f"{at}: {why}", exit=Exit.STAGE_FAILED) from None
            raise TransientError(why) from None
