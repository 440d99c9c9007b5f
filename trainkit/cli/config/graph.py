"""The task `graph`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape
from rich.tree import Tree

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError
from trainkit.base.files import write_text
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.experiment.graph import graph_of_job
from trainkit.reports.graph import MARKS, JobGraph, NodeState, StageNode

COLOURS: dict[NodeState, str] = {
    "fresh": "green",
    "stale": "yellow",
    "waits": "cyan",
    "unknown": "magenta",
}


@dataclass(frozen=True)
class GraphForms:
    """How it is shown besides the terminal.

    Args:
        svg: the file to draw it into; "": none.
        mermaid: print it in Mermaid's words.
    """

    svg: str = ""
    mermaid: bool = False


def graph(task: TaskContext, name: str, sets: Sequence[str], forms: GraphForms) -> TaskResult:
    """The task `graph`.

    Args:
        task: how it was called.
        name: of the job.
        sets: overrides, KEY=VALUE.
        forms: how it is shown.

    Raises:
        ConfigError: the file does not end in .svg; as Jobs.resolve.
    """
    if forms.svg and Path(forms.svg).suffix != ".svg":
        raise ConfigError(f"--svg {forms.svg} does not end in .svg")
    found = graph_of_job(load_jobs(task).resolve(name, sets).job)
    if forms.svg:
        write_text(Path(forms.svg), found.to_svg())
        task.say(f"wrote {forms.svg}")
    elif forms.mermaid:
        task.say(found.to_mermaid().rstrip())
    return TaskResult(
        document("job-graph/1", job=name, nodes=found.to_json()),
        page=() if forms.svg or forms.mermaid else [_tree(found)],
    )


def _tree(found: JobGraph) -> Tree:
    """The run, and below each node what it waits for."""
    shown: set[str] = set()
    last = found.nodes[-1]
    tree = Tree(_words(last, shown), guide_style="dim")
    _grow(tree, last, found, shown)
    return tree


def _grow(tree: Tree, node: StageNode, found: JobGraph, shown: set[str]) -> None:
    for name in node.after:
        before = found.node(name)
        new = name not in shown
        branch = tree.add(_words(before, shown))
        if new:
            _grow(branch, before, found, shown)


def _words(node: StageNode, shown: set[str]) -> str:
    """A node's lines; of one that stands above already its name alone."""
    title = f"[{COLOURS[node.state]}]{MARKS[node.state]} {escape(node.name)}[/]"
    if node.name in shown:
        return f"{title} [dim](above)[/]"
    shown.add(node.name)
    return "\n".join([title, *(escape(line) for line in node.lines())])
