"""The task `plan`: what a job will need, beside what its last run took; exit 4 when it cannot
run, 18 when that is not known yet. With --search every layout of the job, ranked."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import JsonValue

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.cli.config.jobs import load_jobs, refuse_weights
from trainkit.cli.options import PlanOptions
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.engines.registry import ENGINES
from trainkit.jobs.layers import LOCAL_FILE
from trainkit.jobs.load import Jobs
from trainkit.jobs.local_jobs import add_job, refuse_name
from trainkit.launch.job_plan import last_measured, measured_speeds, plan_of, prepared
from trainkit.plan.cloud import cloud
from trainkit.plan.objection import describe_changes
from trainkit.plan.search import Ranked, Search, Searcher, describe
from trainkit.reports.search_picture import SearchPicture, draw_search, refuse_format


def usage(message: str) -> TrainkitError:
    """An error of the command line."""
    return TrainkitError(message, exit=Exit.USAGE)


def overrides(options: PlanOptions, nodes: list[int]) -> list[str]:
    """Options as --set has them; of a range the first number of nodes."""
    given = [f"cluster={json.dumps(options.cluster)}"] if options.cluster else []
    if nodes:
        given.append(f"nodes={nodes[0]}")
    return [*given, *options.set]


def asked_nodes(options: PlanOptions) -> list[int]:
    """The numbers of nodes that --nodes asks for: one, or of a range its ends and every doubling
    of the first between them; none where the job decides.

    Raises TrainkitError (exit 1): it is neither.
    """
    text = options.nodes
    first, dots, last = text.partition("..")
    if not text or text == "0":
        return []
    if not first.isdecimal() or (dots and not last.isdecimal()):
        raise usage(f"--nodes takes a whole number, or with --search a range (2..64), not '{text}'")
    low = int(first)
    high = int(last) if dots else low
    if not 1 <= low <= high:
        raise usage(f"--nodes {text}: from 1, the lower number first")
    found = []
    while low < high:
        found.append(low)
        low *= 2
    return [*found, high]


def plan_search(task: TaskContext, name: str, options: PlanOptions, nodes: list[int]) -> TaskResult:
    """Rank the layouts of a job. Exit 4 where none can be.

    Args:
        task: how it was called.
        name: of the job.
        options: of the command line.
        nodes: numbers of nodes; none: the job's.
    Raises:
        ConfigError: the vocabulary is not known, --write names a job that there is, or
            `init_from` no weights for this one.
    """
    jobs = load_jobs(task)
    if options.write:
        refuse_name(jobs, options.write, "--write")
    if options.picture:
        refuse_format(Path(options.picture))
    job = refuse_weights(jobs.resolve(name, overrides(options, nodes)).job)
    known = prepared(job)
    tokenizer = job.dataset.tokenizer
    vocab = job.model.vocab_size or known.vocab_size or (tokenizer and tokenizer.vocab_size)
    if not vocab:
        raise ConfigError(
            f"job {name}: the size of its vocabulary is not known",
            hint="give model.vocab_size, or prepare the data: it decides memory and time",
        )
    rules = ENGINES[job.engine].rules
    searcher = Searcher(job, rules, vocab, known.vocab_size, known.cores, last_measured(job))
    found = searcher.search(nodes or [job.nodes])
    if not task.json:
        from trainkit.cli.config.render_time import print_search

        print_search(task.console, found, options.price_per_gpu_hour)
    if not found.ranked:
        if not task.json:
            task.console.print(f"[red]no layout can be[/]: {_way_out(found, job.nodes)}")
        return TaskResult(_to_json(found, options), Exit.PLAN)
    if options.picture:
        _draw(task, searcher, found, Path(options.picture))
    if options.write:
        _write(jobs, name, options, found.ranked[0])
        if not task.json:
            task.console.print(f"written to {LOCAL_FILE}: {task.command} plan {options.write}")
    return TaskResult(_to_json(found, options))


def _way_out(found: Search, nodes: int) -> str:
    """What may help where no layout can be."""
    if found.ways_out:
        return describe_changes(found.ways_out, "")
    if "memory" in found.refused:
        return f"see the reasons above; --nodes {nodes}..{8 * nodes} looks at more nodes"
    return "see the reasons above"


def _draw(task: TaskContext, searcher: Searcher, found: Search, path: Path) -> None:
    """Raises MissingExtra (exit 3) without matplotlib."""
    job = searcher.job
    points = cloud(searcher.candidates, searcher.rules, searcher.vocab)
    title = f"{job.name} on {job.cluster.name}: {found.considered:,} layouts"
    draw_search(SearchPicture(title, found.ranked, points, measured_speeds(job), found.known), path)
    task.say(f"wrote {path}")


def _write(jobs: Jobs, name: str, options: PlanOptions, best: Ranked) -> None:
    """Add the layout to jobs.local.toml, as a job that extends the one that was asked for."""
    values: dict[str, JsonValue] = {"nodes": best.job.nodes}
    if options.cluster:
        values["cluster"] = options.cluster
    batch = {"training.global_batch_size": best.job.global_batch_size}
    values |= {**best.change, **batch}
    said = ", ".join(options.set)
    found = f"; found with --set {said}" if said else ""
    comment = f"plan {name} --search: {describe(best.change)}{found}"
    add_job(jobs, options.write, name, values, comment)


def _to_json(found: Search, options: PlanOptions) -> dict[str, object]:
    """The document plan-search/1."""
    from trainkit.cli.config.render_time import price_of

    price = options.price_per_gpu_hour
    return document(
        "plan-search/1",
        considered=found.considered,
        device_known=found.known,
        calibrated_by=found.calibrated_by,
        refused=dict(found.refused.most_common()),
        examples=found.nearest,
        ways_out=list(found.ways_out),
        own_tokens_per_second=found.asked.tokens_per_second if found.asked else None,
        layouts=[
            {
                "nodes": each.job.nodes,
                "change": each.change,
                "layout": describe(each.change),
                "tokens_per_second": each.tokens_per_second if found.known else None,
                "step_terms": each.terms if found.known else None,
                "memory_bytes": (
                    each.plan.memory.fullest.total_bytes if each.plan and each.plan.memory else None
                ),
                "memory_tight": bool(each.plan and each.plan.memory and each.plan.memory.tight),
                "memory_band_bytes": each.plan.memory.band_bytes
                if each.plan and each.plan.memory
                else None,
                "days": each.plan.days if each.plan else None,
                "days_interval": each.plan.duration.days_interval
                if each.plan and each.plan.duration
                else None,
                "device_hours": each.plan.duration.device_hours
                if each.plan and each.plan.duration
                else None,
                "device_hours_interval": each.plan.duration.device_hours_interval
                if each.plan and each.plan.duration
                else None,
                "price": price_of(each, price) if price else None,
            }
            for each in found.ranked
        ],
    )


EXPLAINED = ("time", "optimizer")


def plan(task: TaskContext, name: str, options: PlanOptions) -> TaskResult:
    """The task `plan`.

    Raises TrainkitError (exit 1): options that do not go together.
    """
    nodes = asked_nodes(options)
    if options.explain not in ("", *EXPLAINED):
        known = " and ".join(f"'{each}'" for each in EXPLAINED)
        raise usage(f"--explain '{options.explain}': only {known} are explained")
    if options.search:
        return plan_search(task, name, options, nodes)
    if options.write or options.price_per_gpu_hour or options.picture:
        raise usage("--write, --picture and --price-per-gpu-hour are options of --search")
    if len(nodes) > 1:
        raise usage(f"--nodes {options.nodes}: a range goes with --search; give one number")
    jobs = load_jobs(task)
    job = refuse_weights(jobs.resolve(name, overrides(options, nodes)).job)
    made = plan_of(job)
    if not task.json:
        from rich.markup import escape

        from trainkit.cli.config.render_optimizer import print_optimizer
        from trainkit.cli.config.render_plan import print_page
        from trainkit.cli.config.render_time import print_terms

        if options.explain:
            if options.explain == "time":
                print_terms(task.console, made)
            else:
                print_optimizer(task.console, job, made)
            return TaskResult(made.to_json(), made.exit)
        print_page(
            task.console,
            job,
            made,
            task.command,
            refused=ENGINES[job.engine].problems(job),
            engine=job.engine_source or jobs.engine(job.engine),
        )
        for said in ENGINES[job.engine].notes(job):
            task.console.print(f"[yellow]note[/] {escape(said)}")
    return TaskResult(made.to_json(), made.exit)
