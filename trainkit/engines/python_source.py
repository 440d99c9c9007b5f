"""What Python source says of itself, read without executing it: literals, classes of a tree, the
types that fields are annotated with."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from trainkit.base.lazy_dataclasses import dataclass, replace

# what `literal` gives for an expression that only running the code would tell
UNKNOWN = object()
_PLAIN = {"int", "float", "str", "bool", "dict", "list"}


@dataclass(frozen=True)
class Kind:
    """What values an option takes.

    Args:
        type: int, float, str, bool, dict, list, several of them joined by |, or any.
        nargs: as argparse's; None: one value.
        choices: the only values, where they are listed.
    """

    type: str
    nargs: str | int | None = None
    choices: tuple[object, ...] | None = None


class Tree:
    """A tree of Python files.

    Args:
        folder: its root.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._modules: dict[str, ast.Module] = {}

    def has(self, path: str) -> bool:
        """Whether there is such a file."""
        return (self.folder / path).is_file()

    def module(self, path: str) -> ast.Module:
        """The syntax tree of a file. Raises OSError and SyntaxError."""
        if path not in self._modules:
            text = (self.folder / path).read_text(encoding="utf-8")
            self._modules[path] = ast.parse(text, filename=path)
        return self._modules[path]

    @cached_property
    def _files_by_class(self) -> dict[str, list[str]]:
        """Files that define a class of a name, the shallowest first."""
        found: dict[str, list[str]] = {}
        paths = sorted(self.folder.glob("megatron/**/*.py"), key=lambda path: len(path.parts))
        for path in paths:
            text = path.read_text(encoding="utf-8", errors="replace")
            for name in re.findall(r"^class (\w+)", text, flags=re.MULTILINE):
                found.setdefault(name, []).append(str(path.relative_to(self.folder)))
        return found

    def find_class(self, name: str) -> ast.ClassDef | None:
        """The class of that name in the first file that defines it."""
        for path in self._files_by_class.get(name, []):
            for node in self.module(path).body:
                if isinstance(node, ast.ClassDef) and node.name == name:
                    return node
        return None

    def members(self, name: str) -> dict[str, object] | None:
        """The members of an enumeration; None where `name` is none."""
        found = self.find_class(name)
        if found is None or not any("Enum" in ast.unparse(base) for base in found.bases):
            return None
        members: dict[str, object] = {}
        for node in found.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                members[node.targets[0].id] = literal(node.value, self)
        return members

    def fields(self, found: ast.ClassDef) -> Iterator[ast.AnnAssign]:
        """The fields of a dataclass in its order: those of its bases first, its own over them."""
        fields: dict[str, ast.AnnAssign] = {}
        for base in reversed(found.bases):
            above = self.find_class(ast.unparse(base).rpartition(".")[2])
            if above:
                fields |= {ast.unparse(node.target): node for node in self.fields(above)}
        own = [node for node in found.body if isinstance(node, ast.AnnAssign)]
        fields |= {ast.unparse(node.target): node for node in own}
        return iter(fields.values())


def literal(node: ast.expr | None, tree: Tree) -> object:
    """The value of an expression, or UNKNOWN. Beside literals: powers of numbers, ranges, and
    what names, values and members of the tree's enumerations are."""
    if node is None:
        return UNKNOWN
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        pass
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        base = literal(node.left, tree)
        exponent = literal(node.right, tree)
        if isinstance(base, int) and isinstance(exponent, int) and exponent < 128:
            return base**exponent
    if isinstance(node, ast.Call) and not node.keywords:
        return _listing(node, tree)
    if isinstance(node, ast.ListComp):
        return _comprehension(node, tree)
    if isinstance(node, ast.Attribute):
        members = tree.members(ast.unparse(node.value)) or {}
        if node.attr in members:
            return node.attr
    return UNKNOWN


def _listing(node: ast.Call, tree: Tree) -> object:
    """`range(0, 3)` and `list(AnEnum)`."""
    called = ast.unparse(node.func)
    if called == "range":
        bounds = [literal(argument, tree) for argument in node.args]
        if all(isinstance(bound, int) for bound in bounds):
            return list(range(*bounds))  # type: ignore[call-overload]
    if called == "list" and len(node.args) == 1:
        members = tree.members(ast.unparse(node.args[0]))
        if members is not None:
            return list(members)
    return UNKNOWN


def _comprehension(node: ast.ListComp, tree: Tree) -> object:
    """`[each.name for each in AnEnum]`, or `.value`."""
    members = tree.members(ast.unparse(node.generators[0].iter))
    if members is None or not isinstance(node.elt, ast.Attribute):
        return UNKNOWN
    if node.elt.attr == "name":
        return list(members)
    return list(members.values())


def kind_of(node: ast.expr, tree: Tree) -> Kind:
    """The kind of value that an annotation asks for; type "any" where it cannot be known."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return kind_of(ast.parse(node.value, mode="eval").body, tree)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union([node.left, node.right], tree)
    if not isinstance(node, ast.Subscript):
        return _plain_kind(ast.unparse(node).rpartition(".")[2], tree)
    outer = ast.unparse(node.value).rpartition(".")[2]
    inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if outer == "Optional" or outer == "Union":
        return _union(inner, tree)
    if outer == "Literal":
        choices = tuple(literal(choice, tree) for choice in inner)
        types = {type(choice).__name__ for choice in choices if choice is not None}
        return Kind("|".join(sorted(types)), choices=choices)
    if outer.lower() == "list":
        return replace(kind_of(inner[0], tree), nargs="+")
    if outer.lower() == "dict":
        return Kind("dict")
    return Kind("any")


def _plain_kind(name: str, tree: Tree) -> Kind:
    if name in _PLAIN:
        return Kind(name)
    if name in ("List", "Dict"):
        return Kind(name.lower())
    if name == "Signals":  # of the standard library: SIGTERM and the rest
        return Kind("str")
    members = tree.members(name)
    return Kind("str", choices=tuple(members)) if members else Kind("any")


def _union(parts: list[ast.expr], tree: Tree) -> Kind:
    some = [part for part in parts if ast.unparse(part) != "None"]
    kinds = [kind_of(part, tree) for part in some]
    if len(kinds) == 1:
        return kinds[0]
    words: list[str] = []
    for kind in kinds:
        words += kind.type.split("|")
        words += ["list"] * (kind.nargs is not None)
    return Kind("any") if "any" in words else Kind("|".join(dict.fromkeys(words)))
