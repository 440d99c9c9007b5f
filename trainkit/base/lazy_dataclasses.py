"""The standard library's dataclasses, made in a tenth of the time.

dataclasses.dataclass compiles up to six methods for every class. A start of a run makes 700
classes one after another, in the command, the supervisor and the agent, and uses few of them:
that was a seventh of the command's time and a quarter of the supervisor's. This `dataclass` gives
all classes the same methods, and compiles only `__init__`, when the first instance is made.

For `order`, `slots` and `eq=False`, and for what torch.compile traces, take the standard
library's. Nothing else is imported: the agent runs this on nodes that may have nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import reprlib
from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError, asdict, field, fields, replace
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from dataclasses import dataclass

__all__ = ["asdict", "dataclass", "field", "fields", "replace"]


def _dataclass(cls: Any = None, *, frozen: bool = False, kw_only: bool = False) -> Any:
    """As dataclasses.dataclass, with `eq` and `repr`."""
    if cls is None:
        return functools.partial(_dataclass, frozen=frozen, kw_only=kw_only)
    own = set(vars(cls))
    others = {"kw_only": True} if kw_only else {}  # Python 3.8 does not know it
    dataclasses.dataclass(init=False, repr=False, eq=False, **others)(cls)

    def first_init(self: Any, *args: Any, **values: Any) -> None:
        cls.__init__ = _compiled_init(cls)
        cls.__init__(self, *args, **values)

    names = [each.name for each in fields(cls) if each.compare]
    methods: dict[str, object] = {"__init__": first_init, "__repr__": _repr, "__eq__": _eq}
    methods["__hash__"] = _hash if frozen else None
    if frozen:
        methods.update(__setattr__=_refuse, __delattr__=_refuse)
    if vars(cls).get("__hash__") is None:
        own.discard("__hash__")  # Python itself puts None there where a class has __eq__
    for name in methods.keys() - own:
        setattr(cls, name, methods[name])
    cls._compared = operator.attrgetter(*names, "__class__")  # it wants one name at least
    return cls


if not TYPE_CHECKING:
    dataclass = _dataclass


def _compiled_init(cls: type) -> Callable[..., None]:
    names: dict[str, object] = {"_missing": MISSING, "_set": object.__setattr__}
    positional, keywords, lines = ["self"], ["*"], ["pass"]
    for each in fields(cls):
        value = parameter = each.name
        default = f"_default_{each.name}"
        if each.default is not MISSING:
            names[default] = each.default
            parameter += f"={default}"
        elif each.default_factory is not MISSING:
            names[default] = each.default_factory
            parameter += "=_missing"
            default += "()"
            value = f"{default} if {each.name} is _missing else {each.name}"
        if each.init:
            (keywords if getattr(each, "kw_only", False) else positional).append(parameter)
            lines.append(f"_set(self, {each.name!r}, {value})")
        elif "=" in parameter:
            lines.append(f"_set(self, {each.name!r}, {default})")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    parameters = ", ".join(positional + (keywords if len(keywords) > 1 else []))
    exec(f"def __init__({parameters}):\n " + "\n ".join(lines), names)
    init: Any = names["__init__"]
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    return cast("Callable[..., None]", init)


@reprlib.recursive_repr()
def _repr(self: Any) -> str:
    shown = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.repr)
    return f"{type(self).__qualname__}({shown})"


def _eq(self: Any, other: Any) -> Any:
    if other.__class__ is not self.__class__:
        return NotImplemented
    return self._compared(self) == self._compared(other)


def _hash(self: Any) -> int:
    return hash(self._compared(self))


def _refuse(self: object, name: str, *value: object) -> None:
    raise FrozenInstanceError(f"cannot {'assign to' if value else 'delete'} field {name!r}")
