"""Completion of tasks, flags, jobs, runs and keys in the shell. It must be quick, and it ignores
errors in a jobs.toml that is being edited."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from invoke.parser.context import ParserContext

# arguments and flags that name a table of jobs.toml
TABLES = {"dataset": "datasets", "job": "jobs", "cluster": "clusters"}
CHOICES = {
    "verb": ("start", "stop", "status"),
    "code": ("run", "current"),
    "split": ("train", "valid", "test"),
    "builder": ("docker", "podman", "buildah"),
    "dtype": ("fp32", "bf16", "fp16"),
}

# The command is called as it was typed, so that ./inv of a checkout completes with that checkout.
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
    tokens: Sequence[str], contexts: Mapping[str, ParserContext], core: ParserContext, folder: Path
) -> list[str]:
    """What the last of `tokens` may be completed to.

    Args:
        tokens: as typed after the program's name; the last is unfinished, perhaps empty.
        contexts: the tasks by name.
        core: the program's own flags.
        folder: that of tasks.py; jobs.toml is searched from there upward.
    """
    *before, current = tokens
    at = next((i for i, token in enumerate(before) if token in contexts), None)
    if at is None:
        return _starting_with(current, core.flags if current.startswith("-") else contexts)
    context = contexts[before[at]]
    given = before[at + 1 :]
    flag = context.flags.get(given[-1]) if given else None
    if flag is not None and flag.takes_value:
        return _starting_with(current, names_of(_kind(str(flag.name)), folder))
    if current.startswith("-"):
        return _starting_with(current, context.flags)
    arguments = [str(argument.name) for argument in context.positional_args]
    filled = sum(not token.startswith("-") for token in _without_values(given, context))
    if filled < len(arguments):
        return _starting_with(current, names_of(_kind(arguments[filled]), folder))
    return _starting_with(current, contexts)


def _kind(name: str) -> str:
    """What kind of name an argument or flag takes, for `names_of`."""
    return "keys" if name == "set" else TABLES.get(name, name)


def _starting_with(current: str, names: Iterable[str]) -> list[str]:
    """The names that start so, without flags of one letter."""
    found = {name for name in names if name.startswith(current)}
    return sorted(name for name in found if len(name) != 2 or name[0] != "-")


def _without_values(tokens: Sequence[str], context: ParserContext) -> Iterator[str]:
    """Tokens of a task without the values of its flags."""
    skip = False
    for token in tokens:
        if not skip:
            yield token
        flag = context.flags.get(token)
        skip = not skip and flag is not None and flag.takes_value


def names_of(kind: str, folder: Path) -> list[str]:
    """The names of a kind; none of an unknown kind.

    Args:
        kind: a kind of tables of jobs.toml, "run", "keys", or a key of CHOICES.
        folder: where the search for jobs.toml starts.
    """
    if kind == "keys":
        return list(_keys())
    choices = list(CHOICES.get(kind, ()))
    folders = (folder.absolute(), *folder.absolute().parents)
    root = next((each for each in folders if (each / "jobs.toml").is_file()), None)
    if root is None:
        return choices
    tables = _read_tables(root)
    if kind == "run":
        return _runs(root, tables)
    return [*tables.get(kind, ()), *choices]


# {kind: {name: table}}, of documents that nobody has checked
Tables = dict[str, dict[str, object]]


def _read_tables(root: Path) -> Tables:
    """The tables of jobs.toml, of what it includes and of jobs.local.toml, as far as they can be
    read."""
    found: Tables = {}
    first = _read(root / "jobs.toml")
    included = first.get("include")
    patterns = included if isinstance(included, list) else []
    further = [path for pattern in patterns for path in root.glob(str(pattern))]
    for document in (first, *map(_read, [*further, root / "jobs.local.toml"])):
        for kind, tables in document.items():
            if isinstance(tables, dict):
                found.setdefault(kind, {}).update(tables)
    return found


def _read(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _runs(root: Path, tables: Tables) -> list[str]:
    """Ids of runs, the jobs that have any, and `last`."""
    roots = {root: None}
    for table in tables.get("clusters", {}).values():
        given = table.get("root") if isinstance(table, dict) else None
        if isinstance(given, str):
            roots[Path(given)] = None
    names = {"last"}
    for folder in roots:
        for job in _folders(folder / "runs"):
            ids = [
                entry.name
                for entry in _folders(Path(job.path))
                if os.path.isfile(os.path.join(entry.path, "job.json"))
            ]
            names.update(ids)
            if ids:
                names.add(job.name)
    return sorted(names) if len(names) > 1 else []


def _folders(path: Path) -> list[os.DirEntry[str]]:
    try:
        return [entry for entry in os.scandir(path) if entry.is_dir()]
    except OSError:
        return []


def _keys() -> Iterator[str]:
    """Keys of the resolved job, for --set."""
    from pydantic import BaseModel

    from trainkit.jobs.schema import Job

    def below(model: type[BaseModel], path: str) -> Iterator[str]:
        for name, field in model.model_fields.items():
            annotations = (field.annotation, *getattr(field.annotation, "__args__", ()))
            classes = [each for each in annotations if isinstance(each, type)]
            inner = next((each for each in classes if issubclass(each, BaseModel)), None)
            if inner is not None and path.count(".") < 2:
                yield from below(inner, f"{path}{name}.")
            else:
                yield f"{path}{name}="

    return below(Job, "")
