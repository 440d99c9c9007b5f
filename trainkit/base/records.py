"""Records: dataclasses that are written as JSON objects and read again. The annotation of a field
is both what is written and what a reader accepts; its name is its key.

Fields are text, numbers, booleans, paths, `Literal[...]`, `X | None`, `tuple[X, ...]`, `list[X]`,
`tuple[X, Y]`, `Mapping[str, X]`, records, other dataclasses, pydantic's models, or `object` and
`Any` for what is only passed on. A reader ignores keys that it does not know, so that both sides
may be of different versions; a field that was added later needs a default.

Standard library only: the agent imports this on nodes that may have nothing else.
"""

from __future__ import annotations

import ast
import dataclasses
import sys
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Callable, ClassVar, TypeVar, cast

from trainkit.base.documents import read_document
from trainkit.base.errors import ConfigError

if TYPE_CHECKING:
    from typing import Self

T = TypeVar("T")
_Reader = Callable[[object, str], object]

# Metadata of fields. {"key": "class"}: its key, where that is not its name.
# It is not written while it is None.
OMIT_NONE: Mapping[str, object] = {"omit_none": True}
# The keys of the record in it stand among those of the record that it is in.
INLINE: Mapping[str, object] = {"inline": True}
# It is neither written nor read.
UNWRITTEN: Mapping[str, object] = {"unwritten": True}

_PLAIN = frozenset({str, int, float, bool, type(None)})
_EXPECTED = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


class FieldError(ValueError):
    """A JSON value is not what the field's annotation says."""


class Record:
    """A dataclass with this base reads and writes itself.

    SCHEMA: the form and its version, written first as "schema"; "": it is part of a document.
    """

    SCHEMA: ClassVar[str] = ""

    def to_json(self) -> dict[str, object]:
        """The JSON object: the fields in order."""
        values: dict[str, object] = {"schema": self.SCHEMA} if self.SCHEMA else {}
        values.update(write_fields(self))
        return values

    @classmethod
    def from_json(cls, value: Any, name: str = "") -> Self:
        """Read what `to_json` wrote.

        Args:
            value: what json.loads gave.
            name: what messages call the object; the class by default.

        Raises:
            FieldError: it is another document, or a field is missing or of another type.
        """
        name = name or cls.__name__
        if cls.SCHEMA and isinstance(value, Mapping) and value.get("schema") != cls.SCHEMA:
            raise FieldError(f"{name}: {_shown(value.get('schema'))} is not {cls.SCHEMA!r}")
        return read_fields(cls, value, name)

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read a document. Raises ConfigError where the file is missing, is not JSON, is of
        another form, or a field is missing or of another type."""
        try:
            return cls.from_json(read_document(path, cls.SCHEMA), str(path))
        except FieldError as error:
            raise ConfigError(str(error)) from None


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
    for field, key, read, required in _readers(cast("Any", kind)):
        if key in value:
            values[field] = read(value[key], f"{name}: {key}")
        elif not key:
            values[field] = read(value, name)
        elif required:
            raise FieldError(f"{name}: {key} is missing")
    return kind(**values)


def write_fields(instance: Any) -> dict[str, object]:
    """The JSON object of a dataclass's instance, its fields in order."""
    values: dict[str, object] = {}
    for field, key, omit_none in _written(cast("Any", type(instance))):
        value = getattr(instance, field)
        if not key:
            values.update(write_fields(value))
        elif value is not None or not omit_none:
            values[key] = value if type(value) in _PLAIN else write_value(value)
    return values


def write_value(value: Any) -> Any:
    """What JSON has for the value of a field."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, (tuple, list)):
        return [write_value(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): write_value(item) for name, item in value.items()}
    if isinstance(value, Record):
        return value.to_json()
    if dataclasses.is_dataclass(value):
        return write_fields(value)
    if isinstance(value, PurePath):
        return str(value)
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return value


def _fields(kind: type[Any]) -> list[tuple[dataclasses.Field[Any], str]]:
    """Each field of a record with its key; "" where its keys are among those of the record."""
    return [
        (field, "" if field.metadata.get("inline") else field.metadata.get("key", field.name))
        for field in dataclasses.fields(kind)
        if not field.metadata.get("unwritten")
    ]


@lru_cache(maxsize=None)
def _written(kind: Any) -> tuple[tuple[str, str, bool], ...]:
    """(name, key, whether None is left out) of each field that is written."""
    return tuple(
        (field.name, key, bool(field.metadata.get("omit_none"))) for field, key in _fields(kind)
    )


@lru_cache(maxsize=None)
def _readers(kind: Any) -> tuple[tuple[str, str, _Reader, bool], ...]:
    """(name, key, reader, whether it has to be there) of each field that __init__ takes."""
    names: dict[str, object] = {}
    for base in reversed(kind.__mro__):  # as its own module and those of its bases know them
        names.update(vars(sys.modules[base.__module__]))
    missing = dataclasses.MISSING
    return tuple(
        (
            field.name,
            key,
            _reader(_parsed(field.type), names),
            field.default is missing and field.default_factory is missing,
        )
        for field, key in _fields(kind)
        if field.init
    )


def _reader(annotation: ast.expr, names: Mapping[str, object]) -> _Reader:
    """The reader of what is annotated so. It is read as it is written: Python 3.8 cannot evaluate
    `X | None`."""
    if isinstance(annotation, (ast.Name, ast.Attribute)):
        return _named_reader(_name(annotation), names)
    if isinstance(annotation, ast.BinOp) and _is_constant(annotation.right, None):
        return _optional(_reader(annotation.left, names))
    if isinstance(annotation, ast.Subscript):
        form = _name(annotation.value)
        words = _words(annotation)
        if form == "Literal":
            return _choice([ast.literal_eval(word) for word in words])
        if form == "tuple" and len(words) == 2 and _is_constant(words[1], ...):
            return _list(_reader(words[0], names), tuple)
        if form == "list":
            return _list(_reader(words[0], names), list)
        if form == "tuple":
            return _row([_reader(word, names) for word in words])
        if form in ("Mapping", "dict") and len(words) == 2:
            return _mapping(_reader(words[1], names))
    raise TypeError(f"no reader for fields of type {ast.dump(annotation)}")


def _parsed(annotation: object) -> ast.expr:
    """An annotation of a module with `from __future__ import annotations`: its text."""
    if not isinstance(annotation, str):
        raise TypeError(f"no reader for fields of type {annotation}, which is not text")
    return ast.parse(annotation, mode="eval").body


def _name(annotation: ast.expr) -> str:
    """The name of a class, without that of its module."""
    return getattr(annotation, "id", "") or getattr(annotation, "attr", "")


def _words(subscript: ast.Subscript) -> list[ast.expr]:
    """What stands between the brackets."""
    inside: Any = subscript.slice
    if type(inside).__name__ == "Index":  # Python 3.8 wraps it once more
        inside = inside.value
    return inside.elts if isinstance(inside, ast.Tuple) else [inside]


def _is_constant(node: ast.expr, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _named_reader(name: str, names: Mapping[str, object]) -> _Reader:
    kind = names.get(name)
    if kind is object or kind is Any:
        return lambda value, name: value
    if kind in _EXPECTED:
        return _scalar(cast("type[object]", kind))
    if not isinstance(kind, type) and hasattr(kind, "__origin__"):
        return _reader(_parsed(repr(kind)), names)  # Pair = tuple[int, int], as Python prints it
    if isinstance(kind, type):
        return _class_reader(kind)
    raise TypeError(f"no reader for fields of type {name}")


def _class_reader(kind: type[Any]) -> _Reader:
    if issubclass(kind, PurePath):
        text = _scalar(str)
        return lambda value, name: kind(str(text(value, name)))
    if issubclass(kind, Record):
        return kind.from_json
    if dataclasses.is_dataclass(kind):
        return lambda value, name: read_fields(kind, value, name)
    if hasattr(kind, "model_validate"):
        return lambda value, name: kind.model_validate(value)
    raise TypeError(f"no reader for fields of type {kind.__name__}")


def _scalar(kind: type[object]) -> _Reader:
    accepted = (int, float) if kind is float else kind

    def read(value: object, name: str) -> object:
        # JSON's true and false are numbers to Python
        if not isinstance(value, accepted) or isinstance(value, bool) is not (kind is bool):
            raise FieldError(f"{name}: expected {_EXPECTED[kind]}, got {_shown(value)}")
        return value

    return read


def _choice(choices: list[object]) -> _Reader:
    expected = ", ".join(map(repr, choices))

    def read(value: object, name: str) -> object:
        if value not in choices:
            raise FieldError(f"{name}: expected one of {expected}, got {_shown(value)}")
        return value

    return read


def _optional(inner: _Reader) -> _Reader:
    return lambda value, name: None if value is None else inner(value, name)


def _list(inner: _Reader, kind: Callable[[Iterable[object]], object]) -> _Reader:
    def read(value: object, name: str) -> object:
        items = _items(value, name)
        return kind(inner(item, f"{name}[{index}]") for index, item in enumerate(items))

    return read


def _row(inner: list[_Reader]) -> _Reader:
    def read(value: object, name: str) -> object:
        items = _items(value, name)
        if len(items) != len(inner):
            raise FieldError(f"{name}: expected {len(inner)} values, got {_shown(value)}")
        return tuple(
            read_item(item, f"{name}[{index}]")
            for index, (read_item, item) in enumerate(zip(inner, items))
        )

    return read


def _items(value: object, name: str) -> list[object]:
    if not isinstance(value, (list, tuple)):
        raise FieldError(f"{name}: expected a list, got {_shown(value)}")
    return list(value)


def _mapping(inner: _Reader) -> _Reader:
    def read(value: object, name: str) -> object:
        if not isinstance(value, Mapping):
            raise FieldError(f"{name}: expected an object, got {_shown(value)}")
        return {str(key): inner(item, f"{name}.{key}") for key, item in value.items()}

    return read


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
