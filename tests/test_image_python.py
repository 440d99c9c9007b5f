"""What runs inside the images of others, beside ranks: it imports the standard library and itself
alone, and has nothing that Python 3.8 does not know."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli

import trainkit

PACKAGE = Path(trainkit.__file__).parent
REPOSITORY = PACKAGE.parent
OLDEST = (3, 8)
PROGRAMS = (
    "trainkit.launch.agent.main",
    "trainkit.engines.rank.main",
    "trainkit.launch.cluster_care.container_probe",
)

# whose subscript is an error at run time before 3.9, unless it is an annotation
CONTAINERS = {"tuple", "list", "dict", "set", "frozenset", "type", "deque", "defaultdict", "Popen"}
TYPES = {"str", "int", "float", "bool", "bytes", "object", *CONTAINERS}
# methods that came later, which nothing but their name tells
METHODS = {
    "removeprefix": "str, 3.9",
    "removesuffix": "str, 3.9",
    "is_relative_to": "Path, 3.9",
    "with_stem": "Path, 3.9",
    "readlink": "Path, 3.9",
    "hardlink_to": "Path, 3.10",
    "bit_count": "int, 3.10",
    "walk": "Path, 3.12",
    "add_note": "Exception, 3.11",
}
OF_MODULES = {("os", "readlink"), ("os", "walk"), ("ast", "walk")}


def files_for_ruff() -> set[Path]:
    """The files that ruff reads as Python 3.8."""
    with open(REPOSITORY / "pyproject.toml", "rb") as file:
        targets = tomli.load(file)["tool"]["ruff"]["per-file-target-version"]
    found = set()
    for pattern, version in targets.items():
        assert version == "py38", pattern
        base, words, rest = re.fullmatch(r"([^{]*)\{?([^}]*)\}?(.*)", pattern).groups()  # type: ignore[union-attr]
        patterns = [f"{base}{word}{rest}" for word in words.split(",")]
        paths = [path for each in patterns for path in REPOSITORY.glob(each)]
        assert paths, f"{pattern} of pyproject.toml names no file"
        found.update(paths)
    return found


def module_name(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def module_path(name: str) -> Path | None:
    path = REPOSITORY.joinpath(*name.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def at_run_time(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but what only type checkers read, and annotations, which
    `from __future__ import annotations` leaves alone."""
    if isinstance(tree, ast.Module) and not _leaves_annotations(tree):
        yield from ast.walk(tree)
        return
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST):
                continue
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                continue
            yield node
            yield from at_run_time(node)


def _leaves_annotations(tree: ast.Module) -> bool:
    return any(
        isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body
    )


def imports_of(tree: ast.AST) -> set[str]:
    """Names of the modules that it imports, as far as names can say: of `from a import b`, a.b
    too."""
    found = set()
    for node in at_run_time(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def closure() -> tuple[set[Path], set[str]]:
    """(the files that the programs import, what else they import)."""
    files: set[Path] = set()
    foreign = set()
    waiting = list(PROGRAMS)
    while waiting:
        name = waiting.pop()
        if name.split(".")[0] != "trainkit":
            foreign.add(name.split(".")[0])
            continue
        path = module_path(name)
        if path is None or path in files:
            continue
        files.add(path)
        parents = name.split(".")[:-1]
        waiting += [".".join(parents[: count + 1]) for count in range(len(parents))]
        waiting += sorted(imports_of(ast.parse(path.read_text())))
    return files, foreign


def too_new(source: str) -> list[str]:
    """What Python 3.8 cannot parse or evaluate, as far as the text tells."""
    try:
        tree = ast.parse(source, feature_version=OLDEST)
    except SyntaxError as error:
        return [f"{error.lineno}: {error.msg}"]
    abstract = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in ("collections.abc", "re", "os")
        for alias in node.names
    }
    found = []
    for node in at_run_time(tree):
        if isinstance(node, ast.Subscript) and _last_name(node.value) in CONTAINERS | abstract:
            found.append(f"{node.lineno}: {ast.unparse(node)} is 3.9; typing has one for all")
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr) and _is_union(node):
            found.append(f"{node.lineno}: {ast.unparse(node)} is 3.10; typing has Union")
        elif isinstance(node, ast.AugAssign) and isinstance(node.value, (ast.Dict, ast.DictComp)):
            found.append(f"{node.lineno}: {ast.unparse(node)} is 3.9")
        elif isinstance(node, ast.Attribute) and _is_new_method(node):
            found.append(f"{node.lineno}: .{node.attr} ({METHODS[node.attr]})")
    return found


def _is_new_method(node: ast.Attribute) -> bool:
    return node.attr in METHODS and (_last_name(node.value), node.attr) not in OF_MODULES


def _last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _is_union(node: ast.BinOp) -> bool:
    """Whether `|` is between types: None or a built-in one on either side."""
    return any(
        (isinstance(side, ast.Constant) and side.value is None) or _last_name(side) in TYPES
        for side in (node.left, node.right)
    )


def test_programs_in_images_import_nothing_else() -> None:
    files, foreign = closure()
    assert PACKAGE / "base/watchdog.py" in files and PACKAGE / "engines/rank/run.py" in files
    assert foreign <= sys.stdlib_module_names, "beyond the standard library"
    left_out = sorted(module_name(path) for path in files - files_for_ruff() - TRIVIAL)
    assert not left_out, "per-file-target-version of pyproject.toml has to name their files"


TRIVIAL = {PACKAGE / "__init__.py"}  # imports nothing at run time


def test_what_runs_in_images_is_python_38() -> None:
    for path in sorted(closure()[0]):
        assert not too_new(path.read_text()), path


def test_annotations_count_where_they_are_evaluated() -> None:
    source = "def f(a: int | None) -> None: pass\n"
    assert too_new(source)
    assert not too_new(f"from __future__ import annotations\n{source}")


@pytest.mark.parametrize(
    "source",
    [
        "with (open('a') as a, open('b') as b): pass",
        "match x:\n    case 1: pass",
        "def f():\n    try: pass\n    except* OSError: pass",
        "Name = tuple[int, ...]",
        "from collections.abc import Callable\nOn = Callable[[int], None]",
        "import subprocess\nx: 'str' = subprocess.Popen[bytes]",
        "Maybe = int | None",
        "isinstance(x, list | tuple)",
        "a |= {1: 2}",
        "name.removeprefix('x')",
    ],
)
def test_newer_python_is_found(source: str) -> None:
    assert too_new(f"from __future__ import annotations\n{source}\n")


def test_what_python_38_has_is_not_reported() -> None:
    source = """
from __future__ import annotations
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Callable, Optional
if TYPE_CHECKING:
    Name = tuple[int, ...] | None
On = Callable[[int], Optional[int]]
def f(a: int | None, b: Mapping[str, list[int]]) -> tuple[int, ...]:
    found: dict[str, int] = {}
    flags = os.O_RDONLY | os.O_CLOEXEC
    if (size := len(found)) and {1} | {2}:
        for folder in os.walk("."):
            return found["a"], flags, size
"""
    assert too_new(source) == []


def test_the_standard_library_of_38_is_enough() -> None:
    """By the tables of vermin, which know when each name came."""
    vermin = pytest.importorskip("vermin", reason="the test extra has vermin")
    config = vermin.Config()
    config.set_verbose(2)  # it names what it has found
    assert vermin.visit("import os\nos.pidfd_open(1)\n", config).minimum_versions()[1] == (3, 9)
    for path in sorted(closure()[0]):
        tree = _WithoutTypeChecking().visit(ast.parse(path.read_text()))
        visitor = vermin.visit(ast.unparse(tree), config)
        assert visitor.minimum_versions()[1] <= OLDEST, f"{path}\n{visitor.output_text()}"


class _WithoutTypeChecking(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.AST:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)


def test_each_python_of_images_imports_it(image_python: str) -> None:
    names = sorted(module_name(path) for path in closure()[0])
    code = (
        "import importlib, sys; sys.dont_write_bytecode = True;"
        f" sys.path.insert(0, {str(REPOSITORY)!r})\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print(len([name for name in sys.modules if name.startswith('trainkit')]))"
    )
    argv = [image_python, "-I", "-S", "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(names)
