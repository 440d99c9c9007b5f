"""What another engine's own parser says of the arguments that it would get."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from trainkit.base.errors import ConfigError, Exit
from trainkit.engines.contract import Command
from trainkit.engines.own_parser import CHECKED, PARSED, REFUSED, OwnParser
from trainkit.engines.registry import foreign_engine
from trainkit.engines.sources import engine_python, source_tree
from trainkit.jobs.schema import Job
from trainkit.rehearse.scene import NotLookedAt, RehearsalScene

SECONDS = 60.0


def check_parser(scene: RehearsalScene) -> str:
    """Megatron-LM's and GPT-NeoX's own parsers take what they would get. Other engines read files,
    whose keys were compared with the table of their version."""
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
    if shutil.which(python) is None or not (tree / "megatron").is_dir():
        raise NotLookedAt(f"{python} and {tree} are not both here: see stages")
    command = scene.command
    with tempfile.TemporaryDirectory(prefix="rehearse-") as name:
        words = engine.parser.words(job, command, Path(name))
        done = _ask(job, engine.parser, command, words)
    return _verdict(job, engine.parser, done, words)


def _ask(
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
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NotLookedAt(f"{job.engine}'s parser took more than {SECONDS:.0f} s") from None


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
            hint=f"correct {_key(job, parser, refusals[0])}",
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


def _key(job: Job, parser: OwnParser, message: str) -> str:
    """The key of jobs.toml that a refusal is about, as far as the message names an option."""
    said = re.sub(r"[\W_]+", "_", message).lower()
    given = [name.strip("-").replace("-", "_") for name in job.engine_args]
    keys = {name: f"jobs.{job.name}.engine_args.{name}" for name in given}
    keys = {name.replace("-", "_"): key for name, key in parser.set_by.items()} | keys
    if found := [name for name in keys if len(name) > 3 and name in said]:
        return keys[max(found, key=len)]
    return f"jobs.{job.name}.engine_args or args"
