"""The tasks that prepare: build, prep-data; and the same on behalf of train."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError, Exit
from trainkit.base.extras import MissingExtra
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.run.progress import TerminalStageReporter, dataset_table
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.data.fetch.retry import DEFAULT_RETRY, FetchRetryPolicy, Unreachable
from trainkit.data.indexed.manifest import COUNTS, REASONS, read_manifest
from trainkit.data.indexed.paths import MANIFEST
from trainkit.data.sources import DownloadNotice
from trainkit.data.sources.announce import LARGE_DOWNLOAD
from trainkit.jobs.load import Jobs, find_root
from trainkit.jobs.schema import Job
from trainkit.launch.remote_units import execute_on_hosts, stage_hosts
from trainkit.launch.slurm.arrays import dry_lines, execute_in_slurm, slurm_place_of
from trainkit.launch.slurm.shared_arrays import Asking
from trainkit.stages.build import BuildStage
from trainkit.stages.contract import Need, Stage
from trainkit.stages.execute import (
    missing_units,
    needs_in_turn,
    needs_of,
    stamps_folder,
    update_stage,
)
from trainkit.stages.index import IndexStage
from trainkit.stages.local import execute_locally
from trainkit.stages.prep_data import PrepDataStage, needs_of_dataset
from trainkit.stages.stamps import Freshness, check_freshness, unit_folder
from trainkit.stages.weights import WeightsStage

LATER: tuple[Stage, ...] = (IndexStage(), WeightsStage())  # than the data
HASTY = FetchRetryPolicy(attempts=1, timeout=10.0)  # with servers, under a dry run
STAGES: tuple[Stage, ...] = (BuildStage(), PrepDataStage(), *LATER)


def say_unused_places(task: TaskContext, job: Job) -> None:
    """Say which of clusters.X.stages nobody reads: a name that is misspelt, or of a stage that
    this version has not."""
    names = [stage.name for stage in STAGES]
    for unused in sorted(set(job.cluster.stages) - set(names)):
        task.say(
            f"note: clusters.{job.cluster.name}.stages.{unused} is the place of no stage of this"
            f" version; stages are {', '.join(names)}"
        )


@contextlib.contextmanager
def term_interrupts() -> Iterator[None]:
    """SIGTERM and SIGHUP (a terminal that is closed) end the block as Ctrl-C does: workers are
    stopped, what is half done is undone, finished units stay."""
    # nohup ignores
    heeded = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    former = {number: signal.signal(number, signal.default_int_handler) for number in heeded}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def agree(task: TaskContext, large: DownloadNotice) -> None:
    """Say what is to be fetched and have somebody agree. Raises ConfigError (exit 6) where
    nobody does, or there is no room."""
    task.say(str(large))
    large.check_space()
    if large.accepted:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()) or task.json:
        raise large.refusal()
    sys.stderr.write("fetch it? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise large.refusal()


def _executor(job: Job | None, stage: str, notice: Callable[[str], None]) -> Callable[..., None]:
    """What runs the units of a stage: this machine, the hosts of a hostfile, or Slurm, as the
    job's cluster says."""
    if job is not None and (arrays := slurm_place_of(job, stage, notice)) is not None:
        return functools.partial(execute_in_slurm, arrays)
    if job is not None:
        place = stage_hosts(job, stage, notice)
    else:
        place = None
    if place is None:
        return execute_locally
    return functools.partial(execute_on_hosts, place)


def _lacks_ftfy(need: Need) -> bool:
    """Whether a unit of this would fail for a package that `./inv` can install: asked here,
    before there are workers."""
    return (
        any(key.endswith(".fix_text") and value for key, value in need.settings.items())
        and importlib.util.find_spec("ftfy") is None
    )


def bring_up_to_date(
    task: TaskContext,
    needs: Iterable[Need],
    root: Path,
    *,
    job: Job | None = None,
    force: bool = False,
    workers: int | None = None,
    reporter: TerminalStageReporter | None = None,
) -> list[Freshness]:
    """Make every need fresh, or under a dry run print what would be run.

    Args:
        job: on whose behalf; its cluster may have other hosts for the units of a stage. workers:
        units at once; by default one a core here, and clusters.X.stages.STAGE.tasks_per_node on
        other hosts.
    """
    reporter = reporter or TerminalStageReporter(task.console)
    if not task.dry_run:
        verdicts = []
        asking = Asking(task.say)
        with term_interrupts():
            for need in needs:
                if (
                    need.announcement is not None
                    and not check_freshness(
                        need, stamps_folder(root, need.stage), force=force
                    ).fresh
                ):
                    agree(task, need.announcement)
                executor = _executor(job, need.stage, task.say)
                if (
                    executor is execute_locally
                    and _lacks_ftfy(need)
                    and not check_freshness(
                        need, stamps_folder(root, need.stage), force=force
                    ).fresh
                ):
                    raise MissingExtra(
                        "fix_text = true needs ftfy, which is not installed",
                        "data",
                        exit=Exit.STAGE_FAILED,
                    )
                execute = functools.partial(executor, workers=workers, counted=reporter.counted)
                verdicts.append(
                    update_stage(need, root, execute, reporter, force=force, going=asking)
                )
        return verdicts
    verdicts = []
    for need in needs:
        stamps = stamps_folder(root, need.stage)
        verdicts.append(check_freshness(need, stamps, force=force))
        reporter.verdict(verdicts[-1])
        if (
            job
            and not verdicts[-1].fresh
            and (arrays := slurm_place_of(job, need.stage, task.say)) is not None
        ):
            for line in dry_lines(
                arrays,
                need,
                missing_units(need, stamps, force=force),
                unit_folder(stamps, need.name),
            )[0]:
                task.say(f"  {line}")
            continue
        if job:
            place = stage_hosts(job, need.stage, task.say)
        else:
            place = None
        if place is None:
            where = ""
        else:
            where = f" on one of {', '.join(host.name for host in place.hosts)}"
        for unit in [] if verdicts[-1].fresh else missing_units(need, stamps, force=force):
            task.say(
                f"  would run {shlex.join(unit.argv)}"
                f" {unit.name}.spec.json{'' if unit.network else where}"
            )
    return verdicts


def _answer(
    task: TaskContext, verdicts: Sequence[Freshness], datasets: Sequence[dict[str, Any]] = ()
) -> TaskResult:
    return TaskResult(
        document(
            "stages/1",
            dry_run=task.dry_run,
            stages=[vars(v) for v in verdicts],
            datasets=list(datasets),
        )
    )


def build(task: TaskContext, *, force: bool) -> TaskResult:
    """The task `build`."""
    root = find_root(task.folder)
    needs = BuildStage().needs(None, stamps_folder(root, "build"))
    if not needs:
        task.say(
            "trainkit is installed, not a checkout: its extension is there and works, nothing is to"
            " be built"
        )
    return _answer(task, bring_up_to_date(task, needs, root, force=force))


def _root_of(task: TaskContext, jobs: Jobs, dataset: str, cluster: str) -> Path:
    """Where a dataset goes that is prepared for no job: below the root of `cluster`, by default
    below this folder.

    Raises ConfigError (exit 3) where nobody has said which of several roots is meant for what is
    too large to lie in the wrong place.
    """
    if cluster:
        return Path(jobs.cluster(cluster).root or jobs.root)
    others = [str(root) for root in jobs.roots() if root.resolve() != jobs.root.resolve()]
    if others:
        asked = jobs.dataset(dataset)
        parts = [
            asked,
            *(
                part.dataset
                for blend in (asked.blend, asked.valid_blend, asked.test_blend)
                for part in blend.values()
            ),
        ]
        size = sum(max(part.download_bytes or 0, part.text_bytes or 0) for part in parts)
        words = f"clusters of jobs.toml have other roots: {', '.join(others)}"
        if size > LARGE_DOWNLOAD:
            hint = "name whose root is meant: --cluster NAME, or --job NAME"
            raise ConfigError(
                f"datasets.{dataset}, about {size / 1e9:,.0f} GB, would be prepared below"
                f" {jobs.root}, but {words}",
                hint=hint,
            )
        task.say(f"below {jobs.root} ({words}: --cluster NAME)")
    return jobs.root


def prep_data(
    task: TaskContext, dataset: str, job: str, cluster: str, workers: int, *, force: bool
) -> TaskResult:
    """The task `prep-data`: data and beginning weights of a job, or one dataset below the root
    of that job or cluster, or of this checkout."""
    jobs = load_jobs(task)
    if cluster and (job or not dataset):
        raise ConfigError(
            "--cluster says where --dataset is prepared; a job has a cluster of its own",
            hint="--dataset NAME --cluster NAME, or --job NAME",
        )
    name = job or jobs.default_job
    if name is None and not dataset:
        raise ConfigError(
            "neither --job nor --dataset nor [defaults] job says what to prepare",
            hint=f"jobs: {', '.join(jobs.names())}",
        )
    if not job and not dataset:
        task.say(f"for the job {name}, named in [defaults]")
    if name and (job or not dataset):
        resolved = jobs.resolve(name).job
    else:
        resolved = None
    if resolved:
        root = Path(resolved.cluster.root or ".")
    else:
        root = _root_of(task, jobs, dataset, cluster)
    stamps = stamps_folder(root, PrepDataStage.name)
    needs: Iterable[Need]
    if task.dry_run:
        patience = HASTY
    else:
        patience = DEFAULT_RETRY
    try:
        if dataset:
            needs = needs_of_dataset(
                jobs.dataset(dataset), root, stamps, force=force, patience=patience
            )
        else:
            assert resolved is not None
            needs = PrepDataStage(patience).needs(resolved, stamps, force=force)
            # before the first begins: what is hopeless is said at once
            later = needs_of(resolved, LATER)
    except Unreachable as error:
        if not task.dry_run:
            raise
        return _not_listed(task, dataset or resolved.dataset.name if resolved else dataset, error)
    if not needs:
        task.say("mock data needs no preparation")
    datasets = needs
    if resolved is not None and not dataset:
        needs = itertools.chain(datasets, later if task.dry_run else needs_in_turn(resolved, LATER))
    verdicts = bring_up_to_date(
        task, BuildStage().needs(None, stamps_folder(root, BuildStage.name)), root
    )
    reporter = TerminalStageReporter(task.console)
    verdicts += bring_up_to_date(
        task, needs, root, job=resolved, force=force, workers=workers or None, reporter=reporter
    )
    if task.dry_run:
        rows = []
    else:
        rows = [_row(need, reporter) for need in datasets]
    if rows and not task.json:
        task.console.print(dataset_table(rows))
        for row in rows:
            for used in row["encoders"]:
                task.say(f"{row['name']}: encoded by {used['encoder']}, because {used['because']}")
    return _answer(task, verdicts, rows)


def _not_listed(task: TaskContext, name: str, error: Unreachable) -> TaskResult:
    """What a dry run says of a dataset whose files no server names now: that this would come
    first."""
    verdict = Freshness(
        PrepDataStage.name,
        name,
        False,
        "its files were not listed yet, which its servers would be asked first; now they cannot"
        f" be: {error.message}",
    )
    TerminalStageReporter(task.console).verdict(verdict)
    return _answer(task, [verdict])


def _row(need: Need, reporter: TerminalStageReporter) -> dict[str, Any]:
    """What a dataset holds by its dataset.json and, if it was made just now, in what time."""
    manifest = read_manifest(next(path for path in need.outputs if path.name == MANIFEST))
    row = {key: manifest[key] for key in ("name", *COUNTS, *REASONS) if key in manifest}
    row["encoders"] = manifest.get("encoders", [])
    if need.name in reporter.took:
        seconds = reporter.took[need.name]
        size = reporter.wrote[need.name]["text_bytes"]
        row |= {
            "seconds": round(seconds, 3),
            "mb_per_second": round(size / 1e6 / max(seconds, 1e-3), 3),
        }
    return row
