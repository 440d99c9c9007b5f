"""What neuron_parallel_compile says: how many graphs it found and compiled, and which failed.

Lines, each behind a time and `INFO ||NEURON_PARALLEL_COMPILE||: ` (`||PARALLEL_COMPILE||` in
2023): `Total graphs: 22`, `Total successful compilations: 22`, `Total failed compilations: 0`.
With NEURON_PARALLEL_COMPILE_DUMP_RESULTS=1 a report stands before them, in JSON over several
lines: `"compilation_report": {"/cache/.../MODULE_N+N/model.hlo_module.pb": {"status": true, ..`.
A compiler that fails: `Failed compilation with ['neuronx-cc', .., '/../model.MODULE_N+N.hlo...`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from trainkit.engines.rank.printed import plain

_TOTAL = re.compile(r"\bTotal (graphs|successful compilations|failed compilations): ([0-9]+)\s*$")
_REPORTED = re.compile(r'^\s*"([^"]+\.pb)": \{\s*$')
_STATUS = re.compile(r'^\s*"status": (true|false),?\s*$')
_MODULE = re.compile(r"MODULE_[0-9A-Za-z]+(?:\+[0-9A-Za-z]+)?")
NAMED = 8


@dataclass
class GraphCounts:
    """What was read so far. Where it was printed twice the later one counts: each program that
    compiles on a node has its own."""

    graphs: int | None = None
    compiled: int | None = None
    failed: int | None = None
    failures: list[str] = field(default_factory=list)
    _reported: str = ""

    def read_line(self, text: str) -> bool:
        """Take in a line; whether it was the last of a summary."""
        text = plain(text)
        total = _TOTAL.search(text)
        if total is not None:
            return self._count(total.group(1), int(total.group(2)))
        if "Failed compilation with" in text:
            self._add(text)
            return False
        named = _REPORTED.match(text)
        if named is not None:
            self._reported = named.group(1)
            return False
        status = _STATUS.match(text)
        if status is not None and status.group(1) == "false":
            self._add(self._reported)
        return False

    def _count(self, what: str, number: int) -> bool:
        if what == "graphs":
            self.graphs = number
            self.compiled = None
            self.failed = None
        elif what == "successful compilations":
            self.compiled = number
        else:
            self.failed = number
            return True
        return False

    def _add(self, text: str) -> None:
        module = _MODULE.search(text)
        name = module.group(0) if module else text.strip()[:200]
        if name and name not in self.failures:
            self.failures.append(name)

    def problem(self) -> str:
        """Why not all graphs are compiled; "" where they are."""
        if self.graphs is None or self.compiled is None or self.failed is None:
            return (
                "neuron_parallel_compile never said `Total graphs`, `Total successful compilations`"
                " and `Total failed compilations`"
            )
        if self.failed == 0 and self.graphs == self.compiled:
            return ""
        words = f"{self.failed} of {self.graphs} graphs could not be compiled"
        if self.failed == 0:
            words = f"{self.compiled} of {self.graphs} graphs were compiled"
        if self.failures:
            more = len(self.failures) - NAMED
            words += f": {', '.join(self.failures[:NAMED])}"
            words += f" and {more} more" if more > 0 else ""
        return words
