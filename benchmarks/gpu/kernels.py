"""trainkit's own kernels on the device: benchmarks/kernels.py holds every operation against its
reference and against the bandwidth of a copy. Where the package has no operations, it says so.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.findings import Finding, judged, not_shown
from benchmarks.gpu.sessions import DeviceType, Size

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "benchmarks" / "kernels.py"
NAMES = ("operation", "op", "name", "shape", "dtype", "direction", "contender")
LAST_LINES = 5


def run(device: DeviceType, size: Size, folder: Path) -> Iterator[Finding]:
    """One row for each row of benchmarks/kernels.py, and how its program ended."""
    if importlib.util.find_spec("trainkit.ops") is None:
        yield not_shown("kernels", "not built: this checkout has no trainkit.ops")
        return
    if not PROGRAM.is_file():
        yield not_shown("kernels", f"this checkout has no {PROGRAM.relative_to(ROOT)}")
        return
    rows = folder / "kernels.json"
    argv = [sys.executable, "-P", str(PROGRAM), "--device", device, "--json", str(rows)]
    if size == "small":
        argv.append("--quick")
    done = subprocess.run(
        argv, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    if rows.is_file():
        yield from rows_of(json.loads(rows.read_text()))
    words = " | ".join((done.stdout + done.stderr).splitlines()[-LAST_LINES:])
    yield judged(
        "benchmarks/kernels.py came through",
        done.returncode == 0,
        note=words if done.returncode else "",
    )


def rows_of(document: Any) -> Iterator[Finding]:
    """Its rows as findings: what names a row is its name, `percent` (of the copy's bandwidth) its
    value, `ok` its verdict."""
    rows = document
    if isinstance(document, dict):
        rows = document.get("rows", [])
    for row in rows:
        name = " ".join(str(row[key]) for key in NAMES if key in row)
        value = row.get("percent")
        note = str(row.get("note", ""))
        if "ok" in row:
            goal = str(row.get("goal", ""))
            yield judged(name, bool(row["ok"]), value, unit="% of a copy", goal=goal, note=note)
        else:
            yield Finding(name, "shown", value, "% of a copy", note=note)
