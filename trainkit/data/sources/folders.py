"""The files of text that a folder stands for: a copy of a hub's dataset, what Hugging Face's
`datasets` saved, or any other. Never several configurations, nor training and other splits."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from trainkit.base.errors import ConfigError, Exit
from trainkit.base.files import read_json
from trainkit.data.text.formats import READABLE, READABLE_IN_WORDS

# names up to their first dot: readable by what follows, and no text; "": hidden
ABOUT = {"", "readme", "license", "licence", "notice", "requirements", "state"} | {
    f"dataset_{word}" for word in ("info", "infos", "dict")
}
# words of a path by which the hub knows splits that are not trained on
HELD_OUT = {"validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation"}
SHOWN = 5  # patterns in a message


def folder_files(folder: Path, place: str) -> list[Path]:
    """All files below `folder` that are read, sorted; hidden ones and those that are about the
    data are left out. Of what `save_to_disk` left, the files of the data; of a hub's dataset with
    configurations in README.md, those of the one that holds all that are there.

    Args:
        folder: the folder.
        place: what errors call it.

    Raises ConfigError (exit 6): there is none; no configuration holds all; files of a split that
    is not trained on lie beside others; README.md cannot be understood.
    """
    names = _configured(folder, _readable(folder), place)
    if not names:
        raise ConfigError(
            f"{place}: {folder} is a folder without a file of a format that is read",
            exit=Exit.STAGE_FAILED,
            hint=f"read are {READABLE_IN_WORDS}; the name says the format",
        )
    held_out = [name for name in names if HELD_OUT & set(re.split("[^a-z]+", name.lower()))]
    if 0 < len(held_out) < len(names):
        raise ConfigError(
            f"{place}: {folder} is a folder in which {len(held_out):,} of {len(names):,} files are"
            f" not of a training split by their names, such as {held_out[0]}",
            exit=Exit.STAGE_FAILED,
            hint=_name_them(folder, [name for name in names if name not in held_out]),
        )
    return [folder / name for name in names]


def _readable(folder: Path) -> list[str]:
    def give_up(error: OSError) -> None:
        raise error  # os.walk would leave the folder out without a word

    found = []
    for here, folders, files in os.walk(folder, onerror=give_up):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if "state.json" in files and "dataset_info.json" in files:
            # caches of what was done to the data lie beside them
            files = [
                file["filename"] for file in read_json(Path(here, "state.json"))["_data_files"]
            ]
        found += [
            os.path.relpath(os.path.join(here, name), folder)
            for name in files
            if name.endswith(READABLE) and name.lower().partition(".")[0] not in ABOUT
        ]
    return sorted(found)


def _configured(folder: Path, names: list[str], place: str) -> list[str]:
    configs = {}
    for config, patterns in _configs(folder, place).items():
        matches = {m for p in patterns for m in glob.glob(p, root_dir=folder, recursive=True)}
        if files := [name for name in names if name in matches]:
            configs[config] = files
    if not configs:
        return names
    largest = max(configs.values(), key=len)
    if any(set(files) - set(largest) for files in configs.values()):
        raise ConfigError(
            f"{place}: {folder} is a folder of several configurations: {', '.join(configs)}",
            exit=Exit.STAGE_FAILED,
            hint=_name_them(folder, [files[0] for files in configs.values()]),
        )
    return largest


def _configs(folder: Path, place: str) -> dict[str, list[str]]:
    """{configuration: patterns of its files}, from the head of README.md."""
    readme = folder / "README.md"
    head = (
        re.match(r"---\n(.*?)\n---", readme.read_text("utf-8"), re.S) if readme.is_file() else None
    )
    if head is None:
        return {}
    import yaml  # 20 ms, for few datasets

    try:
        return {
            str(config["config_name"]): list(_patterns(config["data_files"]))
            for config in (yaml.safe_load(head[1]) or {}).get("configs") or ()
            if "data_files" in config
        }
    except (yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{place}: what {readme} says of configurations cannot be understood: {error!r}",
            exit=Exit.STAGE_FAILED,
            hint=f"name the files by patterns, such as {folder}/**/*.parquet",
        ) from None


def _patterns(value: object) -> Iterable[str]:
    """Of data_files: "p", ["p", ..], [{"split": "s", "path": "p" or ["p", ..]}, ..]."""
    if isinstance(value, str):
        return [value.removeprefix("./")]
    if isinstance(value, Mapping):
        return _patterns(value["path"])
    if isinstance(value, list):
        return [pattern for part in value for pattern in _patterns(part)]
    raise TypeError(f"data_files: {value!r}")


def _name_them(folder: Path, names: Sequence[str]) -> str:
    patterns = list(dict.fromkeys(f"{folder}/{re.sub('[0-9]+', '*', name)}" for name in names))
    return f"name the files that are meant by patterns, such as {' or '.join(patterns[:SHOWN])}"
