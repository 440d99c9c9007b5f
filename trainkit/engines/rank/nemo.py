"""NeMo's lines and checkpoints, and those of neuronx-nemo-megatron, which is made from it.

Sources: pytorch-lightning 1.7 to 2.4, callbacks/progress/tqdm_progress.py and
callbacks/model_checkpoint.py; NeMo 1.12 (bignlp 22.09) and 2.1 (24.12): megatron_gpt_model.py
(training_step), utils/exp_manager.py (check_resume), utils/callbacks/nemo_model_checkpoint.py, nlp
parts/nlp_overrides.py; tqdm 4, format_num.
"""

from __future__ import annotations

import contextlib
import math
import re
from pathlib import Path

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.engines.rank.printed import plain, to_float
from trainkit.engines.rank.readings import EvaluationLine, FoundCheckpoint, Iteration
from trainkit.engines.rank.saved_files import (
    archive_problem,
    core_problems,
    distributed_problems,
    folder_bytes,
    grid_problems,
    subfolders,
)

# "Epoch 0:   0%|     | 189/301501 [59:12<1573:03:24, 18.79s/it, loss=7.75, global_step=188.0]";
# without a known length "Epoch 0: 189it [59:12, ...]". NeMo 2 writes "Epoch 0: :   0%|".
_BAR = re.compile(r"\bEpoch (\d+):[^\r\n]*?\s(?:(\d+)/(?:\d+|\?)|(\d+)it) \[([^\]]*)\]")
_VALIDATION = re.compile(r"\bValidation DataLoader \d+:[^\r\n]*?\s(\d+)/(\d+) \[")
# megatron_gpt--val_loss=2.31-step=2000-consumed_samples=511744.0-last[-v1]
_STEP = re.compile(r"(?:^|[-_])step=(\d{1,18})(?=$|[-_.])")
_LAST = "-last"
_UNFINISHED = "-unfinished"
_SUFFIX = ".ckpt"
# mp_rank_TENSOR with one pipeline stage, else tp_rank_TENSOR_pp_rank_STAGE
_RANK = re.compile(r"(?:mp_rank_(\d{2,})|tp_rank_(\d{2,})_pp_rank_(\d{3,}))")
_TENSORS = ".tensors"  # torch_xla's serialization: one file a tensor beside the checkpoint's own


@dataclass(frozen=True)
class BarLine:
    """One state of the progress bar of training.

    Args:
        count: batches of this epoch, with pytorch-lightning 1 those of its validations too.
        said: what stands behind the times, by name.
    """

    count: int
    said: dict[str, str]


def read_bar(text: str) -> BarLine | None:
    """The last whole state of the bar in `text`; None where there is none."""
    found = list(_BAR.finditer(plain(text)))
    if not found:
        return None
    _, of_total, alone, inside = found[-1].groups()
    said = {}
    for part in inside.split(", "):
        name, equals, value = part.partition("=")
        if equals:
            said[name.strip()] = value.strip()
    return BarLine(int(of_total or alone), said)


def read_validation(text: str) -> tuple[int, int] | None:
    """(batches done, all) of a validation's bar; None where there is none."""
    found = list(_VALIDATION.finditer(plain(text)))
    return (int(found[-1].group(1)), int(found[-1].group(2))) if found else None


def iteration_of(bar: BarLine) -> int | None:
    """The iteration after which the bar was drawn. `global_step` is logged before the optimizer's
    step. From 100,000 on tqdm writes it with three digits ("1.23e+5"): there the count of batches,
    where it is one of the numbers that are written so."""
    before = to_float(bar.said.get("global_step"))
    if before is None or not math.isfinite(before):
        return None
    if int(before) != bar.count - 1 and bar.said["global_step"] == as_tqdm(bar.count - 1):
        return bar.count
    return int(before) + 1


def as_tqdm(number: float) -> str:
    """A number as pytorch-lightning's bar has it: tqdm.format_num, then filled up to five."""
    short = f"{float(number):.3g}".replace("e+0", "e+").replace("e-0", "e-")
    text = str(float(number))
    if len(short) < len(text):
        text = short
    if "e" in text:
        return text
    if "." not in text and len(text) < 5:
        text += "."
    return text + "0" * (5 - len(text))


def read_line(text: str) -> Iteration | EvaluationLine | None:
    """What a line of any rank's output says of training, or None. Rank 0 prints them. Its
    evaluations, times and log intervals are known to who saw the lines before: `NemoLines`."""
    bar = read_bar(text)
    return None if bar is None else iteration_line(bar, iteration_of(bar))


def iteration_line(
    bar: BarLine, step: int | None, elapsed_ms: float | None = None
) -> Iteration | None:
    """A state of the bar as a line of training.

    Args:
        bar: the state.
        step: the iteration; None: it says none.
        elapsed_ms: milliseconds an iteration, where they were measured.
    """
    loss = to_float(bar.said.get("reduced_train_loss"))
    if step is None or "reduced_train_loss" not in bar.said:
        return None
    timing = to_float(bar.said.get("train_step_timing in s"))
    if timing is not None:
        elapsed_ms = timing * 1000.0
    return Iteration(
        step=step,
        elapsed_ms=elapsed_ms,
        lm_loss=loss,
        grad_norm=to_float(bar.said.get("gradient_norm")),
        samples_per_second=to_float(bar.said.get("throughput")),
    )


@dataclass(frozen=True)
class SavedName:
    """One checkpoint by its name, without the folders of its ranks and without `.ckpt`.

    Args:
        name: as the markers have it: "megatron_gpt--val_loss=2.31-step=2000-...-last".
        step: the iteration.
        ranks: its files by (tensor rank,) or (tensor rank, stage); () where it has no such
            folders. Empty for a distributed one.
        folder: of a distributed one.
        unfinished: NeMo's marker says that its save or its removal did not end.
    """

    name: str
    step: int
    ranks: dict[tuple[int, ...], Path]
    folder: Path | None = None
    unfinished: bool = False

    @property
    def is_last(self) -> bool:
        """It is one that `resume_if_exists` looks for: "*last.ckpt" or a folder "*last"."""
        return self.name.endswith(_LAST)

    @property
    def place(self) -> Path:
        """Where it is; with ranks' folders the path that NeMo puts them into."""
        if self.folder is not None:
            return self.folder
        rank, path = min(self.ranks.items())
        return path.parent.parent / path.name if rank else path


def saved_names(folder: Path) -> list[SavedName]:
    """Every checkpoint in a folder `checkpoints` of exp_manager, oldest first, of one iteration
    that which is resumed from last."""
    files: dict[str, dict[tuple[int, ...], Path]] = {}
    _collect(files, folder, ())
    distributed = {}
    for place in subfolders(folder):
        rank = _rank_of(place.name)
        if rank is not None:
            _collect(files, place, rank)
        elif _step_of(place.name) is not None and not place.name.endswith(_SUFFIX + _TENSORS):
            distributed[place.name] = place
    found = []
    for name in {**files, **distributed}:
        step = _step_of(name)
        assert step is not None
        marked = (folder / (name + _UNFINISHED)).exists()
        found.append(SavedName(name, step, files.get(name, {}), distributed.get(name), marked))
    return sorted(found, key=lambda each: (each.step, each.is_last, each.name))


def _collect(
    files: dict[str, dict[tuple[int, ...], Path]], folder: Path, rank: tuple[int, ...]
) -> None:
    try:
        paths = sorted(folder.glob(f"*{_SUFFIX}"))
    except OSError:
        return
    for path in paths:
        if path.is_file() and _step_of(path.stem) is not None:
            files.setdefault(path.name[: -len(_SUFFIX)], {})[rank] = path


def _rank_of(name: str) -> tuple[int, ...] | None:
    found = _RANK.fullmatch(name)
    if found is None:
        return None
    return tuple(int(number) for number in found.groups() if number is not None)


def _step_of(name: str) -> int | None:
    found = list(_STEP.finditer(name))
    return int(found[-1].group(1)) if found else None


def tracked_step(folder: Path) -> int | None:
    """The iteration of the newest checkpoint that `resume_if_exists` finds; where there is none,
    of the newest whole one, which `resume_from_checkpoint` names then. None without either."""
    found = saved_names(folder)
    last = [each.step for each in found if each.is_last and not each.unfinished]
    if last:
        return max(last)
    grid = rank_grid(folder)
    for each in reversed(found):
        if not saved_problems(each, grid):
            return each.step
    return None


def found_checkpoints(folder: Path) -> list[FoundCheckpoint]:
    """Every checkpoint in `folder`, the oldest first; of one iteration whole ones first."""
    grid = rank_grid(folder)
    found = []
    for saved in saved_names(folder):
        problems = tuple(saved_problems(saved, grid))
        found.append(FoundCheckpoint(saved.step, saved.place, _bytes(saved), problems))
    return sorted(found, key=lambda each: (each.step, bool(each.problems)))


def finished_names(folder: Path) -> list[str]:
    """Checkpoints that were written to their end, by their names alone."""
    return [each.name for each in saved_names(folder) if not each.unfinished]


def rank_grid(folder: Path) -> tuple[int, ...]:
    """The sizes of the ranks' grid, as its folders say it: a rank has one from its first save."""
    ranks = [rank for rank in (_rank_of(each.name) for each in subfolders(folder)) if rank]
    if not ranks or len({len(rank) for rank in ranks}) > 1:
        return ()
    return tuple(max(rank[axis] for rank in ranks) + 1 for axis in range(len(ranks[0])))


def saved_problems(saved: SavedName, grid: tuple[int, ...]) -> list[str]:
    """Why NeMo could not load a checkpoint.

    Args:
        saved: the checkpoint.
        grid: how many ranks there are: (tensor,) or (tensor, stages); () where it is not known.
    """
    problems = []
    if saved.unfinished:
        problems.append(f"{saved.name}{_UNFINISHED} says that it was not saved to its end")
    if saved.folder is not None:
        return problems + core_problems(saved.folder) + _tensor_problems(saved.folder)
    if () not in saved.ranks:
        problems += grid_problems(set(saved.ranks), grid, "rank")
    for rank, path in sorted(saved.ranks.items()):
        problem = archive_problem(path)
        if problem is not None:
            problems.append(f"{path.parent.name}/{problem}" if rank else problem)
        problems += _beside_problems(path)
    return problems


def _tensor_problems(folder: Path) -> list[str]:
    """Of torch_dist; zarr (until NeMo 2.0) has a folder a tensor and no list of them."""
    if (folder / ".metadata").exists() or list(folder.glob("*.distcp")):
        return distributed_problems(folder)
    if any((each / ".zarray").exists() for each in subfolders(folder)):
        return []
    return ["neither .metadata nor .distcp files are in it: nothing that can be loaded"]


def _beside_problems(path: Path) -> list[str]:
    """Of the tensors beside a file, where there are any (save_xser)."""
    tensors = path.with_name(path.name + _TENSORS)
    if not tensors.is_dir():
        return []
    empty = [each.name for each in sorted(tensors.iterdir()) if each.stat().st_size == 0]
    if empty:
        return [f"{path.parent.name}/{tensors.name}/{empty[0]} is empty"]
    return []


def _bytes(saved: SavedName) -> int:
    if saved.folder is not None:
        return folder_bytes(saved.folder)
    total = 0
    for path in saved.ranks.values():
        with contextlib.suppress(OSError):  # it was just removed
            total += path.stat().st_size
        total += folder_bytes(path.with_name(path.name + _TENSORS))
    return total
