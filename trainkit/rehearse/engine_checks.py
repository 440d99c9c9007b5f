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
from trainkit.engines.gpt_neox.config import SAID_BY_THE_JOB
from trainkit.engines.registry import ENGINES
from trainkit.engines.sources import engine_python, source_tree
from trainkit.jobs.schema import Job
from trainkit.rehearse.report import NotLookedAt
from trainkit.rehearse.scene import RehearsalScene
from trainkit.runs.folder import RunFolder

SECONDS = 60.0
PARSED = "trainkit: parsed"
CHECKED = "trainkit: checked"
REFUSED = "trainkit: refused "
# Programs of the engine's interpreter, in its tree. What an engine asserts is its own refusal;
# any other error is of the place: a package or a GPU that is missing here.
REFUSAL = f"""
import json, sys, traceback
sys.path.insert(0, ".")

def refused(error):
    frame = traceback.extract_tb(error.__traceback__)[-1]
    print({REFUSED!r} + json.dumps(str(error) or frame.line), flush=True)
"""
MEGATRON = f"""{REFUSAL}
try:
    from megatron.training import arguments
except ImportError:
    from megatron import arguments
try:
    args = arguments.parse_args()
    print({PARSED!r}, flush=True)
    # that of 2021 validates by itself
    if hasattr(arguments, "validate_args"):
        arguments.validate_args(args, {{"tokenizer_type": "GPT2BPETokenizer"}})
    print({CHECKED!r}, flush=True)
except (AssertionError, ValueError) as error:
    refused(error)
"""
NEOX = f"""{REFUSAL}
from megatron.neox_arguments import NeoXArgs
# it would write into the run's folder
NeoXArgs.enable_logging = lambda self: None
try:
    NeoXArgs.from_ymls([sys.argv[1]], overwrite_values={{"global_num_gpus": int(sys.argv[2])}})
    print({CHECKED!r}, flush=True)
except (AssertionError, ValueError) as error:
    refused(error)
"""
PROGRAMS = {"megatron-lm": MEGATRON, "gpt-neox": NEOX}


def check_parser(scene: RehearsalScene) -> str:
    """Megatron-LM's and GPT-NeoX's own parsers take what they would get. Other engines read files,
    whose keys were compared with the table of their version."""
    job = scene.job
    if job.is_native:
        return "native reads job.json itself"
    if job.container is not None:
        raise NotLookedAt("the engine is in the job's image")
    if ENGINES[job.engine].problems(job):
        raise NotLookedAt("the command cannot be made: see engine")
    if job.engine not in PROGRAMS:
        raise NotLookedAt(f"{job.engine} reads files: its keys were compared with its version's")
    tree = source_tree(job)
    python = str(engine_python(job))
    if shutil.which(python) is None or not (tree / "megatron").is_dir():
        raise NotLookedAt(f"{python} and {tree} are not both here: see stages")
    run = RunFolder(scene.root.absolute() / "runs" / job.name / "RUN")
    command = ENGINES[job.engine].command(job, run, 1)
    with tempfile.TemporaryDirectory(prefix="rehearse-") as name:
        words = _words(job, command, Path(name))
        done = _ask(job, python, tree, command, words)
    return _verdict(job, done, words)


def _words(job: Job, command: Command, folder: Path) -> Sequence[str]:
    """What the program is given."""
    if job.engine == "megatron-lm":
        argv = command.engine_argv
        script = next(number for number, word in enumerate(argv) if word.endswith(".py"))
        return argv[script + 1 :]
    config = folder / f"{job.name}.yml"
    config.write_text(command.files[f"launch/{config.name}"])
    return str(config), str(job.world_size)


def _ask(
    job: Job, python: str, tree: Path, command: Command, words: Sequence[str]
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
            [python, "-c", PROGRAMS[job.engine], *words],
            cwd=tree,
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


def _verdict(job: Job, done: subprocess.CompletedProcess[str], words: Sequence[str]) -> str:
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
            hint=f"correct {_key(job, refusals[0])}",
        )
    why = said[-1] if said else f"it ended with {done.returncode}"
    if CHECKED in out:
        if job.engine == "gpt-neox":
            return "gpt-neox's own parser takes the configuration"
        return f"megatron-lm's own parser and checks take all {len(words)} words"
    if PARSED in out:
        return (
            f"megatron-lm's own parser takes all {len(words)} words; its validate_args does not"
            f" run here: {why}"
        )
    raise NotLookedAt(f"{job.engine}'s parser does not run here: {why}")


def _key(job: Job, message: str) -> str:
    """The key of jobs.toml that a refusal is about, as far as the message names an option."""
    said = re.sub(r"[\W_]+", "_", message).lower()
    given = [name.strip("-").replace("-", "_") for name in job.engine_args]
    keys = {name: f"jobs.{job.name}.engine_args.{name}" for name in given}
    if found := [name for name in {**SAID_BY_THE_JOB, **keys} if len(name) > 3 and name in said]:
        return {**SAID_BY_THE_JOB, **keys}[max(found, key=len)]
    return f"jobs.{job.name}.engine_args or args"
