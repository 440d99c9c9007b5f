"""What engines that are not trainkit's own have in common: their program runs beside a small one of
ours on every rank, which reads what it prints and judges how it ended."""

from __future__ import annotations

import itertools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from trainkit.base.errors import ConfigError, Problem, raise_problems
from trainkit.base.files import write_text
from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.engines.compiled import engine_path
from trainkit.engines.contract import Command, launcher_problems
from trainkit.engines.imported import ImportedJob, ImportRequest
from trainkit.engines.options import OptionTable, load_table, version_at
from trainkit.engines.own_parser import OwnParser, asked_table, asks, has_changed, not_asked
from trainkit.engines.rank.node_setup import NodeSetup
from trainkit.engines.rank.readers import READERS
from trainkit.engines.rank.spec import RankSpec, RequiredModule
from trainkit.engines.sources import is_url, source_of, source_tree
from trainkit.jobs.schema import Job, Model
from trainkit.plan.arithmetic import hardware_flops_per_token_of, model_flops_per_token_of
from trainkit.plan.rules import Rules
from trainkit.runs.folder import RunFolder
from trainkit.runs.metrics import truncate_metrics
from trainkit.runs.retention import ListedCheckpoint


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
    peak = job.cluster.device.peak_tflops.get(job.training.precision)
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
        peak_tflops=peak,
        peak=None if peak is None else _peak_words(job, peak),
        saves_on_term=program.saves_on_term,
        modules=program.modules,
        reads=tuple(map(str, program.reads)),
        # clients of a file system over a network see a file some seconds late: nfs(5), "acregmin"
        seen_seconds=1.0 if job.cluster.launcher_traits.one_machine else 10.0,
        path=tuple(map(str, engine_path(job))),
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
    main = str(run.code / "trainkit/engines/rank/main.py")
    return Command(
        argv=(program.python, "-I", "-S", main, str(run.path / name)),
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


def _peak_words(job: Job, peak: float) -> str:
    device = job.cluster.device
    return f"{peak:g} TFLOP/s ({device.label or device.name}, {job.training.precision})"


def run_name(run: RunFolder) -> str:
    """Of a run, for reports."""
    return f"{run.job_name}-{run.id}"


def trait_problems(engine: str, model: Model, known: frozenset[str]) -> list[Problem]:
    """What of a model an engine cannot compute, whatever its version.

    Args:
        engine: its name.
        model: the shape.
        known: traits that it can.
    """
    asked = model.traits
    if model.parametrization != "standard":
        asked["parametrization"] = model.parametrization
    return [
        Problem(
            f"models.{model.name}: {engine} has no {key} = {value!r} (family {model.family!r})",
            hint="engine = 'native' has it",
        )
        for key, value in asked.items()
        if key not in known
    ]


class ForeignEngine(ABC):
    """An engine with a tree of its own, and with options that differ by its version.

    Each says the attributes without a value and the abstract methods; the rest where it differs.
    """

    name: ClassVar[str]
    rules: ClassVar[Rules]
    # what every tree of it holds, whatever its version
    entry_files: ClassVar[tuple[str, ...]]
    # why it keeps a checkpoint
    keeps: ClassVar[str]
    # the file that names the checkpoint it goes on from, and how; "": it looks for the newest
    tracker: ClassVar[str] = ""
    tracks: ClassVar[str] = "{step}"
    # how checkpoints come to be read by ranks of other degrees, as the end of a hint
    other_degrees: ClassVar[str] = ""
    # kinds of device that it computes on
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    # keys of [models.X] beyond those of GPT, GPT-NeoX and Llama that it can compute (Model.traits)
    traits: ClassVar[frozenset[str]] = frozenset()
    # whether it has graphs that are compiled before training
    compiles: ClassVar[bool] = False
    # folders of its tree that are submodules, and needed
    submodules: ClassVar[tuple[str, ...]] = ()
    # folders of its tree that are installed as wheels
    wheels: ClassVar[tuple[str, ...]] = ()
    # Python of one line that compiles its CUDA kernels as it does itself; "": it has none
    load_kernels: ClassVar[str] = ""
    # its own parser, for a rehearsal; None: it reads a file, whose keys are compared here
    parser: ClassVar[OwnParser | None] = None

    @abstractmethod
    def version_in(self, tree: Path) -> str | None:
        """What version the text of a tree says it is; None where it says none."""

    @abstractmethod
    def option_problems(self, job: Job, table: OptionTable) -> list[Problem]:
        """What of a job a version cannot do, before anything of its data is there."""

    @abstractmethod
    def command(self, job: Job, run: RunFolder, attempt: int) -> Command:
        """As of Engine."""

    @abstractmethod
    def import_job(self, request: ImportRequest) -> ImportedJob:
        """Another project's files of this engine as a job. Raises ConfigError: they cannot be
        read, or are none of it."""

    @abstractmethod
    def is_its_file(self, path: Path, text: str) -> bool:
        """Whether a file to import is this engine's, by its name and its first lines."""

    def lacks(self, tree: Path) -> list[str]:
        """Which of the files that every tree of it holds are not in a folder."""
        return [name for name in self.entry_files if not (tree / name).is_file()]

    def version_of_tree(self, tree: Path) -> str:
        """What version a tree is, read from its text: "core-0.12.0" or "2021" for Megatron-LM,
        "2.0.0" or "1.0.0" for GPT-NeoX, "2.21" or "2.13.1" for neuronx-nemo-megatron,
        "22.09" or "24.12" for the NeMo of those launchers.

        Raises ConfigError (exit 3) where the folder is missing or holds no such engine.
        """
        if not tree.is_dir():
            raise ConfigError(
                f"the tree of {self.name} is not at {tree}",
                hint=(
                    "`invoke train` clones it where engines.X.source is a URL; a folder has to be"
                    " there (one inside an image cannot be read from here: set engines.X.version)"
                ),
            )
        if missing := self.lacks(tree):
            raise ConfigError(
                f"{tree} is not a tree of {self.name}: it has no {missing[0]}",
                hint=(
                    f"git -C {tree} submodule update --init"
                    if missing[0].startswith(self.submodules)
                    else f"set engines.X.source to the top folder of {self.name}, or to its git URL"
                ),
            )
        version = self.version_in(tree)
        if version is None:
            raise ConfigError(
                f"{tree} does not say which version of {self.name} it is",
                hint="set engines.X.version to the table of options that fits it",
            )
        return version

    def version_at(self, revision: str) -> str | None:
        """The version that a commit, tag or branch is known to be."""
        return version_at(self.name, revision)

    def version_of(self, job: Job) -> str | None:
        """Whose options a job's tree has: what [engines.X] says, what its commit, tag or branch
        is, what the tree says. None where the tree is still to be cloned and its revision says
        nothing.

        Raises ConfigError: the job names no source, or the tree is none of the engine.
        """
        source = source_of(job)
        if source.version is not None:
            return source.version
        if source.revision is not None and is_url(source.source):
            known = self.version_at(source.revision)
            if known is not None:
                return known
        tree = source_tree(job)
        if tree.exists() or not is_url(source.source):
            return self.version_of_tree(tree)
        return None

    def known_table(self, job: Job) -> OptionTable | None:
        """The options of the job's version; None where they are not known yet. Raises as
        `version_of`, and ConfigError where the tree's own parser cannot be asked."""
        version = self.version_of(job)
        if version is None:
            return None
        if not asks(job):
            return load_table(self.name, version)
        # of a tree that has changed since, the stage asks first
        return None if has_changed(job) else asked_table(job, version)

    def table_of(self, job: Job) -> OptionTable:
        """The options of the job's version. Raises ConfigError where they are not known."""
        found = self.known_table(job)
        if found is not None:
            return found
        version = self.version_of_tree(source_tree(job))
        if not asks(job):
            return load_table(self.name, version)
        if (asked := asked_table(job, version)) is None:
            raise not_asked(job)
        return asked

    def problems(self, job: Job) -> list[Problem]:
        """What this version of the engine cannot do. Nothing of its options while the tree is
        still to be cloned: `command` says it then."""
        found = [
            *launcher_problems(job, self.devices, compiles=self.compiles),
            *trait_problems(self.name, job.model, self.traits),
        ]
        try:
            table = self.known_table(job)
            if table is not None:
                found += self.option_problems(job, table)
        except ConfigError as error:
            found += error.list
        return found

    def notes(self, job: Job) -> list[str]:
        """Nothing where its version is not known yet."""
        try:
            table = self.known_table(job)
        except ConfigError:  # `problems` says it
            return []
        if table is None:
            return []
        return [*filter(None, [table.notice]), *self.version_notes(job, table)]

    def version_notes(self, job: Job, table: OptionTable) -> list[str]:
        """What of a job a version is given otherwise than it stands there, in words."""
        return []

    def saved_degrees(self, run: RunFolder) -> tuple[Path, Mapping[str, int]] | None:
        """The checkpoint that the engine goes on from where only ranks of the same degrees read
        it, and these by the keys of [jobs.X.parallelism]. None where any do."""
        return None

    def resume_problems(self, job: Job, run: RunFolder) -> list[Problem]:
        """That the checkpoint has a file of each rank that holds other weights, and the job has
        other degrees."""
        found = self.saved_degrees(run)
        place, saved = found or (None, {})
        asked = {key: getattr(job.parallelism, key) for key in saved}
        other = [key for key in saved if saved[key] != asked[key]]
        if not other:
            return []
        return [
            Problem(
                f"{place} was saved with {' and '.join(f'{key} {saved[key]}' for key in other)},"
                f" and the job has {' and '.join(str(asked[key]) for key in other)}",
                hint=f"resume with the same degrees{self.other_degrees}",
            )
        ]

    def ready_folder(self, run: RunFolder) -> None:
        """Let the tracker name the newest whole checkpoint: the engine loads what it names, and a
        save that was cut short may be newer."""
        if not self.tracker:
            return
        reader = READERS[self.name]
        found = reader.found_checkpoints(run.checkpoints)
        whole = {each.step for each in found if not each.problems}
        if reader.tracked_step(run.checkpoints) in whole:
            return
        tracker = run.checkpoints / self.tracker
        if whole:
            write_text(tracker, self.tracks.format(step=max(whole)))  # without a newline, as theirs
        else:
            tracker.unlink(missing_ok=True)

    def put_aside(self, run: RunFolder) -> None:
        """Give checkpoints that cannot be loaded a name that is none of the engine's: it would
        load the newest, count them as kept, delete whole ones for them, or save over them."""
        for found in READERS[self.name].found_checkpoints(run.checkpoints):
            if found.problems:
                names = (f"damaged-{found.step}-{n}" for n in itertools.count(1))
                free = next(name for name in names if not (run.checkpoints / name).exists())
                found.folder.rename(run.checkpoints / free)

    def before_attempt(self, job: Job, run: RunFolder) -> None:
        """Rows of metrics after the checkpoint from which the engine will go on are taken back:
        it makes them again."""
        self.ready_folder(run)
        raise_problems(self.resume_problems(job, run))
        truncate_metrics(run.metrics, READERS[self.name].tracked_step(run.checkpoints) or 0)

    def checkpoints(self, run: RunFolder, *, hashes: bool) -> list[ListedCheckpoint]:
        """As the engine's own rules judge them."""
        return [
            ListedCheckpoint(
                found.step,
                str(found.folder),
                found.bytes,
                kept=[self.keeps],
                problems=list(found.problems),
            )
            for found in READERS[self.name].found_checkpoints(run.checkpoints)
        ]

    def checkpoint_names(self, run: RunFolder) -> list[str]:
        """By their names alone: to judge all of a long run takes a shared file system its time."""
        newest = READERS[self.name].tracked_step(run.checkpoints)
        if newest is None:
            return []
        found = {
            int(match[1]): folder.name
            for folder in run.checkpoints.iterdir()
            if (match := re.fullmatch(r"(?:iter_|global_step|step-)(\d+)", folder.name))
        }
        return [name for step, name in sorted(found.items()) if step <= newest]

    def compiled_nodes(self, job: Job) -> int | None:
        return None

    def helper_folders(self, tree: Path, python: str) -> list[Path]:
        """Where the Makefile may be that compiles the helper samples are counted with.

        Args:
            tree: of the engine.
            python: its interpreter.
        """
        return [tree / "megatron/core/datasets", tree / "megatron/data"]

    def needs_kernels(self, job: Job) -> bool:
        """Whether a job would load CUDA kernels of the tree, if it has any."""
        return bool(self.load_kernels)
