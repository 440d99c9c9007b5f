"""The tasks that prepare: build, which ends with a table of what is compiled, and prep-data."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.markup import escape

from trainkit.base.documents import document
from trainkit.base.errors import TrainkitError
from trainkit.base.extras import MissingExtra
from trainkit.base.install import extension_path
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.cli.config.funnel import funnel_page
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.run.progress import TerminalStageReporter, dataset_table
from trainkit.cli.tables import Listing, Page
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.data.curate.funnel import CURATION, read_curation
from trainkit.data.fetch.retry import Unreachable
from trainkit.data.indexed.manifest import COUNTS, REASONS
from trainkit.data.indexed.paths import MANIFEST, read_manifest
from trainkit.data.sources import DownloadNotice
from trainkit.experiment.prepare import PrepareOptions, choose_target, prepare_target
from trainkit.jobs.load import find_root
from trainkit.jobs.schema import Job
from trainkit.launch.preparation import StageUi
from trainkit.launch.scheduler_registry import preparation_for
from trainkit.ops.build import LIBRARY_FILE, find_cuda, origin_of
from trainkit.stages.build import CHECKOUT, INDEX, KERNELS, BuildStage
from trainkit.stages.contract import Need
from trainkit.stages.execute import stamps_folder
from trainkit.stages.prep_data import PrepDataStage
from trainkit.stages.registry import STAGES
from trainkit.stages.stamps import Freshness


@dataclass(frozen=True)
class BuiltPiece:
    """A row.

    Args:
        piece: "helper" (the extension), "kernels" or "CUDA".
        state: compiled (just now), fresh, or what is missing.
        versions: of what it was made with, or of what makes it.
        where: the file, or the GPUs.
        seconds: that compiling took.
    """

    piece: str
    state: str
    versions: str
    where: str
    seconds: float = 0.0


def build_report(took: Mapping[str, float]) -> list[BuiltPiece]:
    """A row for the extension, the kernels, and CUDA.

    Args:
        took: seconds of what was compiled just now, by its name.
    """

    def compiled(piece: str, name: str, versions: str, where: str) -> BuiltPiece:
        state = "compiled" if name in took else "fresh"
        return BuiltPiece(piece, state, versions, where, round(took.get(name, 0.0), 1))

    pybind = f"pybind11 {version('pybind11')}"
    rows = [compiled("helper", INDEX, pybind, str(extension_path(CHECKOUT)))]
    if made := origin_of(LIBRARY_FILE):
        versions = f"torch {made.torch}, {made.compiler}"
        rows.append(compiled("kernels", KERNELS, versions, str(LIBRARY_FILE)))
    cuda = find_cuda()
    rows.append(BuiltPiece("CUDA", cuda.state, cuda.versions, cuda.where))
    return rows


def build_table(rows: Sequence[BuiltPiece]) -> Listing:
    """The rows of `build_report` for people."""
    return Listing(
        "piece",
        "state",
        "versions",
        "where",
        "seconds",
        right=("seconds",),
        drop=("where",),
        rows=(
            (
                *map(escape, (row.piece, row.state, row.versions, row.where)),
                f"{row.seconds:.1f}" if row.seconds else "",
            )
            for row in rows
        ),
    )


def say_unused_stages(task: TaskContext, job: Job) -> None:
    """Say which of clusters.X.stages nothing reads: a name that is misspelt, or of a stage that
    this version has not."""
    names = [stage.name for stage in STAGES]
    for unused in sorted(set(job.cluster.stages) - set(names)):
        task.say(
            f"note: clusters.{job.cluster.name}.stages.{unused} is the place of no stage of this"
            f" version; stages are {', '.join(names)}"
        )


def ask_to_fetch(task: TaskContext, large: DownloadNotice) -> None:
    """Say what is to be fetched and have the person agree. Raises ConfigError (exit 6) where
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


def stage_ui(task: TaskContext, bars: TerminalStageReporter | None = None) -> StageUi:
    """How the person at this terminal follows stages."""
    bars = bars or TerminalStageReporter(task.console)
    return StageUi(bars, task.say, lambda large: ask_to_fetch(task, large))


def bring_up_to_date(
    task: TaskContext,
    needs: Iterable[Need],
    root: Path,
    bars: TerminalStageReporter | None = None,
    *,
    force: bool = False,
) -> list[Freshness]:
    """Make every need fresh on this machine, or under a dry run print what would be run.

    Args:
        task: how the task speaks.
        needs: what is needed, in order.
        root: the folder that holds data/ and stamps/.
        bars: how the person follows it.
        force: make what is fresh, too.
    """
    preparation = preparation_for(None, root, stage_ui(task, bars), force=force)
    return preparation.show(needs) if task.dry_run else preparation.make(needs)


def _result(
    task: TaskContext,
    verdicts: Sequence[Freshness],
    page: Page = (),
    **made: Sequence[dict[str, Any]],
) -> TaskResult:
    return TaskResult(
        document(
            "stages/1",
            dry_run=task.dry_run,
            stages=[vars(v) for v in verdicts],
            **{"datasets": [], **made},
        ),
        page=page,
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
    bars = TerminalStageReporter(task.console)
    verdicts = bring_up_to_date(task, needs, root, bars, force=force)
    pieces = [] if task.dry_run else build_report(bars.took)
    page = [build_table(pieces)] if pieces else []
    return _result(task, verdicts, page, pieces=[vars(piece) for piece in pieces])


def prep_data(task: TaskContext, options: PrepareOptions) -> TaskResult:
    """The task `prep-data`: data and beginning weights of a job, or one dataset below the root
    of that job or cluster, or of this checkout."""
    jobs = load_jobs(task)
    bars = TerminalStageReporter(task.console)
    ui = stage_ui(task, bars)
    target = choose_target(jobs, options, ui)
    try:
        prepared = prepare_target(jobs, target, options, ui)
    except (Unreachable, MissingExtra) as error:
        if not task.dry_run:
            raise
        return _not_listed(task, target.dataset, error)
    if task.dry_run:
        return _result(task, prepared.verdicts)
    made = [path for need in prepared.datasets for path in need.outputs]
    rows = [
        _row(need, bars)
        for need in prepared.datasets
        if any(path.name == MANIFEST for path in need.outputs)
    ]
    curated = [read_curation(path.parent) for path in made if path.name == CURATION]
    return _result(task, prepared.verdicts, _datasets_page(rows, curated), datasets=rows)


def _datasets_page(rows: Sequence[Mapping[str, Any]], curated: Sequence[Mapping[str, Any]]) -> Page:
    for curation in curated:
        yield from funnel_page(curation)
    if rows:
        yield dataset_table(rows)
    for row in rows:
        for used in row["encoders"]:
            yield f"{row['name']}: encoded by {used['encoder']}, because {used['because']}"


def _not_listed(task: TaskContext, name: str, error: TrainkitError) -> TaskResult:
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
    return _result(task, [verdict])


def _row(need: Need, bars: TerminalStageReporter) -> dict[str, Any]:
    """What a dataset holds by its dataset.json and, if it was made just now, in what time."""
    manifest = read_manifest(next(path for path in need.outputs if path.name == MANIFEST))
    row = {key: manifest[key] for key in ("name", *COUNTS, *REASONS) if key in manifest}
    if "curation" in manifest:  # bad lines were met there
        row |= {key: manifest["curation"][key] for key in ("rejects", *REASONS)}
    row["encoders"] = manifest.get("encoders", [])
    if need.name in bars.took:
        seconds = bars.took[need.name]
        size = bars.wrote[need.name]["text_bytes"]
        row |= {
            "seconds": round(seconds, 3),
            "mb_per_second": round(size / 1e6 / max(seconds, 1e-3), 3),
        }
    return row
