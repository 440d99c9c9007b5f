"""Finding runs: all below some roots, and the one that a user's word means."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from trainkit.base.errors import ConfigError
from trainkit.runs.folder import RunFolder
from trainkit.runs.slurm import read_slurm_jobs


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


def all_runs(roots: Iterable[Path], warn: Callable[[str], None] = _warn) -> list[RunFolder]:
    """Every run below ROOT/runs of any root, oldest first. `warn` is called with what cannot
    be read, and with what is not a run yet."""
    found = [run for root in roots for run in _runs_below(root, warn)]
    return sorted(found, key=lambda run: run.id)


def _runs_below(root: Path, warn: Callable[[str], None]) -> list[RunFolder]:
    """Runs of one root; those that can be seen where parts of it are not to be read from here
    (another cluster's root, a dead mount)."""
    found = []
    for job in _folders(root / "runs", warn):
        for run in _folders(job, warn):
            try:
                if (run / "job.json").is_file():
                    found.append(RunFolder(run))
                elif (run / "lock").is_file():
                    warn(
                        f"{run} has no job.json: `train` is just making that run, or was killed"
                        f" while it did; then rm -r {run}"
                    )
            except OSError as error:
                warn(f"{run} cannot be read ({error.strerror}): that run is not seen")
    return found


def _folders(path: Path, warn: Callable[[str], None]) -> list[Path]:
    try:
        return [entry for entry in path.iterdir() if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        warn(f"{path} cannot be read ({error.strerror}): runs there are not seen")
        return []


def find_run(roots: Sequence[Path], query: str) -> RunFolder:
    """The run `query` means: an id, a unique prefix of one, a job's name (its newest run),
    Slurm's number of its job, or "last".

    Raises ConfigError (exit 3) where there is none or more than one.
    """
    runs = all_runs(roots)
    if not runs:
        raise ConfigError(
            f"there are no runs in {' or '.join(str(root / 'runs') for root in roots)}",
            hint="start one: invoke train JOB",
        )
    if query == "last":
        return runs[-1]
    matches = (
        [run for run in runs if run.id == query]
        or [run for run in runs if run.job_name == query][-1:]
        or [run for run in runs if _has_slurm_job(run, query)][-1:]
        or [run for run in runs if run.id.startswith(query)]
    )
    if len(matches) > 1:
        raise ConfigError(
            f"{query!r} is the beginning of {len(matches)} runs:"
            f" {', '.join(run.id for run in matches[:8])}"
        )
    if not matches:
        raise ConfigError(
            f"no run and no job with runs is called {query!r}",
            hint="invoke runs lists them; `last` is the newest",
        )
    return matches[0]


def _has_slurm_job(run: RunFolder, query: str) -> bool:
    array, _, element = query.partition("_")
    number = array.isdigit() and (element.isdigit() or not element)
    return number and any(job.id == query for job in read_slurm_jobs(run))
