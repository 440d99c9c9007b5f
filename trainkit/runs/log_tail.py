"""The end of a log file that is being written, and what is added to it."""

from __future__ import annotations

import collections
import contextlib
import os
from pathlib import Path

from trainkit.base.files import rotated_log
from trainkit.base.printable import printable


class LogTail:
    """The end of one log. The file may be replaced by a new one meanwhile (`rotated_log`).

    Args:
        path: the file.
        prefix: put before each line; then only whole lines are given, because the lines of other
            logs stand between them.
    """

    def __init__(self, path: Path, prefix: str = "") -> None:
        self.path = path
        self.prefix = prefix
        self.offset = 0
        self.inode = 0  # of the file that the offset belongs to

    def last(self, count: int, *, unfinished: bool) -> list[str]:
        """The last lines.

        Args:
            count: how many at most.
            unfinished: include a last line without a newline; else `new` gives it later.
        """
        lines: collections.deque[bytes] = collections.deque(maxlen=count)
        with contextlib.suppress(FileNotFoundError), open(rotated_log(self.path), "rb") as before:
            lines.extend(before)
        with open(self.path, "rb") as file:
            self.inode = os.fstat(file.fileno()).st_ino
            for line in file:
                if unfinished or line.endswith(b"\n"):
                    self.offset += len(line)
                    lines.append(line)
        return [printable(line.decode(errors="replace").rstrip("\n")) for line in lines]

    def new(self, *, unfinished: bool) -> str:
        """What was added since the last call.

        Args:
            unfinished: include a last line without a newline.
        """
        with open(self.path, "rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            rest = b""
            start = self.offset
            if inode != self.inode:  # a new file: what is left of the former comes first
                rest = self._rest_of_former()
                start = 0
            file.seek(start)
            data = rest + file.read()
        if self.prefix and not unfinished:
            data = data[: data.rfind(b"\n") + 1]
        if len(data) < len(rest):
            return ""  # the new file has no whole line yet
        self.inode = inode
        self.offset = start + len(data) - len(rest)
        text = printable(data.decode(errors="replace"))
        if self.prefix and text:
            return "".join(f"{self.prefix}{line}\n" for line in text.removesuffix("\n").split("\n"))
        return text

    def _rest_of_former(self) -> bytes:
        """What the former file has beyond what was given; nothing if it was replaced again."""
        with contextlib.suppress(FileNotFoundError), open(rotated_log(self.path), "rb") as before:
            if os.fstat(before.fileno()).st_ino == self.inode:
                before.seek(self.offset)
                return before.read()
        return b""
