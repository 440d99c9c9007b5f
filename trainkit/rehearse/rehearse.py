"""The rehearsal of a job: every check, in an order in which the first failure says most."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

from trainkit.base.errors import ConfigError, TrainkitError
from trainkit.experiment.options import RehearseOptions
from trainkit.jobs.load import Jobs
from trainkit.rehearse import engine_checks, place_checks
from trainkit.rehearse.rank_checks import RankChecks, traced_ranks, tracing
from trainkit.rehearse.report import (
    NotLookedAt,
    RehearsalReport,
    RehearsedCheck,
    failed_checks,
)
from trainkit.rehearse.scene import RehearsalScene, scene_of

Check = Callable[[RehearsalScene], str]
OnChecked = Callable[[RehearsedCheck], None]
OF_THE_PLACE: tuple[tuple[str, Check], ...] = (
    ("plan", place_checks.check_plan),
    ("engine", place_checks.check_launchable),
    ("hosts", place_checks.check_hosts),
    ("programs", place_checks.check_programs),
    ("secrets", place_checks.check_secrets),
    ("container", place_checks.check_mounts),
    ("root", place_checks.check_root),
    ("disk", place_checks.check_disk),
    ("stages", place_checks.check_stages),
    ("engine's parser", engine_checks.check_parser),
)


def rehearse(
    jobs: Jobs,
    name: str,
    options: RehearseOptions,
    on_checked: OnChecked = lambda check: None,
) -> RehearsalReport:
    """Look at a job from end to end. Nothing is written but a temporary folder.

    Args:
        jobs: those of a jobs.toml.
        name: which of them.
        options: how it would be started.
        on_checked: is called with every check as it is made.
    """
    began = time.perf_counter()
    checks: list[RehearsedCheck] = []
    for check in _checks(jobs, name, options):
        checks.append(check)
        on_checked(check)
    return RehearsalReport(name, checks, time.perf_counter() - began)


def _checks(jobs: Jobs, name: str, options: RehearseOptions) -> Iterator[RehearsedCheck]:
    found = list(_resolve(jobs, name, options))
    yield from (each for each in found if isinstance(each, RehearsedCheck))
    scene = next((each for each in found if isinstance(each, RehearsalScene)), None)
    if scene is None:
        return
    with ExitStack() as stack:
        try:
            ranks, vocab = traced_ranks(scene)
            # beside all that follows
            of_ranks = RankChecks(scene, stack.enter_context(tracing(scene, ranks, vocab)))
        except NotLookedAt as why:
            of_ranks = None
            reason = str(why)
        for title, check in OF_THE_PLACE:
            yield from _made(title, check, scene)
        from trainkit.rehearse import data_checks  # torch: a second, beside the ranks' process

        yield from _made("tokenizer", data_checks.check_tokenizer, scene)
        yield from _made("batches", data_checks.check_batches, scene)
        yield from _made("validation", data_checks.check_validation, scene)
        yield from _made("layout", data_checks.check_layout, scene)
        if of_ranks is None:
            for title in ("ranks", "collectives"):
                yield RehearsedCheck(title, "not looked at", reason)
            yield from _made("checkpoint", partial(data_checks.check_checkpoint, shapes={}), scene)
            return
        yield from _made("ranks", of_ranks.check_ranks, scene)
        yield from _made("collectives", of_ranks.check_collectives, scene)
        yield from _made("checkpoint", of_ranks.check_checkpoint, scene)


def _resolve(
    jobs: Jobs, name: str, options: RehearseOptions
) -> Iterator[RehearsedCheck | RehearsalScene]:
    """The check of the job's tables, and the scene where they are right."""
    began = time.perf_counter()
    try:
        scene = scene_of(jobs, name, options)
    except TrainkitError as error:
        yield from failed_checks("job", error, time.perf_counter() - began)
        return
    seconds = time.perf_counter() - began
    yield RehearsedCheck("job", "held", f"all keys of job {name} are right", seconds=seconds)
    yield scene


def _made(name: str, check: Check, scene: RehearsalScene) -> Iterator[RehearsedCheck]:
    """What became of one check."""
    began = time.perf_counter()
    try:
        message = check(scene)
    except NotLookedAt as why:
        yield RehearsedCheck(name, "not looked at", str(why), seconds=time.perf_counter() - began)
    except TrainkitError as error:
        yield from failed_checks(name, error, time.perf_counter() - began)
    except OSError as error:
        broken = ConfigError(f"{error.strerror or error}: {error.filename or name}")
        yield from failed_checks(name, broken, time.perf_counter() - began)
    else:
        yield RehearsedCheck(name, "held", message, seconds=time.perf_counter() - began)
