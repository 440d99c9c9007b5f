"""Checks of where a job runs and of what is started there: hosts, programs, secrets, container,
folders, disk, stages, and what another engine's own parser says of its arguments."""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from trainkit.base.errors import ConfigError, Exit, Problem, TrainkitError, raise_problems
from trainkit.engines.contract import Command
from trainkit.engines.own_parser import CHECKED, PARSED, REFUSED, OwnParser
from trainkit.engines.registry import ENGINES, foreign_engine, refuse_unlaunchable
from trainkit.engines.sources import engine_python, source_tree
from trainkit.jobs.schema import Job
from trainkit.launch.containers import check_container
from trainkit.launch.scheduler_registry import scheduler_for
from trainkit.launch.supervise.rank_environment import refuse_without_wandb, secret_values
from trainkit.plan.planner import refuse_infeasible
from trainkit.plan.storage import GIB
from trainkit.rehearse.scene import NotLookedAt, RehearsalScene
from trainkit.stages.execute import missing_units, stamps_folder

# what a launcher's commands begin with on the machine where you type
PROGRAMS = {
    "slurm": ("sbatch", "srun", "squeue", "scancel"),
    "ssh": ("ssh",),
    "pdsh": ("pdsh",),
    "kubernetes": ("kubectl",),
}
QUOTA_SECONDS = 10.0
PARSER_SECONDS = 60.0
MISNAMED = 0.25  # share by which a name may be wrong about the number of parameters


def check_plan(scene: RehearsalScene) -> str:
    """The plan has no objection."""
    plan = refuse_infeasible(scene.plan)
    if plan.not_known:
        raise NotLookedAt("; ".join(each.message for each in plan.not_known))
    size = f"{(plan.parameters or 0) / 1e6:,.1f} million parameters"
    notes = [note.message for note in plan.notes]
    for name in dict.fromkeys((scene.job.model.name, scene.job.name)):
        named = named_size(name)
        if plan.parameters and named and abs(plan.parameters / named - 1) > MISNAMED:
            notes.append(
                f"{name!r} says {named / 1e6:,.0f} million: correct num_layers and hidden_size, or"
                " the name"
            )
    return "; ".join([f"{size}, {plan.world_size} ranks", *(f"note: {note}" for note in notes)])


def named_size(name: str) -> float | None:
    """Parameters that a name promises: "gpt3-175b", "azure-375m", "jean-zay-7-5b"; None where it
    has no such word."""
    found = re.search(r"(?<![a-z0-9])(\d+(?:[.-]\d+)?)([mb])(?![a-z0-9])", name)
    if found is None:
        return None
    return float(found[1].replace("-", ".")) * {"m": 1e6, "b": 1e9}[found[2]]


def check_launchable(scene: RehearsalScene) -> str:
    """This version can start it, and its engine takes all that it is given."""
    job = scene.job
    refuse_unlaunchable(job)
    return "; ".join([f"engine {job.engine} takes it", *ENGINES[job.engine].notes(job)])


def check_hosts(scene: RehearsalScene) -> str:
    """There are as many hosts as nodes."""
    job = scene.job
    scheduler = scheduler_for(job.cluster)
    if scheduler.queues and not scene.options.existing:
        found = scheduler.examine(job)
        raise_problems(
            Problem(f"{each.host}: {each.message}", hint=each.advice)
            for each in found
            if each.wrong
        )
        notes = "".join(f"; note: {each.host}: {each.message}" for each in found)
        raise NotLookedAt(
            f"{scheduler.title} chooses the nodes; invoke doctor {job.cluster.name} asks those that"
            f" are free{notes}"
        )
    hosts = scene.hosts
    names = ", ".join(host.name for host in hosts.running[:4])
    more = f" and {len(hosts.running) - 4} more" if len(hosts.running) > 4 else ""
    ask = ""
    if not job.cluster.launcher_traits.one_machine:
        ask = f"; whether they answer: invoke doctor {job.cluster.name}"
    return f"{names}{more}, {hosts.ranks_per_node} ranks each{ask}"


def check_programs(scene: RehearsalScene) -> str:
    """The launcher's programs are on this machine, and the command of the ranks can be made."""
    job = scene.job
    wanted = PROGRAMS.get(job.cluster.launcher, ())
    if missing := [name for name in wanted if shutil.which(name) is None]:
        raise ConfigError(
            f"launcher = '{job.cluster.launcher}' needs {', '.join(missing)}, which is not on PATH"
            " here",
            exit=Exit.START,
            hint=(
                "install it, rehearse and train where it is, or choose another cluster (--cluster)"
            ),
        )
    program = scene.command.argv[0]
    here = job.cluster.launcher_traits.one_machine and job.container is None
    if here and shutil.which(program) is None:
        raise ConfigError(
            f"the ranks' program {program} is not here",
            exit=Exit.START,
            hint=f"clusters.{job.cluster.name}.python or engines.X.python names an interpreter",
        )
    found = ", ".join((*wanted, Path(program).name))
    if not here:
        found += f"; {program} on the nodes was not looked at: invoke doctor {job.cluster.name}"
    return found


def check_secrets(scene: RehearsalScene) -> str:
    """Secrets that ranks need are in the environment, and so is what reports need."""
    names = scene.job.cluster.secrets
    refuse_without_wandb(scene.job)
    if scene.job.cluster.launcher_traits.pods:
        return f"pods have {len(names)} of the namespace's secrets" if names else "none asked for"
    values = secret_values(names, os.environ)
    if not names:
        return "none asked for"
    return f"{len(values)} of {len(names)} are set"


def check_mounts(scene: RehearsalScene) -> str:
    """The container's file is whole, and what it mounts is there."""
    job = scene.job
    container = job.container
    if container is None:
        return "no container"
    check_container(job)
    image = Path(container.image)
    missing = [
        source
        for source in (text.split(":")[0] for text in container.mounts)
        if not Path(source).exists()
    ]
    if container.image.startswith("/") and not container.is_made and not image.exists():
        missing.insert(0, container.image)
    key = f"containers.{container.name}"
    here = [path for path in missing if _must_be_here(scene, path)]
    if here:
        raise ConfigError(
            [
                Problem(
                    f"{key} needs {path}, which is not there",
                    hint=f"make it, or correct {key}.mounts or {key}.image",
                )
                for path in here
            ]
        )
    if job.cluster.launcher_traits.one_machine and shutil.which(container.runtime) is None:
        raise ConfigError(
            f"{key}.runtime = '{container.runtime}' is not on PATH here",
            exit=Exit.START,
            hint="install it, or --set container=none runs without",
        )
    if missing:
        raise NotLookedAt(
            f"{', '.join(missing)}: not on this machine; whether nodes have it: invoke doctor"
            f" {job.cluster.name}"
        )
    return f"{container.runtime}, {container.image}, {len(container.mounts)} mounts"


def _must_be_here(scene: RehearsalScene, path: str) -> bool:
    """Whether what nodes see under this path is what this machine sees."""
    if scene.job.cluster.launcher_traits.one_machine:
        return True
    try:
        _existing(scene)
    except NotLookedAt:
        return False
    return Path(path).is_relative_to(scene.root.absolute())


def check_root(scene: RehearsalScene) -> str:
    """The shared folder is there and can be written."""
    root = scene.root.absolute()
    there = _existing(scene)
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{there} cannot be written, and runs go below {root}",
            hint=f"clusters.{scene.job.cluster.name}.root must be a folder of yours",
        )
    return f"{root} can be written"


def _existing(scene: RehearsalScene) -> Path:
    """The cluster's root, or the nearest folder above it that is there. Raises NotLookedAt where
    its file system is that of other machines."""
    root = scene.root.absolute()
    there = next(folder for folder in (root, *root.parents) if folder.is_dir())
    one_machine = scene.job.cluster.launcher_traits.one_machine
    if there != root and not one_machine and len(there.parts) < 3:
        raise NotLookedAt(f"{root} is not on this machine: rehearse where its file system is")
    return there


def check_disk(scene: RehearsalScene) -> str:
    """There is room for the checkpoints that lie there at once, by free space and quota."""
    storage = scene.plan.storage
    if storage is None and scene.plan.between:
        raise NotLookedAt("the size of a checkpoint is known when the vocabulary is")
    if storage is None:
        return "no checkpoints are written"
    there = _existing(scene)
    wanted = storage.on_disk_bytes
    words = f"{storage.on_disk} checkpoints of {storage.checkpoint_bytes / GIB:,.2f} GiB at once"
    room = {"free": shutil.disk_usage(there).free}
    quota = quota_left(there)
    if quota is not None:
        room["left of your quota"] = quota
    for name, size in room.items():
        if size < wanted:
            raise ConfigError(
                f"{words}, and {there} has {size / GIB:,.2f} GiB {name}",
                exit=Exit.PLAN,
                hint=(
                    "delete old runs (invoke clean), lower checkpoint.keep_last, or move"
                    f" clusters.{scene.job.cluster.name}.root"
                ),
            )
    known = ", ".join(f"{size / GIB:,.1f} GiB {name}" for name, size in room.items())
    if quota is None:
        known += ", no quota known"
    return f"{words}; {known}"


def quota_left(folder: Path) -> int | None:
    """Bytes that the caller's quota leaves on a Lustre file system, or one that quota(1) knows;
    None where no program says one.

    `lfs quota -q -u USER FOLDER` prints: folder, kilobytes used (with * where over), quota,
    limit, ...; 0 means no limit (lfs-quota(1)).
    """
    if shutil.which("lfs") is None:
        return None
    argv = ["lfs", "quota", "-q", "-u", getpass.getuser(), str(folder)]
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=QUOTA_SECONDS, check=True
        )
        words = done.stdout.split()
        used, soft, hard = (int(word.rstrip("*")) for word in words[1:4])
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    limit = hard or soft
    return None if not limit else max(0, limit - used) * 1024


def check_stages(scene: RehearsalScene) -> str:
    """All that the job needs is there, or can be made: what that would take."""
    stale: list[str] = []
    for need, verdict in zip(scene.needs, scene.verdicts, strict=True):
        if need.announcement is not None and not verdict.fresh:
            need.announcement.check_space()
        if not verdict.fresh:
            count = len(missing_units(need, stamps_folder(scene.root, need.stage), force=False))
            units = "1 unit" if count == 1 else f"{count} units"
            stale.append(f"{need.stage} {need.name} ({units}) because {verdict.because}")
    if stale and scene.options.no_stages:
        raise TrainkitError(
            "; ".join(stale),
            exit=Exit.STAGE_STALE,
            hint=f"without --no-stages, or invoke prep-data --job {scene.job.name} first",
        )
    fresh = sum(verdict.fresh for verdict in scene.verdicts)
    if stale:
        return f"{fresh} fresh; train would make first: {'; '.join(stale)}"
    return f"{fresh} fresh"


def check_parser(scene: RehearsalScene) -> str:
    """The own parsers of Megatron-LM, Megatron-Bridge and GPT-NeoX take what they would get. Other
    engines read files, whose keys were compared with the table of their version."""
    job = scene.job
    if job.is_native:
        return "native reads job.json itself"
    if job.container is not None:
        raise NotLookedAt("the engine is in the job's image")
    engine = foreign_engine(job.engine)
    if engine.parser is None:
        raise NotLookedAt(f"{job.engine} reads files: its keys were compared with its version's")
    tree = source_tree(job)
    python = str(engine_python(job))
    if shutil.which(python) is None or engine.lacks(tree):
        raise NotLookedAt(f"{python} and {tree} are not both here: see stages")
    command = scene.command
    with tempfile.TemporaryDirectory(prefix="rehearse-") as name:
        words = engine.parser.words(job, command, Path(name))
        done = _ask_parser(job, engine.parser, command, words)
    return _verdict(job, engine.parser, done, words)


def _ask_parser(
    job: Job, parser: OwnParser, command: Command, words: Sequence[str]
) -> subprocess.CompletedProcess[str]:
    """Run the engine's program, without a GPU."""
    environment = {
        **os.environ,
        **command.env,
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(job.world_size),
        "CUDA_VISIBLE_DEVICES": "",
    }
    try:
        return subprocess.run(
            [str(engine_python(job)), "-c", parser.program, *words],
            cwd=source_tree(job),
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PARSER_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NotLookedAt(f"{job.engine}'s parser took more than {PARSER_SECONDS:.0f} s") from None


def _verdict(
    job: Job, parser: OwnParser, done: subprocess.CompletedProcess[str], words: Sequence[str]
) -> str:
    out = done.stdout.splitlines()
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    refusals = [json.loads(line[len(REFUSED) :]) for line in out if line.startswith(REFUSED)]
    # argparse's way to say no
    if done.returncode == 2 and any("error: " in line for line in said):
        refusals = [said[-1].partition("error: ")[2] or said[-1]]
    if refusals:
        raise ConfigError(
            f"{job.engine}'s own parser: {refusals[0]}",
            exit=Exit.CONFIG,
            hint=f"correct {_refused_key(job, parser, refusals[0])}",
        )
    why = said[-1] if said else f"it ended with {done.returncode}"
    if CHECKED in out:
        return parser.takes.format(words=len(words))
    if PARSED in out:
        return (
            f"{job.engine}'s own parser takes all {len(words)} words; its further checks do not"
            f" run here: {why}"
        )
    raise NotLookedAt(f"{job.engine}'s parser does not run here: {why}")


def _refused_key(job: Job, parser: OwnParser, message: str) -> str:
    """The key of jobs.toml that a refusal is about, as far as the message names an option."""
    said = re.sub(r"[\W_]+", "_", message).lower()
    given = [name.strip("-").replace("-", "_") for name in job.engine_args]
    keys = {name: f"jobs.{job.name}.engine_args.{name}" for name in given}
    keys = {name.replace("-", "_"): key for name, key in parser.set_by.items()} | keys
    if found := [name for name in keys if len(name) > 3 and name in said]:
        return keys[max(found, key=len)]
    return f"jobs.{job.name}.engine_args or args"
