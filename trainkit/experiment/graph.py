"""The stages of a job as a graph: what each makes and waits for, and whether it is fresh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trainkit.base.errors import TrainkitError
from trainkit.jobs.schema import Job
from trainkit.reports.graph import JobGraph, StageNode
from trainkit.stages.contract import Need, Stage
from trainkit.stages.execute import missing_units, stamps_folder
from trainkit.stages.registry import stages_asked_once
from trainkit.stages.stamps import check_freshness


def graph_of_job(job: Job) -> JobGraph:
    """What a job needs, and the run that reads it all. Nothing is written; a server that does not
    answer, or a file that is missing, makes a stage unknown."""
    root = job.cluster.root_folder
    nodes: list[StageNode] = []
    outputs: dict[Path, str] = {}  # whose they are
    of_stage: dict[str, list[str]] = {}
    for stage in stages_asked_once():
        waits = [name for other in stage.waits_for(job) for name in of_stage.get(other, [])]
        found = _nodes_of_stage(stage, job, root, waits, outputs)
        of_stage[stage.name] = [node.name for node in found]
        nodes += [_judged_after(node, nodes) for node in found]
    nodes.append(_run_node(job, nodes))
    return JobGraph(job.name, [_without_detours(node, nodes) for node in nodes])


def _nodes_of_stage(
    stage: Stage, job: Job, root: Path, waits: Sequence[str], outputs: dict[Path, str]
) -> list[StageNode]:
    """What a job needs of one stage.

    Args:
        stage: the stage.
        job: the job.
        root: the folder that holds data/ and stamps/.
        waits: nodes that the stage waits for.
        outputs: whose each file is; those of this stage are added.
    """
    stamps = stamps_folder(root, stage.name)
    try:
        needs = stage.needs(job, stamps)
    except TrainkitError as error:
        return [StageNode(stage.name, "unknown", error.message, after=waits)]
    nodes = []
    for need in needs:
        name = f"{need.stage} {need.name}"
        before = [outputs[path] for path in need.inputs if path in outputs]
        nodes.append(_node(need, name, root, stamps, [*waits, *before]))
        outputs |= dict.fromkeys(need.outputs, name)
    return nodes


def _node(need: Need, name: str, root: Path, stamps: Path, after: Sequence[str]) -> StageNode:
    verdict = check_freshness(need, stamps)
    missing = 0
    state = StageNode(name, "fresh", verdict.because)
    if not verdict.fresh:
        missing = len(missing_units(need, stamps, force=False))
        state = replace(state, state="stale")
    return replace(
        state,
        makes=[
            str(path.relative_to(root) if path.is_relative_to(root) else path)
            for path in need.outputs
        ],
        after=list(dict.fromkeys(after)),
        units=len(need.units),
        missing=missing,
    )


def _judged_after(node: StageNode, before: Sequence[StageNode]) -> StageNode:
    """A node that is fresh by what is there now, and comes after one that is not, is judged again
    when that is made."""
    not_made = [each.name for each in before if each.name in node.after and each.state != "fresh"]
    if node.state != "fresh" or not not_made:
        return node
    return replace(node, state="waits", because=f"{' and '.join(not_made)} comes first")


def _run_node(job: Job, nodes: Sequence[StageNode]) -> StageNode:
    read = {name for node in nodes for name in node.after}
    last = [node.name for node in nodes if node.name not in read]
    stale = [node.name for node in nodes if node.state != "fresh"]
    name = f"train {job.name}"
    makes = [f"runs/{job.name}/RUN"]
    if stale:
        words = f"{' and '.join(stale)} comes first"
        return StageNode(name, "waits", words, makes, last)
    return StageNode(name, "fresh", "all that it reads is there", makes, last)


def _without_detours(node: StageNode, nodes: Sequence[StageNode]) -> StageNode:
    """The node without waiting for what another one that it waits for has waited for already."""
    by_name = {each.name: each for each in nodes}

    def reached(name: str) -> set[str]:
        found = set()
        for before in by_name[name].after:
            found |= {before, *reached(before)}
        return found

    far = {name for before in node.after for name in reached(before)}
    return replace(node, after=[name for name in node.after if name not in far])
