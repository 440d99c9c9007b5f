"""What engines that are not trainkit's own have in common: their program runs beside a small one of
ours on every rank, which reads what it prints and judges how it ended."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trainkit.engines.compiled import engine_path
from trainkit.engines.contract import Command
from trainkit.engines.rank.nemo import saved_names
from trainkit.engines.rank.node_setup import NodeSetup
from trainkit.engines.rank.readers import READERS
from trainkit.engines.rank.spec import RankSpec, RequiredModule
from trainkit.jobs.schema import Job
from trainkit.plan.arithmetic import hardware_flops_per_token_of, model_flops_per_token_of
from trainkit.runs.checkpoint_list import ListedCheckpoint
from trainkit.runs.folder import RunFolder
from trainkit.runs.metrics import truncate_metrics

# why the engines keep a checkpoint
KEPT = {
    "megatron-lm": "megatron-lm deletes none",
    "gpt-neox": "gpt-neox keeps the newest, as many as checkpoint.keep_last says",
    "neuronx-nemo": "neuronx-nemo keeps the newest, as many as checkpoint.keep_last says",
    "nemo": "nemo keeps the best, as many as checkpoint.keep_last says, and the last",
}
# whose checkpoints have their step somewhere in their names
BY_STEP_AND_LOSS = ("nemo", "neuronx-nemo")


@dataclass(frozen=True)
class EngineProgram:
    """What an engine's rank runs.

    Args:
        engine: its name in jobs.toml.
        python: the interpreter that has what the engine needs.
        tree: the engine's source on the nodes.
        argv: the script of the tree and its arguments, with what stands for a rank's numbers as
            RankSpec says; with `program` its arguments.
        env: variables of the engine itself; the job's own lie over them.
        files: small files to write below the run folder, by relative name.
        saves_on_term: it saves a checkpoint and ends with 0 when it gets TERM.
        modules: what its interpreter must be able to import.
        reads: files that every node must see.
        versions: requirement lines that it is known to run with.
        saves: as of RankSpec.
        program: what is started instead of the interpreter, and starts the ranks of its node
            itself; "": each rank is the interpreter.
        node: what is set on each node before.
        port: as of Command.
        compiled: as of RankSpec, where it compiles graphs instead of training.
        compiled_for: as of RankSpec.
        checkpoints: where it saves; None: the run's folder for them.
        before: as of RankSpec.
        python_path: as of RankSpec.
        ends_in_time: as of RankSpec.
    """

    engine: str
    python: str
    tree: Path
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    saves_on_term: bool = False
    modules: tuple[RequiredModule, ...] = ()
    reads: tuple[Path, ...] = ()
    versions: tuple[str, ...] = ()
    saves: bool = True
    program: str = ""
    node: NodeSetup = field(default_factory=NodeSetup)
    port: int = 0
    compiled: str = ""
    compiled_for: str = ""
    checkpoints: Path | None = None
    before: tuple[str, ...] = ()
    python_path: tuple[str, ...] = ()
    ends_in_time: bool = False


def spec_name(attempt: int) -> str:
    """The spec of an attempt's ranks, below the run folder."""
    return f"launch/engine-rank-{attempt}.json"


def rank_command(job: Job, run: RunFolder, attempt: int, program: EngineProgram) -> Command:
    """The command of one attempt.

    Args:
        job: the job.
        run: its folder, with the code snapshot.
        attempt: counted from 1.
        program: what each rank runs.
    """
    model_flops, hardware_flops = _flops(job)
    spec = RankSpec(
        engine=program.engine,
        argv=(program.program or program.python, *program.argv),
        cwd=str(program.tree),
        checkpoints=str(program.checkpoints or run.checkpoints),
        metrics=str(run.metrics),
        train_iters=job.training.train_iters,
        log_interval=job.training.log_interval,
        global_batch_size=job.global_batch_size,
        seq_length=job.model.seq_length,
        world_size=job.world_size,
        model_flops=model_flops,
        hardware_flops=hardware_flops,
        peak_tflops=job.cluster.device.peak_tflops.get(job.training.precision),
        peak=_peak_words(job),
        saves_on_term=program.saves_on_term,
        modules=program.modules,
        reads=tuple(str(path) for path in program.reads),
        seen_seconds=_seen_seconds(job),
        path=tuple(str(folder) for folder in engine_path(job)),
        versions=program.versions,
        eval_interval=job.training.eval_interval or 0,
        eval_iters=job.training.eval_iters,
        saves=program.saves,
        python=program.python if program.program else "",
        starts_ranks=bool(program.program),
        node=program.node,
        compiled=program.compiled,
        compiled_for=program.compiled_for,
        before=(program.python, *program.before) if program.before else (),
        python_path=program.python_path,
        ends_in_time=program.ends_in_time,
        save_interval=job.training.save_interval or 0,
    )
    name = spec_name(attempt)
    main = run.code / "trainkit" / "engines" / "rank" / "main.py"
    return Command(
        argv=(program.python, "-I", "-S", str(main), str(run.path / name)),
        env={**program.env, **job.environment},
        secret_names=job.cluster.secrets,
        cwd=run.path,
        files={**program.files, name: json.dumps(spec.to_json(), indent=1) + "\n"},
        ranks_per_node=job.ranks_per_node,
        port=program.port,
        spawn="per_node" if program.program else "per_rank",
        engine_argv=spec.argv,
        engine_cwd=spec.cwd,
    )


def _flops(job: Job) -> tuple[float, float]:
    """FLOPs a token of the model, and with what is computed again, as the plan counts them for
    published engines; (0, 0) where the vocabulary is not known yet."""
    tokenizer = job.dataset.tokenizer
    vocab = job.model.vocab_size or (tokenizer.vocab_size if tokenizer else None)
    if vocab is None:
        return 0.0, 0.0
    model = model_flops_per_token_of(job.model, vocab)
    return model, hardware_flops_per_token_of(job.model, vocab, job.training, native=False)


def _seen_seconds(job: Job) -> float:
    """Until a file that one rank has written is seen by all: file systems over a network keep
    what they know of a file for some seconds (nfs(5), "acregmin")."""
    if job.cluster.launcher_traits.one_machine:
        return 1.0
    return 10.0


def _peak_words(job: Job) -> str | None:
    device = job.cluster.device
    peak = device.peak_tflops.get(job.training.precision)
    if peak is None:
        return None
    return f"{peak:g} TFLOP/s ({device.label or device.name}, {job.training.precision})"


def take_back_metrics(job: Job, run: RunFolder) -> None:
    """Take back the rows after the checkpoint from which the engine will go on: it makes them
    again."""
    truncate_metrics(run.metrics, READERS[job.engine].tracked_step(run.checkpoints) or 0)


def listed_checkpoints(engine: str, run: RunFolder) -> list[ListedCheckpoint]:
    """The run's checkpoints as the engine's own rules judge them."""
    return [
        ListedCheckpoint(
            found.step,
            str(found.folder),
            found.bytes,
            kept=[KEPT[engine]],
            problems=list(found.problems),
        )
        for found in READERS[engine].found_checkpoints(run.checkpoints)
    ]


def checkpoint_names(engine: str, run: RunFolder) -> list[str]:
    """The folders of a run's checkpoints up to the one that the engine would go on from, by their
    names alone: to judge all of a long run takes a shared file system its time."""
    if engine in BY_STEP_AND_LOSS:
        return [each.name for each in saved_names(run.checkpoints) if not each.unfinished]
    newest = READERS[engine].tracked_step(run.checkpoints)
    if newest is None:
        return []
    found = {
        int(match[1]): folder.name
        for folder in run.checkpoints.iterdir()
        if (match := re.fullmatch(r"(?:iter_|global_step)(\d+)", folder.name))
    }
    return [name for step, name in sorted(found.items()) if step <= newest]
