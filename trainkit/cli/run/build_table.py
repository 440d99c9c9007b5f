"""What `build` ends with: what is compiled, of which versions, where, and in what time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from rich.markup import escape

from trainkit.base.install import extension_path
from trainkit.cli.tables import Listing
from trainkit.ops.build import LIBRARY_FILE, find_cuda, origin_of
from trainkit.stages.build import CHECKOUT, INDEX, KERNELS


def build_report(took: Mapping[str, float]) -> list[dict[str, Any]]:
    """A row for the extension, the kernels, and CUDA.

    Args:
        took: seconds of what was compiled just now, by its name.
    """
    rows = [
        _row("helper", "pybind11 " + version("pybind11"), str(extension_path(CHECKOUT))),
    ]
    made = origin_of(LIBRARY_FILE)
    if made is not None:
        rows.append(_row(KERNELS, f"torch {made.torch}, {made.compiler}", str(LIBRARY_FILE)))
    for row, name in zip(rows, (INDEX, KERNELS), strict=False):
        row["state"] = "compiled" if name in took else "fresh"
        row["seconds"] = round(took.get(name, 0.0), 1)
    cuda = find_cuda()
    rows.append(_row("CUDA", cuda.versions, cuda.where) | {"state": cuda.state})
    return rows


def _row(piece: str, versions: str, where: str) -> dict[str, Any]:
    return {"piece": piece, "state": "", "versions": versions, "where": where, "seconds": 0.0}


def build_table(rows: Sequence[Mapping[str, Any]]) -> Listing:
    """The rows of `build_report` for people."""
    table = Listing(
        "piece", "state", "versions", "where", "seconds", right=("seconds",), drop=("where",)
    )
    for row in rows:
        seconds = f"{row['seconds']:.1f}" if row["seconds"] else ""
        words = [escape(str(row[key])) for key in ("piece", "state", "versions", "where")]
        table.add_row(*words, seconds)
    return table
