"""The values of GPT-NeoX's configuration files while they become a job's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainkit.base.errors import ConfigError


@dataclass
class NeoxValues:
    """What the files say, and what is taken out of it.

    Args:
        given: what the files say and nobody has taken yet.
        defaults: what GPT-NeoX takes by itself, of every option.
        said: all names that the files had.
        engine_args: what stays in GPT-NeoX's own words.
        left: what has no place in a job, a line each.
        keep_last: checkpoints that are kept.
        layers: of the model.
    """

    given: dict[str, object]
    defaults: Mapping[str, object]
    said: frozenset[str]
    engine_args: dict[str, object] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    keep_last: int = 1
    layers: int = 0

    @classmethod
    def read(cls, paths: Sequence[Path], defaults: Mapping[str, object]) -> NeoxValues:
        """The files together, as NeoXArgs.from_ymls reads them: dashes are underscores.

        Raises ConfigError: a file cannot be read or is no table, or a key is in two of them.
        """
        given: dict[str, object] = {}
        places: dict[str, Path] = {}
        for path in paths:
            for key, value in read_yaml(path).items():
                name = key.replace("-", "_")
                if name in given:
                    raise ConfigError(
                        f"{path}: {key} is in {places[name]} too, and gpt-neox refuses that",
                        hint="leave it in one of them",
                    )
                given[name] = value
                places[name] = path
        values = cls(given, defaults, frozenset(given))
        layers = values.peek("num_layers")
        if not isinstance(layers, int):
            raise ConfigError(
                f"{', '.join(map(str, paths))}: no num_layers, so no model is described",
                hint="name all files that deepy.py is given, model and data",
            )
        values.layers = layers
        return values

    def peek(self, key: str) -> object:
        """The value of an option, without taking it."""
        return self.given.get(key, self.defaults.get(key))

    def take(self, key: str) -> object:
        """The value of an option, which then is no longer there."""
        found = self.peek(key)
        self.given.pop(key, None)
        return found

    def drop(self, key: str) -> None:
        """Take an option that says nothing of its own."""
        self.given.pop(key, None)

    def whole(self, key: str) -> int | None:
        """Take a whole number. Raises ConfigError for anything else."""
        found = self.take(key)
        if found is None or (isinstance(found, int) and not isinstance(found, bool)):
            return found
        if isinstance(found, float) and found.is_integer():
            return int(found)
        raise ConfigError(f"{key} = {found!r} is no whole number")

    def number(self, key: str) -> float | None:
        """Take a number; YAML 1.1 reads 1e-8 as a text. Raises ConfigError for anything else."""
        found = self.take(key)
        if found is None:
            return None
        try:
            return float(str(found))
        except ValueError:
            raise ConfigError(f"{key} = {found!r} is no number") from None

    def table(self, key: str) -> dict[str, object] | None:
        """Take a table, as a copy. Raises ConfigError for anything else."""
        found = self.take(key)
        if found is None or isinstance(found, Mapping):
            return None if found is None else dict(found)
        raise ConfigError(f"{key} = {found!r} is no table")

    def leave(self, key: str, value: object, why: str) -> None:
        """Note that a value is not taken."""
        self.left.append(f"{key} = {value!r}: {why}")


def read_yaml(path: Path) -> dict[str, object]:
    """One configuration file. Raises ConfigError: it cannot be read, or is no table of names."""
    import yaml  # 20 ms, for one task

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        where = " ".join(str(error).split())
        raise ConfigError(f"{path} is no YAML: {where}") from None
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ConfigError(f"{path} is no table of gpt-neox's options")
    return found
