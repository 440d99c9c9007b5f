"""Workers of pytest-xdist that are forked from the server of tests/forkserver.py: what each of them
would import, for several seconds of a processor, is there at once."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from tests import fork_programs, forkserver


def fork_workers() -> None:
    """Have the workers of this test run, which execnet starts, forked."""
    from execnet import gateway_base, gateway_io

    class Forked(gateway_io.Popen2IOMaster):
        def __init__(self, args: list[str], execmodel: Any) -> None:
            pipe = subprocess.PIPE
            self.popen = forkserver.Popen(args, stdin=pipe, stdout=pipe)
            gateway_base.Popen2IO.__init__(
                self, self.popen.stdin, self.popen.stdout, execmodel=execmodel
            )

    def arguments(spec: Any) -> list[str]:
        return [sys.executable, "-u", "-m", "tests.fork_worker"]

    gateway_io.Popen2IOMaster = Forked  # type: ignore[misc]
    gateway_io.popen_args = arguments


def main() -> None:
    """What `python -c` does in such a worker otherwise (execnet.gateway_io.popen_bootstrapline),
    in a process where what tests start is executed unless they say otherwise."""
    fork_programs.execute_again()
    exec(eval(sys.stdin.readline()), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
