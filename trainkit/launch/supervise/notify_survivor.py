"""The program that tells of a supervisor that was killed: python -I notify_survivor.py RUN_FOLDER.

The supervisor starts it where somebody wants to be notified of failures, and says at its end that
it is over. On its standard input are one line of JSON (settings, secrets, the supervisor's pid),
then a line that says so; an end without that one is the end of a supervisor that could not say it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    first, _, rest = sys.stdin.buffer.read().partition(b"\n")
    if rest or not first.endswith(b"}"):
        return
    # only now: until then this process is to cost as little as may be
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from trainkit.jobs.notify import NotifySettings
    from trainkit.launch.supervise.notifications import Notifier
    from trainkit.runs.folder import RunFolder

    given = json.loads(first)
    settings = NotifySettings.model_validate(given["settings"])
    notifier = Notifier(RunFolder(Path(sys.argv[1])), settings, given["secrets"])
    notifier.on_supervisor_lost(given["pid"])
    notifier.close()


if __name__ == "__main__":
    main()
