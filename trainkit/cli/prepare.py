"""The tasks that prepare: build, prep-data; and the same on behalf of train."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from trainkit.base.errors import ConfigError
from trainkit.base.forms import document
from trainkit.cli.jobs import load_jobs
from trainkit.cli.progress import StageReporter
from trainkit.cli.wrapper import Answer, Talk
from trainkit.jobs.load import Jobs, find_root
from trainkit.jobs.schema import Job
from trainkit.stages.build import Build
from trainkit.stages.contract import Need, Stage
from trainkit.stages.here import execute_here
from trainkit.stages.prep_data import PrepData
from trainkit.stages.run import make_fresh, missing_units, stamps_folder
from trainkit.stages.stamps import Verdict, judge

STAGES: tuple[Stage, ...] = (Build(), PrepData())


def bring_up_to_date(talk: Talk, needs: Sequence[Need], root: Path, *, force: bool = False) -> list[Verdict]:
    """Make every need fresh, or under a dry run print what would be run."""
    reporter = StageReporter(talk.console)
    if not talk.dry_run:
        return [make_fresh(need, root, execute_here, reporter, force=force) for need in needs]
    verdicts = []
    for need in needs:
        stamps = stamps_folder(root, need.stage)
        verdicts.append(judge(need, stamps, force=force))
        reporter.verdict(verdicts[-1])
        for unit in [] if verdicts[-1].fresh else missing_units(need, stamps, force=force):
            talk.say(f"  would run {shlex.join(unit.argv)} {unit.name}.spec.json")
    return verdicts


def _answer(talk: Talk, verdicts: Sequence[Verdict]) -> Answer:
    return Answer(document("stages/1", dry_run=talk.dry_run, stages=[vars(v) for v in verdicts]))


def build(talk: Talk, *, force: bool) -> Answer:
    """The task `build`."""
    root = find_root(talk.folder)
    need = Build().need(None, stamps_folder(root, "build"))
    return _answer(talk, bring_up_to_date(talk, [need] if need else [], root, force=force))


def _job_of(talk: Talk, jobs: Jobs, dataset: str, job: str) -> Job:
    name = job or jobs.default_job
    if name is None:
        raise ConfigError("neither --job nor [defaults] job says what to prepare for", hint=f"jobs: {', '.join(jobs.names())}")
    if not job:
        talk.say(f"for the job {name}, named in [defaults]" if not dataset else f"for the dataset {dataset}")
    return jobs.resolve(name, [f"dataset={dataset}"] if dataset else []).job


def prep_data(talk: Talk, dataset: str, job: str, *, force: bool) -> Answer:
    """The task `prep-data`: the data of a job or of one dataset, and nothing else forced."""
    resolved = _job_of(talk, load_jobs(talk), dataset, job)
    root = Path(resolved.cluster.root or ".")
    verdicts = []
    for stage in STAGES:
        need = stage.need(resolved, stamps_folder(root, stage.name))
        if need is not None:
            verdicts += bring_up_to_date(talk, [need], root, force=force and need.stage == "prep-data")
    if resolved.dataset.source == "mock":
        talk.say("mock data needs no preparation")
    return _answer(talk, verdicts)
