"""What another engine's own parser says of the arguments that it would get."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from trainkit.base.errors import ConfigError, Exit
from trainkit.engines.registry import ENGINES
from trainkit.rehearse.report import NotLookedAt
from trainkit.rehearse.scene import RehearsalScene
from trainkit.runs.folder import RunFolder

SECONDS = 60.0
SAID = 3  # lines of the parser's that a message has
# parse_args is argparse's; validate_args would ask for a GPU
MEGATRON = """
import sys
sys.path.insert(0, ".")
try:
    from megatron.training.arguments import parse_args
except ImportError:
    from megatron.arguments import parse_args
parse_args()
"""


def check_parser(scene: RehearsalScene) -> str:
    """Megatron-LM's argparse takes the command line. Other engines read files, whose keys were
    compared with the table of their version."""
    job = scene.job
    if job.engine == "native":
        return "native reads job.json itself"
    if job.container is not None:
        raise NotLookedAt("the engine is in the job's image")
    if ENGINES[job.engine].problems(job):
        raise NotLookedAt("the command cannot be made: see engine")
    run = RunFolder(scene.root.absolute() / "runs" / job.name / "RUN")
    command = ENGINES[job.engine].command(job, run, 1)
    if job.engine != "megatron-lm":
        raise NotLookedAt(f"{job.engine} reads files: its keys were compared with its version's")
    python, script, *words = command.engine_argv
    tree = Path(command.engine_cwd)
    if shutil.which(python) is None or not (tree / script).is_file():
        raise NotLookedAt(f"{python} and {tree} are not both here: see stages")
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": str(job.world_size), "LOCAL_RANK": "0"}
    try:
        done = subprocess.run(
            [python, "-c", MEGATRON, *words],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NotLookedAt(f"megatron-lm's parser had not ended after {SECONDS:.0f} s") from None
    said = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode == 2 and any("error: " in line for line in said):
        raise ConfigError(
            f"megatron-lm's own parser: {said[-1].partition('error: ')[2] or said[-1]}",
            exit=Exit.CONFIG,
            hint=f"correct jobs.{job.name}.engine_args or args",
        )
    if done.returncode:
        raise NotLookedAt(f"megatron-lm's parser does not run here: {' '.join(said[-SAID:])}")
    return f"megatron-lm's own parser takes all {len(words)} words"
