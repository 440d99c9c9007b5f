"""The same job on two engines for a few steps, from the same weights and the same samples: where do
their losses, their gradient norms and, at the end, their tensors part?"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.lazy_dataclasses import dataclass, replace
from trainkit.engines.registry import PLACES
from trainkit.experiment.cancel import cancel_run
from trainkit.experiment.follow import GOING
from trainkit.experiment.options import TrainOptions
from trainkit.experiment.start import plan_new_run, prepare, submit
from trainkit.jobs.load import Jobs
from trainkit.jobs.notify import NotifySettings
from trainkit.jobs.resolved import ResolvedJob
from trainkit.jobs.schema import Job
from trainkit.jobs.table import Table
from trainkit.launch.preparation import StageUi
from trainkit.launch.scheduler_contract import Start
from trainkit.launch.scheduler_registry import current
from trainkit.runs.folder import RunFolder
from trainkit.runs.metrics import read_rows
from trainkit.runs.record import read_run_record

if TYPE_CHECKING:
    from trainkit.engines.convert.formats import RunWeights

POLL_SECONDS = 0.5
TENSOR_TOLERANCE = 0.1  # of the way that training has moved a tensor
NUMBERS = ("lm_loss", "grad_norm")
Say = Callable[[str], None]


@dataclass(frozen=True)
class StepDifference:
    """A number of one step, by both engines."""

    step: int
    number: str
    first: float
    second: float

    @property
    def relative(self) -> float:
        return abs(self.first - self.second) / max(abs(self.first), 1e-30)


@dataclass(frozen=True)
class TensorDifference:
    """A tensor after the last step: the distance between both engines', in parts of the way that
    training has moved it (root of the mean of both squares)."""

    name: str
    parts: float


@dataclass(frozen=True)
class EnginesDiff:
    """What was found.

    Args:
        names: of the two, as they were asked for.
        runs: of theirs.
        steps: what both have logged, in order.
        tensors: in the order of the network.
        tolerance: of the numbers of steps.
    """

    names: Sequence[str]
    runs: Sequence[RunFolder]
    steps: Sequence[StepDifference]
    tensors: Sequence[TensorDifference]
    tolerance: float

    def compared(self, number: str) -> bool:
        """Whether both engines have logged it."""
        return any(each.number == number for each in self.steps)

    def first(self, number: str) -> StepDifference | None:
        """The first step whose `number` is further apart than the tolerance."""
        of = (each for each in self.steps if each.number == number)
        return next((each for each in of if not each.relative <= self.tolerance), None)

    @property
    def tensor(self) -> TensorDifference | None:
        """The first tensor that is further apart than TENSOR_TOLERANCE."""
        return next((each for each in self.tensors if not each.parts <= TENSOR_TOLERANCE), None)

    @property
    def exit(self) -> Exit:
        """DONE, or HEALTH where they part."""
        parted = self.tensor or any(self.first(number) for number in NUMBERS)
        return Exit.HEALTH if parted else Exit.DONE

    def to_json(self) -> dict[str, object]:
        return document(
            "engines-diff/1",
            engines=list(self.names),
            runs=[run.id for run in self.runs],
            tolerance=self.tolerance,
            tensor_tolerance=TENSOR_TOLERANCE,
            steps=[{**vars(each), "relative": each.relative} for each in self.steps],
            tensors=[vars(each) for each in self.tensors],
            first={
                number: found.step if (found := self.first(number)) else None for number in NUMBERS
            },
            first_tensor=self.tensor.name if self.tensor else None,
            not_compared=[number for number in NUMBERS if not self.compared(number)],
            exit=int(self.exit),
        )


class Contest:
    """Two engines beside each other. Nothing is written before `conduct`.

    Args:
        jobs: those of a jobs.toml.
        name: of the job.
        words: of the two: an engine, or a job that differs in its engine.
        options: how its runs are started.
        steps: how many each makes.

    Raises TrainkitError as `plan_new_run`, and ConfigError for what is not two of the same job.
    """

    def __init__(
        self, jobs: Jobs, name: str, words: Sequence[str], options: TrainOptions, steps: int
    ) -> None:
        if len(words) != 2:
            raise ConfigError(
                f"--engines {','.join(words)!r} is not two",
                hint="--engines native,torchtitan; a word may be a job that differs in its engine",
            )
        for key in ("foreground", "no_stages", "rehearse"):
            if getattr(options, key):
                raise ConfigError(
                    f"--{key.replace('_', '-')} is nothing that diff-engines does",
                    hint="it prepares and starts its runs itself, and waits for them",
                )
        self.jobs = jobs
        self.name = name
        self.words = words
        self.options = replace(options, detach=True)
        self.steps = steps
        self.seen = [self._resolved(word).job for word in words]
        _refuse_other_jobs(self.seen)
        self.order = _sample_order(self.seen)
        for word in (*words, "native"):
            self._start(word)  # what is wrong with any of them is said before one begins

    def _options(self, word: str, *more: str) -> TrainOptions:
        """How a run of one of the two is started."""
        engine = [f'engine="{word}"'] if word in PLACES else []
        return replace(self.options, set=(*engine, *self.options.set, *more))

    def _resolved(self, word: str, *more: str) -> ResolvedJob:
        name = self.name if word in PLACES else word
        return self.jobs.resolve(name, self._options(word, *more).overrides())

    def _start(self, word: str, *more: str) -> Start:
        """A run of its own, not of the job's: it sends no notifications."""
        whole = self._resolved(word).job
        t = whole.training
        warmup = "lr_warmup_iters" if t.lr_warmup_fraction is None else "lr_warmup_fraction"
        sets = [
            f"training.train_iters={self.steps}",
            f"training.lr_decay_iters={t.decay_iters}",
            # with a warmup from 0 the first step would move nothing
            f"training.{warmup}=0",
            "training.log_interval=1",
            "training.eval_iters=0",
            f"training.save_interval={self.steps}",
            *([f'sample_order="{self.order}"'] if whole.is_native else []),
            *more,
        ]
        resolved = self._resolved(word, *sets)
        own = {"notify": NotifySettings(), "wandb": None}
        resolved = replace(resolved, job=resolved.job.model_copy(update=own))
        start = plan_new_run(self.jobs, resolved, self._options(word, *sets))
        job = start.job.model_copy(update={**own, "name": f"{self.name}-diff"})
        shown = {**start.document, "job": job.model_dump(mode="json")}
        return replace(start, job=job, document=shown)

    def conduct(self, ui: StageUi, say: Say, tolerance: float) -> EnginesDiff:
        """All of it; nothing is left running, also where a person interrupts it. The runs stay.
        Raises TrainkitError where a run does not come to its end, or logs other steps than the
        other."""
        from trainkit.engines.convert import formats

        begin = self._begin(ui, say)
        runs = []
        for word, job in zip(self.words, self.seen, strict=True):
            start = self._start(word, *begin.words(job))
            say(f"{word}: {self.steps} steps")
            runs.append(_run(start, ui, say))
        # steps whose loss is printed as a mean of several, which nothing is compared with
        means = {step for job in self.seen for step in formats.MEAN_LOSSES.get(job.engine, ())}
        steps = [
            each
            for each in _step_differences(*(_numbers(run) for run in runs))
            if each.number != "lm_loss" or each.step not in means
        ]
        both = [_weights(run) for run in runs]
        tensors = list(_tensor_differences(begin.weights, both[0], both[1]))
        return EnginesDiff(self.words, runs, steps, tensors, tolerance)

    def _begin(self, ui: StageUi, say: Say) -> InitialWeights:
        """The weights that both begin with: those of a native run before its first step."""
        say("native: the weights that both begin with")
        steps = ("training.train_iters=1", "training.save_interval=1")
        sets = (*steps, "checkpoint.save_first=true", "checkpoint.keep_last=2")
        return InitialWeights(_run(self._start("native", *sets), ui, say))


class InitialWeights:
    """The weights of a run before its first step, in each engine's format."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self.weights = _weights(run, 0)

    def words(self, job: Job) -> list[str]:
        """What has a job begin with them, as KEY=VALUE."""
        from trainkit.engines.convert import formats
        from trainkit.engines.convert.options import FileLayout

        target = job.engine if job.engine in formats.ENGINE_FORMATS else formats.HUGGING_FACE
        folder = self.run.path / "converted" / target
        if not folder.exists():
            import torch

            layout = FileLayout(
                tensor=job.parallelism.tensor_model_parallel_size,
                pipeline=job.parallelism.pipeline_model_parallel_size,
                names="",
                dtype=torch.float32,
                divisor=job.model.make_vocab_size_divisible_by,
                expert=job.parallelism.expert_model_parallel_size,
            )
            nothing = formats.HuggingFaceExtras(10**10, None, {})
            formats.convert(self.weights, target, layout, folder, nothing)
        if target == formats.HUGGING_FACE:
            return [f"init_from={json.dumps(str(folder))}"]
        given = formats.ENGINE_FORMATS[target].begin(folder)
        return [
            f"engine_args.{json.dumps(key)}={json.dumps(value)}" for key, value in given.items()
        ]


def _unnamed(table: Table) -> Table:
    """A table by what it says: two of one content are the same."""
    return table.model_copy(update={"name": ""})


def _refuse_other_jobs(jobs: Sequence[Job]) -> None:
    """Raise ConfigError unless both train the same model on the same samples."""
    one, other = jobs
    alike = {
        "model": _unnamed(one.model) == _unnamed(other.model),
        "dataset": _unnamed(one.dataset) == _unnamed(other.dataset),
        "phases": one.phases == other.phases,
        "global_batch_size": one.global_batch_size == other.global_batch_size,
        "training.seed": one.training.seed == other.training.seed,
    }
    apart = [what for what, same in alike.items() if not same]
    if apart:
        raise ConfigError(f"'{one.name}' and '{other.name}' differ in {', '.join(apart)}")


def _sample_order(jobs: Sequence[Job]) -> str:
    """In which both read. Raises ConfigError where there is none."""
    from trainkit.engines.convert import formats

    orders = {formats.SAMPLE_ORDERS.get(job.engine, "none") for job in jobs} - {"any"}
    if len(orders) > 1 or "none" in orders:
        raise ConfigError(
            f"{jobs[0].engine} and {jobs[1].engine} read no samples in the same order",
            hint=f"native beside any of {', '.join(formats.SAMPLE_ORDERS)}",
        )
    return next(iter(orders), "native")


def _run(start: Start, ui: StageUi, say: Say) -> RunFolder:
    """A run to its end. Raises TrainkitError where it is another than its last step."""
    run = submit(prepare(start, ui)).run
    say(f"  run {run.id}")
    ended = False
    try:
        while (record := current(read_run_record(run))).state in GOING:
            time.sleep(POLL_SECONDS)
        ended = True
    finally:
        if not ended:
            cancel_run(run, save=False, force=False, say=say)
    if record.state != "succeeded":
        raise TrainkitError(
            f"run {run.id} of engine {start.job.engine} ended as {record.state}",
            exit=Exit(record.exit or Exit.RANK_USER),
            hint=f"invoke why {run.id}",
        )
    return run


def _numbers(run: RunFolder) -> Mapping[tuple[int, str], float]:
    """What is not finite stands as null there, and is nan here."""
    found = {}
    for row in read_rows(run.metrics):
        for number in NUMBERS:
            if "eval" not in row and number in row:
                value = row.get(number)
                found[row["step"], number] = value if isinstance(value, float) else math.nan
    return found


def _step_differences(
    first: Mapping[tuple[int, str], float], second: Mapping[tuple[int, str], float]
) -> Iterator[StepDifference]:
    """Of the numbers that both have. Raises TrainkitError where one has a step that the other has
    not."""
    for number in NUMBERS:
        steps = [{step for step, name in each if name == number} for each in (first, second)]
        if steps[0] and steps[1] and steps[0] != steps[1]:
            raise TrainkitError(
                f"the runs have logged {number} of other steps", exit=Exit.STAGE_FAILED
            )
    for step, number in sorted(first.keys() & second.keys()):
        yield StepDifference(step, number, first[step, number], second[step, number])


def _weights(run: RunFolder, step: int | None = None) -> RunWeights:
    from trainkit.engines.convert import formats
    from trainkit.jobs.resolved import read_job

    return formats.open_run(run, read_job(run.job), step)


def _tensor_differences(
    begin: RunWeights, first: RunWeights, second: RunWeights
) -> Iterator[TensorDifference]:
    """Raises ConfigError where a checkpoint is of another model, or damaged."""
    for name in begin.weights.shapes:
        start = begin.weights.read(name).double()
        mine = first.weights.read(name).double()
        theirs = second.weights.read(name).double()
        moved = ((mine - start).square() + (theirs - start).square()).mean() / 2
        apart = (mine - theirs).square().mean()
        yield TensorDifference(name, float((apart / moved.clamp(min=1e-300)).sqrt()))
