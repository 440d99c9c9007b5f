"""The task build-container."""

from __future__ import annotations

import shlex

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.run.progress import TerminalStageReporter
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.images.build import push_commands, refuse_other_image
from trainkit.images.builders import BUILDERS, choose_builder
from trainkit.images.contract import Argv, ImagePlan, ImageRecord
from trainkit.images.programs import run_program
from trainkit.jobs.schema import Job
from trainkit.launch.preparation import LocalUnits, Preparation, StageUi
from trainkit.stages.build_container import BuildContainerStage, image_plan, made_image
from trainkit.stages.execute import stamps_folder
from trainkit.stages.in_flight import refuse_in_flight


@dataclass(frozen=True)
class ImageOptions:
    """What `build-container` was asked for.

    Args:
        builder: the builder; "": that of jobs.toml, or the first that is here.
        push: put the image into the container's registry.
        force: build what is fresh, too.
        sets: overrides of the job, KEY=VALUE.
    """

    builder: str
    push: bool
    force: bool
    sets: tuple[str, ...]


def build_container(task: TaskContext, job: str, options: ImageOptions) -> TaskResult:
    """The task `build-container`.

    Args:
        task: how the task was called.
        job: whose container it is.
        options: what was asked for.
    """
    builder = options.builder
    if builder and builder not in BUILDERS:
        raise ConfigError(f"--builder {builder}: builders are {', '.join(BUILDERS)}")
    asked = load_jobs(task).resolve(job, options.sets).job
    stage = BuildContainerStage(builder or None)
    plan = _plan(asked, stage)
    pushes = _pushes(plan) if options.push else ()
    root = asked.cluster.root_folder
    if plan.container.dockerfile is not None and plan.builder:
        _, why = choose_builder(plan.builder, plan.container)
        named = builder or plan.container.builder
        task.say(f"builder: {why if named else choose_builder(None, plan.container)[1]}")
    needs = stage.needs(asked, stamps_folder(root, stage.name))
    ui = StageUi(TerminalStageReporter(task.console), task.say)
    # as it is on this machine, without what only other stages need: it is asked for often
    preparation = Preparation(
        root, ui, lambda _: LocalUnits(), refuse_in_flight, force=options.force
    )
    verdicts = preparation.show(needs) if task.dry_run else preparation.make(needs)
    record = None if task.dry_run else made_image(asked)
    if pushes and record is not None:
        refuse_other_image(BUILDERS[plan.builder], record)
    for argv in pushes:
        if task.dry_run:
            task.say(f"would run {shlex.join(argv)}")
        else:
            run_program(argv)
    if record is not None:
        task.say(_words(plan, record))
    return TaskResult(
        document(
            "build-container/1",
            dry_run=task.dry_run,
            stages=[vars(verdict) for verdict in verdicts],
            image=record.to_json() if record else None,
            pushed=[list(argv) for argv in pushes] if not task.dry_run else [],
        )
    )


def _plan(job: Job, stage: BuildContainerStage) -> ImagePlan:
    plan = image_plan(job, stage.builder)
    if plan is not None:
        return plan
    if job.container is None:
        raise ConfigError(
            f"jobs.{job.name} has no container, so there is no image to build",
            hint='add [containers.X] with dockerfile or source, and container = "X" to the job',
        )
    raise ConfigError(
        f"containers.{job.container.name}.image = '{job.container.image}' is used as it is:"
        " nothing says what it is made of",
        hint="add dockerfile or source to the table",
    )


def _pushes(plan: ImagePlan) -> tuple[Argv, ...]:
    if plan.container.dockerfile is None:
        raise ConfigError(f"--push: containers.{plan.container.name} is imported, not built")
    builder, _ = choose_builder(plan.builder or None, plan.container)
    return push_commands(plan, builder)


def _words(plan: ImagePlan, record: ImageRecord) -> str:
    what = f"{record.tag} is {record.digest or 'imported'}"
    if plan.image_file is not None and plan.image_file.is_file():
        what += f", in {plan.image_file} ({plan.image_file.stat().st_size / 1e6:,.0f} MB)"
    return what
