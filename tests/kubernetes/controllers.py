"""All controllers of a cluster, as clients of its API."""

from __future__ import annotations

from tests.kubernetes.api_client import Client, Loop
from tests.kubernetes.job_controller import JobController
from tests.kubernetes.jobset_controller import JobSetController
from tests.kubernetes.kinds import KINDS
from tests.kubernetes.kueue import Kueue
from tests.kubernetes.lifecycle import GarbageCollector, NodeLifecycle
from tests.kubernetes.scheduler import Scheduler


class Controllers:
    """What kube-controller-manager, kube-scheduler, JobSet and Kueue do.

    Args:
        without: groups of the API that this cluster does not have.
        grace, eviction: seconds until a silent node is Unknown, and from then until its pods are
        deleted.
    """

    def __init__(
        self, client: Client, without: tuple[str, ...], grace: float, eviction: float
    ) -> None:
        self.jobs = JobController(client)
        self.nodes = NodeLifecycle(client, grace, eviction)
        self.kueue = Kueue(client)
        self.loops: list[Loop] = [self.jobs, self.nodes, Scheduler(client)]
        self.loops.append(GarbageCollector(client))
        if "jobset.x-k8s.io" not in without:
            self.loops.append(JobSetController(client))
        if "kueue.x-k8s.io" not in without:
            self.loops.append(self.kueue)
        client.start(
            plural
            for plural, kind in KINDS.items()
            if plural not in ("events", "customresourcedefinitions") and kind.group not in without
        )

    def start(self) -> None:
        for loop in self.loops:
            loop.start()
