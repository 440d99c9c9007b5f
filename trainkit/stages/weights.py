"""The stage weights: a job's `init_from` is here and fits its model before any rank starts. As a
program: the unit that fetches it from the hub.

Files come one by one through huggingface_hub, which takes up a broken connection where it broke;
finished ones are kept across interruptions.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainkit.base.documents import document, utc_now
from trainkit.base.errors import ConfigError, Exit, TrainkitError, raise_problems
from trainkit.base.files import publish_folder, write_json
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.base.records import Record
from trainkit.base.redact import Redactor
from trainkit.base.worker import ProgressCallback, run_unit
from trainkit.jobs.schema import Job, Model
from trainkit.stages.contract import Need, Unit
from trainkit.train.huggingface.folder import (
    CONFIG,
    INDEX,
    check_weights,
    config_problems,
    no_safetensors,
    safetensors_files,
)
from trainkit.train.huggingface.hub import SCHEMA, HubModel, parse, read_record, root_of

VERSION = 1
TOKEN = "HF_TOKEN"
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
KEPT = (*TOKENIZER, "generation_config.json")
PROGRESS_SECONDS = 0.2


@dataclass(frozen=True)
class WeightsSpec(Record):
    """The spec of the unit that fetches a model.

    Args:
        name: OWNER/NAME on the hub.
        revision: a branch, a tag or a commit.
        endpoint: of another hub.
        root: the folder of fetched models.
        token: whether the variable HF_TOKEN holds an access token.
        model: what the weights have to fit.
    """

    name: str
    revision: str
    endpoint: str | None
    root: Path
    token: bool
    model: Model


class WeightsStage:
    """What `init_from` names: a folder is looked at, a model of the hub is fetched once for
    every revision."""

    name = "weights"

    def needs(self, job: Job, stamps: Path) -> list[Need]:
        if job.init_from is None:
            return []
        source = parse(job.init_from)
        root = root_of(job)
        if isinstance(source, Path):
            raise_problems(check_weights(source, job.model, job.model.vocab_size))
            return []
        endpoint = job.cluster.hub_endpoint
        fresh, _ = _judge(source, root, endpoint)
        if fresh:
            raise_problems(
                check_weights(_commit_folder(source, root), job.model, job.model.vocab_size)
            )
        return [self._need(job, source, root, endpoint)]

    def waits_for(self, job: Job) -> tuple[str, ...]:
        return ()

    def _need(self, job: Job, source: HubModel, root: Path, endpoint: str | None) -> Need:
        with_token = TOKEN in {name.rstrip("?") for name in job.cluster.secrets}
        spec = WeightsSpec(source.name, source.revision, endpoint, root, with_token, job.model)
        unit = Unit(
            "fetch",
            (sys.executable, "-I", "-m", "trainkit.stages.weights"),
            spec.to_json(),
            _outputs(source, root),
        )
        settings = {
            "init_from": job.init_from,
            f"clusters.{job.cluster.name}.hub_endpoint": endpoint,
        }
        name = f"{source.folder(root).name}--{source.record(root).stem}"
        return Need(
            self.name,
            name,
            source.folder(root).name,
            VERSION,
            settings,
            (),
            (),
            (unit,),
            evidence=lambda: _judge(source, root, endpoint),
        )


def _commit_folder(source: HubModel, root: Path) -> Path:
    return source.folder(root) / read_record(source.record(root)).commit


def _outputs(source: HubModel, root: Path) -> tuple[Path, ...]:
    """The record and, where there is one, the files it names: any that is gone makes the unit
    run again."""
    record = source.record(root)
    try:
        files = read_record(record).files
    except ConfigError:
        return (record,)
    return (record, *(_commit_folder(source, root) / name for name in files))


def _judge(source: HubModel, root: Path, endpoint: str | None) -> tuple[bool, str]:
    """Whether what was fetched is still there, and why or why not. What the revision is on the
    hub by now is not asked: `--force` does."""
    path = source.record(root)
    if not path.is_file():
        return False, "it was never fetched"
    try:
        record = read_record(path)
    except ConfigError as error:
        return False, error.message
    if record.endpoint != endpoint:
        return (
            False,
            f"hub_endpoint changed from {json.dumps(record.endpoint)} to {json.dumps(endpoint)}",
        )
    folder = _commit_folder(source, root)
    for name, size in record.files.items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != size:
            return False, f"{folder / name} is missing or cut off"
    return (
        True,
        f"{source.revision} was {record.commit[:12]} when it was fetched, {record.fetched}",
    )


@dataclass(frozen=True)
class _Listing:
    """What the hub has under a commit: sizes in bytes, and SHA-256 of large files, by name; only
    files outside of folders."""

    commit: str
    sizes: Mapping[str, int | None]
    sha256: Mapping[str, str]


class _Hub:
    """One model of the hub. Every failure is a TrainkitError (exit 6) that says what to do."""

    def __init__(self, spec: WeightsSpec, token: str | None) -> None:
        os.environ.pop("HF_ENDPOINT", None)  # where to fetch from is said by jobs.toml alone
        from huggingface_hub import HfApi
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
        self.api = HfApi(endpoint=spec.endpoint, token=token or False, library_name="trainkit")
        self.name = spec.name
        self.revision = spec.revision
        self.redactor = Redactor([token] if token else [])

    def listing(self) -> _Listing:
        """Resolve the revision, once."""
        with self._errors():
            found = self.api.model_info(self.name, revision=self.revision, files_metadata=True)
        if not found.sha:
            raise TrainkitError(
                f"the hub names no commit for {self.name}@{self.revision}", exit=Exit.STAGE_FAILED
            )
        files = [
            file for file in found.siblings or [] if file.rfilename == Path(file.rfilename).name
        ]
        return _Listing(
            found.sha,
            {f.rfilename: f.size for f in files},
            {f.rfilename: f.lfs.sha256 for f in files if f.lfs},
        )

    def get(self, file: str, commit: str, folder: Path) -> None:
        """Fetch one file into `folder`, where it appears whole."""
        with self._errors():
            self.api.hf_hub_download(self.name, file, revision=commit, local_dir=folder)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        from huggingface_hub import errors

        at = f"hf:{self.name}@{self.revision} at {self.api.endpoint}"
        secret = f"name {TOKEN} in clusters.X.secrets and export it"
        try:
            yield
        except errors.GatedRepoError:
            hint = f"accept the model's terms on its page, then {secret}"
            raise TrainkitError(
                f"{at} is gated: it is given only to who accepted its terms",
                exit=Exit.STAGE_FAILED,
                hint=hint,
            ) from None
        except errors.RevisionNotFoundError:
            raise TrainkitError(
                f"{at}: the model has no such revision",
                exit=Exit.STAGE_FAILED,
                hint="it is a branch, a tag or a commit",
            ) from None
        except errors.RepositoryNotFoundError:
            hint = f"look at its spelling; if it is private, {secret}"
            raise TrainkitError(
                f"{at}: the hub knows no such model, or does not show it",
                exit=Exit.STAGE_FAILED,
                hint=hint,
            ) from None
        except Exception as error:
            # the library's HTTP client, and so the errors of a connection, are others from version
            # to version
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the disk's
            why = self.redactor.text(str(error).strip().partition("\n")[0])
            hint = (
                "without a way to the hub, copy the model's folder here and name it: init_from ="
                " PATH; another hub: clusters.X.hub_endpoint"
            )
            raise TrainkitError(
                f"{at} cannot be fetched: {type(error).__name__}: {why}",
                exit=Exit.STAGE_FAILED,
                hint=hint,
            ) from None


class _Fetch:
    """Fetches one commit into <commit>.part, to which a later try adds, and publishes it as
    <commit>; into that itself, where files of it were lost."""

    def __init__(self, spec: WeightsSpec, hub: _Hub, progress: ProgressCallback) -> None:
        self.hub = hub
        self.progress = progress
        self.model = spec.model
        self.source = HubModel(spec.name, spec.revision)
        self.root = spec.root

    def run(self) -> tuple[str, dict[str, int]]:
        """The commit, and its files with their sizes."""
        listing = self.listing = self.hub.listing()
        folder = self.source.folder(self.root)
        target = folder / listing.commit
        part = folder / f"{listing.commit}.part"
        if target.is_dir():
            self.folder = target
        else:
            self.folder = part
        self.folder.mkdir(parents=True, exist_ok=True)
        self._forget_halves()
        sizes = {name: self._verified(name) for name in self._get_all()}
        self._forget_halves()
        if self.folder == part:
            publish_folder(part, target)
        return listing.commit, sizes

    def _forget_halves(self) -> None:
        """Remove the library's own folder: what a killed process left in it is of no use to the
        next."""
        shutil.rmtree(self.folder / ".cache", ignore_errors=True)

    def _get_all(self) -> list[str]:
        """All files; a model that does not fit the job is refused before its weights are
        fetched."""
        names = set(self.listing.sizes)
        if CONFIG not in names:
            raise TrainkitError(
                f"hf:{self.source.name} has no {CONFIG}: it is not a model that transformers wrote",
                exit=Exit.STAGE_FAILED,
            )
        self._get(CONFIG)
        raise_problems(config_problems(self.folder / CONFIG, self.model, self.model.vocab_size))
        if INDEX in names:
            self._get(INDEX)
        try:
            weights = safetensors_files(
                names, json.loads((self.folder / INDEX).read_bytes()) if INDEX in names else None
            )
        except (ValueError, RecursionError) as error:
            raise TrainkitError(
                f"hf:{self.source.name}: {INDEX}: {error}", exit=Exit.STAGE_FAILED
            ) from None
        if not weights:
            problem = no_safetensors(names, None)
            raise TrainkitError(
                f"hf:{self.source.name} {problem.message}",
                exit=Exit.STAGE_FAILED,
                hint=problem.hint,
            )
        if lost := sorted(set(weights) - names):
            raise TrainkitError(
                f"hf:{self.source.name}: {INDEX} names files that are not there:"
                f" {', '.join(lost[:5])}",
                exit=Exit.STAGE_FAILED,
            )
        rest = [*sorted(names & set(KEPT)), *weights]
        with self._reporting(rest):
            for name in rest:
                self._get(name)
        return [CONFIG, *([INDEX] if INDEX in names else []), *rest]

    def _get(self, name: str) -> None:
        path = self.folder / name
        size = self.listing.sizes[name]
        if not path.is_file() or (size is not None and path.stat().st_size != size):
            path.unlink(missing_ok=True)
            self.hub.get(name, self.listing.commit, self.folder)

    @contextlib.contextmanager
    def _reporting(self, names: list[str]) -> Iterator[None]:
        """Tell how many bytes have come, whatever the library writes them into."""
        total = sum(self.listing.sizes[name] or 0 for name in names)
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(PROGRESS_SECONDS):
                self.progress(min(_bytes_below(self.folder), total), total)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()

    def _verified(self, name: str) -> int:
        """A file's size; the file is durable and what the hub says it is, or gone and
        TrainkitError raised."""
        path = self.folder / name
        expected = self.listing.sha256.get(name)
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            size = os.fstat(file.fileno()).st_size
            right = self.listing.sizes[name] in (None, size) and (
                expected is None or hashlib.file_digest(file, "sha256").hexdigest() == expected
            )
        if not right:
            path.unlink()
            raise TrainkitError(
                f"{name} of hf:{self.source.name} is not what the hub says it is",
                exit=Exit.STAGE_FAILED,
                hint="fetch it again",
            )
        return size


def _bytes_below(folder: Path) -> int:
    found = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # it was just renamed
            found += path.stat().st_size if path.is_file() else 0
    return found


def work(value: Mapping[str, Any], progress: ProgressCallback) -> dict[str, object]:
    """Fetch a model and record which commit its revision is. Returns {"commit"}."""
    spec = WeightsSpec.from_json(value)
    token = os.environ.get(TOKEN) if spec.token else None
    fetch = _Fetch(spec, _Hub(spec, token), progress)
    commit, sizes = fetch.run()
    source = fetch.source
    record = document(
        SCHEMA,
        name=source.name,
        revision=source.revision,
        endpoint=spec.endpoint,
        commit=commit,
        files=sizes,
        fetched=utc_now(),
    )
    write_json(source.record(fetch.root), record)
    raise_problems(
        check_weights(source.folder(fetch.root) / commit, fetch.model, fetch.model.vocab_size)
    )
    return {"commit": commit}


if __name__ == "__main__":
    run_unit(work)
