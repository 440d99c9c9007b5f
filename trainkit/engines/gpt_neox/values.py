"""The values of GPT-NeoX's configuration files while they become a job's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainkit.base.errors import ConfigError
from trainkit.engines.given import Given


@dataclass
class NeoxValues(Given):
    """What the files say together.

    Args:
        said: all names that the files had.
        keep_last: checkpoints that are kept.
        layers: of the model.
    """

    said: frozenset[str] = frozenset()
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
        values = cls(given, defaults, said=frozenset(given))
        layers = values.peek("num_layers")
        if not isinstance(layers, int):
            raise ConfigError(
                f"{', '.join(map(str, paths))}: no num_layers, so no model is described",
                hint="name all files that deepy.py is given, model and data",
            )
        values.layers = layers
        return values


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
