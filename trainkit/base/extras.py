"""What the base installation leaves out: the error where it is missing, and the exact command
that installs it for this interpreter.

Never `pip install trainkit`: that name on the package index belongs to somebody else.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from trainkit.base.errors import ConfigError, Exit

DISTRIBUTION = "trainkit-lm"
CHECKOUT = Path(__file__).resolve().parents[2]


def install_command(extra: str = "") -> str:
    """The line for a shell that installs an extra (or what every installation has) beside the
    running interpreter.

    It names the checkout, or, where that is not known, the packages.
    """
    pip = [sys.executable, "-m", "pip", "install"]
    wanted = f"[{extra}]" if extra else ""
    if (CHECKOUT / "pyproject.toml").is_file():
        return shlex.join([*pip, "-e", f"{CHECKOUT}{wanted}"])
    return shlex.join([*pip, *(_packages(extra) or [f"CHECKOUT{wanted}"])])


def _packages(extra: str) -> list[str]:
    from importlib.metadata import PackageNotFoundError, requires  # 30 ms, for messages only

    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return []
    pairs = [line.partition(";") for line in lines]
    wanted = f'extra == "{extra}"' if extra else ""
    return [
        package.strip()
        for package, _, marker in pairs
        if marker.replace("'", '"').strip() == wanted
    ]


class MissingExtra(ConfigError):
    """Something needs a package that only an extra of trainkit installs. `./inv` installs it and
    begins again.

    Args:
        message: what needs which package.
        extra: its name in pyproject.toml.
        otherwise: another way out, after the command that installs it.
    """

    def __init__(
        self, message: str, extra: str, *, exit: Exit = Exit.CONFIG, otherwise: str = ""
    ) -> None:
        self.extra = extra
        super().__init__(
            message,
            exit=exit,
            hint=install_command(extra) + (f"\n  {otherwise}" if otherwise else ""),
        )
