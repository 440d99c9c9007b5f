"""Compiled functions that need no compiler: what torch.compile makes of a function for arguments
of given shapes and dtypes, made before the run, kept as files, and looked up by what the arguments
are. Nothing is traced again: who takes them says that the code is the one they were made of. At its
first use a graph is proved: it computes what the function computes.

FOLDER/index.json lists them, FOLDER/DIGEST.graph is one of them as torch keeps it.
"""

from __future__ import annotations

import hashlib
import sys
from ast import literal_eval
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.base.documents import document, read_document
from trainkit.base.files import atomic_open, write_json
from trainkit.base.lazy_dataclasses import asdict, dataclass, fields
from trainkit.base.printable import warn
from trainkit.train.proved_graphs import difference
from trainkit.train.torch_compiler import (
    VectorUnit,
    compile_ahead,
    eager_is_asked,
    load_ahead,
    loading_graphs,
    vector_unit,
)

SCHEMA = "ready-graphs/2"
Key = tuple[Any, ...]
Function = Callable[..., Any]


@dataclass(frozen=True)
class ReadyGraph:
    """A function compiled for arguments of one kind.

    Args:
        function: its name.
        key: what the arguments are, as Python writes it.
        graphs: with its backward two, else one.
        code: digest of what the compiler wrote: the same of ranks that do the same.
        file: its name in the folder.
    """

    function: str
    key: str
    graphs: int
    code: str
    file: str


class NoKeyError(Exception):
    """An argument is of no kind that graphs are looked up by."""


class ReadyGraphs:
    """What blocks and losses are compiled by: the graphs of a folder, and where it has none for
    some arguments, torch.compile.

    Args:
        folder: where they lie; None: there are none.
        making: put there what is not there yet; `made` lists it.
    """

    def __init__(self, folder: Path | None = None, *, making: bool = False) -> None:
        self.folder = folder
        self.making = making
        self.made: list[ReadyGraph] = []
        self.failed: set[str] = set()  # functions that graphs could not be made of
        self.hits = 0
        self.misses = 0  # graphs of the folder that are not used
        self.reported = False
        self._loaded: dict[str, dict[Key, tuple[Function, int]]] = {}
        self._modules: dict[nn.Module, Key] = {}

    def compile(self, function: Function) -> Function:
        """As torch.compile(function, fullgraph=True)."""
        compiled: Function = torch.compile(function, fullgraph=True)
        if self.folder is None:
            return compiled
        name = _name_of(function)
        if name not in self._loaded:
            self._loaded[name] = {} if self.making else self._load(self.folder, function)
        loaded = self._loaded[name]
        used: set[Key] = set()

        @wraps(function)
        def call(*args: Any) -> Any:
            if not (loaded or self.making) or eager_is_asked():
                return compiled(*args)
            try:
                key = self._key(args)
            except NoKeyError:
                return compiled(*args)
            if self.making and key not in loaded:
                loaded[key] = (self._make(function, compiled, args, key), 0)
            run, graphs = loaded.get(key, (compiled, 0))
            if graphs and key not in used:
                used.add(key)
                if why := difference(function, run, args):
                    self._warn(f"{name} {key}: {why}")
                    self.misses += graphs
                    loaded[key] = (compiled, 0)
                    return compiled(*args)
                self.hits += graphs
            return run(*args)

        return call

    def _load(self, folder: Path, function: Function) -> dict[Key, tuple[Function, int]]:
        """The graphs of a function. One that cannot be read is left out, with a warning."""
        loaded: dict[Key, tuple[Function, int]] = {}
        index = read_index(folder)
        for ready in index.graphs:
            if ready.function != _name_of(function):
                continue
            try:
                with loading_graphs(index.unit):
                    run = load_ahead((folder / ready.file).read_bytes(), function.__globals__)
            except Exception as error:  # torch and pickle raise many kinds
                self._warn(f"{folder / ready.file}: {type(error).__name__}: {error}")
                self.misses += ready.graphs
            else:
                loaded[literal_eval(ready.key)] = (run, ready.graphs)
        return loaded

    def forget(self) -> None:
        """Take none of them any more."""
        for loaded in self._loaded.values():
            loaded.clear()

    @staticmethod
    def _warn(what: str) -> None:
        warn(f"a graph compiled before is not used: {what}")

    def _make(self, function: Function, compiled: Function, args: Sequence[Any], key: Key) -> Any:
        """Compile for these arguments, into the folder; torch.compile's own function where torch
        cannot keep what it makes of this one."""
        assert self.folder is not None
        try:
            run, content, sources = compile_ahead(function, args)
        except Exception as error:  # torch and pickle raise many kinds
            print(f"{_name_of(function)}: {type(error).__name__}: {error}", file=sys.stderr)
            self.failed.add(_name_of(function))
            return compiled
        digest = hashlib.sha256(content).hexdigest()[:32]
        self.folder.mkdir(exist_ok=True)
        with atomic_open(self.folder / f"{digest}.graph") as file:
            file.write(content)
        code = hashlib.sha256("\0".join(map(_without_comments, sources)).encode()).hexdigest()
        self.made.append(
            ReadyGraph(_name_of(function), repr(key), len(sources), code, f"{digest}.graph")
        )
        return run

    def _key(self, args: Iterable[Any]) -> Key:
        return (torch.is_grad_enabled(), *(self._describe(value) for value in args))

    def _describe(self, value: Any) -> Any:
        """What a graph depends on of an argument. Raises NoKeyError."""
        if isinstance(value, nn.Module):
            if value not in self._modules:
                self._modules[value] = _describe_module(value)
            return (value.training, *self._modules[value])
        if type(value) in (Tensor, nn.Parameter):
            return _describe_tensor(value)
        if value is None or isinstance(value, bool | int | float | str):
            return repr(value)  # 1, 1.0 and True are equal
        if isinstance(value, tuple):
            return tuple(self._describe(each) for each in value)
        if is_dataclass(value):
            return tuple(self._describe(getattr(value, each.name)) for each in fields(value))
        raise NoKeyError(type(value).__name__)


def _name_of(function: Function) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _describe_tensor(tensor: Tensor) -> Key:
    return (
        tuple(tensor.shape),
        tensor.stride(),
        str(tensor.dtype),
        str(tensor.device),  # its number is in the code
        tensor.requires_grad,
    )


def _describe_module(module: nn.Module) -> Key:
    """A module's parameters, where it computes; they stay what they are."""
    return (
        type(module).__qualname__,
        *((name, *_describe_tensor(each)) for name, each in module.named_parameters()),
    )


def _without_comments(source: str) -> str:
    """They number graphs in the order in which a process made them."""
    return "\n".join(line for line in source.splitlines() if not line.startswith("#"))


@dataclass(frozen=True)
class Index:
    """What a folder has, and what its C++ was compiled for."""

    graphs: Sequence[ReadyGraph]
    unit: VectorUnit


def read_index(folder: Path) -> Index:
    """What a folder has; nothing where no index is."""
    if not (folder / "index.json").is_file():
        return Index((), VectorUnit(0, (), ""))
    values = read_document(folder / "index.json", SCHEMA)
    return Index([ReadyGraph(**each) for each in values["graphs"]], VectorUnit(**values["unit"]))


def merge(
    folder: Path,
    of_ranks: Mapping[int, Sequence[ReadyGraph]],
    failed: Collection[str] = (),
) -> dict[int, tuple[int, int]]:
    """Write the index of what ranks made side by side: of what several made, the first's. A
    function of which a graph could not be made, or of which ranks made different code for the same
    arguments, gets none: ranks that compute together take graphs together.

    Args:
        folder: where they lie.
        of_ranks: what each rank made.
        failed: functions that graphs could not be made of.

    Returns:
        {rank: (graphs that it made first, graphs that others had made)}.
    """
    first: dict[tuple[str, str], ReadyGraph] = {}
    left_out = set(failed)
    counts: dict[int, tuple[int, int]] = {}
    for rank, made in of_ranks.items():
        new = old = 0
        for ready in made:
            found = first.setdefault((ready.function, ready.key), ready)
            if found is ready:
                new += ready.graphs
                continue
            old += ready.graphs
            (folder / ready.file).unlink()
            if found.code != ready.code:
                left_out.add(ready.function)
                print(f"rank {rank} needs another {ready.function}: {ready.key}", file=sys.stderr)
        counts[rank] = (new, old)
    for key in [key for key in first if key[0] in left_out]:
        (folder / first.pop(key).file).unlink()
    folder.mkdir(exist_ok=True)
    graphs = [asdict(ready) for ready in first.values()]
    values = document(SCHEMA, graphs=graphs, unit=asdict(vector_unit()))
    write_json(folder / "index.json", values)
    return counts
