"""How the code reads: sizes, width, density and names, of trainkit and of any other tree.

`python benchmarks/readability.py [TREE ...]` prints a column of a table for each tree (trainkit
without one), tests left out unless the tree is one. `--worst` names the longest and densest
places, `--names` the public classes with several meanings. tests/test_house.py holds trainkit to
the table of these figures in CONTRIBUTING.md.

Statements are counted without docstrings; tokens without comments, strings and layout, over lines
that are neither blank nor comments ("code lines"). A parallel assignment is `a, b = x, y`.
"""

from __future__ import annotations

import argparse
import ast
import graphlib
import io
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WIDE = 100  # columns
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.STRING,
}
BRANCHES = (
    ast.If,
    ast.For,
    ast.While,
    ast.AsyncFor,
    ast.IfExp,
    ast.ExceptHandler,
    ast.match_case,
    ast.Assert,
)


@dataclass(frozen=True, order=True)
class Place:
    """A number and where it was found, `file:line name`."""

    value: int
    where: str


@dataclass
class Readability:
    """What was counted in a tree.

    Args:
        files: lines of each file.
        functions: lines of each function and method.
        complexity: cyclomatic complexity of each.
        wide: lines over 100 columns, with their width.
        lines: lines that are not blank.
        code: lines that are neither blank nor comments.
        tokens: tokens in them.
        statements: statements, docstrings left out.
        import_statements: those of them that import.
        parallel: assignments `a, b = x, y`.
        untyped: places with `dict[str, Any]`.
        classes: files that define a public class of a name.
        imports: by module, the modules of the tree that it imports.
    """

    files: list[Place] = field(default_factory=list)
    functions: list[Place] = field(default_factory=list)
    complexity: list[Place] = field(default_factory=list)
    wide: list[Place] = field(default_factory=list)
    lines: int = 0
    code: int = 0
    tokens: int = 0
    statements: int = 0
    import_statements: int = 0
    parallel: int = 0
    untyped: int = 0
    classes: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    imports: dict[str, set[str]] = field(default_factory=dict)

    @property
    def homonyms(self) -> dict[str, set[str]]:
        """Public classes that several files define."""
        return {name: files for name, files in self.classes.items() if len(files) > 1}

    @property
    def figures(self) -> dict[str, tuple[float, ...]]:
        """What the tables show, by their words."""
        code = max(1, self.code)
        return {
            "files": (len(self.files),),
            "statements": (self.statements,),
            "imports, per cent of statements": (
                100 * self.import_statements / max(1, self.statements),
            ),
            "lines of a file: median, 99th percentile, longest": spread(self.files),
            "lines of a function: median, 99th percentile, longest": spread(self.functions),
            "cyclomatic complexity: 99th percentile, highest": spread(self.complexity)[1:],
            "lines over 100 columns, per cent": (100 * len(self.wide) / max(1, self.lines),),
            "tokens per line of code": (self.tokens / code,),
            "parallel assignments (`a, b = x, y`) per thousand lines": (
                1000 * self.parallel / code,
            ),
            "`dict[str, Any]`": (self.untyped,),
            "public classes whose name has two meanings": (len(self.homonyms),),
            "import circles": (self.circles,),
        }

    @property
    def circles(self) -> int:
        """1 if the files import each other in a circle, else 0."""
        try:
            graphlib.TopologicalSorter(self.imports).prepare()
        except graphlib.CycleError:
            return 1
        return 0


def complexity_of(function: ast.AST) -> int:
    """Cyclomatic complexity: one and the number of branches, conditions and loops."""
    branches = 1
    for node in ast.walk(function):
        branches += isinstance(node, BRANCHES)
        if isinstance(node, ast.BoolOp):
            branches += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            branches += 1 + len(node.ifs)
    return branches


def python_files(root: Path) -> Iterator[Path]:
    """Those of a tree, without environments, builds and, unless it is one, tests."""
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        skipped = {"build", ".venv", ".git"}
        if root.name != "tests":
            skipped.add("tests")
        if skipped.isdisjoint(inside.parts) and not (
            root.name != "tests" and path.name.startswith("test_")
        ):
            yield path


def is_docstring(node: ast.stmt) -> bool:
    """Whether a statement is a text alone."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def count_nodes(found: Readability, tree: ast.Module, inside: str) -> None:
    """Add what the syntax tree of one file has."""
    for top in tree.body:  # a class within another one is called by both names
        if isinstance(top, ast.ClassDef) and not top.name.startswith("_"):
            found.classes[top.name].add(inside)
    for node in ast.walk(tree):
        found.statements += isinstance(node, ast.stmt) and not is_docstring(node)
        found.import_statements += isinstance(node, ast.Import | ast.ImportFrom)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            where = f"{inside}:{node.lineno} {node.name}"
            assert node.end_lineno is not None
            found.functions.append(Place(node.end_lineno - node.lineno + 1, where))
            found.complexity.append(Place(complexity_of(node), where))
        elif isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                found.parallel += len(target.elts) == len(value.elts)


def imported(tree: ast.AST) -> set[str]:
    """Names of modules, and of what is imported from them, in one file."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def module_name(root: Path, path: Path) -> str:
    """The dotted name of a file, the tree's own name first."""
    parts = (root.name, *path.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def keep_most_specific(names: set[str]) -> set[str]:
    """Without packages of which a module is imported: `from a import b` of a module b needs b."""
    return {
        name for name in names if not any(other.startswith(f"{name}.") for other in names - {name})
    }


def measure(root: Path) -> Readability:
    """Count a tree of Python files. Files that are not Python 3 are left out.

    Args:
        root: its folder.
    """
    found = Readability()
    names: dict[str, set[str]] = {}
    for path in python_files(root):
        inside = str(path.relative_to(root))
        try:
            text = path.read_text()
            tree = ast.parse(text)
            tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
        except (SyntaxError, UnicodeDecodeError, tokenize.TokenError):
            continue
        lines = text.splitlines()
        found.files.append(Place(len(lines), inside))
        for number, line in enumerate(lines, 1):
            found.lines += bool(line.strip())
            found.code += bool(line.strip()) and not line.strip().startswith("#")
            if len(line) > WIDE:
                found.wide.append(Place(len(line), f"{inside}:{number}"))
        found.tokens += sum(token.type not in NOT_CODE for token in tokens)
        found.untyped += text.count("dict[str, Any]")
        count_nodes(found, tree, inside)
        names[module_name(root, path)] = imported(tree)
    for module, others in names.items():
        found.imports[module] = keep_most_specific(others & names.keys()) - {module}
    return found


def quantile(places: Sequence[Place], share: float) -> int:
    """The value that so many of the places do not exceed; 0 of none."""
    values = sorted(place.value for place in places)
    return 0 if not values else values[round(share * (len(values) - 1))]


def spread(places: Sequence[Place]) -> tuple[int, int, int]:
    """Median, 99th percentile, highest."""
    return quantile(places, 0.5), quantile(places, 0.99), quantile(places, 1)


def shown(values: Sequence[float]) -> str:
    """Figures as tables have them."""
    return ", ".join(f"{value:,.1f}".removesuffix(".0") for value in values)


def print_worst(found: Readability) -> None:
    """The five longest or densest places of each kind."""
    kinds = {
        "functions": found.functions,
        "complexity": found.complexity,
        "files": found.files,
        "lines": found.wide,
    }
    for kind, places in kinds.items():
        worst = "; ".join(f"{p.value} {p.where}" for p in sorted(places, reverse=True)[:5])
        print(f"  {kind}: {worst}")


def main(argv: Sequence[str] | None = None) -> None:
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("trees", nargs="*", type=Path, default=[ROOT / "trainkit"])
    parser.add_argument("--worst", action="store_true", help="the longest and densest places")
    parser.add_argument("--names", action="store_true", help="classes with several meanings")
    options = parser.parse_args(argv)
    measured = {tree.name: measure(tree) for tree in options.trees}
    print(f"| | {' | '.join(measured)} |")
    print("|" + "---|" * (1 + len(measured)))
    for name in Readability().figures:
        print(f"| {name} | {' | '.join(shown(each.figures[name]) for each in measured.values())} |")
    for found in measured.values():
        if options.names:
            for name, files in sorted(found.homonyms.items()):
                print(f"  {name}: {', '.join(sorted(files))}")
        if options.worst:
            print_worst(found)


if __name__ == "__main__":
    main()
