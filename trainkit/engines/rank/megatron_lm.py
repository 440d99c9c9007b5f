"""Megatron-LM's lines and checkpoints.

Sources: training_log and evaluate_and_print_results of megatron/training.py (later
megatron/training/training.py), and checkpointing.py beside it, at 825375cf38 (May 2021), v2.5, and
core 0.4 to 0.19.
"""

from __future__ import annotations

import re
from pathlib import Path

from trainkit.engines.rank.printed import fields, plain, to_float, to_whole
from trainkit.engines.rank.readings import EvaluationLine, FoundCheckpoint, Iteration
from trainkit.engines.rank.saved_files import (
    archive_problem,
    core_problems,
    cut_short,
    distributed_problems,
    grid_problems,
    judged,
    numbered,
    pickled_numbers,
    read_tracker,
    saved_steps,
    subfolders,
)

TRACKER = "latest_checkpointed_iteration.txt"
# " [2026-11-22 03:40:46.123456] iteration        3/       3 | consumed samples: ..."
_ITERATION = re.compile(r"\biteration +(\S+)/ *(\S+) \|")
# " validation loss at iteration 3 on test set | lm loss value: 1.070228E+01 | ...": "-1" or
# "-NAME" behind `validation` with several validation sets (0.15 and later).
_EVALUATION = re.compile(r"\bvalidation(?:-(\S+))? loss at ([^|]*) \|")
_AT = re.compile(r"\biteration (\S+)")
FOLDER = re.compile(r"iter_([0-9]{7,})")
# mp_rank_TENSOR, with pipelines _PIPELINE, with experts one more.
_RANK = re.compile(r"mp_rank_([0-9]{2,})(?:_([0-9]{3,}))?(?:_([0-9]{3,}))?")
# One of them is in every rank's folder; the second in releases of early 2023.
_MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
_DEGREES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
# With the distributed optimizer, beside it: if one rank has it, all have.
_OPTIMIZER_FILES = ("distrib_optim.pt", "optim.pt")


def read_line(text: str) -> Iteration | EvaluationLine | None:
    """What a line of any rank's output says, or None. The last rank prints them."""
    text = plain(text)
    lines = list(_ITERATION.finditer(text))
    if lines:
        found = lines[-1]  # of two that run into each other, the later one
        return _iteration(found.group(1), found.group(2), fields(text[found.end() :]))
    evaluation = _EVALUATION.search(text)
    if evaluation is not None:
        which, where = evaluation.groups()
        return _evaluation(which, where, fields(text[evaluation.end() :]))
    return None


def _iteration(step: str, train_iters: str, said: dict[str, str]) -> Iteration | None:
    """The fields of a line of training."""
    number = to_whole(step)
    if number is None or "elapsed time per iteration (ms)" not in said:
        return None
    return Iteration(
        step=number,
        train_iters=to_whole(train_iters),
        elapsed_ms=to_float(said["elapsed time per iteration (ms)"]),
        learning_rate=to_float(said.get("learning rate")),
        lm_loss=to_float(said.get("lm loss")),
        grad_norm=to_float(said.get("grad norm")),
        loss_scale=to_float(said.get("loss scale")),
        global_batch_size=to_whole(said.get("global batch size")),
        consumed_samples=to_whole(said.get("consumed samples")),
        skipped_iterations=to_whole(said.get("number of skipped iterations")),
        nan_iterations=to_whole(said.get("number of nan iterations")),
    )


def _evaluation(which: str | None, where: str, said: dict[str, str]) -> EvaluationLine | None:
    """The fields of a line of an evaluation."""
    if "lm loss value" not in said:
        return None
    name = "test" if re.search(r"\btest\b", where) else "valid"
    if which is not None and which != "0":
        name = f"{name}-{which}"
    at = _AT.search(where)
    step = to_whole(at.group(1)) if at is not None else None
    return EvaluationLine(step, name, to_float(said["lm loss value"]))


def tracked_step(folder: Path) -> int | None:
    """The iteration that the tracker file names: what `--load` of `folder` would load. 0 for
    `release`; None without a tracker, or with one that the engine cannot read either."""
    said = read_tracker(folder / TRACKER)
    return 0 if said == "release" else to_whole(said)


def found_checkpoints(folder: Path) -> list[FoundCheckpoint]:
    """Every checkpoint in `folder`, the oldest first; that which the tracker names also if it is
    not there."""
    tracked = tracked_step(folder)
    steps = saved_steps(folder, FOLDER)
    release = folder / "release"
    if read_tracker(folder / TRACKER) == "release" and release.is_dir():
        steps[0] = release
    if tracked is not None:
        steps.setdefault(tracked, folder / f"iter_{tracked:07d}")
    return judged(
        steps, lambda step, place: [*cut_short(step, tracked, TRACKER), *load_problems(place)]
    )


def load_problems(place: Path) -> list[str]:
    """Why the engine could not load `place`."""
    if not place.is_dir():
        return [f"{TRACKER} names {place.name}, but there is no such folder"]
    if ranks := numbered(subfolders(place), _RANK):
        return _torch_problems(ranks)
    names = {path.name for path in place.iterdir()}
    if "metadata.json" in names or "common.pt" in names:
        # torch_dist (and zarr, core 0.4 to 0.7, whose tensors are folders)
        problems = core_problems(place)
        if ".metadata" in names or any(name.endswith(".distcp") for name in names):
            problems += distributed_problems(place)
        return problems
    if ".metadata" in names or any(name.endswith(".distcp") for name in names):
        return distributed_problems(place)  # torch_dcp, fsdp_dtensor
    return ["there is neither mp_rank_00 nor .metadata in it: nothing that can be loaded"]


def _saved_sizes(folder: Path) -> dict[str, int]:
    """What the arguments in a rank's folder say of `_DEGREES`."""
    files = [folder / name for name in _MODEL_FILES if (folder / name).is_file()]
    return pickled_numbers(files[-1], _DEGREES) if files else {}


def saved_degrees(place: Path) -> dict[str, int] | None:
    """By the keys of [jobs.X.parallelism], on how many ranks a whole checkpoint with a folder a
    rank was saved; None where it is of another format.

    With pipelines or with experts a name has two numbers, with both three: the arguments in it say
    whether the last is of experts.
    """
    ranks = numbered(subfolders(place), _RANK)
    if not ranks:
        return None
    sizes = [1 + max(numbers) for numbers in zip(*ranks)]
    experts = 1
    if _saved_sizes(ranks[min(ranks)]).get("expert_model_parallel_size", 1) > 1:
        experts = sizes.pop()
    return dict(zip(_DEGREES, (*(*sizes, 1)[:2], experts)))


def _torch_problems(ranks: dict[tuple[int, ...], Path]) -> list[str]:
    """Of a checkpoint with a folder a rank (--ckpt-format torch)."""
    problems = []
    sizes = _saved_sizes(ranks[min(ranks)])
    tensor = sizes.get("tensor_model_parallel_size", 1)
    experts = sizes.get("expert_model_parallel_size", 1)
    # ranks with parts of other experts are other tensor-parallel ranks too where one expert is
    # split otherwise: then there are fewer folders than numbers
    if experts == 1 or sizes.get("expert_tensor_parallel_size", 1) == tensor:
        stages = sizes.get("pipeline_model_parallel_size", 1)
        world = (tensor, *(size for size in (stages, experts) if size > 1))
        problems += grid_problems(set(ranks), world, "mp_rank")
    optimizer = [n for n in _OPTIMIZER_FILES if any((f / n).is_file() for f in ranks.values())]
    for _, folder in sorted(ranks.items()):
        model = [name for name in _MODEL_FILES if (folder / name).is_file()]
        for name in (model or [_MODEL_FILES[0]]) + optimizer:
            problem = archive_problem(folder / name)
            if problem is not None:
                problems.append(f"{folder.name}/{problem}")
    return problems
