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
from trainkit.jobs.load import find_root
from trainkit.stages.build import Build
from trainkit.stages.contract import Need, Stage
from trainkit.stages.here import execute_here
from trainkit.stages.prep_data import PrepData, need_of_dataset
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
    if need is None:
        talk.say("trainkit is installed, not a checkout: its extension is there and works, nothing is to be built")
    return _answer(talk, bring_up_to_date(talk, [need] if need else [], root, force=force))


def prep_data(talk: Talk, dataset: str, job: str, *, force: bool) -> Answer:
    """The task `prep-data`: the data of a job, or of one dataset below the root of that job (without a job, of this checkout)."""
    jobs = load_jobs(talk)
    name = job or jobs.default_job
    if name is None and not dataset:
        raise ConfigError("neither --job nor --dataset nor [defaults] job says what to prepare", hint=f"jobs: {', '.join(jobs.names())}")
    if not job and not dataset:
        talk.say(f"for the job {name}, named in [defaults]")
    resolved = jobs.resolve(name).job if name and (job or not dataset) else None
    wanted = jobs.dataset(dataset) if dataset else resolved.dataset if resolved else None
    assert wanted is not None
    root = Path(resolved.cluster.root or ".") if resolved else jobs.root
    needs = [Build().need(None, stamps_folder(root, Build.name)), need_of_dataset(wanted, root, stamps_folder(root, PrepData.name))]
    if needs[1] is None:
        talk.say("mock data needs no preparation")
    verdicts = []
    for need in needs:
        if need is not None:
            verdicts += bring_up_to_date(talk, [need], root, force=force and need.stage == PrepData.name)
    return _answer(talk, verdicts)
