"""The training loop of one rank: from a job to a trained model, or to the step where it was told to stop."""

from __future__ import annotations

import math
import sys
import threading
import time

import torch
import torch.distributed as dist

from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.jobs.schema import Job
from trainkit.runs.folder import RunFolder
from trainkit.train import checkpoint, data_parallel
from trainkit.train.data_parallel import World
from trainkit.train.feed import Feed, vocab_size
from trainkit.train.heartbeat import Heartbeat
from trainkit.train.initialize import initialize
from trainkit.train.model import GPT, token_loss
from trainkit.train.optimizer import MOMENTS, adamw, clip, local_gradients, set_steps, squared_norm
from trainkit.train.report import Reporter
from trainkit.train.schedule import learning_rate


def check_layout(job: Job, world: World) -> None:
    """Refuse a world or a batch that does not fit the job. Raises ConfigError."""
    if world.size != job.world_size:
        raise ConfigError(f"job {job.name!r} is for {job.world_size} ranks and was started with {world.size}")
    samples = job.training.micro_batch_size * world.size
    if job.global_batch_size % samples:
        raise ConfigError(f"global_batch_size {job.global_batch_size} does not divide by micro_batch_size x data-parallel size = {samples}")


class Trainer:
    """Model, optimizer, data and reports of one rank. Afterwards `step` is the number of completed optimizer steps.

    Args:
        job: what to train.
        run: where it is recorded.
        heartbeat: this rank's word on where it is.
        stop: set when the rank was told to save and stop.
    """

    def __init__(self, job: Job, run: RunFolder, world: World, heartbeat: Heartbeat, stop: threading.Event) -> None:
        heartbeat.beat("load", 0)
        check_layout(job, world)
        self.job, self.run, self.world, self.heartbeat, self.stop = job, run, world, heartbeat, stop
        self.device, mesh = data_parallel.join(world, job.cluster.device)
        with torch.device("meta"):
            self.model = GPT(job.model, vocab_size(job))
        self.sharded = data_parallel.shard(self.model, mesh)
        initialize(self.model, job.model, job.training.seed, self.device)
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = adamw(self.parameters, job.training)
        self.train_feed = Feed(job, "train", world, self.device)
        self.valid_feed = Feed(job, "valid", world, self.device) if job.training.eval_iters else None
        self.micro_batches = job.global_batch_size // job.training.micro_batch_size  # of the whole world
        self.step = self.consumed_samples = 0
        self._resume()
        self.reporter = Reporter(run, job, self.step or -1) if world.rank == 0 else None
        self.logged_step, self.seconds = self.step, 0.0  # since the last logged step

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds, by name; reading into them is loading."""
        moments = {f"optimizer.{m}.{name}": self.optimizer.state[p][m] for name, p in self.parameters.items() for m in MOMENTS}
        return {f"model.{name}": p.detach() for name, p in self.parameters.items()} | moments

    def _resume(self) -> None:
        """Go on from the newest valid checkpoint that rank 0 finds, if there is any."""
        step = torch.full((), -1, dtype=torch.int64, device=self.device)
        if self.world.rank == 0:
            newest = checkpoint.newest_valid(self.run.checkpoints, lambda words: print(f"WARNING: passed over: {words}", file=sys.stderr, flush=True))
            step.fill_(newest.manifest.step if newest else -1)
        dist.broadcast(step, 0)
        if (found := int(step)) >= 0:
            saved = checkpoint.open_checkpoint(checkpoint.folder_of(self.run.checkpoints, found))
            checkpoint.load(saved, self.tensors())
            set_steps(self.optimizer, int(saved.manifest.state["optimizer_steps"]))
            self.step, self.consumed_samples = found, saved.manifest.consumed_samples

    def train(self) -> Exit:
        """Train to the last step. Returns DONE, or PREEMPTED when told to stop: then the checkpoint of the step reached exists."""
        t = self.job.training
        if self.step == 0:
            self.evaluate()
        while self.step < t.train_iters:
            stopping = self.train_step()
            last = self.step == t.train_iters
            if last or (t.eval_interval and self.step % t.eval_interval == 0):
                self.evaluate()  # before the save: whoever resumes from it finds this evaluation made
            if last or stopping or (t.save_interval and self.step % t.save_interval == 0):
                self.save()
            if stopping:
                break
        if self.reporter:
            self.reporter.close()
        return Exit.DONE if self.step >= t.train_iters else Exit.PREEMPTED

    def train_step(self) -> bool:
        """One optimizer step; returns whether any rank was told to stop.

        Raises TrainkitError (exit 9) where loss or gradient norm is not finite, before a weight is touched.
        """
        self.heartbeat.beat("train", self.step)
        began = time.perf_counter()
        rate = learning_rate(self.job.training, self.step)
        loss, norm, checksum, stopping = self._gradients()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise TrainkitError(
                f"step {self.step + 1}: lm loss {loss}, gradient norm {norm}; training stops before this step touches the weights",
                exit=Exit.RANK_USER,
                hint="lower training.lr or lengthen lr_warmup_iters; `resume` goes on from the last checkpoint",
            )
        clip(local_gradients(self.parameters.values()), norm, self.job.training.clip_grad)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.consumed_samples += self.job.global_batch_size
        self.seconds += time.perf_counter() - began
        if self.step % self.job.training.log_interval == 0 or self.step == self.job.training.train_iters:
            self._log(loss, norm, rate, checksum)
        return stopping

    def _gradients(self) -> tuple[float, float, int, bool]:
        """Forward and backward of one global batch. Returns its mean loss, the global gradient norm, its checksum and whether to stop.

        One reduction and one wait for the device a step: everything the ranks must agree on is in one vector.
        """
        loss, checksum = torch.zeros((), dtype=torch.float64, device=self.device), 0
        for m, batch in enumerate(self.train_feed.read(self.consumed_samples), start=1):
            data_parallel.prepare_backward(self.sharded, last=m * self.world.size == self.micro_batches)
            batch_loss = token_loss(self.model(batch.tokens_BS), batch.labels_BS) / self.micro_batches
            batch_loss.backward()  # type: ignore[no-untyped-call]
            loss += batch_loss.detach()
            checksum += batch.checksum
        square = squared_norm(local_gradients(self.parameters.values()))
        # In fp64 the checksums' sum is exact up to 2**21 samples a step.
        told = torch.tensor([checksum, self.stop.is_set()], dtype=torch.float64, device=self.device)
        agreed = torch.cat([torch.stack([loss, square]), told])
        dist.all_reduce(agreed)
        loss_sum, square_sum, checksum_sum, stops = agreed.tolist()
        return loss_sum, math.sqrt(square_sum), int(checksum_sum), stops > 0

    def _log(self, loss: float, norm: float, rate: float, checksum: int) -> None:
        steps, seconds = self.step - self.logged_step, self.seconds
        self.logged_step, self.seconds = self.step, 0.0
        if self.reporter:
            self.reporter.step(
                {
                    "step": self.step,
                    "consumed_samples": self.consumed_samples,
                    "lm_loss": loss,
                    "grad_norm": norm,
                    "learning_rate": rate,
                    "loss_scale": 1.0,
                    "elapsed_ms": 1000 * seconds / steps,
                    "tokens_per_second": steps * self.job.global_batch_size * self.job.model.seq_length / seconds,
                    "batch_checksum": checksum,
                }
            )

    @torch.no_grad()
    def evaluate(self) -> None:
        """Mean loss over the same eval_iters global batches of the valid split every time."""
        if self.valid_feed is None:
            return
        self.heartbeat.beat("eval", self.step)
        iters, loss = self.job.training.eval_iters, torch.zeros((), dtype=torch.float64, device=self.device)
        for i in range(iters):
            for batch in self.valid_feed.read(i * self.job.global_batch_size):
                loss += token_loss(self.model(batch.tokens_BS), batch.labels_BS)
        data_parallel.release(self.model)
        dist.all_reduce(loss)
        if self.reporter:
            mean = float(loss) / (iters * self.micro_batches)
            self.reporter.evaluation({"step": self.step, "consumed_samples": self.consumed_samples, "eval": "valid", "lm_loss": mean})

    def save(self) -> None:
        """Publish the checkpoint of this step, then delete what is too old."""
        self.heartbeat.beat("save", self.step)
        if self.reporter:
            self.reporter.sync()
        layout = {"world_size": self.world.size, "data_parallel_size": self.world.size, **self.job.parallelism.model_dump()}
        about = {"layout": layout, "job": self.job.model_dump(mode="json"), "state": {"optimizer_steps": self.step}}
        checkpoint.save(self.run.checkpoints, self.tensors(), step=self.step, consumed_samples=self.consumed_samples, **about)
        if self.world.rank == 0:
            checkpoint.prune(self.run.checkpoints, self.job.checkpoint.keep_last)
