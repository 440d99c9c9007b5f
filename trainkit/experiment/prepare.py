"""Data, index and beginning weights: of a job, or of one dataset."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

from trainkit.base.errors import ConfigError
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.data.fetch.retry import DEFAULT_RETRY
from trainkit.data.sources.announce import LARGE_DOWNLOAD
from trainkit.jobs.load import Jobs
from trainkit.jobs.schema import Job
from trainkit.launch.preparation import Preparation, StageUi
from trainkit.launch.scheduler_registry import preparation_for
from trainkit.stages.build import INDEX, BuildStage
from trainkit.stages.contract import Need
from trainkit.stages.execute import needs_in_turn, needs_of, stamps_folder
from trainkit.stages.prep_data import PrepDataStage, needs_of_dataset
from trainkit.stages.registry import AFTER_DATA, ONCE
from trainkit.stages.stamps import Freshness


@dataclass(frozen=True)
class PrepareOptions:
    """What is prepared, and how.

    Args:
        dataset: a dataset of jobs.toml; "": what the job needs.
        job: on whose behalf.
        cluster: with a dataset: below the root of this cluster.
        workers: processes that compute at once; None: one a core.
        force: make what is fresh, too.
        dry_run: only say what would be made.
    """

    dataset: str = ""
    job: str = ""
    cluster: str = ""
    workers: int | None = None
    force: bool = False
    dry_run: bool = False


@dataclass(frozen=True)
class Target:
    """What is to be prepared, and where.

    Args:
        root: the folder that gets data/ and stamps/.
        job: the whole job is prepared; None: a dataset only.
        dataset: the name of the dataset.
        on_behalf: the job whose cluster has hosts for the units; None: this machine has.
    """

    root: Path
    job: Job | None
    dataset: str
    on_behalf: Job | None


def choose_target(jobs: Jobs, options: PrepareOptions, ui: StageUi) -> Target:
    """What the options ask for. What they leave open is decided and said.

    Args:
        jobs: those of a jobs.toml.
        options: what is asked for.
        ui: how the person follows.

    Raises ConfigError (exit 3) where they contradict each other or say too little.
    """
    if options.cluster and (options.job or not options.dataset):
        raise ConfigError(
            "--cluster says where --dataset is prepared; a job has a cluster of its own",
            hint="--dataset NAME --cluster NAME, or --job NAME",
        )
    name = options.job or jobs.default_job
    if options.dataset and not options.job:
        root = dataset_root(jobs, options.dataset, options.cluster, ui)
        return Target(root, None, options.dataset, None)
    if name is None:
        raise ConfigError(
            "neither --job nor --dataset nor [defaults] job says what to prepare",
            hint=f"jobs: {', '.join(jobs.names())}",
        )
    if not options.job:
        ui.say(f"for the job {name}, named in [defaults]")
    job = jobs.resolve(name).job
    root = job.cluster.root_folder
    if options.dataset:
        return Target(root, None, options.dataset, job)
    return Target(root, job, job.dataset.name, job)


def dataset_root(jobs: Jobs, dataset: str, cluster: str, ui: StageUi) -> Path:
    """Where a dataset goes that is prepared for no job: below the root of `cluster`, by default
    below the folder of jobs.toml.

    Args:
        jobs: those of a jobs.toml.
        dataset: its name.
        cluster: the name of a cluster; "" for none.
        ui: how the person follows.

    Raises ConfigError (exit 3) where nothing says which of several roots is meant for what is
    too large to lie in the wrong place.
    """
    if cluster:
        return Path(jobs.cluster(cluster).root or jobs.root)
    others = [str(root) for root in jobs.roots() if root.resolve() != jobs.root.resolve()]
    if not others:
        return jobs.root
    asked = jobs.dataset(dataset)
    blends = (asked.blend, asked.valid_blend, asked.test_blend)
    parts = [asked, *(part.dataset for blend in blends for part in blend.values())]
    size = sum(max(part.download_bytes or 0, part.text_bytes or 0) for part in parts)
    elsewhere = f"clusters of jobs.toml have other roots: {', '.join(others)}"
    if size > LARGE_DOWNLOAD:
        raise ConfigError(
            f"datasets.{dataset}, about {size / 1e9:,.0f} GB, would be prepared below"
            f" {jobs.root}, but {elsewhere}",
            hint="name whose root is meant: --cluster NAME, or --job NAME",
        )
    ui.say(f"below {jobs.root} ({elsewhere}: --cluster NAME)")
    return jobs.root


@dataclass(frozen=True)
class Prepared:
    """What was found of each stage, and the datasets that are there now."""

    verdicts: list[Freshness]
    datasets: Sequence[Need]


def prepare_target(jobs: Jobs, target: Target, options: PrepareOptions, ui: StageUi) -> Prepared:
    """Bring a target up to date, the compiled extension first; under a dry run say what would be
    made.

    Args:
        jobs: those of a jobs.toml.
        target: what and where, see `choose_target`.
        options: how.
        ui: how the person follows.

    Raises TrainkitError as a stage does; Unreachable where the servers of a dataset do not
    answer.
    """
    stamps = stamps_folder(target.root, PrepDataStage.name)
    patience = ONCE if options.dry_run else DEFAULT_RETRY
    needs: Iterable[Need]
    if target.job is None:
        dataset = jobs.dataset(target.dataset)
        datasets = needs_of_dataset(
            dataset, target.root, stamps, force=options.force, patience=patience
        )
        needs = datasets
    else:
        datasets = PrepDataStage(patience).needs(target.job, stamps, force=options.force)
        # before the first begins: what is hopeless is said at once
        later: Iterable[Need] = needs_of(target.job, AFTER_DATA)
        if not options.dry_run:
            later = needs_in_turn(target.job, AFTER_DATA)
        needs = itertools.chain(datasets, later)
    if not datasets:
        ui.say("mock data needs no preparation")
    here = preparation_for(None, target.root, ui)
    built = BuildStage().needs(None, stamps_folder(target.root, BuildStage.name))
    # data are made without the kernels, which take minutes to compile
    verdicts = _bring(here, [need for need in built if need.name == INDEX], options.dry_run)
    preparation = preparation_for(
        target.on_behalf, target.root, ui, workers=options.workers, force=options.force
    )
    verdicts += _bring(preparation, needs, options.dry_run)
    return Prepared(verdicts, datasets)


def _bring(preparation: Preparation, needs: Iterable[Need], dry_run: bool) -> list[Freshness]:
    return preparation.show(needs) if dry_run else preparation.make(needs)
