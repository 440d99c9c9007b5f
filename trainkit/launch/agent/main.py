"""The program of one host: python -I -S <snapshot>/trainkit/launch/agent/main.py SESSION_FOLDER
NODE.

It connects to the run's supervisor, starts what that asks for and answers for its end. Standard
library, trainkit.base and the frames only.

Exit codes: 0 the supervisor said goodbye; 7 the session's folder cannot be read here; 8 the
supervisor cannot be reached or cannot prove itself; 13 contact lost; 15 stopped by TERM.
Nothing of the run is left on this host by then.
"""

# without `from __future__ import annotations`: what is too old to know it is to get a message

import os
import sys
from pathlib import Path


def main() -> None:
    # whatever Python is on a host or in an image may be asked to run this
    if sys.version_info < (3, 8):  # noqa: UP036
        sys.exit(
            f"trainkit agent: {sys.executable} is Python {sys.version.split()[0]}; 3.8 or newer is"
            " needed: clusters.X.python, containers.X.python"
        )
    # before an import writes bytecode: files.keep_others_from_writing says why
    os.umask(os.umask(0o002) | 0o002)
    # the snapshot this file is part of
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from trainkit.base.watchdog import run_under_watchdog
    from trainkit.launch.agent.commands import COMMANDS
    from trainkit.launch.agent.loop import run_agent

    if len(sys.argv) != 3 or not sys.argv[2].isdigit():
        sys.exit("usage: agent/main.py SESSION_FOLDER NODE")
    folder = Path(sys.argv[1])
    node = int(sys.argv[2])
    # `pkill -9 -f trainkit` and `killall -9 python` spare it: it ends what they leave
    title = f"run-keeper {'/'.join(folder.parts[-3:])} {node}"
    sys.exit(
        run_under_watchdog(lambda watchdog: run_agent(folder, node, watchdog, COMMANDS), title)
    )


if __name__ == "__main__":
    main()
