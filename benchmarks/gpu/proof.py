"""The document gpu-proof/1: what each part found, on which machine, with which code. It is written
again, whole, after each part, so that an end in the middle leaves a partial one.

    {"schema": "gpu-proof/1", "size", "date", "code", "parts": {NAME: {
        "status": "done" | "timed out" | "failed" | "not run", "seconds", "device", "hardware": {},
        "power": {FIGURE: {least, median, most}}, "findings": [...], "note"}}}

A part keeps the machine it was run on: parts of several calls may be of several machines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu.findings import Finding, table
from benchmarks.gpu.hardware import Hardware, today
from benchmarks.gpu.parts import PARTS
from trainkit.base.documents import document, read_document
from trainkit.base.files import sha256_tree, write_json, write_text

SCHEMA = "gpu-proof/1"
NAME = "gpu-proof.json"
TABLE = "gpu-proof.txt"
HEAD = ("part", "what", "found", "goal", "verdict", "note")
ROOT = Path(__file__).resolve().parents[2]
Status = Literal["done", "timed out", "failed", "not run"]


@dataclass(frozen=True)
class PartResult:
    """How one part went.

    Args:
        status: "failed": its process did not come to its end by itself.
        device: "cuda" or "cpu".
        size: "full" or "small".
        code: hash of the code it was run with.
        hardware: where.
        seconds: it took.
        findings: what it found by then.
        power: nvidia-smi's figures meanwhile.
        note: why it was not run, or its last words.
    """

    status: Status
    device: str
    size: str
    code: str
    hardware: Hardware
    seconds: float = 0.0
    findings: tuple[Finding, ...] = ()
    power: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    note: str = ""

    def is_of(self, device: str, size: str, code: str, hardware: Hardware) -> bool:
        """Whether it was found with this code on such a GPU."""
        own = (self.device, self.size, self.code, self.hardware.gpu, self.hardware.torch)
        return own == (device, size, code, hardware.gpu, hardware.torch)

    def stands_for(self, device: str, size: str, code: str, hardware: Hardware) -> bool:
        """Whether it need not be run again: so it is, and it came to its end."""
        return self.status == "done" and self.is_of(device, size, code, hardware)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PartResult:
        """An entry of `parts`."""
        made = dict(value)
        made["hardware"] = Hardware(**made["hardware"])
        made["findings"] = tuple(Finding(**one) for one in made["findings"])
        return cls(**made)


class Proof:
    """The document in a folder, and its table beside it.

    Args:
        folder: made if need be.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results: dict[str, PartResult] = {}
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / NAME
        if path.is_file():
            said = read_document(path, SCHEMA)
            self.results = {
                name: PartResult.from_json(value)
                for name, value in said["parts"].items()
                if name in PARTS
            }

    def put(self, name: str, result: PartResult) -> None:
        """Take in a part's result, and write all down."""
        self.results[name] = result
        parts = {name: asdict(self.results[name]) for name in PARTS if name in self.results}
        write_json(self.folder / NAME, document(SCHEMA, date=today(), parts=parts))
        write_text(self.folder / TABLE, self.words() + "\n")

    def words(self) -> str:
        """The table, and above it each machine of it."""
        machines: dict[str, list[str]] = {}
        for name in PARTS:
            if name in self.results:
                machines.setdefault(self.results[name].hardware.words(), []).append(name)
        heads = [f"{words}\n({', '.join(names)})" for words, names in machines.items()]
        rows = list(self._rows())
        return "\n".join([f"GPU proof, {today()}", *heads, "", table(rows, head=HEAD)])

    def _rows(self) -> Iterator[list[str]]:
        for name in PARTS:
            if name not in self.results:
                continue
            result = self.results[name]
            for finding in result.findings:
                yield [name, *finding.cells()]
            if result.status != "done":
                verdict = "not shown" if result.status == "not run" else "fail"
                yield [name, "the whole part", result.status, "", verdict, result.note]
            if watts := result.power.get("power.draw"):
                clock = result.power.get("clocks.sm", {})
                value = f"{watts['median']:.0f} W, {clock.get('median', 0):.0f} MHz"
                yield [name, "power and SM clock, medians", value, "", "shown", ""]

    def failed(self, names: list[str]) -> list[str]:
        """Parts with a finding that misses its goal, or that did not come to their end."""
        return [
            name
            for name in names
            if (result := self.results.get(name)) is not None
            and (
                result.status in ("failed", "timed out")
                or any(finding.verdict == "fail" for finding in result.findings)
            )
        ]

    def not_shown(self, names: list[str]) -> int:
        """Findings that this machine could not show."""
        return sum(
            finding.verdict == "not shown"
            for name in names
            if name in self.results
            for finding in self.results[name].findings
        )

    def not_run(self, names: list[str]) -> list[str]:
        """Parts that have no result."""
        return [
            name
            for name in names
            if name not in self.results or self.results[name].status == "not run"
        ]


def code_hash() -> str:
    """Of what a figure depends on: the package and the benchmarks of this checkout."""
    folders = ("trainkit", "benchmarks")
    names = [
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if "__pycache__" not in path.parts
    ]
    return sha256_tree(ROOT, sorted(names))
