"""Reads which options an engine's tree has, without importing or executing any of it:

    python -m trainkit.engines.extract_options TREE [--version V] [--commit C] > TABLE.json

Megatron-LM: every `add_argument` that parse_args reaches, with those of its extra provider, and
the groups that ArgumentGroupFactory makes from dataclasses (core 0.16 and newer). GPT-NeoX: the
fields of the dataclasses that BASE_CLASSES names. What only running the code would tell stands
in `not_seen` of the table.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from trainkit.base.lazy_dataclasses import dataclass, field, replace
from trainkit.engines.options import Action, Option, OptionTable, dump_table
from trainkit.engines.python_source import UNKNOWN, Tree, kind_of, literal

_ARGUMENTS = ("megatron/training/arguments.py", "megatron/arguments.py")
_FACTORY = "ArgumentGroupFactory"


@dataclass
class _Found:
    """What was read so far."""

    options: dict[str, Option] = field(default_factory=dict)
    not_seen: list[str] = field(default_factory=list)

    def add(self, option: Option) -> None:
        """A later option of a name replaces the earlier one; a name with an optional `no-` is two
        names."""
        self.options[option.name] = option


def megatron_options(tree: Tree) -> _Found:
    """The options of pretrain_gpt.py.

    Raises FileNotFoundError: it is not a tree of Megatron-LM.
    """
    path = next((path for path in _ARGUMENTS if tree.has(path)), None)
    if path is None:
        raise FileNotFoundError(f"{tree.folder} has neither {' nor '.join(_ARGUMENTS)}")
    found = _Found()
    _Parser(tree, path, found, "").read(("add_megatron_arguments", "parse_args"))
    for name, condition in _extra_providers(tree):
        post = "megatron/post_training/arguments.py"
        if tree.has(post):
            _Parser(tree, post, found, condition).read((name,))
    return found


def _extra_providers(tree: Tree) -> Iterator[tuple[str, str]]:
    """`extra_args_provider=NAME if CONDITION else None` in pretrain_gpt.py."""
    for node in ast.walk(tree.module("pretrain_gpt.py")):
        if not isinstance(node, ast.keyword) or node.arg != "extra_args_provider":
            continue
        if isinstance(node.value, ast.IfExp):
            yield ast.unparse(node.value.body), ast.unparse(node.value.test)
        elif isinstance(node.value, ast.Name):
            yield node.value.id, ""


class _Parser:
    """Follows the functions of one file that add options to a parser.

    Args:
        tree: the engine's tree.
        path: the file.
        found: what is added to.
        condition: what must be true for its options to be there; "": nothing.
    """

    def __init__(self, tree: Tree, path: str, found: _Found, condition: str) -> None:
        self.tree = tree
        self.found = found
        self.condition = condition
        self.functions = {
            node.name: node for node in tree.module(path).body if isinstance(node, ast.FunctionDef)
        }
        self._read: set[str] = set()

    def read(self, names: tuple[str, ...]) -> None:
        """These functions, and those of the file that they call."""
        for name in names:
            if name in self.functions and name not in self._read:
                self._read.add(name)
                self._body(self.functions[name].body, self.condition, {})

    def _body(self, body: list[ast.stmt], condition: str, names: dict[str, ast.expr]) -> None:
        for statement in body:
            if isinstance(statement, ast.If):
                inner = " and ".join(
                    part for part in (condition, ast.unparse(statement.test)) if part
                )
                self._body(statement.body, inner, names)
                self._body(statement.orelse, condition, names)
                continue
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                names[statement.targets[0].id] = statement.value
            for call in _calls(statement):
                self._call(call, condition, names)

    def _call(self, call: ast.Call, condition: str, names: dict[str, ast.expr]) -> None:
        called = ast.unparse(call.func)
        if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
            self._argument(call, condition)
        elif called == _FACTORY:
            self._group(call, condition, names)
        elif called.endswith(("_args", "_arguments")):
            self.read((called,))

    def _argument(self, call: ast.Call, condition: str) -> None:
        flags = [literal(argument, self.tree) for argument in call.args]
        names = [flag for flag in flags if isinstance(flag, str) and flag.startswith("--")]
        if not names:
            self.found.not_seen.append(f"line {call.lineno}: {ast.unparse(call)[:80]}")
            return
        given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        plain = [name.removeprefix("--") for name in names]
        option = Option(plain[0], aliases=tuple(plain[1:]), condition=condition)
        self.found.add(_over(option, given, self.tree))
        if "choices" in given and literal(given["choices"], self.tree) is UNKNOWN:
            said = ast.unparse(given["choices"])
            self.found.not_seen.append(f"{names[0]}: the choices {said}")

    def _group(self, call: ast.Call, condition: str, names: dict[str, ast.expr]) -> None:
        """The options that a dataclass becomes."""
        name = ast.unparse(call.args[0])
        source = self.tree.find_class(name)
        if source is None:
            self.found.not_seen.append(f"dataclass {name}: not found in the tree")
            return
        excluded: object = []
        for keyword in call.keywords:
            if keyword.arg == "exclude":
                value = keyword.value
                if isinstance(value, ast.Name):
                    value = names.get(value.id, value)
                excluded = literal(value, self.tree)
        if not isinstance(excluded, list):
            self.found.not_seen.append(f"dataclass {name}: which fields are excluded")
            excluded = []
        for field_ in self.tree.fields(source):
            if ast.unparse(field_.target) not in excluded and "ClassVar" not in ast.unparse(
                field_.annotation
            ):
                self._field(name, field_, condition)

    def _field(self, owner: str, field_: ast.AnnAssign, condition: str) -> None:
        """One field, as ArgumentGroupFactory._build_argparse_kwargs_from_field makes an option of
        it."""
        attribute = ast.unparse(field_.target)
        default, meta, in_init = _field_default(field_.value, self.tree)
        if not in_init:
            return
        kind = kind_of(field_.annotation, self.tree)
        names = [f"--{attribute.replace('_', '-')}"]
        action: Action = "store"
        if kind.type == "bool" and kind.nargs is None:
            action = "store_false"
            # False and 0, as the factory compares; None is neither
            if isinstance(default, (bool, int)) and not default:
                action = "store_true"
        if action == "store_false":
            words = names[0].removeprefix("--")
            names = [f"--no-{words}", f"--disable-{words}"]
        given = literal(meta.pop("arg_names", None), self.tree)
        if isinstance(given, list):
            names = [str(each) for each in given]
        if kind.type == "any" and "type" not in meta:
            annotation = ast.unparse(field_.annotation)
            self.found.not_seen.append(f"{names[0]}, of {owner}: the type {annotation}")
        option = Option(
            name=names[0].removeprefix("--"),
            type=kind.type,
            action=action,
            nargs=kind.nargs,
            choices=kind.choices,
            aliases=tuple(each.removeprefix("--") for each in names[1:]),
            default=_known(default) if action == "store" else None,
            condition=condition,
        )
        self.found.add(_over(option, meta, self.tree))


def _calls(statement: ast.stmt) -> list[ast.Call]:
    """The calls of a statement as they are written, outer ones too."""
    found = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return sorted(found, key=lambda node: (node.lineno, node.col_offset))


def _known(value: object) -> object:
    """A default that JSON can hold; None for every other."""
    if value is UNKNOWN or not isinstance(value, (str, int, float, bool, list)):
        return None
    return value


def _field_default(node: ast.expr | None, tree: Tree) -> tuple[object, dict[str, ast.expr], bool]:
    """What a field is set to in its class: (default, metadata["argparse_meta"], whether it is an
    argument of __init__)."""
    if not isinstance(node, ast.Call) or ast.unparse(node.func).rpartition(".")[2] != "field":
        return literal(node, tree), {}, True
    default: object = UNKNOWN
    in_init = True
    meta: dict[str, ast.expr] = {}
    for keyword in node.keywords:
        if keyword.arg == "default":
            default = literal(keyword.value, tree)
        elif keyword.arg == "init":
            in_init = literal(keyword.value, tree) is not False
        elif keyword.arg == "metadata" and isinstance(keyword.value, ast.Dict):
            inner = _entries(keyword.value).get("argparse_meta")
            if isinstance(inner, ast.Dict):
                meta = _entries(inner)
    return default, meta, in_init


def _entries(node: ast.Dict) -> dict[str, ast.expr]:
    return {
        str(key.value): value
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant)
    }


def _over(option: Option, given: Mapping[str, ast.expr], tree: Tree) -> Option:
    """An option with keywords of add_argument put over it."""
    changed: dict[str, Any] = {}
    action = given.get("action")
    if action is not None:
        changed["action"] = _action(action)
        changed["type"] = "bool"
    if "type" in given:
        changed["type"] = kind_of(given["type"], tree).type
        if option.action != "store":
            changed["action"] = "store"
    for key in ("nargs", "choices", "default"):
        value = literal(given.get(key), tree)
        if value is not UNKNOWN:
            changed[key] = _known(value)
    if isinstance(changed.get("choices"), list):
        changed["choices"] = tuple(changed["choices"])
    return replace(option, **changed)


def _action(node: ast.expr) -> Action:
    word = ast.unparse(node).strip("'")
    if word.endswith("BooleanOptionalAction"):
        return "switch"
    if word in ("store_true", "store_false"):
        return cast(Action, word)
    return "store"


def neox_options(tree: Tree) -> _Found:
    """The options of GPT-NeoX: fields of the dataclasses that NeoXArgs is made of.

    Raises FileNotFoundError: it is not a tree of GPT-NeoX.
    """
    path = "megatron/neox_arguments/arguments.py"
    if not tree.has(path):
        raise FileNotFoundError(f"{tree.folder} has no {path}")
    found = _Found()
    bases: list[str] = []
    for node in tree.module(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "BASE_CLASSES":
            assert isinstance(node.value, ast.List)
            bases = [ast.unparse(each) for each in node.value.elts]
    for name in bases:
        source = tree.find_class(name)
        if source is None:
            found.not_seen.append(f"dataclass {name}: not found in the tree")
            continue
        for field_ in tree.fields(source):
            kind = kind_of(field_.annotation, tree)
            default, _, _ = _field_default(field_.value, tree)
            attribute = ast.unparse(field_.target)
            if kind.type == "any":
                annotation = ast.unparse(field_.annotation)
                found.not_seen.append(f"{attribute}, of {name}: the type {annotation}")
            type_ = "list" if kind.nargs else kind.type
            found.add(Option(attribute, type_, choices=kind.choices, default=_known(default)))
    return found


def megatron_version(tree: Tree) -> str:
    """As megatron/core/package_info.py says it; "2021" for a tree without one."""
    path = "megatron/core/package_info.py"
    if not tree.has(path):
        return "2021"
    said: dict[str, object] = {}
    for node in tree.module(path).body:
        if isinstance(node, ast.Assign):
            said[ast.unparse(node.targets[0])] = literal(node.value, tree)
    return f"core-{said['MAJOR']}.{said['MINOR']}.{said['PATCH']}{said['PRE_RELEASE']}"


def read_tree(folder: Path, version: str | None, commit: str) -> OptionTable:
    """The table of a tree.

    Args:
        folder: its root.
        version: what the table says; None: what the tree says.
        commit: of the tree.

    Raises FileNotFoundError: it is neither engine's.
    """
    tree = Tree(folder)
    if tree.has("megatron/neox_arguments/arguments.py"):
        engine = "gpt-neox"
        said = "2.0.0"
        found = neox_options(tree)
    else:
        engine = "megatron-lm"
        said = megatron_version(tree)
        found = megatron_options(tree)
    return OptionTable(engine, version or said, commit, found.options, tuple(found.not_seen))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of a tree."""
    parser = argparse.ArgumentParser(prog="extract_options", description=__doc__)
    parser.add_argument("tree", type=Path, help="the engine's source tree")
    parser.add_argument("--version", help="by default what the tree says")
    parser.add_argument("--commit", help="by default that of the git repository it is")
    given = parser.parse_args(argv)
    commit = given.commit
    if commit is None:
        asked = ["git", "-C", str(given.tree), "rev-parse", "--short=10", "HEAD"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        commit = done.stdout.strip() if (given.tree / ".git").exists() else ""
    try:
        table = read_tree(given.tree, given.version, commit)
    except (FileNotFoundError, SyntaxError) as error:
        print(error, file=sys.stderr)
        return 3
    print(dump_table(table), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
