"""What a pod runs while the supervisor of its run is silent, where pods have rights: python -I
CODE/trainkit/launch/kubernetes/caretaker.py RUN_FOLDER JOBSET. The node of the supervisor's pod may
be gone, and Kubernetes replaces no pod of such a node by itself. Until it is killed."""

from __future__ import annotations

import sys
import time
from pathlib import Path

CARE_SECONDS = 5.0  # between two looks at pods on nodes that are gone


def main() -> None:
    # the snapshot this file is part of
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from trainkit.jobs.resolved import read_job
    from trainkit.launch.kubernetes.own_jobsets import OwnJobSets
    from trainkit.runs.folder import RunFolder

    run = RunFolder(Path(sys.argv[1]))
    own = OwnJobSets.in_pod(read_job(run.job), run)
    while own is not None:
        own.replace_lost(sys.argv[2], lambda text: print(f"trainkit: {text}", flush=True))
        time.sleep(CARE_SECONDS)


if __name__ == "__main__":
    main()
