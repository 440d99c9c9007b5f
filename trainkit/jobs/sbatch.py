"""The long options of sbatch, as clusters.X.slurm and jobs.X.slurm take them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

# sbatch(1) of Slurm 22.05, and what later versions (to 24.11) added
_NAMES = """
    account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment
    constraint container container-id contiguous core-spec cores-per-socket cpu-freq
    cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution error exclude
    exclusive export export-file extra extra-node-info get-user-env gid gpu-bind gpu-freq gpus
    gpus-per-node gpus-per-socket gpus-per-task gres gres-flags help hint hold ignore-pbs input
    job-name kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu
    mem-per-gpu mincpus network nice no-kill no-requeue nodefile nodelist nodes ntasks
    ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket oom-kill-step open-mode
    output overcommit oversubscribe parsable partition power prefer priority profile propagate
    qos quiet reboot requeue reservation resv-ports segment signal sockets-per-node spread-job
    stepmgr switches test-only thread-spec threads-per-core time time-min tmp tres-bind
    tres-per-task uid usage use-min-nodes verbose version wait wait-all-nodes wckey wrap"""
OPTIONS = frozenset(_NAMES.split())
# Those of pyxis, which is a plugin and has none of its own in Slurm
_PYXIS = """
    container-image container-mounts container-workdir container-name container-save
    container-mount-home no-container-mount-home container-remap-root no-container-remap-root
    container-entrypoint no-container-entrypoint container-entrypoint-log container-writable
    container-readonly container-env"""
PYXIS = frozenset(_PYXIS.split())
OURS = {
    "nodes": "jobs.X.nodes says how many",
    "array": "a run is one job",
    "wrap": "trainkit writes the script",
    "wait": "trainkit follows the job itself; sbatch --wait may return half a minute late",
    "parsable": "trainkit reads what sbatch prints",
    "test-only": "`invoke train JOB --dry-run` submits nothing",
    "input": "ranks read no standard input",
    "chdir": "the batch script names its folders in full",
    "error": "both streams go to one file: output",
    "export-file": "environment variables belong into clusters.X.env",
    "container": "OCI bundles cannot be used here",
    **dict.fromkeys(
        ("help", "usage", "version", "verbose", "quiet", "ignore-pbs", "uid", "gid"),
        "it would not describe the job",
    ),
}


def objection(name: str) -> str:
    """What is wrong with an option of this name, in words; "" where it may be used."""
    if name in OURS:
        return f"slurm.{name} cannot be set: {OURS[name]}"
    if name in PYXIS:
        return (
            f"slurm.{name} belongs into a [containers.X] table, from which the line of srun is made"
        )
    if name in OPTIONS:
        return ""
    close = difflib.get_close_matches(name, OPTIONS, n=1, cutoff=0.6)
    return f"slurm.{name} is not a long option of sbatch" + (
        f"; did you mean '{close[0]}'?" if close else ""
    )


def limit_seconds(options: Mapping[str, object]) -> int | None:
    """The time limit that `time` asks for, in seconds; None for none, and for words that only
    sbatch understands. sbatch(1) has the forms."""
    days, dash, rest = str(options.get("time", "")).rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in parts) or len(parts) > 3 or (dash and not days.isdigit()):
        return None
    numbers = [int(part) for part in parts]
    if dash:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, minutes, seconds = 0, *(*numbers, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds or None


def signal_time(options: Mapping[str, object]) -> int | None:
    """The seconds before the time limit in `signal`, "[R][B:]NAME[@SECONDS]"; None where it is
    not set."""
    if "signal" not in options:
        return None
    seconds = str(options["signal"]).partition("@")[2] or "60"
    return int(seconds) if seconds.isdigit() else None


def signal_objection(options: Mapping[str, object]) -> str:
    """What is wrong with a signal that comes before the job begins; "" where nothing is."""
    limit = limit_seconds(options)
    ahead = signal_time(options)
    if limit is None or ahead is None or ahead < limit:
        return ""
    said = (
        f"slurm.signal = {options['signal']!r} comes {ahead} s before the end of slurm.time ="
        f" {options['time']!r}, which is {limit} s: at once"
    )
    return (
        f"{said}, and nothing is trained; give it less, or leave it out: trainkit takes 5 minutes,"
        " or a quarter of a shorter limit"
    )


def words(options: dict[str, str | int | bool]) -> list[str]:
    """Options as words of a command line; one that is false is left out."""
    return [
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in options.items()
        if value is not False
    ]


TIME = r"(\d+-)?\d+(:\d+){0,2}"
NO_LIMIT = ("UNLIMITED", "INFINITE")
SIZE = r"(\d+)([KMGTkmgt]?)[Bb]?"


def wrong_value(name: str, value: str | int | bool) -> str:
    """What is wrong with an option's value, in words; "" where sbatch may take it. Looked at are
    those that a plan counts with."""
    text = str(value)
    if (
        name in ("time", "time-min")
        and not re.fullmatch(TIME, text)
        and text.upper() not in NO_LIMIT
    ):
        return (
            f"slurm.{name} = {value!r} is not a time of Slurm: MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM,"
            " D-HH:MM:SS or UNLIMITED"
        )
    if name == "mem" and not re.fullmatch(SIZE, text):
        return (
            f"slurm.{name} = {value!r} is not a size of Slurm: a number with K, M, G or T behind"
            " it, such as 500G; 0 is all there is"
        )
    return ""
