"""The tasks that prepare: build, prep-data; and the same on behalf of train."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
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
from trainkit.stages.index import Index
from trainkit.stages.prep_data import PrepData, needs_of_dataset
from trainkit.stages.run import make_fresh, missing_units, needs_in_turn, needs_of, stamps_folder
from trainkit.stages.stamps import Verdict, judge
from trainkit.stages.weights import Weights

STAGES: tuple[Stage, ...] = (Build(), PrepData(), Index(), Weights())


def bring_up_to_date(talk: Talk, needs: Iterable[Need], root: Path, *, force: bool = False) -> list[Verdict]:
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
    needs = Build().needs(None, stamps_folder(root, "build"))
    if not needs:
        talk.say("trainkit is installed, not a checkout: its extension is there and works, nothing is to be built")
    return _answer(talk, bring_up_to_date(talk, needs, root, force=force))


def prep_data(talk: Talk, dataset: str, job: str, *, force: bool) -> Answer:
    """The task `prep-data`: data and beginning weights of a job, or one dataset below the root of that job (without a job, of this checkout)."""
    jobs = load_jobs(talk)
    name = job or jobs.default_job
    if name is None and not dataset:
        raise ConfigError("neither --job nor --dataset nor [defaults] job says what to prepare", hint=f"jobs: {', '.join(jobs.names())}")
    if not job and not dataset:
        talk.say(f"for the job {name}, named in [defaults]")
    resolved = jobs.resolve(name).job if name and (job or not dataset) else None
    root = Path(resolved.cluster.root or ".") if resolved else jobs.root
    stamps = stamps_folder(root, PrepData.name)
    needs: Iterable[Need]
    if dataset:
        needs = needs_of_dataset(jobs.dataset(dataset), root, stamps)
    else:
        assert resolved is not None
        needs = needs_of(resolved, STAGES[1:])  # of all, before the first begins: what is hopeless is said at once
    if not needs:
        talk.say("mock data needs no preparation")
    if resolved is not None and not dataset:
        needs = needs_of(resolved, STAGES[1:]) if talk.dry_run else needs_in_turn(resolved, STAGES[1:])
    verdicts = bring_up_to_date(talk, Build().needs(None, stamps_folder(root, Build.name)), root)
    return _answer(talk, verdicts + bring_up_to_date(talk, needs, root, force=force))
