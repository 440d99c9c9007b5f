"""From a folder with a jobs.toml to its jobs: listed, checked, resolved."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from trainkit.base.errors import ConfigError, Problem
from trainkit.base.lazy_dataclasses import dataclass, replace
from trainkit.jobs.assemble import TableBuilder, in_order, validate
from trainkit.jobs.layers import JOBS_FILE, ProblemList, compose, parse_overrides, read
from trainkit.jobs.messages import suggest
from trainkit.jobs.provenance import SourcedTable
from trainkit.jobs.resolved import ResolvedJob, provenance_of
from trainkit.jobs.schema import TABLES, Cluster, Dataset, EngineSource, Job, Table
from trainkit.jobs.sweeps import Sweep, each_value_once, overrides_of

T = TypeVar("T", bound=Table)


@dataclass(frozen=True)
class JobSummary:
    """One line of the jobs listing, as written; what is not given is empty."""

    name: str
    engine: str
    cluster: str
    model: str
    dataset: str
    nodes: int | str
    description: str


class Jobs:
    """The experiments of one jobs.toml. Made by `load`."""

    def __init__(self, root: Path, builder: TableBuilder) -> None:
        self.root = root
        self._builder = builder

    def names(self, kind: str = "jobs") -> list[str]:
        """The jobs, or tables of another kind, as ordered in the file."""
        return list(self._builder.tables(kind))

    @property
    def default_job(self) -> str | None:
        """The job that tasks without one serve: [defaults] job."""
        defaults = dict(self._builder.document.sections()).get("defaults")
        name = defaults.value("job") if defaults else None
        return name if isinstance(name, str) else None

    def roots(self) -> list[Path]:
        """Folders that runs may lie in: that of jobs.toml first, then every cluster's root."""
        clusters = [
            self._builder.build("clusters", name, (), ProblemList())
            for name in self._builder.tables("clusters")
        ]
        given = [
            Path(root)
            for root in (cluster.value("root") for cluster in clusters)
            if isinstance(root, str)
        ]
        return list(dict.fromkeys([self.root, *given]))

    def describe(self) -> list[JobSummary]:
        """The listing. Answers for broken jobs too; `check` says what is wrong with them."""
        tables = self._builder.tables("jobs")
        return [_row(name, compose(tables, name, ProblemList(), ())) for name in tables]

    def check(self) -> list[Problem]:
        """Everything that is wrong in any table of any kind, by file and line. A table that
        others extend may be incomplete."""
        problems = self._builder.outline_problems() + self._builder.stray_problems()
        for kind, model in TABLES.items():
            extended = self._builder.extended(kind)
            for name in self._builder.tables(kind):
                findings = ProblemList(partial={()} if name in extended else set())
                table = validate(model, self._builder.build(kind, name, (), findings), findings)
                problems += findings.problems
                if isinstance(table, Job) and table.sweep is not None:
                    problems += self._sweep_problems(name, table.sweep)
        return in_order(problems)

    def _sweep_problems(self, name: str, sweep: Sweep) -> list[Problem]:
        """What is wrong with the runs of a job's sweep, and not with the job."""
        found: dict[str, Problem] = {}
        for point in each_value_once(sweep.points()):
            try:
                self.resolve(name, overrides_of(point))
            except ConfigError as error:
                words = f"jobs.{name}.sweep with {', '.join(overrides_of(point))}"
                for each in error.list:
                    said = replace(each, message=f"{words}: {each.message}")
                    found.setdefault(each.message, said)
        return list(found.values())

    def dataset(self, name: str) -> Dataset:
        """A dataset with its tokenizer, apart from any job. Raises ConfigError with everything
        that is wrong with it."""
        return self._apart("datasets", Dataset, name)

    def cluster(self, name: str) -> Cluster:
        """A cluster apart from any job. Raises ConfigError with everything that is wrong with
        it."""
        return self._apart("clusters", Cluster, name)

    def engine(self, name: str) -> EngineSource | None:
        """Where an engine comes from; None where no [engines.X] table says it. Raises
        ConfigError with everything that is wrong with the table."""
        if name in self._builder.tables("engines"):
            return self._apart("engines", EngineSource, name)
        return None

    def _apart(self, kind: str, model: type[T], name: str) -> T:
        known = self._builder.tables(kind)
        if name not in known:
            raise ConfigError(
                f"{JOBS_FILE} in {self.root} has no {kind[:-1]} '{name}'", hint=suggest(name, known)
            )
        findings = ProblemList(self._builder.outline_problems())
        table = validate(model, self._builder.build(kind, name, (), findings), findings)
        if findings.problems or table is None:
            raise ConfigError(in_order(findings.problems))
        return table

    def resolve(self, name: str, sets: Sequence[str] = ()) -> ResolvedJob:
        """The job `name` with every value and its origin.

        Args:
            name: a [jobs.X] table.
            sets: overrides, "training.lr=1e-4"; the highest layer.

        Raises ConfigError with everything that is wrong with that job or with the top level of
        the file.
        """
        if name not in self.names():
            raise ConfigError(
                f"{JOBS_FILE} in {self.root} has no job '{name}'", hint=suggest(name, self.names())
            )
        overrides = [(origin.path, origin) for origin in parse_overrides(sets)]
        findings = ProblemList(self._builder.outline_problems())
        section = self._builder.build("jobs", name, overrides, findings)
        job = validate(Job, section, findings)
        if findings.problems or job is None:
            raise ConfigError(in_order(findings.problems))
        return ResolvedJob(job, dict(provenance_of(job, section)))


def _row(name: str, job: SourcedTable) -> JobSummary:
    def given(key: str) -> str:
        value = job.value(key)
        return "" if value is None else str(value)

    nodes = job.value("nodes")
    return JobSummary(
        name=name,
        engine=given("engine") or Job.model_fields["engine"].default,
        cluster=given("cluster"),
        model=given("model"),
        dataset=given("dataset"),
        nodes=(
            nodes if isinstance(nodes, int) else given("nodes") or Job.model_fields["nodes"].default
        ),
        description=given("description"),
    )


def find_root(start: Path) -> Path:
    """The nearest folder with a jobs.toml, from `start` upward. Raises ConfigError."""
    start = start.absolute()
    for folder in (start, *start.parents):
        if (folder / JOBS_FILE).is_file():
            return folder
    raise ConfigError(
        f"no {JOBS_FILE} in {start} or any folder above it",
        hint="cd to a folder with a jobs.toml, or write a first one there: trainkit init",
    )


def load(root: Path, environ: Mapping[str, str] = os.environ) -> Jobs:
    """Read jobs.toml and jobs.local.toml of a folder.

    Args:
        root: the folder.
        environ: where ${host:VAR} is looked up.

    Raises ConfigError where a file cannot be read or is not TOML.
    """
    root = root.absolute()
    return Jobs(root, TableBuilder(root, read(root), environ))
