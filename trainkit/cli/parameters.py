"""The arguments and options of a task: parameters of its function, or fields of a dataclass of
options. Numbers among them are read and checked here.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from trainkit.base.errors import Exit, TrainkitError

OPTIONAL_INT = "int | None"  # annotations are text
OPTIONS = "options"  # the parameter for a dataclass of options


class Parameter(NamedTuple):
    """One argument or option of a task.

    Args:
        name: as Python has it.
        default: inspect.Parameter.empty for one that is required.
        annotation: its type, as text.
        help: one line, or "".
        minimum: the lowest value of a number.
    """

    name: str
    default: object
    annotation: str
    help: str = ""
    minimum: float | None = None

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty

    @property
    def repeated(self) -> bool:
        """Whether it may be given several times."""
        return self.default == ()

    @property
    def _optional_int(self) -> bool:
        """A whole number that is None where it is left out: 0 is a step like any other."""
        return self.default is None and self.annotation == OPTIONAL_INT

    def for_invoke(self) -> inspect.Parameter:
        """As Invoke is shown it: numbers as text, because its own conversion ends in a
        traceback."""
        default = self.default
        if self._optional_int:
            default = ""
        elif type(default) in (int, float):
            default = str(default)
        elif self.repeated:
            default = None
        return inspect.Parameter(
            self.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default
        )

    def value(self, given: object) -> object:
        """What Invoke was given for it. Ends the task where that is not such a number."""
        if self.repeated:
            return tuple(given) if isinstance(given, Sequence) else ()
        if self._optional_int:
            if given == "":
                return None
            return self._number(str(given), int)
        if type(self.default) is int:
            return self._number(str(given), int)
        if type(self.default) is float:
            return self._number(str(given), float)
        return given

    def _number(self, text: str, kind: type[int] | type[float]) -> float:
        try:
            number = kind(text)
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise _usage_error(f"{self.flag} takes {wanted}, not {text!r}") from None
        if isinstance(number, float) and not math.isfinite(number):
            raise _usage_error(f"{self.flag} takes a finite number, not {text!r}")
        if number >= 2**63:
            raise _usage_error(f"{self.flag} {text} is too large: it must be below 2**63")
        if self.minimum is not None and number < self.minimum:
            raise _usage_error(f"{self.flag} {text}: it must be at least {self.minimum}")
        return number


def _usage_error(message: str) -> TrainkitError:
    return TrainkitError(message, exit=Exit.USAGE)


class Signature(NamedTuple):
    """What a task takes.

    Args:
        own: parameters of the function itself, after the TaskContext.
        fields: those that become one argument, an instance of `options`.
        options: the dataclass; None where the function takes none.
    """

    own: tuple[Parameter, ...]
    fields: tuple[Parameter, ...] = ()
    options: Callable[..., object] | None = None

    @property
    def all(self) -> tuple[Parameter, ...]:
        return (*self.own, *self.fields)

    def arguments(self, given: Mapping[str, object]) -> dict[str, object]:
        """The keyword arguments of the function, from what Invoke was given. Ends the task for
        text that is not the number it should be."""
        found = {each.name: each.value(given[each.name]) for each in self.own}
        if self.options is not None:
            values = {each.name: each.value(given[each.name]) for each in self.fields}
            found[OPTIONS] = self.options(**values)
        return found


def signature_of(
    function: Callable[..., object],
    options: type | None,
    *,
    help: Mapping[str, str],
    minimum: Mapping[str, float],
) -> Signature:
    """Read what a task takes from its function and its dataclass of options.

    Args:
        function: takes a TaskContext, arguments, and as its parameter `options` an instance of
            the dataclass, if there is one.
        options: a subclass of `experiment.options.Options`.
        help: a line for each parameter of the function, by its flag without dashes.
        minimum: the lowest value of a parameter that is a number.
    """
    parameters = list(inspect.signature(function).parameters.values())[1:]
    if options is not None:
        parameters = [each for each in parameters if each.name != OPTIONS]
    own = [
        Parameter(
            each.name,
            each.default,
            str(each.annotation),
            help.get(each.name.replace("_", "-"), ""),
            minimum.get(each.name),
        )
        for each in parameters
    ]
    fields = [
        Parameter(
            field.name,
            field.default,
            str(field.type),
            str(field.metadata["help"]),
            field.metadata["minimum"],
        )
        for field in (dataclasses.fields(options) if options is not None else ())
    ]
    return Signature(tuple(own), tuple(fields), options)
