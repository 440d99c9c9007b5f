"""The options of a command line that is imported: their words, and what has been done with them."""

from __future__ import annotations

from collections.abc import Sequence

from trainkit.base.errors import ConfigError
from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.engines.options import Option, OptionTable


@dataclass
class Options:
    """The options of a command line, and what has been done with them."""

    table: OptionTable
    given: dict[str, list[str]]
    raw: list[str] = field(default_factory=list)
    not_taken: list[str] = field(default_factory=list)

    def take(self, name: str) -> list[str] | None:
        """An option's words; None where it is not there. It is done with."""
        return self.given.pop(name, None)

    def flag(self, name: str) -> bool:
        """Whether a flag is there. It is done with."""
        return self.take(name) is not None

    def leave(self, name: str, why: str) -> None:
        """Take an option, and note that the job does not have it."""
        words = " ".join(self.given.pop(name))
        self.not_taken.append(f"{f'--{name} {words}'.rstrip()}: {why}")


def parsed(words: Sequence[str], table: OptionTable) -> Options:
    """Options with their values; a later one of the same name counts, as argparse has it."""
    options = Options(table, {})
    current = ""
    for word in words:
        if word.startswith("--"):
            current, _, value = word.partition("=")
            option = table.find(current)
            name = option.name if option else current.removeprefix("--")
            options.given[name] = [value] if value else []
            current = name
        elif current:
            options.given[current].append(word)
        elif word not in ("$@",):
            options.not_taken.append(f"{word}: a word without an option before it")
    _leave_surplus(options)
    return options


def _leave_surplus(options: Options) -> None:
    """Say which words follow an option that takes fewer; argparse would refuse them."""
    for name, words in options.given.items():
        option = options.table.find(name)
        if option is None or option.nargs is not None:
            continue
        taken = int(option.action == "store")
        if surplus := words[taken:]:
            options.given[name] = words[:taken]
            options.not_taken.append(f"{' '.join(surplus)}: --{name} takes {taken or 'no'} value")


def typed(option: Option | None, words: Sequence[str]) -> object:
    """Words as TOML's values, by the option's type."""
    if option is None:  # of another version
        option = Option("", type="any", action="store" if words else "store_true")
    if option.action != "store":
        return True
    values = [_number(word, option.type) for word in words]
    if option.nargs is not None:
        return values
    return values[0] if values else ""


def _number(word: str, type_: str) -> object:
    """A word as argparse's types read it; itself where they would not."""
    for kind, names in ((int, ("int", "any")), (float, ("float", "any"))):
        if type_ in names:
            try:
                return kind(word)
            except ValueError:
                continue
    return word


def whole(name: str, value: object) -> int:
    """The value of an option that others are computed from. Raises ConfigError where it is no
    number from 1, as where the script leaves it to a variable of its caller."""
    found = _number(str(value), "int")  # as argparse does, with 2_000_000
    if isinstance(found, int) and found > 0:
        return found
    raise _no_number(name, value)


def real(name: str, value: object) -> float:
    """The same of a number with a fraction."""
    if is_number(str(value)):
        return float(str(value))
    raise _no_number(name, value)


def _no_number(name: str, value: object) -> ConfigError:
    return ConfigError(
        f"--{name} {value}: a number is needed here",
        hint="write it into the script, or import the command line that `bash -x` prints",
    )


def default_of(options: Options, name: str) -> object:
    option = options.table.find(name)
    return option.default if option is not None else None


def is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def take_value(options: Options, name: str) -> object:
    """What an option says, or its default. It is done with."""
    words = options.take(name)
    if words is None:
        return default_of(options, name)
    found = typed(options.table.find(name), words)
    return found[0] if isinstance(found, list) and len(found) == 1 else found
