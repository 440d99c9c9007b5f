"""Where published weights lie: `hf:NAME[@REVISION]` of the hub, fetched once below <root>/hub,
or a folder.

    <root>/hub/<NAME with / as -->/<commit>/      config.json, safetensors, tokenizer: whole, or
    not there <root>/hub/<NAME with / as -->/<REVISION>.json   the form weights/1: which commit
    that revision was when it was fetched

The stage `weights` writes both before any rank starts; every rank reads the commit there, so
that all begin with the same weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from trainkit.base.documents import read_document
from trainkit.base.errors import ConfigError
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.jobs.schema import Job

SCHEME = "hf:"
SCHEMA = "weights/1"
_PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_NAME = re.compile(rf"(?P<name>{_PART}(/{_PART})?)(@(?P<revision>[A-Za-z0-9_][A-Za-z0-9_./-]*))?")


@dataclass(frozen=True)
class HubModel:
    """A model of the hub. `revision` is a branch, a tag or a commit."""

    name: str
    revision: str = "main"

    def folder(self, root: Path) -> Path:
        """Everything of this model below `root`."""
        return root / "hub" / self.name.replace("/", "--")

    def record(self, root: Path) -> Path:
        """Which commit the revision was."""
        return self.folder(root) / f"{quote(self.revision, safe='')}.json"


def parse(init_from: str) -> HubModel | Path:
    """What a job's `init_from` names. Raises ConfigError for a name no hub can have."""
    if not init_from.startswith(SCHEME):
        return Path(init_from)
    match = _NAME.fullmatch(init_from.removeprefix(SCHEME))
    if match is None or "--" in match["name"]:  # the hub allows no "--", which keeps folders apart
        raise ConfigError(
            f"init_from = {init_from!r} names no model of a hub",
            hint="hf:NAME or hf:ORGANIZATION/NAME, with @REVISION for a branch, tag or commit",
        )
    return HubModel(match["name"], match["revision"] or "main")


def root_of(job: Job) -> Path:
    """The folder that holds hub/."""
    return job.cluster.root_folder


@dataclass(frozen=True)
class FetchedRevision:
    """What a record says: which commit a revision was when it was fetched.

    Args:
        commit: its hash.
        files: sizes in bytes by name.
        endpoint: the hub it was fetched from; None: the usual one.
        fetched: when, in UTC.
    """

    commit: str
    files: Mapping[str, int]
    endpoint: str | None
    fetched: str


def read_record(path: Path) -> FetchedRevision:
    """A record, checked. Raises ConfigError where there is none that can be used."""
    record = read_document(path, SCHEMA)
    commit = record.get("commit")
    files = record.get("files")
    if not re.fullmatch(r"[0-9a-f]{40,64}", str(commit)) or not isinstance(files, dict):
        raise ConfigError(
            f"{path} names no commit or no files",
            hint="delete it, and run `invoke prep-data --job JOB`",
        )
    return FetchedRevision(str(commit), files, record.get("endpoint"), str(record.get("fetched")))


def weights_folder(job: Job) -> Path:
    """The folder that a job with `init_from` takes its weights from.

    Raises:
        ConfigError: exit 3, the name is wrong, or the stage has not fetched it.
    """
    if job.init_from is None:
        raise ConfigError(f"job {job.name!r} has no init_from")
    source = parse(job.init_from)
    if isinstance(source, Path):
        return source
    record = source.record(root_of(job))
    if not record.is_file():
        raise ConfigError(
            f"init_from = {job.init_from!r} was not fetched: there is no {record}",
            hint=f"invoke prep-data --job {job.name}",
        )
    folder = source.folder(root_of(job)) / read_record(record).commit
    if not folder.is_dir():
        raise ConfigError(
            f"init_from = {job.init_from!r}: {folder} is gone",
            hint=f"invoke prep-data --job {job.name}",
        )
    return folder
