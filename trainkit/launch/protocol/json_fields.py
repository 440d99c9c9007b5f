"""Dataclasses to JSON objects and back: the annotation of a field is both what is written and
what a reader accepts.

Fields are text, numbers, booleans, `X | None`, `tuple[X, ...]`, `Mapping[str, X]`, dataclasses of
these, or `object` for what is only passed on. A reader ignores keys that it does not know, so that
both sides may be of different versions.

Standard library only: the agent imports this on nodes that may have nothing else.
"""

from __future__ import annotations

import ast
import dataclasses
import sys
from collections.abc import Mapping
from typing import Callable, TypeVar, cast

T = TypeVar("T")
_Reader = Callable[[object, str], object]

# readers of the fields of a dataclass, made at its first use
_KNOWN: dict[type[object], tuple[tuple[str, _Reader, bool], ...]] = {}

# of a field: it is not written while it is None
OMIT_NONE: Mapping[str, bool] = {"omit_none": True}


class FieldError(ValueError):
    """A JSON value is not what the field's annotation says."""


def read_fields(kind: type[T], value: object, name: str) -> T:
    """An instance of a dataclass from a JSON object.

    Args:
        kind: the dataclass.
        value: what json.loads gave.
        name: what messages call the object.

    Raises:
        FieldError: a field is missing or of another type.
    """
    if not isinstance(value, Mapping):
        raise FieldError(f"{name}: expected an object, got {_shown(value)}")
    values = {}
    for field, read, required in _readers(kind):
        if field in value:
            values[field] = read(value[field], f"{name}: {field}")
        elif required:
            raise FieldError(f"{name}: {field} is missing")
    return kind(**values)


def write_fields(instance: object) -> dict[str, object]:
    """The JSON object of a dataclass's instance, its fields in order."""
    values = {}
    for field in dataclasses.fields(instance):  # type: ignore[arg-type]
        value = getattr(instance, field.name)
        if value is not None or not field.metadata.get("omit_none"):
            values[field.name] = _written(value)
    return values


def _written(value: object) -> object:
    if dataclasses.is_dataclass(value):
        return write_fields(value)
    if isinstance(value, (tuple, list)):
        return [_written(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _written(item) for key, item in value.items()}
    return value


def _readers(kind: type[object]) -> tuple[tuple[str, _Reader, bool], ...]:
    """(name, reader, whether it has to be there) of each field."""
    if kind in _KNOWN:
        return _KNOWN[kind]
    names: dict[str, object] = {}
    for base in reversed(kind.__mro__):  # as its own module and those of its bases know them
        names.update(vars(sys.modules[base.__module__]))
    _KNOWN[kind] = tuple(
        (
            field.name,
            _reader(_parsed(field.type), names),
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(kind)  # type: ignore[arg-type]
    )
    return _KNOWN[kind]


def _reader(annotation: ast.expr, names: Mapping[str, object]) -> _Reader:
    """The reader of what is annotated so. It is read as it is written: Python 3.8 cannot evaluate
    `X | None`."""
    if isinstance(annotation, ast.Name):
        return _named_reader(annotation.id, names)
    if isinstance(annotation, ast.BinOp) and _is_constant(annotation.right, None):
        return _optional(_reader(annotation.left, names))
    if isinstance(annotation, ast.Subscript) and isinstance(annotation.value, ast.Name):
        words = _words(annotation)
        if annotation.value.id == "tuple" and len(words) == 2 and _is_constant(words[1], ...):
            return _list(_reader(words[0], names))
        if annotation.value.id == "Mapping" and len(words) == 2:
            return _mapping(_reader(words[1], names))
    raise TypeError(f"no reader for fields of type {ast.dump(annotation)}")


def _parsed(annotation: object) -> ast.expr:
    """An annotation of a module with `from __future__ import annotations`: its text."""
    if not isinstance(annotation, str):
        raise TypeError(f"no reader for fields of type {annotation}, which is no text")
    return ast.parse(annotation, mode="eval").body


def _words(subscript: ast.Subscript) -> list[ast.expr]:
    """What stands between the brackets, with a comma in it."""
    inside = getattr(subscript.slice, "value", subscript.slice)  # Python 3.8 wraps it once more
    if isinstance(inside, ast.Tuple):
        return inside.elts
    return []


def _is_constant(node: ast.expr, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _named_reader(name: str, names: Mapping[str, object]) -> _Reader:
    kind = names.get(name)
    if kind is object:
        return lambda value, name: value
    if kind in (str, int, float, bool):
        return _scalar(cast("type[object]", kind))
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return lambda value, name: read_fields(kind, value, name)
    raise TypeError(f"no reader for fields of type {name}")


def _scalar(kind: type[object]) -> _Reader:
    accepted = (int, float) if kind is float else kind
    expected = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}[kind]

    def read(value: object, name: str) -> object:
        # JSON's true and false are numbers to Python
        if not isinstance(value, accepted) or isinstance(value, bool) is not (kind is bool):
            raise FieldError(f"{name}: expected {expected}, got {_shown(value)}")
        return value

    return read


def _optional(inner: _Reader) -> _Reader:
    return lambda value, name: None if value is None else inner(value, name)


def _list(inner: _Reader) -> _Reader:
    def read(value: object, name: str) -> object:
        if not isinstance(value, (list, tuple)):
            raise FieldError(f"{name}: expected a list, got {_shown(value)}")
        return tuple(inner(item, f"{name}[{index}]") for index, item in enumerate(value))

    return read


def _mapping(inner: _Reader) -> _Reader:
    def read(value: object, name: str) -> object:
        if not isinstance(value, Mapping):
            raise FieldError(f"{name}: expected an object, got {_shown(value)}")
        return {str(key): inner(item, f"{name}.{key}") for key, item in value.items()}

    return read


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
