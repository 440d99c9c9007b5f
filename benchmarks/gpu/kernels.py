"""trainkit's own kernels on the device: every case of benchmarks/kernels.py beside its reference in
fp64, and then what that program says of their speed, in parts of a copy of as many bytes. Where the
package has no operations, that is said.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.findings import Finding, judged, judged_if, not_shown
from benchmarks.gpu.sessions import DeviceType, Size

if TYPE_CHECKING:
    from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "benchmarks" / "kernels.py"
GOALS = {"forward": 0.90, "backward": 0.85}  # of a copy's rate
BOUNDS = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}  # |y - y64| / |y64|
SHAPES = {"small": (64, 96, 1000), "full": (2048, 4096, 50257)}  # tokens, width, vocabulary
LAST_LINES = 5


def run(device: DeviceType, size: Size, folder: Path) -> Iterator[Finding]:
    """Numerics, then speed."""
    if importlib.util.find_spec("trainkit.ops") is None:
        yield not_shown("kernels", "not built: this checkout has no trainkit.ops")
        return
    if importlib.util.find_spec("benchmarks.kernels") is None:
        yield not_shown("kernels", "this checkout has no benchmarks/kernels.py")
        return
    cases = importlib.import_module("benchmarks.kernels")
    kernels = importlib.import_module("trainkit.ops.kernels")
    try:
        fused = kernels.choose("fused", device).kernels
    except kernels.Unavailable as error:
        yield not_shown("kernels", "not built: " + "; ".join(str(error).split("\n  ")))
        return
    yield from _numerics(cases, fused, device, size)
    yield from _speed(device, size, folder / "kernels.json")


def _numerics(cases: Any, fused: Any, device: DeviceType, size: Size) -> Iterator[Finding]:
    """Results of every case beside the reference's in fp64 of the same inputs."""
    import torch

    torch.manual_seed(0)
    at = cases.Shapes(*SHAPES[size], device)
    for name, bound in BOUNDS.items():
        for family in cases.FAMILIES:
            for case in family(at, getattr(torch, name)):
                words = f"{case.name} {name}"
                if not case.inputs:
                    why = "its case has tensors of its own; tests/ops holds them to the reference"
                    yield not_shown(words, why)
                    continue
                yield _compared(words, case, fused, cases.REFERENCE, bound)


def _compared(words: str, case: Any, fused: Any, reference: Any, bound: float) -> Finding:
    """One case. What mixes its inputs with fp32 tensors of its own cannot be had in fp64: then the
    reference is in the case's own dtype."""
    wide = [t.double() if t.is_floating_point() else t.clone() for t in case.inputs]
    note = "from fp64"
    try:
        try:
            exact = _results(case, reference, wide)
        except RuntimeError:
            note = "from the reference in its own dtype"
            exact = _results(case, reference, [t.clone() for t in case.inputs])
        off = _distance(_results(case, fused, [t.clone() for t in case.inputs]), exact)
    except (RuntimeError, TypeError, ValueError) as error:
        return judged(words, False, note=str(error).splitlines()[0])
    return judged(words, off <= bound, off, goal=f"{bound:.0e}", note=note)


def _distance(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest of any result."""
    return max(
        float((x.double() - y.double()).norm() / y.double().norm().clamp(min=1e-30))
        for x, y in zip(found, exact, strict=True)
    )


def _results(case: Any, kernels: Any, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Of inputs that it may change: some operations work in place."""
    import torch

    with torch.no_grad():
        found = case.call(kernels, *inputs)
    whole = found if isinstance(found, tuple) else (found,)
    # what returns nothing has worked in place
    return [t for t in whole if isinstance(t, torch.Tensor)] or list(inputs)


def _speed(device: DeviceType, size: Size, rows: Path) -> Iterator[Finding]:
    """benchmarks/kernels.py in a process of its own."""
    argv = [sys.executable, "-P", str(PROGRAM), "--device", device, "--rows", str(rows)]
    if size == "small":
        argv += ["--quick", "--rounds", "3"]  # shown, not judged
    done = subprocess.run(
        argv, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    if rows.is_file():
        yield from rows_of(json.loads(rows.read_text()), judge=size == "full")
    words = " | ".join((done.stdout + done.stderr).splitlines()[-LAST_LINES:])
    note = words if done.returncode else ""
    yield judged("benchmarks/kernels.py came through", done.returncode == 0, note=note)


def rows_of(rows: Sequence[Any], *, judge: bool) -> Iterator[Finding]:
    """Its rows: the time of the copy over that of the operation, and how much faster than others.

    Args:
        rows: what it wrote.
        judge: they are of sizes that the goals are meant for.
    """
    for row in rows:
        share = row["limit"]["wall"] / row["fused"]["wall"]
        goal = GOALS[row["direction"]]
        others = [
            f"{took['wall'] / row['fused']['wall']:.2f} x as fast as {name}"
            for name, took in row["others"].items()
        ]
        yield judged_if(
            judge,
            f"{row['name']} {row['dtype']} {row['direction']}: in parts of a copy's rate",
            share >= goal,
            share,
            goal=f"at least {goal:g}",
            note=", ".join(others),
        )
