"""The program that supervises one run: python -I RUN/code/trainkit/launch/main.py RUN_FOLDER
[--share], in a session of its own.

docs/dispatch.md says what dies when.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from pathlib import Path

if __name__ == "__main__":  # by path: the snapshot this file is part of comes first
    # before an import writes bytecode: files.keep_others_from_writing says why
    os.umask(os.umask(0o002) | 0o002)
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    gc.set_threshold(100_000)  # looking for garbage among imports takes a tenth of their time

from trainkit.base.errors import TrainkitError
from trainkit.jobs.resolved import read_job
from trainkit.launch.scheduler_registry import scheduler_for
from trainkit.launch.supervise.run_lock import locked_run
from trainkit.runs.folder import RunFolder


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(description="The supervisor of one run.")
    parser.add_argument("run_folder", type=Path)
    parser.add_argument(
        "--share", action="store_true", help="run beside other runs on the same slots"
    )
    parser.add_argument(
        "--prolog-failed",
        type=int,
        default=0,
        metavar="CODE",
        help="of a batch script, here; the other nodes may be good",
    )
    words = parser.parse_args()
    run = RunFolder(words.run_folder)
    try:
        with locked_run(run):
            scheduler = scheduler_for(read_job(run.job).cluster)
            outcome = scheduler.supervise(
                run, os.environ, share=words.share, prolog_failed=words.prolog_failed
            )
            sys.exit(int(outcome.exit))
    except TrainkitError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        sys.exit(int(error.exit))


if __name__ == "__main__":
    main()
