"""What another engine's configuration becomes: tables of jobs.toml, and a list of what could not be
taken."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainkit.base.errors import ConfigError
from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.base.toml_text import toml_table
from trainkit.jobs.training import ramp_problem


def job_name(text: str) -> str:
    """A name that a job can have."""
    return re.sub(r"[^a-z0-9_-]+", "-", text.lower()).strip("-_") or "imported"


def refuse_ramp(key: str, ramp: object, batch: object) -> None:
    """Raise ConfigError where a batch does not grow to the global one.

    Args:
        key: the engine's own for it.
        ramp: start, increment and samples.
        batch: the global one, where it is known.
    """
    if not (isinstance(ramp, list) and len(ramp) == 3 and all(type(n) is int for n in ramp)):
        raise ConfigError(f"{key} {ramp!r}: start, increment and samples are needed here")
    if isinstance(batch, int) and (problem := ramp_problem((ramp[0], ramp[1], ramp[2]), batch)):
        raise ConfigError(f"{key} {ramp!r}: {problem}", hint="the engine would refuse it too")


def ask_engine(
    argv: Sequence[str], paths: Sequence[str], folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """What a program of the engine's own Python says of its files.

    Args:
        argv: the interpreter first.
        paths: where it finds modules, before those of PYTHONPATH.
        folder: in which it runs; None: here.

    Raises ConfigError: it cannot be started.
    """
    known = [*paths, *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        return subprocess.run(
            argv,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(known)},
            cwd=folder,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except OSError as error:
        raise ConfigError(f"{argv[0]} cannot be started: {error.strerror}") from None


def refused_by_engine(message: str, said: str, engine: str) -> ConfigError:
    """What to raise where it does not take the files.

    Args:
        message: for people.
        said: what it printed.
        engine: as messages name it.
    """
    hint = ""
    if "ModuleNotFoundError" in said or "ImportError" in said:
        hint = f"python=... names the interpreter that has what {engine} asks for"
    return ConfigError(message, hint=hint)


@dataclass(frozen=True)
class ImportRequest:
    """Files of another engine that are to become a job.

    Args:
        paths: of them.
        words: KEY=VALUE, words of a launcher's command line or variables of a script's caller.
        name: of the job; "": the files' own.
        version: whose options; "": as the files look, or the newest known.
    """

    paths: tuple[Path, ...]
    words: tuple[str, ...] = ()
    name: str = ""
    version: str = ""

    @property
    def job_name(self) -> str:
        """That of the job, by default as the first file is called."""
        return self.name or job_name(self.paths[0].stem)

    def only_file(self, what: str) -> Path:
        """The one file that there is. Raises ConfigError where there are several."""
        if len(self.paths) > 1:
            raise ConfigError(f"{what} has one file", hint="several files are GPT-NeoX's YAML")
        return self.paths[0]

    def refuse_words(self, what: str) -> None:
        """Raise ConfigError where there are words, for files that take none."""
        if self.words:
            raise ConfigError(
                f"'{self.words[0]}': {what} takes no KEY=VALUE", hint="change the file"
            )


@dataclass(frozen=True)
class ImportedJob:
    """A job as it was read from an engine's own files.

    Args:
        name: of the job, its model and its dataset.
        engine: its name in jobs.toml.
        model: keys of [models.X].
        job: keys of [jobs.X] itself.
        parallelism: keys of [jobs.X.parallelism].
        training: keys of [jobs.X.training].
        engine_args: options of the engine that have no key of their own.
        dataset: keys of [datasets.X].
        tokenizer: keys of [tokenizers.X].
        not_taken: what has no place in jobs.toml, a line each with the reason.
    """

    name: str
    engine: str
    model: Mapping[str, object]
    job: Mapping[str, object] = field(default_factory=dict)
    parallelism: Mapping[str, object] = field(default_factory=dict)
    training: Mapping[str, object] = field(default_factory=dict)
    engine_args: Mapping[str, object] = field(default_factory=dict)
    dataset: Mapping[str, object] = field(default_factory=dict)
    tokenizer: Mapping[str, object] = field(default_factory=dict)
    not_taken: tuple[str, ...] = ()

    def to_toml(self, cluster: str = "") -> str:
        """The tables, for jobs.toml or a file that it includes. `cluster`: of the job."""
        own: dict[str, object] = {"engine": self.engine, "model": self.name}
        if cluster:
            own["cluster"] = cluster
        dataset = dict(self.dataset)
        if self.tokenizer:
            dataset["tokenizer"] = self.name
        if dataset:
            own["dataset"] = self.name
        tables: list[tuple[tuple[str, ...], Mapping[str, object]]] = [
            (("tokenizers", self.name), self.tokenizer),
            (("datasets", self.name), dataset),
            (("models", self.name), self.model),
            (("jobs", self.name), {**own, **self.job}),
            (("jobs", self.name, "parallelism"), self.parallelism),
            (("jobs", self.name, "engine_args"), self.engine_args),
            (("jobs", self.name, "training"), self.training),
        ]
        lines = [f"# not taken: {each}" for each in self.not_taken]
        for path, values in tables:
            if values:
                lines += ["", *toml_table(path, values)]
        return "\n".join(lines).lstrip("\n") + "\n"
