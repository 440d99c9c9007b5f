"""Handing a run over to Slurm: its script, its secrets, sbatch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainkit.base.documents import read_document
from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.files import write_json, write_text
from trainkit.jobs.clusters import SlurmOptions
from trainkit.jobs.schema import Job
from trainkit.launch.slurm.allocation import run_slurm, slurms_words
from trainkit.launch.slurm.batch_script import batch_script, script_path
from trainkit.runs.folder import RunFolder
from trainkit.runs.slurm import add_slurm_job, change_slurm_job

SUBMIT_SECONDS = 60.0  # a busy slurmctld
# of Slurm's variables; others, SBATCH_PARTITION say, would change the job unseen
KEPT = ("SLURM_CONF", "SLURM_CLUSTERS")


def run_sbatch_argv(run: RunFolder, further: Sequence[str] = ()) -> list[str]:
    """The line of sbatch."""
    return ["sbatch", "--parsable", *further, str(script_path(run))]


def dependency_options(ready: str, options: SlurmOptions) -> list[str]:
    """Words of sbatch for a run whose stages the job `ready` completes. A dependency of the
    job's own is kept: the command line outdoes the script.

    Raises ConfigError where the two cannot be joined.
    """
    own = str(options.get("dependency", ""))
    if "?" in own:
        raise ConfigError(
            f"slurm.dependency = {own!r} means any of several, and the run's own stages must be"
            " made too",
            hint="prep-data first, then train",
        )
    return [f"--dependency={own + ',' if own else ''}afterok:{ready}", "--kill-on-invalid-dep=yes"]


def submit(
    run: RunFolder, *, first_attempt: int, follows: str | None = None, further: Sequence[str] = ()
) -> str:
    """Submit a run's script and note Slurm's number of the job, which is returned.

    Args:
        first_attempt: see SlurmJob.
        follows: a job after whose end, whatever it is, this one begins.
        further: more words for sbatch, see `dependency_options`.

    Raises TrainkitError (exit 8) with sbatch's own words.
    """
    words = run_sbatch_argv(
        run, [*further, *([f"--dependency=afterany:{follows}"] if follows else [])]
    )
    id = sbatch(
        words,
        run.path,
        hint=(
            f"options come from clusters.X.slurm and jobs.X.slurm; `invoke train {run.job_name}"
            " --dry-run` prints the script"
        ),
    )
    add_slurm_job(run, id, first_attempt=first_attempt, follows=follows)
    return id


def sbatch(words: Sequence[str], folder: Path, *, hint: str) -> str:
    """Run a line of sbatch --parsable: the job's number. Raises TrainkitError (exit 8) with
    sbatch's own words."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in KEPT or not name.startswith(("SLURM_", "SBATCH_"))
    }
    late = "squeue --me says whether it has the job all the same"
    done = run_slurm(words, SUBMIT_SECONDS, late=late, folder=folder, environment=environment)
    id = done.stdout.strip().split("\n")[-1].partition(";")[0]
    if done.returncode != 0 or not id.isdigit():
        message = f"sbatch refuses the job: {slurms_words(done)}"
        raise TrainkitError(message, exit=Exit.START, hint=hint)
    return id


def write_script(
    run: RunFolder, job: Job, secret_values: Mapping[str, str], *, seconds: int | None = None
) -> None:
    """Write launch/slurm.sh, and for the supervisor on the node launch/secrets.json (0600): the
    job's environment has no secret."""
    write_text(script_path(run), batch_script(job, run, seconds=seconds), 0o755)
    if secret_values:
        write_json(secrets_path(run), {"schema": "secrets/1", "values": dict(secret_values)}, 0o600)


def secrets_path(run: RunFolder) -> Path:
    return run.path / "launch" / "secrets.json"


def read_secrets(run: RunFolder) -> dict[str, str]:
    """What the submitter left for the supervisor."""
    path = secrets_path(run)
    if path.is_file():
        return dict(read_document(path, "secrets/1")["values"])
    return {}


def note_end(run: RunFolder, id: str, ended: dict[str, object]) -> None:
    """Note how a job ended of which no supervisor could tell, see `SlurmJob.ended`; nobody is
    left who needs the secrets."""
    change_slurm_job(run, id, ended=ended)
    forget_secrets(run)


def forget_secrets(run: RunFolder) -> None:
    """Take their values off the disk."""
    secrets_path(run).unlink(missing_ok=True)
