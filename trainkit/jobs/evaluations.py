"""What is measured of a run's checkpoints beside training: the tables `[[jobs.X.evaluations]]`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from trainkit.jobs.datasets import Dataset
from trainkit.jobs.table import NAME, Strings, Table, wrong
from trainkit.jobs.training import Training

OF_TASKS = ("include_path", "python", "num_fewshot", "batch_size")


class EvaluationSettings(Table):
    """One evaluation: held-out sets by bits per byte, or tasks of lm-evaluation-harness."""

    name: str = Field(pattern=NAME, description="what its results are called")
    every: int = Field(
        0,
        ge=0,
        description=(
            "steps between two, a multiple of training.save_interval; one is always made at the"
            " end, and 0 makes no other"
        ),
    )
    datasets: Annotated[tuple[Dataset, ...], Field(strict=False)] = Field(
        (),
        description=(
            "names of [datasets.X] tables with the job's tokenizer, whose valid splits are measured"
            " in bits per byte"
        ),
    )
    tasks: Strings = Field(
        (),
        description="tasks of lm-evaluation-harness, such as arc_easy; their data is not fetched",
    )
    include_path: str | None = Field(
        None,
        min_length=1,
        description="a folder with tasks of one's own; files that they name lie below it",
    )
    python: str | None = Field(
        None,
        min_length=1,
        description="the Python that has lm_eval and transformers; by default trainkit's own",
    )
    num_fewshot: int | None = Field(
        None, ge=0, description="examples before each question; by default as the task says"
    )
    batch_size: int = Field(1, ge=1, description="questions of a task that are computed at once")
    limit: int | None = Field(
        None,
        ge=1,
        description="only the first so many windows of a dataset, or examples of a task",
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="what computes it")
    threads: int = Field(1, ge=1, description="threads that compute it on a CPU")
    through: Strings = Field(
        (),
        description=(
            "a command that takes another to run elsewhere, as its last word: ['ssh', 'HOST'],"
            " ['sbatch', '--wait', '--wrap']; by default it runs beside the supervisor"
        ),
    )

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> EvaluationSettings:
        if bool(self.datasets) == bool(self.tasks):
            raise wrong("name", f"evaluation '{self.name}' needs datasets or tasks, one of the two")
        for key in OF_TASKS if self.datasets else ():
            if getattr(self, key) != type(self).model_fields[key].default:
                raise wrong(key, f"{key} is of tasks: trainkit reads datasets itself")
        for dataset in self.datasets:
            if dataset.source == "mock":
                raise wrong("datasets", f"dataset '{dataset.name}' is random tokens: no text")
        return self

    def is_due(self, step: int, last: int) -> bool:
        """Whether the checkpoint of `step` is measured; `last`: the step at which training ends."""
        return step == last or bool(self.every and step and step % self.every == 0)


def evaluation_objection(
    evaluations: Sequence[EvaluationSettings], training: Training, obstacle: str
) -> PydanticCustomError | None:
    """What is wrong with the evaluations of a job; None: nothing.

    Args:
        evaluations: the job's.
        training: which says what is saved.
        obstacle: why the job's checkpoints cannot be measured at all; "" for nothing.
    """
    if evaluations and obstacle:
        return wrong("evaluations", f"evaluations {obstacle}; take them out")
    names = [each.name for each in evaluations]
    saved = training.save_interval
    for at, each in enumerate(evaluations):
        if names.index(each.name) < at:
            key = f"evaluations.{at}.name"
            return wrong(key, f"{key} = '{each.name}' is an evaluation's before: rename one")
        if each.every and (saved is None or each.every % saved):
            key = f"evaluations.{at}.every"
            there = f"after every {saved} steps" if saved else "at the end alone"
            return wrong(
                key,
                f"{key} = {each.every}: an evaluation reads a saved checkpoint, and"
                f" training.save_interval = {saved} saves one {there}; give a multiple of it",
            )
    return None


def held_out_sets(evaluations: Sequence[EvaluationSettings]) -> Iterator[tuple[str, Dataset]]:
    """(its key in the job, dataset) of all that is measured in bits per byte."""
    for at, each in enumerate(evaluations):
        for number, dataset in enumerate(each.datasets):
            yield f"evaluations.{at}.datasets.{number}", dataset
