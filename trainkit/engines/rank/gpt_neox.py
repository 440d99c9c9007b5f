"""GPT-NeoX's lines and checkpoints.

Sources: training_log of megatron/logging.py and evaluate_and_print_results of megatron/training.py,
at 8dc25da9 (December 2022) and ea7aefd; the files are DeepSpeed's (runtime/engine.py and
runtime/pipe/module.py, 0.19.8).
"""

from __future__ import annotations

import re
from pathlib import Path

from trainkit.engines.rank.printed import fields, plain, to_float, to_whole
from trainkit.engines.rank.readings import EvaluationLine, FoundCheckpoint, Iteration
from trainkit.engines.rank.saved_files import (
    archive_problem,
    cut_short,
    grid_problems,
    judged,
    numbered,
    pickled_numbers,
    read_tracker,
    saved_steps,
)

TRACKER = "latest"
# " samples/sec: 0.862 | iteration        1/       3 | elapsed time per iteration (ms): ..."
_ITERATION = re.compile(r"\bsamples/sec: *([^|]*)\| *iteration +(\S+)/ *(\S+) \|")
# " validation results at iteration 3 | lm_loss value: 1.057839E+01 | ..."
_EVALUATION = re.compile(r"\b(validation|test) results at ([^|]*) \|")
_AT = re.compile(r"\biteration (\S+)")
_FOLDER = re.compile(r"global_step([0-9]{1,18})")
_MODEL = re.compile(r"(?:zero_pp_rank_([0-9]+)_)?mp_rank_([0-9]+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:[a-z0-9]+_)?zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)_optim_states\.pt")
_LAYER = re.compile(r"layer_([0-9]+)-model_([0-9]+)-model_states\.pt")


def read_line(text: str) -> Iteration | EvaluationLine | None:
    """What a line of any rank's output says, or None. Rank 0 prints them."""
    text = plain(text)
    lines = list(_ITERATION.finditer(text))
    if lines:
        found = lines[-1]  # of two that run into each other, the later one
        return _iteration(found.groups(), fields(text[found.end() :]))
    evaluation = _EVALUATION.search(text)
    if evaluation is not None:
        which, where = evaluation.groups()
        return _evaluation(which, where, fields(text[evaluation.end() :]))
    return None


def _iteration(first: tuple[str, ...], said: dict[str, str]) -> Iteration | None:
    """The fields of a line of training; `first` are samples a second, step and train_iters."""
    speed, step, train_iters = first
    number = to_whole(step)
    if number is None:
        return None
    return Iteration(
        step=number,
        train_iters=to_whole(train_iters),
        elapsed_ms=to_float(said.get("elapsed time per iteration (ms)")),
        learning_rate=to_float(said.get("learning rate")),
        lm_loss=to_float(said.get("lm_loss")),
        loss_scale=to_float(said.get("loss scale")),
        samples_per_second=to_float(speed),
        skipped_iterations=to_whole(said.get("number of skipped iterations")),
        nan_iterations=to_whole(said.get("number of nan iterations")),
    )


def _evaluation(chart: str, where: str, said: dict[str, str]) -> EvaluationLine | None:
    """The fields of a line of an evaluation. Older versions call the test data `validation
    results at the end of training for test data`."""
    if "lm_loss value" not in said:
        return None
    name = "valid"
    if chart == "test" or re.search(r"\btest data\b", where):
        name = "test"
    at = _AT.search(where)
    step = to_whole(at.group(1)) if at is not None else None
    return EvaluationLine(step, name, to_float(said["lm_loss value"]))


def tracked_step(folder: Path) -> int | None:
    """The step that the file `latest` names (`global_step3`); None without it, or if it names
    something else."""
    named = _FOLDER.fullmatch(read_tracker(folder / TRACKER) or "")
    return None if named is None else int(named.group(1))


def found_checkpoints(folder: Path) -> list[FoundCheckpoint]:
    """Every checkpoint in `folder`, the oldest first; that which `latest` names also if it is not
    there."""
    tracked = tracked_step(folder)
    steps = saved_steps(folder, _FOLDER)
    if tracked is not None:
        steps.setdefault(tracked, folder / f"global_step{tracked}")
    return judged(
        steps, lambda step, place: [*cut_short(step, tracked, TRACKER), *_problems(place)]
    )


def _problems(place: Path) -> list[str]:
    """Why DeepSpeed could not load `place`."""
    if not place.is_dir():
        return [f"{TRACKER} names {place.name}, but there is no such folder"]
    files = sorted(path for path in place.iterdir() if path.name.endswith(".pt"))
    models = numbered(files, _MODEL)
    if not models:
        return ["there is no mp_rank_00_model_states.pt in it: nothing that can be loaded"]
    optimizers = numbered(files, _OPTIMIZER)
    layers = numbered(files, _LAYER)
    first = min(models.items())[1]
    sizes = pickled_numbers(first, ("dp_world_size", "mp_world_size"))
    world = sizes.get("mp_world_size", 1)
    if optimizers:  # ZeRO: one file a rank
        world = max(world, 1 + max(rank[1] for rank in optimizers))
    grid = (sizes.get("dp_world_size", 1), world)
    # with ZeRO-3 the model's states are a file a rank too, and have one number more
    of_models = grid if len(min(models)) > 1 else (world,)
    problems = grid_problems(set(models), of_models, "model states of rank")
    if optimizers:
        problems += grid_problems(set(optimizers), grid, "optimizer states of rank")
    problems += _layer_problems(set(layers))
    wrong = (archive_problem(path) for path in files)
    return problems + [problem for problem in wrong if problem is not None]


def _layer_problems(layers: set[tuple[int, ...]]) -> list[str]:
    """With pipelines each layer is a file of its own for each tensor-parallel rank. Layers
    without weights have none, so only the ranks can be counted."""
    ranks = {rank for _, rank in layers}
    problems = []
    for number in sorted({layer for layer, _ in layers}):
        missing = sorted(rank for rank in ranks if (number, rank) not in layers)
        if missing:
            problems.append(f"layer {number} of tensor-parallel rank {missing[0]} is missing")
    return problems
