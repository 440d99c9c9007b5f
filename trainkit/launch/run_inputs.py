"""launch/inputs.json: which files a run's samples come from, so that nobody resumes it on
others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainkit.base.documents import document, read_document
from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.files import write_json
from trainkit.runs.folder import RunFolder
from trainkit.stages.contract import Need
from trainkit.stages.stamps import file_identity

PROGRAMS = ("build", "build-container", "precompile")  # stages that make what runs, and no samples


def write_inputs(run: RunFolder, needs: Sequence[Need]) -> None:
    """Write inputs.json. `needs` are up to date."""
    of_data = [need for need in needs if need.stage not in PROGRAMS]
    made = [path for need in of_data for path in need.outputs]
    # pairs that nobody made here: the run reads them itself
    ready = [path for need in of_data for path in need.inputs if path.suffix in (".bin", ".idx")]
    files = [file_identity(path) for path in dict.fromkeys([*made, *ready])]
    write_json(run.inputs, document("inputs/1", files=files))


def refuse_other_inputs(run: RunFolder) -> None:
    """Raise (exit 5) if a file that the run's samples come from is not the one it began with:
    its losses would jump."""
    if not run.inputs.is_file():
        raise TrainkitError(
            f"run {run.id} has no samples: its stages were never made",
            exit=Exit.STAGE_STALE,
            hint=f"invoke train {run.job_name}",
        )
    for old in read_document(run.inputs, "inputs/1")["files"]:
        new = file_identity(Path(old[0]))
        if new != old:
            what = "is missing" if new is None else "has changed"
            message = (
                f"{old[0]} {what} since run {run.id} began; its samples would no longer be the same"
            )
            raise TrainkitError(
                message,
                exit=Exit.STAGE_STALE,
                hint="put the file back, or start a new run with invoke train",
            )
