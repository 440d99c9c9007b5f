"""Completion of tasks, flags, jobs, runs and keys in the shell. It must be quick, and a
jobs.toml that is half written is no error here."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from invoke.parser.context import ParserContext

# flags and words that name a table of jobs.toml
NAMES = {"dataset": "datasets", "job": "jobs", "cluster": "clusters"}
CHOICES = {
    "verb": ("start", "stop", "status"),
    "code": ("run", "current"),
    "split": ("train", "valid", "test"),
    "dtype": ("fp32", "bf16", "fp16"),
}

# The command is asked as it was typed, so that the completion of one checkout's ./inv is that
# checkout's.
_BASH = """_complete_trainkit() {
    local candidates
    candidates=$("${COMP_WORDS[0]}" --complete -- "${COMP_WORDS[@]:0:COMP_CWORD+1}" 2>/dev/null)
    COMPREPLY=( $(compgen -W "$candidates" -- "${COMP_WORDS[COMP_CWORD]}") )
}
complete -F _complete_trainkit -o default trainkit inv ./inv"""
_ZSH = """_complete_trainkit() {
    local -a candidates
    candidates=(${(f)"$("${words[1]}" --complete -- "${(@)words[1,CURRENT]}" 2>/dev/null)"})
    (( ${#candidates} )) && compadd -a candidates || _files
}
compdef _complete_trainkit trainkit inv ./inv"""
_FISH = """function __complete_trainkit
    set --local words (commandline --tokenize --cut-at-cursor)
    set --append words (commandline --current-token --cut-at-cursor)
    $words[1] --complete -- $words 2>/dev/null
end
complete --command trainkit --arguments '(__complete_trainkit)'
complete --command inv --arguments '(__complete_trainkit)'"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def candidates(
    words: Sequence[str], contexts: Mapping[str, ParserContext], core: ParserContext, folder: Path
) -> list[str]:
    """What the last of `words` may become, by what stands before it.

    Args:
        words: as typed behind the program's name; the last is the one that is being typed,
        perhaps empty. contexts: the tasks. core: the program's own flags. folder: that of
        tasks.py; jobs.toml is looked for from there upward.
    """
    *before, current = words
    at = next((i for i, word in enumerate(before) if word in contexts), None)
    if at is None:
        return _beginning(current, core.flags if current.startswith("-") else contexts)
    context = contexts[before[at]]
    given = before[at + 1 :]
    if given:
        flag = context.flags.get(given[-1])
    else:
        flag = None
    if flag is not None and flag.takes_value:
        name = str(flag.name)
        return _beginning(
            current, names_of("keys" if name == "set" else NAMES.get(name, name), folder)
        )
    places = [str(argument.name) for argument in context.positional_args]
    filled = sum(not word.startswith("-") for word in _without_values(given, context))
    if filled < len(places) and not current.startswith("-"):
        return _beginning(current, names_of(NAMES.get(places[filled], places[filled]), folder))
    return _beginning(current, context.flags if current.startswith("-") else contexts)


def _beginning(current: str, names: Iterable[str]) -> list[str]:
    return sorted(
        {name for name in names if name.startswith(current) and (len(name) != 2 or name[0] != "-")}
    )


def _without_values(words: Sequence[str], context: ParserContext) -> Iterator[str]:
    """Words of a task without the values of its flags."""
    skip = False
    for word in words:
        if not skip:
            yield word
        flag = context.flags.get(word)
        skip = not skip and flag is not None and flag.takes_value


def names_of(kind: str, folder: Path) -> list[str]:
    """The names of a kind: a kind of tables of jobs.toml, "run", "keys", or what CHOICES has;
    none of a kind that is not known."""
    if kind == "keys":
        return list(_keys())
    root = next(
        (f for f in (folder.absolute(), *folder.absolute().parents) if (f / "jobs.toml").is_file()),
        None,
    )
    if root is None:
        return list(CHOICES.get(kind, ()))
    tables = _tables(root)
    if kind == "run":
        return _runs(root, tables)
    return [*tables.get(kind, ()), *CHOICES.get(kind, ())]


def _tables(root: Path) -> dict[str, dict[str, Any]]:
    """{kind: {name: table}} of jobs.toml, what it includes and jobs.local.toml, as far as they
    can be read."""
    found: dict[str, dict[str, Any]] = {}
    first = _read(root / "jobs.toml")
    patterns = [pattern for pattern in first.get("include") or () if isinstance(pattern, str)]
    further = [path for pattern in patterns for path in root.glob(pattern)]
    for document in (first, *map(_read, [*further, root / "jobs.local.toml"])):
        for kind, tables in document.items():
            if isinstance(tables, dict):
                found.setdefault(kind, {}).update(tables)
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _runs(root: Path, tables: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Ids of runs, the jobs that have any, and `last`."""
    given = [
        table.get("root")
        for table in tables.get("clusters", {}).values()
        if isinstance(table, dict)
    ]
    names = {"last"}
    for folder in dict.fromkeys(
        [root, *(Path(where) for where in given if isinstance(where, str))]
    ):
        for job in _folders(folder / "runs"):
            ids = [
                entry.name
                for entry in _folders(Path(job.path))
                if os.path.isfile(os.path.join(entry.path, "job.json"))
            ]
            names |= {*ids, *([job.name] if ids else [])}
    if len(names) > 1:
        return sorted(names)
    return []


def _folders(path: Path) -> list[os.DirEntry[str]]:
    try:
        return [entry for entry in os.scandir(path) if entry.is_dir()]
    except OSError:
        return []


def _keys() -> Iterator[str]:
    """Paths of the resolved job that --set takes."""
    from pydantic import BaseModel

    from trainkit.jobs.schema import Job

    def below(model: type[BaseModel], path: str) -> Iterator[str]:
        for name, field in model.model_fields.items():
            kinds = [
                kind
                for kind in (field.annotation, *getattr(field.annotation, "__args__", ()))
                if isinstance(kind, type)
            ]
            inner = next((kind for kind in kinds if issubclass(kind, BaseModel)), None)
            yield from (
                below(inner, f"{path}{name}.")
                if inner is not None and path.count(".") < 2
                else [f"{path}{name}="]
            )

    return below(Job, "")
