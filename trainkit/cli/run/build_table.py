"""What `build` ends with: what is compiled, of which versions, where, and in what time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from rich.markup import escape

from trainkit.base.install import extension_path
from trainkit.cli.tables import Listing
from trainkit.ops.build import LIBRARY_FILE, find_cuda, origin_of
from trainkit.stages.build import CHECKOUT, INDEX, KERNELS


@dataclass(frozen=True)
class BuiltPiece:
    """A row.

    Args:
        piece: "helper" (the extension), "kernels" or "CUDA".
        state: compiled (just now), fresh, or what is missing.
        versions: of what it was made with, or of what makes it.
        where: the file, or the GPUs.
        seconds: that compiling took.
    """

    piece: str
    state: str
    versions: str
    where: str
    seconds: float = 0.0


def build_report(took: Mapping[str, float]) -> list[BuiltPiece]:
    """A row for the extension, the kernels, and CUDA.

    Args:
        took: seconds of what was compiled just now, by its name.
    """

    def compiled(piece: str, name: str, versions: str, where: str) -> BuiltPiece:
        state = "compiled" if name in took else "fresh"
        return BuiltPiece(piece, state, versions, where, round(took.get(name, 0.0), 1))

    pybind = f"pybind11 {version('pybind11')}"
    rows = [compiled("helper", INDEX, pybind, str(extension_path(CHECKOUT)))]
    if made := origin_of(LIBRARY_FILE):
        versions = f"torch {made.torch}, {made.compiler}"
        rows.append(compiled("kernels", KERNELS, versions, str(LIBRARY_FILE)))
    cuda = find_cuda()
    rows.append(BuiltPiece("CUDA", cuda.state, cuda.versions, cuda.where))
    return rows


def build_table(rows: Sequence[BuiltPiece]) -> Listing:
    """The rows of `build_report` for people."""
    table = Listing(
        "piece", "state", "versions", "where", "seconds", right=("seconds",), drop=("where",)
    )
    for row in rows:
        seconds = f"{row.seconds:.1f}" if row.seconds else ""
        words = [escape(word) for word in (row.piece, row.state, row.versions, row.where)]
        table.add_row(*words, seconds)
    return table
