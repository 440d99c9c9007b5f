"""Whether what torch saved is whole, without torch and without loading: a zip archive is judged by
its directory, a pickle by its opcodes, which pickletools lists and never executes."""

from __future__ import annotations

import json
import os
import pickletools
import re
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Callable

from trainkit.engines.rank.readings import FoundCheckpoint

# Pickles beyond this are not walked through: a minute's work.
LIMIT = 64 << 20
# What torch.save wrote before 1.6 begins with its magic number, pickled.
_LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19"
# What zipfile raises for damaged archives: RuntimeError for one that seems to be encrypted.
_DAMAGE = (OSError, zipfile.BadZipFile, ValueError, EOFError, RuntimeError, zlib.error)
_STRINGS = {"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "STRING", "BINSTRING"}
_STRINGS |= {"SHORT_BINSTRING"}
_NUMBERS = {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"}
_PUT = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}
_GET = {"GET", "BINGET", "LONG_BINGET"}


def read_tracker(path: Path) -> str | None:
    """The word in a file that names the latest checkpoint; None without it."""
    try:
        return path.read_bytes()[:1000].decode("utf-8", "replace").strip()
    except OSError:
        return None


def cut_short(step: int, tracked: int | None, tracker: str) -> list[str]:
    """Engines write the tracker last: what is newer was not saved to its end.

    Args:
        step: of a checkpoint.
        tracked: what the tracker says.
        tracker: its file's name.
    """
    if tracked is None:
        return [f"there is no {tracker} that names a checkpoint"]
    if step > tracked:
        return [f"{tracker} names step {tracked}: this one was not saved to its end"]
    return []


def subfolders(folder: Path) -> list[Path]:
    """The folders in `folder`, by name; none if it is not there."""
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []


def numbered(paths: Iterable[Path], pattern: re.Pattern[str]) -> dict[tuple[int, ...], Path]:
    """The paths whose names fit `pattern`, by the numbers in them."""
    named = ((pattern.fullmatch(path.name), path) for path in paths)
    return {
        tuple(int(number) for number in found.groups() if number is not None): path
        for found, path in named
        if found is not None
    }


def saved_steps(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    """The folders in `folder` whose names fit `pattern`, by the step in them, whole or not."""
    return {numbers[0]: place for numbers, place in numbered(subfolders(folder), pattern).items()}


def judged(
    steps: dict[int, Path], problems: Callable[[int, Path], Iterable[str]]
) -> list[FoundCheckpoint]:
    """Checkpoints by their steps, the oldest first; `problems`: why one could not be loaded."""
    return [
        FoundCheckpoint(step, place, folder_bytes(place), tuple(problems(step, place)))
        for step, place in sorted(steps.items())
    ]


def newest_whole(found: list[FoundCheckpoint]) -> FoundCheckpoint | None:
    """Of checkpoints, the oldest first, the last without a problem; None where there is none."""
    return next((each for each in reversed(found) if not each.problems), None)


def folder_bytes(folder: Path) -> int:
    """Of all files below; those that vanish meanwhile count nothing."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(where, name)).st_size
            except OSError:
                continue
    return total


def archive_problem(path: Path) -> str | None:
    """Why torch could not load a file of its own, as "NAME ..."; None if it is whole. Contents
    are not read: a changed byte in the middle is not found."""
    try:
        if path.stat().st_size == 0:
            return f"{path.name} is empty"
        with path.open("rb") as file:
            if file.read(len(_LEGACY)) == _LEGACY:
                return None  # without a directory: nothing to judge by
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except FileNotFoundError:
        return f"{path.name} is missing"
    except _DAMAGE as error:
        return f"{path.name} is cut off or damaged ({error})"
    if not any(name.endswith("data.pkl") for name in names):
        return f"{path.name} is not a file of torch: no data.pkl in it"
    return None


def json_problem(path: Path, key: str) -> str | None:
    """Why a JSON object with `key` cannot be read from `path`; None if it can."""
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return f"{path.name} is missing"
    except (OSError, ValueError) as error:
        return f"{path.name} cannot be read ({error})"
    if not isinstance(document, dict) or key not in document:
        return f"{path.name} has no {key}"
    return None


def pickled_values(pickled: bytes) -> Iterator[str | int | None]:
    """Strings and whole numbers in the order in which they come, None for everything else.

    Raises ValueError if it is not a whole pickle.
    """
    memo: dict[object, str | int | None] = {}
    last: str | int | None = None
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name in _PUT:
            memo[len(memo) if argument is None else argument] = last
            continue
        last = None
        if opcode.name in _GET:
            last = memo.get(argument)
        elif opcode.name in _STRINGS or opcode.name in _NUMBERS:
            last = argument
        yield last


def pickled_numbers(path: Path, names: Collection[str]) -> dict[str, int]:
    """The whole numbers that a file of torch has under `names` in any of its dicts, the first of
    each name. Empty if the file cannot be read."""
    found: dict[str, int] = {}
    name: str | int | None = None
    try:
        with zipfile.ZipFile(path) as archive:
            members = [info for info in archive.infolist() if info.filename.endswith("data.pkl")]
            if not members or members[0].file_size > LIMIT:
                return {}
            for value in pickled_values(archive.read(members[0])):
                if isinstance(name, str) and name in names and isinstance(value, int):
                    found.setdefault(name, value)
                name = value
    except _DAMAGE:
        return {}
    return found


def grid_problems(found: Collection[tuple[int, ...]], sizes: Sequence[int], what: str) -> list[str]:
    """The ranks of a grid that are not there.

    Args:
        found: the ranks that are, by their numbers.
        sizes: of the grid, as far as it is known; ranks beyond it make it larger.
        what: the beginning of their names.
    """
    dimensions = len(min(found))
    if any(len(rank) != dimensions for rank in found):
        return [f"folders of different layouts ({what}) in one checkpoint"]
    whole = []
    for axis in range(dimensions):
        known = sizes[axis] if axis < len(sizes) else 1
        whole.append(max(known, 1 + max(rank[axis] for rank in found)))
    missing = []
    for rank in product(*(range(size) for size in whole)):
        if rank not in found:
            missing.append("_".join(str(number) for number in rank))
        if len(missing) > 4:
            break
    if not missing:
        return []
    size = " x ".join(str(number) for number in whole)
    return [f"{what} {', '.join(missing)} of {size} missing"]


def distributed_problems(folder: Path) -> list[str]:
    """Of a checkpoint of torch.distributed.checkpoint: `.metadata`, which is written last, says
    which part of which `.distcp` file holds what."""
    try:
        if (folder / ".metadata").stat().st_size > LIMIT:
            needed: dict[str, int] = {}
        else:
            needed = _needed_sizes((folder / ".metadata").read_bytes())
    except FileNotFoundError:
        return [".metadata is missing: the save did not end"]
    except (OSError, ValueError) as error:
        return [f".metadata is cut off or damaged ({error})"]
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.distcp")}
    problems = []
    for name in sorted(sizes.keys() | needed):
        if name not in sizes:
            problems.append(f"{name}, which .metadata names, is missing")
        elif sizes[name] == 0:
            problems.append(f"{name} is empty")
        elif sizes[name] < needed.get(name, 0):
            problems.append(f"{name} is cut off: {sizes[name]} of {needed[name]} bytes")
    if not sizes and not problems:
        problems.append("no .distcp file is there")
    return problems


def core_problems(place: Path) -> list[str]:
    """Of the files that megatron.core.dist_checkpointing adds to those of torch in `place`. What
    is not a tensor lies in common.pt if metadata.json names a backend for it: from core 0.19 on it
    lies among the tensors."""
    wrong = [json_problem(place / "metadata.json", "sharded_backend")]
    named = json_problem(place / "metadata.json", "common_backend") is None
    if named or (place / "common.pt").exists():
        wrong.append(archive_problem(place / "common.pt"))
    return [problem for problem in wrong if problem is not None]


def _needed_sizes(metadata: bytes) -> dict[str, int]:
    """The end of the last part of each file: torch/distributed/checkpoint/filesystem.py,
    _StorageInfo(relative_path, offset, length)."""
    needed: dict[str, int] = {}
    record: dict[str, str | int] = {}
    name: str | int | None = None
    for value in pickled_values(metadata):
        if value is not None and name in ("relative_path", "offset", "length"):
            record[str(name)] = value
            if name == "length":
                path, offset, length = (
                    record.get(k) for k in ("relative_path", "offset", "length")
                )
                if isinstance(path, str) and isinstance(offset, int) and isinstance(length, int):
                    needed[path] = max(needed.get(path, 0), offset + length)
                record = {}
            name = None
            continue
        name = value
    return needed
