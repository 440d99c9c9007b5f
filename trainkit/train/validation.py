"""The loss on a job's validation sets while it trains."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from trainkit.jobs.schema import Job
from trainkit.train.batches import Feed
from trainkit.train.metrics.heartbeat import Heartbeat
from trainkit.train.parallel.mesh import Mesh
from trainkit.train.update.step import Step


class Validator:
    """Mean losses over the same eval_iters global batches of every validation set, every time.

    Args:
        job: which sets, and how many batches.
        mesh: this rank among the others.
        step_runner: computes the losses.
        heartbeat: shows that an evaluation goes on.
        any_rank_stopping: asked by all ranks before every batch.
    """

    def __init__(
        self,
        job: Job,
        mesh: Mesh,
        step_runner: Step,
        heartbeat: Heartbeat,
        any_rank_stopping: Callable[[], bool],
    ) -> None:
        self.batches = job.training.eval_iters
        self.batch_size = job.global_batch_size
        self.device = mesh.device
        self.step_runner = step_runner
        self.heartbeat = heartbeat
        self.any_rank_stopping = any_rank_stopping
        self.feeds: dict[str, Feed] = {}
        if self.batches:
            self.feeds = {
                name: Feed(job, dataset, "valid", mesh.data_world, mesh.device)
                for name, dataset in {"valid": job.dataset, **job.validation}.items()
            }

    def measure(self, name: str) -> torch.Tensor | None:
        """(summed cross-entropy, tokens) of a validation set over all ranks, fp64; None where a
        rank was asked to stop."""
        feed = self.feeds[name]
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for i in range(self.batches):
            if self.any_rank_stopping():
                return None
            self.heartbeat.refresh()
            first = i * self.batch_size
            sums += self.step_runner.evaluate(feed.read(first, self.batch_size))
        dist.all_reduce(sums)
        return sums

    def close(self) -> None:
        """End the feeds."""
        for feed in self.feeds.values():
            feed.close()
