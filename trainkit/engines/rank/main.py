"""The program of one rank of a foreign engine: python -I -S
<snapshot>/trainkit/engines/rank/main.py SPEC.

It starts the engine's own process, passes on what that prints, tells the agent and metrics.jsonl
how far it is, and says how it ended: an engine's exit code 0 proves nothing. Standard library and
Python 3.8: it runs inside the engine's image.

Exit codes: 0 all iterations are made and their checkpoint is whole; 12 asked to stop, and saved; 7
something the engine needs is missing on this host; 9 for any other end. Where a signal ended the
engine it ends this program too.
"""

# without `from __future__ import annotations`: what is too old to know it is to get a message

import os
import resource
import signal
import sys
from pathlib import Path


def main() -> None:
    if sys.version_info < (3, 8):  # noqa: UP036  whatever Python an engine's image has
        sys.stderr.write(
            f"trainkit: {sys.executable} is Python {sys.version.split()[0]}; 3.8 or newer is"
            " needed: engines.X.python\n"
        )
        sys.exit(7)
    os.umask(os.umask(0o002) | 0o002)
    # the snapshot this file is part of
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from trainkit.base.process import die_with_parent
    from trainkit.base.worker import PARENT_VARIABLE
    from trainkit.engines.rank.run import run_engine
    from trainkit.engines.rank.spec import read_spec

    if len(sys.argv) != 2:
        sys.exit("usage: engines/rank/main.py SPEC")
    parent = os.environ.pop(PARENT_VARIABLE, "")
    if parent:
        die_with_parent(int(parent))
    code = run_engine(read_spec(Path(sys.argv[1])))
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        # as the engine ended: a second core file would only take room
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        signal.pause()
    os._exit(code)


if __name__ == "__main__":
    main()
