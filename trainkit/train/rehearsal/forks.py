"""What is found by forks of this process, a few at a time: each may join a world of its own."""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NoReturn

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.process import die_with_parent

OfRank = Callable[[int], Mapping[str, object]]


def in_forks(work: OfRank, ranks: Sequence[int], *, at_once: int) -> Iterator[Mapping[str, Any]]:
    """What `work` returns of each rank, as JSON keeps it, in order. Raises TrainkitError with what
    one raises.

    Args:
        work: is called in a fork.
        ranks: one fork each.
        at_once: forks that run side by side.
    """
    children: deque[_RankFork] = deque()
    rest = iter(ranks)
    try:
        while True:
            room = at_once - len(children)
            children += [_RankFork(work, rank) for rank in islice(rest, room)]
            if not children:
                return
            yield children[0].result()
            children.popleft()
    finally:
        for child in children:
            child.stop()


class _RankFork:
    """A fork of this process that writes what it found into a pipe."""

    def __init__(self, work: OfRank, rank: int) -> None:
        self.rank = rank
        ours, theirs = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(ours)
            _work_and_exit(parent, theirs, work, rank)
        os.close(theirs)
        self.pipe = os.fdopen(ours, "rb")

    def result(self) -> Mapping[str, Any]:
        """Wait for it. Raises TrainkitError with what it raised."""
        with self.pipe:
            content = self.pipe.read()
        os.waitpid(self.pid, 0)
        if not content:
            raise TrainkitError(f"the process of rank {self.rank} died", exit=Exit.BUG)
        value: Mapping[str, Any] = json.loads(content)
        if "failed" in value:
            raise TrainkitError(value["failed"], exit=Exit.RANK_USER)
        return value

    def stop(self) -> None:
        """End it, where nobody waits for it any more."""
        if not self.pipe.closed:
            self.pipe.close()
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def _work_and_exit(parent: int, pipe: int, work: OfRank, rank: int) -> NoReturn:
    value: Mapping[str, object]
    try:
        die_with_parent(parent)
        value = work(rank)
    except BaseException as error:
        traceback.print_exc()
        value = {"failed": f"rank {rank} cannot be built: {type(error).__name__}: {error}"}
    with os.fdopen(pipe, "w") as file:
        json.dump(value, file)
    os._exit(0)
