"""Files of torch.save that other programs wrote, read without executing anything.

They are pickles inside a zip file (torch/serialization.py). torch's restricted unpickler builds
tensors, plain containers, and what it is allowed by name. Nothing of the engine is imported: an
object of one of the names below becomes an `InertValue`, which only keeps what it was made of.
"""

from __future__ import annotations

import contextlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from trainkit.base.errors import ConfigError

# What arguments and the states of random generators are made of; none of it is called. Python 3.11
# before 3.11.4 writes a member of an enum as getattr(class, name).
HARMLESS = frozenset(
    {
        "argparse.Namespace",
        "builtins.getattr",
        "collections.defaultdict",
        "datetime.timedelta",
        "numpy._core.multiarray._reconstruct",
        "numpy._core.multiarray.scalar",
        "numpy.core.multiarray._reconstruct",
        "numpy.core.multiarray.scalar",
        "numpy.dtype",
        "numpy.ndarray",
        "pathlib.PosixPath",
        "types.SimpleNamespace",
        "signal.Signals",
    }
)
# Enums and records of the engines themselves: Megatron-LM's and GPT-NeoX's package, DeepSpeed.
ENGINE_PACKAGES = ("megatron.", "deepspeed.")


class InertValue:
    """Stands for an object of an engine: its attributes where it had any, nothing that acts."""

    made_of: tuple[Any, ...]
    attributes: dict[str, Any]

    def __new__(cls, *made_of: object) -> InertValue:
        """Pickles make some objects without a call of __init__."""
        made = super().__new__(cls)
        made.made_of = made_of
        made.attributes = {}
        return made

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.attributes = {str(name): value for name, value in state.items()}


def read_pickle(path: Path) -> dict[str, object]:
    """The dictionary in a file of torch.save. Tensors are mapped: their bytes are read when they
    are used.

    Raises:
        ConfigError: the file is cut off or changed, holds no dictionary, or asks for anything
        that is not known to be harmless; that is named, and nothing of it has run.
    """
    found = _load(path, path, mmap=True)
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds a {type(found).__name__}, not a checkpoint's dictionary")
    return {str(key): value for key, value in found.items()}


def read_tensor(content: bytes, path: Path) -> object:
    """What torch.save made into these bytes of a larger file; as `read_pickle` otherwise."""
    return _load(io.BytesIO(content), path, mmap=False)


def _load(source: Path | io.BytesIO, path: Path, *, mmap: bool) -> object:
    """Load what torch.save wrote.

    Args:
        source: a file or its content.
        path: to be named.
        mmap: map the tensors.
    """
    _refuse_damaged(source, path)
    if isinstance(source, io.BytesIO):
        source.seek(0)
    try:
        with _nothing_allowed():
            wanted = torch.serialization.get_unsafe_globals_in_checkpoint(source)
    except Exception as error:  # whatever a wrong pickle makes torch raise
        raise _unreadable(path, error) from None
    if refused := sorted(n for n in {*wanted} - HARMLESS if not n.startswith(ENGINE_PACKAGES)):
        raise ConfigError(
            f"{path} is not loaded: it asks for {', '.join(refused)}, which could execute code",
            hint="only tensors, plain values and the engines' own settings are read",
        )
    if isinstance(source, io.BytesIO):
        source.seek(0)
    try:
        with (
            _nothing_allowed(),
            torch.serialization.safe_globals([(InertValue, name) for name in wanted]),
        ):
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:
        raise _unreadable(path, error) from None


@contextlib.contextmanager
def _nothing_allowed() -> Iterator[None]:
    """Without the classes that a library has allowed torch to build: an engine's package does so
    when it is imported."""
    allowed = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        yield
    finally:
        torch.serialization.add_safe_globals(allowed)


def _refuse_damaged(source: Path | io.BytesIO, path: Path) -> None:
    """Raise ConfigError unless every part of the file has the checksum that was written with it."""
    try:
        with zipfile.ZipFile(source) as archive:
            changed = archive.testzip()
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # a changed byte may stand for anything: a password, a wrong text
        raise _unreadable(path, error) from None
    if changed is not None:
        raise ConfigError(
            f"{path} has changed since it was written: {changed} in it does not have its checksum",
            hint="copy it again, or convert another step (--step)",
        )


def _unreadable(path: Path, error: Exception) -> ConfigError:
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return ConfigError(
        f"{path} is not a whole file of torch.save: {reason}",
        hint="copy it again, or convert another step (--step)",
    )
