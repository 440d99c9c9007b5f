"""The training loop of one rank: from a job to a trained model, or to the step where it was told to stop."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from trainkit.base.errors import Exit, TrainkitError
from trainkit.jobs.schema import Job
from trainkit.runs.folder import RunFolder
from trainkit.train import checkpoint, data_parallel
from trainkit.train.begin import begin_weights, refuse_what_cannot_run
from trainkit.train.data_parallel import World
from trainkit.train.feed import Feed, vocab_size
from trainkit.train.heartbeat import Heartbeat
from trainkit.train.loss import Labels, Losses
from trainkit.train.memory import Memory
from trainkit.train.model import build_on_meta
from trainkit.train.profiling import StepProfiler
from trainkit.train.readback import Readback
from trainkit.train.recompute import wrap_blocks
from trainkit.train.report import Reporter
from trainkit.train.schedule import batch_sizes, global_batch_size
from trainkit.train.step import Step, StepValues
from trainkit.train.timers import Timers
from trainkit.train.torch_compat import compile_cache_counts
from trainkit.train.utilization import Utilization


@dataclass(frozen=True)
class StepFacts:
    """What the host knows of a step before its numbers arrive."""

    step: int
    consumed_samples: int
    samples: int


@dataclass
class SinceLog:
    """What adds up between two log lines."""

    steps: int = 0
    samples: int = 0
    skipped: int = 0
    nan: int = 0
    began: float = 0.0


class RollBack(Exception):
    """A step asks to go back to the last checkpoint; the words say why, `nan` whether it was not finite (else a spike)."""

    def __init__(self, words: str, *, nan: bool) -> None:
        super().__init__(words)
        self.nan = nan


class Trainer:
    """Model, optimizer, data and reports of one rank. Afterwards `step` is the number of completed optimizer steps, skipped ones included.

    Args:
        job: what to train.
        run: where it is recorded.
        heartbeat: this rank's word on where it is.
        stop: set when the rank was told to save and stop.
    """

    def __init__(self, job: Job, run: RunFolder, world: World, heartbeat: Heartbeat, stop: threading.Event) -> None:
        heartbeat.beat("load", 0)
        refuse_what_cannot_run(job, world, begins=not checkpoint.finished(run.checkpoints))
        self.job, self.run, self.world, self.heartbeat, self.stop = job, run, world, heartbeat, stop
        self.device, mesh = data_parallel.join(world, job.cluster.device_type)
        vocab = vocab_size(job)
        self.model = build_on_meta(job.model, vocab)
        wrap_blocks(self.model, job.model, job.training)
        self.timers = Timers(self.device)
        sums = world.size > 1 or max(batch_sizes(job)) > job.training.micro_batch_size
        sharded = data_parallel.shard(self.model, mesh, job.training.precision, sums=sums)
        self.model.to_empty(device=self.device)
        self.maker = Step(job, self.model, sharded, world, self.device, self.timers)
        self.train_feed = Feed(job, job.dataset, "train", world, self.device)
        datasets = {"valid": job.dataset, **job.validation} if job.training.eval_iters else {}
        self.valid_feeds = {name: Feed(job, dataset, "valid", world, self.device) for name, dataset in datasets.items()}
        self.step = self.consumed_samples = self.rollbacks = 0
        if not self._load_newest():
            begin_weights(job, self.model)
        self.readback: Readback[StepFacts] = Readback(self.device)
        self.utilization = Utilization(job, vocab, self.device)
        self.memory = Memory(self.maker.parameters, self.maker.optimizer.state_tensors().values(), self.device)
        self.profiler = StepProfiler(job.profile, world.rank, run.path / "profile")
        self.reporter = Reporter(run, job, self.step or -1) if world.rank == 0 else None
        self.since, self.said_compiled = SinceLog(), False

    def _load_newest(self) -> bool:
        """Go on from the newest valid checkpoint that rank 0 finds; returns whether there is one."""
        step = torch.full((), -1, dtype=torch.int64, device=self.device)
        if self.world.rank == 0:
            newest = checkpoint.newest_valid(self.run.checkpoints, lambda words: print(f"WARNING: passed over: {words}", file=sys.stderr, flush=True))
            step.fill_(newest.manifest.step if newest else -1)
        dist.broadcast(step, 0)
        found = int(step)
        if found < 0:
            return False
        saved = checkpoint.open_checkpoint(checkpoint.folder_of(self.run.checkpoints, found))
        checkpoint.load(saved, self.maker.tensors())
        self.maker.load_state(saved.manifest.state)
        self.step, self.consumed_samples = found, saved.manifest.consumed_samples
        self.rollbacks = int(saved.manifest.state.get("rollbacks", 0))
        return True

    def train(self) -> Exit:
        """Train to the last step. Returns DONE, or PREEMPTED when told to stop: then the checkpoint of the step reached exists."""
        try:
            if self.step == 0:
                self.evaluate()
            self.since.began = time.perf_counter()
            self._train()
        finally:
            for feed in (self.train_feed, *self.valid_feeds.values()):
                feed.close()
            self.profiler.close()
            if self.reporter:
                self.reporter.close()
        return Exit.DONE if self.step >= self.job.training.train_iters else Exit.PREEMPTED

    def _train(self) -> None:
        """Steps, evaluations and checkpoints, to the last step or until told to stop."""
        t, stopping = self.job.training, False
        while self.step < t.train_iters and not stopping:
            self.train_step()
            last = self.step == t.train_iters
            evaluating = last or bool(t.eval_interval and self.step % t.eval_interval == 0)
            saving = last or bool(t.save_interval and self.step % t.save_interval == 0)
            try:
                stopping = self.settle(all=evaluating or saving)
                stopping = (stopping and self.settle(all=True)) or stopping  # what is saved must have been judged
            except RollBack as why:
                self._roll_back(why)
                stopping = False  # who asked is heard again at the next step
                continue
            if evaluating:
                self.evaluate()  # before the save: whoever resumes from it finds this evaluation made
            if saving or stopping:
                self.save()

    def train_step(self) -> None:
        """Set one optimizer step going; `settle` looks at how it went."""
        self.heartbeat.beat("train", self.step)
        self.model.train()
        self.profiler.before(self.step + 1)
        samples = global_batch_size(self.job, self.consumed_samples)
        values = self.maker.run(self.train_feed.read(self.consumed_samples, samples), samples, self.stop.is_set())
        if self.job.training.compile and self.reporter and not self.said_compiled:
            print(f"compiled: {compile_cache_counts()}", flush=True)
            self.said_compiled = True
        self.since.began += self.profiler.after(self.step + 1)
        self.step += 1
        self.consumed_samples += samples
        self.readback.push(StepFacts(self.step, self.consumed_samples, samples), values)

    def settle(self, *, all: bool = False) -> bool:
        """Log and judge the steps whose numbers are due; with `all` every one. Returns whether any rank was told to stop.

        Raises TrainkitError (exit 9) or RollBack where on_nan or on_spike says so.
        """
        stopping = False
        for facts, numbers in self.readback.take(all=all):
            values = StepValues(*numbers)
            self._log(facts, values)
            self._heed(facts, values)
            stopping = stopping or values.stops > 0
        return stopping

    def _heed(self, facts: StepFacts, values: StepValues) -> None:
        """Do what on_nan and on_spike say about a step whose update was withheld."""
        t = self.job.training
        if not (values.nan or values.spike):
            return
        policy = t.on_nan if values.nan else t.on_spike
        jump = f", a spike above {t.spike_factor} x its mean" if values.spike else ""
        what = f"step {facts.step}: lm loss {values.loss}, gradient norm {values.norm}{jump}"
        if policy == "rollback":
            raise RollBack(what, nan=bool(values.nan))
        if policy == "skip" and values.skipped_in_a_row <= t.max_skipped_in_a_row:
            if self.reporter:
                print(f"WARNING: {what}; skipped", file=sys.stderr, flush=True)
            return
        why = f"{what}; training stops, this step has not touched the weights"
        if policy == "skip":
            why = f"{what}; {values.skipped_in_a_row:.0f} steps in a row were skipped (max_skipped_in_a_row {t.max_skipped_in_a_row})"
        further = "`resume` goes on from the last checkpoint" if checkpoint.finished(self.run.checkpoints) else "no checkpoint was written yet"
        raise TrainkitError(why, exit=Exit.RANK_USER, hint=f"lower training.lr or lengthen lr_warmup_iters; {further}")

    def _roll_back(self, why: RollBack) -> None:
        """Go back to the last checkpoint and on with the samples after the bad ones (as PaLM did, arXiv:2204.02311, section 5.1)."""
        position, rollbacks, t = self.consumed_samples, self.rollbacks, self.job.training
        if rollbacks >= t.max_rollbacks:
            raise TrainkitError(f"{why}; max_rollbacks {t.max_rollbacks} are used up", exit=Exit.RANK_USER, hint="lower training.lr")
        self.readback.forget()
        self.timers.forget()
        self.heartbeat.beat("load", self.step)
        if self.reporter:
            self.reporter.close()
            self.reporter = None
        if not self._load_newest():
            raise TrainkitError(f"{why}; there is no checkpoint to roll back to", exit=Exit.RANK_USER, hint="set training.save_interval, or on_nan = 'skip'")
        self.consumed_samples, self.rollbacks = position, rollbacks + 1
        if self.world.rank == 0:
            print(f"WARNING: {why}; rolled back to step {self.step}, going on with sample {position}", file=sys.stderr, flush=True)
            self.reporter = Reporter(self.run, self.job, self.step or -1)
        self.since = SinceLog(began=time.perf_counter(), skipped=1, nan=int(why.nan))  # the next row tells of it: its own is taken back

    def _log(self, facts: StepFacts, values: StepValues) -> None:
        """Add a step up, and report it where the interval says so."""
        since, t = self.since, self.job.training
        since.steps, since.samples = since.steps + 1, since.samples + facts.samples
        since.skipped += bool(values.overflow or values.nan or values.spike)
        since.nan += bool(values.nan)
        if facts.step % t.log_interval and facts.step != t.train_iters:
            return
        times, now = self.timers.take(since.steps), time.perf_counter()
        seconds = now - since.began
        self.since = SinceLog(began=now)
        if not self.reporter:
            return
        tokens_per_second = since.samples * self.job.model.seq_length / seconds
        row: dict[str, Any] = {
            "step": facts.step,
            "consumed_samples": facts.consumed_samples,
            "global_batch_size": facts.samples,
            "lm_loss": values.loss,
            "grad_norm": values.norm,
            "learning_rate": values.rate,
            "loss_scale": values.scale,
            "skipped_iterations": since.skipped,
            "nan_iterations": since.nan,
            "rollbacks": self.rollbacks,
            "elapsed_ms": 1000 * seconds / since.steps,
            "tokens_per_second": tokens_per_second,
            "samples_per_second": since.samples / seconds,
            **self.utilization.of(tokens_per_second),
            "batch_checksum": int(values.checksum),
            "times_ms": times,
            "memory_bytes": self.memory.now(),
        }
        self.reporter.step(row)

    @torch.no_grad()
    def evaluate(self) -> None:
        """Mean loss over the same eval_iters global batches of every validation set, every time."""
        began = time.perf_counter()
        self.model.eval()
        for name, feed in self.valid_feeds.items():
            self.heartbeat.beat("eval", self.step)
            with self.timers("evaluation"):
                sums = self._evaluate(feed)
            if self.reporter:
                entropy, tokens = sums.tolist()
                self.reporter.evaluation({"step": self.step, "consumed_samples": self.consumed_samples, "eval": name, "lm_loss": entropy / max(1, tokens)})
        data_parallel.release(self.model)
        self.since.began += time.perf_counter() - began

    def _evaluate(self, feed: Feed) -> torch.Tensor:
        """(summed cross-entropy, tokens) over all ranks."""
        sums, batch_size = torch.zeros(2, dtype=torch.float64, device=self.device), self.job.global_batch_size
        for i in range(self.job.training.eval_iters):
            self.heartbeat.again()
            for batch in feed.read(i * batch_size, batch_size):
                losses: Losses = self.model(batch.tokens_BS, Labels(batch.labels_BS), positions_BS=batch.positions_BS, documents=batch.documents)
                sums += torch.stack([losses.cross_entropy, losses.tokens.double()])
        dist.all_reduce(sums)
        return sums

    def save(self) -> None:
        """Publish the checkpoint of this step, then delete what is too old."""
        began = time.perf_counter()
        self.heartbeat.beat("save", self.step)
        if self.reporter:
            self.reporter.sync()
        degrees = {key: int(value) for key, value in self.job.parallelism.model_dump(exclude_none=True).items()}
        layout = {"world_size": self.world.size, "data_parallel_size": self.world.size, **degrees}
        about = {"layout": layout, "job": self.job.model_dump(mode="json"), "state": {**self.maker.state(), "rollbacks": self.rollbacks}}
        with self.timers("checkpoint"):
            checkpoint.save(
                self.run.checkpoints, self.maker.tensors(), step=self.step, consumed_samples=self.consumed_samples, moved=self.heartbeat.again, **about
            )
            if self.world.rank == 0:
                checkpoint.prune(self.run.checkpoints, self.job.checkpoint.keep_last, self.step)
        self.since.began += time.perf_counter() - began
