"""The stages of a job as a picture: what is fresh, what is stale and because of what, what each
makes and waits for. As SVG, and as Mermaid's words (https://mermaid.js.org/syntax/flowchart.html).
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Literal

from trainkit.base.lazy_dataclasses import asdict, dataclass
from trainkit.base.printable import printable
from trainkit.reports.chart import text

NodeState = Literal["fresh", "stale", "waits", "unknown"]
MARKS: dict[NodeState, str] = {"fresh": "✔", "stale": "✗", "waits": "…", "unknown": "?"}
WIDTH = 330  # of a box
GAP = 70  # between columns
LINE = 17
ROOM = 24  # between boxes of a column
CHARACTERS = 44  # that fit into a line of a box
SHOWN = 3  # files that are named
NEW_LINE = "\n"
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1d1d1f; } .name { font-weight: 600; }
.box { fill: #fff; stroke-width: 2; } .fresh { stroke: #009e73; } .stale { stroke: #d55e00; }
.waits, .unknown { stroke: #777; stroke-dasharray: 5 4; }
.edge { fill: none; stroke: #777; stroke-width: 1.5; }
.head { fill: #777; } svg { background: #fafafa; }
@media (prefers-color-scheme: dark) { svg { background: #16181c; } text { fill: #e8e8ea; }
  .box { fill: #22252b; } .edge { stroke: #999; } .head { fill: #999; } }
"""


@dataclass(frozen=True)
class StageNode:
    """One thing that is made, or the run that reads it.

    Args:
        name: stage and what it makes: "prep-data lines".
        state: fresh, or stale; waits: it is judged when what it comes after is made; unknown: it
            is not known now.
        because: why.
        makes: files, below the root where they lie there.
        after: names of those that it waits for.
        units: pieces of its work.
        missing: those of them that are to be done.
    """

    name: str
    state: NodeState
    because: str
    makes: Sequence[str] = ()
    after: Sequence[str] = ()
    units: int = 0
    missing: int = 0

    def lines(self) -> list[str]:
        """What is said of it below its name."""
        found = [f"{self.state} because {self.because.partition(NEW_LINE)[0]}"]
        if self.makes:
            few = ", ".join(self.makes[:SHOWN])
            more = len(self.makes) - SHOWN
            found.append(f"makes {few}" + (f" and {more:,} more" if more > 0 else ""))
        if self.missing:
            found.append(f"{self.missing:,} of {self.units:,} units to do")
        return [printable(line) for line in found]


@dataclass(frozen=True)
class JobGraph:
    """All that a job needs, each after what it waits for; the run itself is the last."""

    job: str
    nodes: Sequence[StageNode]

    def node(self, name: str) -> StageNode:
        """The one of this name."""
        return next(node for node in self.nodes if node.name == name)

    def to_json(self) -> list[dict[str, object]]:
        """The key `nodes` of job-graph/1."""
        return [asdict(node) for node in self.nodes]

    def to_mermaid(self) -> str:
        """A flowchart; labels are quoted, so that no text of a job is read as syntax."""
        ids = {node.name: f"n{number}" for number, node in enumerate(self.nodes)}
        lines = ["flowchart LR"]
        for node in self.nodes:
            label = "<br/>".join(_mermaid_text(each) for each in (node.name, *node.lines()))
            lines.append(f'  {ids[node.name]}["{label}"]:::{node.state}')
        lines += [
            f"  {ids[before]} --> {ids[node.name]}" for node in self.nodes for before in node.after
        ]
        lines += [
            "  classDef fresh stroke:#009e73,stroke-width:2px",
            "  classDef stale stroke:#d55e00,stroke-width:2px",
            "  classDef waits stroke:#777,stroke-dasharray:5 4",
            "  classDef unknown stroke:#777,stroke-dasharray:5 4",
        ]
        return "\n".join(lines) + "\n"

    def to_svg(self) -> str:
        """A picture in one file; it follows the viewer's dark mode."""
        boxes = self._boxes()
        width = max(box.left for box in boxes.values()) + WIDTH + ROOM
        height = max(box.top + box.height for box in boxes.values()) + ROOM
        return "".join(
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
                f' width="{width}" height="{height}" role="img"'
                f' aria-label="{text(f"stages of {self.job}")}"><style>{STYLE}</style>',
                '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8"'
                ' markerHeight="8" orient="auto"><path class="head" d="M0 0 8 4 0 8z"/></marker>'
                "</defs>",
                *self._edges(boxes),
                *(piece for box in boxes.values() for piece in box.to_svg()),
                "</svg>\n",
            )
        )

    def _boxes(self) -> dict[str, _Box]:
        """Where each lies: in the column before the first that waits for it."""
        distance: dict[str, int] = {}  # to the run
        for node in reversed(self.nodes):
            distance.setdefault(node.name, 0)
            for before in node.after:
                distance[before] = max(distance.get(before, 0), distance[node.name] + 1)
        filled: dict[int, int] = {}
        boxes = {}
        for node in self.nodes:
            column = max(distance.values()) - distance[node.name]
            top = filled.get(column, ROOM)
            box = _Box(node, ROOM + column * (WIDTH + GAP), top, _wrapped(node))
            filled[column] = top + box.height + ROOM
            boxes[node.name] = box
        return boxes

    def _edges(self, boxes: dict[str, _Box]) -> Iterator[str]:
        for node in self.nodes:
            end = boxes[node.name]
            for before in node.after:
                start = boxes[before]
                begin = start.left + WIDTH
                middle = begin + GAP // 2
                yield (
                    f'<path class="edge" marker-end="url(#head)" d="M{begin} {start.middle}'
                    f"C{middle} {start.middle} {end.left - GAP // 2} {end.middle}"
                    f' {end.left} {end.middle}"/>'
                )


@dataclass(frozen=True)
class _Box:
    node: StageNode
    left: int
    top: int
    lines: Sequence[str]

    @property
    def height(self) -> int:
        return LINE * (len(self.lines) + 1) + 18

    @property
    def middle(self) -> int:
        return self.top + self.height // 2

    def to_svg(self) -> Iterator[str]:
        state = self.node.state
        yield (
            f'<rect class="box {state}" x="{self.left}" y="{self.top}" width="{WIDTH}"'
            f' height="{self.height}" rx="8"/>'
        )
        title = f"{MARKS[state]} {textwrap.shorten(self.node.name, CHARACTERS - 4)}"
        for number, line in enumerate((title, *self.lines)):
            kind = "" if number else ' class="name"'
            y = self.top + 22 + LINE * number
            yield f'<text{kind} x="{self.left + 12}" y="{y}">{text(line)}</text>'


def _wrapped(node: StageNode) -> list[str]:
    """What is said of a node in lines that fit into its box."""
    return [
        part
        for line in node.lines()
        for part in textwrap.wrap(line, CHARACTERS, max_lines=5, placeholder=" …")
    ]


def _mermaid_text(words: str) -> str:
    """Text inside a quoted label: Mermaid has entities with # where HTML has &."""
    for sign, entity in (("#", "#35;"), ('"', "#quot;"), ("<", "#lt;"), (">", "#gt;")):
        words = words.replace(sign, entity)
    return words.replace("\n", " ")
