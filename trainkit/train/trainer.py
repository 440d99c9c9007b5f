"""The training loop of one rank: from a job to a trained model, or to the step where it was told
to stop."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from trainkit.base.errors import Exit, TrainkitError
from trainkit.jobs.ranks import degrees_of
from trainkit.jobs.schema import Job
from trainkit.runs.checkpoints import published_folders
from trainkit.runs.folder import RunFolder
from trainkit.runs.sample_windows import SampleWindow
from trainkit.train.batches import Feed, vocab_size
from trainkit.train.checkpoint import save_load as checkpoint
from trainkit.train.checkpoint.manager import CheckpointManager
from trainkit.train.metrics.heartbeat import Heartbeat
from trainkit.train.metrics.profiler import StepProfiler
from trainkit.train.metrics.readback import Readback
from trainkit.train.metrics.reporter import Reporter
from trainkit.train.metrics.timers import Timers
from trainkit.train.metrics.utilization import Utilization
from trainkit.train.parallel import data_parallel
from trainkit.train.parallel.data_parallel import World
from trainkit.train.parallel.memory import MemoryStats
from trainkit.train.parallel.mesh import Mesh
from trainkit.train.parallel.pipeline import tied_at
from trainkit.train.preflight import begin_weights, refuse_what_cannot_run
from trainkit.train.rank_agreement import refuse_disagreement
from trainkit.train.rank_statistics import compare_ranks
from trainkit.train.torch_compat import be_deterministic, compile_cache_counts
from trainkit.train.update.build import build_model_parts
from trainkit.train.update.recheck import explain, recompute_step
from trainkit.train.update.schedule import global_batch_size
from trainkit.train.update.step import Step, StepValues


@dataclass(frozen=True)
class StepInfo:
    """What the host knows of a step before its numbers arrive."""

    step: int
    consumed_samples: int
    samples: int


@dataclass
class LogInterval:
    """What adds up between two log lines."""

    steps: int = 0
    samples: int = 0
    skipped: int = 0
    nan: int = 0
    began: float = 0.0


class RollbackRequest(Exception):
    """A step asks to go back to the last checkpoint; the words say why, `nan` whether it was not
    finite (else a spike), `cause` finds out where."""

    def __init__(self, words: str, *, nan: bool, cause: Callable[[], str]) -> None:
        super().__init__(words)
        self.nan = nan
        self.cause = cause


class Trainer:
    """Model, optimizer, data and reports of one rank. Afterwards `step` is the number of
    completed optimizer steps, skipped ones included.

    Args:
        job: what to train.
        run: where it is recorded.
        heartbeat: this rank's word on where it is.
        stop: set when the rank was told to save and stop.
    """

    def __init__(
        self, job: Job, run: RunFolder, world: World, heartbeat: Heartbeat, stop: threading.Event
    ) -> None:
        heartbeat.beat("load", 0)
        refuse_what_cannot_run(job, world, begins=not published_folders(run.checkpoints))
        self.job = job
        self.run = run
        self.world = world
        self.heartbeat = heartbeat
        self.stop = stop
        self.device = data_parallel.join(world, job.cluster.device_type)
        refuse_disagreement(job, world)
        if job.training.deterministic:
            be_deterministic()
        self.mesh = mesh = Mesh.of(
            degrees_of(job),
            world,
            self.device,
            sequence=job.parallelism.sequence_parallel,
            tied_at=tied_at(job),
        )
        vocab = vocab_size(job)
        self.parts = build_model_parts(job, mesh, vocab)
        self.timers = Timers(self.device)
        self.maker = Step(job, self.parts, mesh, self.timers)
        self.train_feed = Feed(job, job.dataset, "train", mesh.data_world, self.device)
        if job.training.eval_iters:
            datasets = {"valid": job.dataset, **job.validation}
        else:
            datasets = {}
        self.valid_feeds = {
            name: Feed(job, dataset, "valid", mesh.data_world, self.device)
            for name, dataset in datasets.items()
        }
        self.step = self.consumed_samples = self.rollbacks = 0
        self.evaluation_due = True  # the next thing to do at this step
        self.validation: dict[str, float] = {}  # losses measured at this step (rank 0)
        self.since = LogInterval()
        self.said_compiled = False
        self.saver = CheckpointManager(
            job.checkpoint, run.checkpoints, heartbeat.saved, heartbeat.again
        )
        self.begins = not self._load_newest()
        if self.begins:
            begin_weights(job, self.parts)
        self.readback: Readback[StepInfo] = Readback(self.device)
        self.utilization = Utilization(job, vocab, self.device)
        states = self.maker.optimizer.state_tensors().values()
        self.memory = MemoryStats(
            self.parts.held, states, self.device, accumulates=data_parallel.accumulates_whole(job)
        )
        self.profiler = StepProfiler(job.profile, world.rank, run.path / "profile")
        self.reporter = (
            Reporter(run, job, self.step or -1, evaluated=not self.evaluation_due)
            if world.rank == 0
            else None
        )

    def _load_newest(self) -> bool:
        """Go on from the newest valid checkpoint; returns whether there is one."""
        saved = self.saver.newest()
        if saved is None:
            return False
        checkpoint.load(saved, self.maker.tensors(), self.maker.expected())
        self.maker.after_loading()
        self.maker.load_state(saved.manifest.state)
        self.step = saved.manifest.step
        self.consumed_samples = saved.manifest.consumed_samples
        self.evaluation_due = bool(saved.manifest.state.get("evaluation_due", False))
        self.rollbacks = int(saved.manifest.state.get("rollbacks", 0))
        self.since = LogInterval(
            skipped=int(saved.manifest.state.get("unlogged_skipped", 0)),
            nan=int(saved.manifest.state.get("unlogged_nan", 0)),
        )
        return True

    def train(self) -> Exit:
        """Train to the last step. Returns DONE, or PREEMPTED when told to stop: then the
        checkpoint of the step reached exists."""
        failed = True
        try:
            self.since.began = time.perf_counter()
            self._train()
            failed = False
        finally:
            self.saver.close()
            for feed in (self.train_feed, *self.valid_feeds.values()):
                feed.close()
            self.profiler.close()
            if self.reporter:
                self.reporter.close(failed=failed)
        if self.step >= self.job.training.train_iters and not self.evaluation_due:
            return Exit.DONE
        return Exit.PREEMPTED

    def _train(self) -> None:
        """Steps, evaluations and checkpoints, to the last step or until told to stop."""
        t = self.job.training
        stopping = self._save_first()
        due = self.evaluation_due and not stopping
        stopping = stopping or (due and not self.evaluate())
        if due and not stopping:
            self._note_evaluation()
        while self.step < t.train_iters and not stopping:
            self.train_step()
            last = self.step == t.train_iters
            evaluating = last or bool(t.eval_interval and self.step % t.eval_interval == 0)
            saving = last or bool(t.save_interval and self.step % t.save_interval == 0)
            try:
                stopping = self.settle(all=evaluating or saving)
                # what is saved must have been judged
                stopping = (stopping and self.settle(all=True)) or stopping
            except RollbackRequest as why:
                self._roll_back(why)
                stopping = False  # who asked is heard again at the next step
                continue
            self.evaluation_due = evaluating
            # before the save: whoever resumes from it finds this evaluation made, or told to make
            # it
            if evaluating and not stopping:
                stopping = not self.evaluate()
            if stopping:
                self.saver.hurry()
            if saving or stopping:
                self.save(last=last or stopping)
                stopping = stopping or self.told()  # it takes long; nobody waits for another step
        if stopping:
            self.saver.hurry()
        self.saver.finish(last=True)

    def _save_first(self) -> bool:
        """Where the job wants it, the checkpoint that a run begins with: before the first
        evaluation, for that may be the first to compile. Returns whether any rank was told to
        stop meanwhile. Raises NotSaved: on such a disk it would be in vain to train."""
        if not (self.begins and self.job.checkpoint.save_first):
            return False
        self.save(last=True)
        return self.told()

    def told(self) -> bool:
        """Whether any rank was told to stop, asked by all together where the next step is far.
        Nothing waits for the device."""
        ranks = torch.tensor(int(self.stop.is_set()))
        dist.all_reduce(ranks)
        return bool(ranks)

    def train_step(self) -> None:
        """Set one optimizer step going; `settle` looks at how it went."""
        self.validation = {}
        self.heartbeat.beat("train", self.step)
        self.parts.train()
        self.profiler.before(self.step + 1)
        samples = global_batch_size(self.job, self.consumed_samples)
        if self.reporter:
            self.reporter.begins(SampleWindow(self.step + 1, self.consumed_samples, samples))
        values = self.maker.run(
            self.train_feed.read(self.consumed_samples, samples),
            samples,
            self.stop.is_set(),
            self._before_update,
        )
        if self.job.training.compile and self.reporter and not self.said_compiled:
            print(f"compiled: {compile_cache_counts()}", flush=True)
            self.said_compiled = True
        self.since.began += self.profiler.after(self.step + 1)
        self.step += 1
        self.consumed_samples += samples
        self.readback.push(StepInfo(self.step, self.consumed_samples, samples), values)

    def _before_update(self) -> None:
        """What is saved behind training was copied beside forward and backward so far, and may
        not be any more when the weights change."""
        if self.saver.copying:
            with self.timers("checkpoint"):
                self.saver.taken()

    def settle(self, *, all: bool = False) -> bool:
        """Log and judge the steps whose numbers are due; with `all` every one. Returns whether
        any rank was told to stop.

        Raises TrainkitError (exit 9) or RollBack where on_nan or on_spike says so.
        """
        stopping = False
        for facts, numbers in self.readback.take(all=all):
            values = StepValues(*numbers)
            self._log(facts, values)
            self._heed(facts, values)
            stopping = stopping or values.stops > 0
        return stopping

    def _heed(self, facts: StepInfo, values: StepValues) -> None:
        """Do what on_nan and on_spike say about a step whose update was withheld."""
        t = self.job.training
        if not (values.nan or values.spike):
            return
        policy = t.on_nan if values.nan else t.on_spike
        if values.spike:
            jump = f", a spike above {t.spike_factor} x its mean"
        else:
            jump = ""
        what = f"step {facts.step}: lm loss {values.loss}, gradient norm {values.norm}{jump}"
        if policy == "rollback":
            raise RollbackRequest(
                what,
                nan=bool(values.nan),
                cause=lambda: f"; {self._cause(facts, values)}" if values.nan else "",
            )
        if policy == "skip" and values.skipped_in_a_row <= t.max_skipped_in_a_row:
            if self.reporter:
                print(f"WARNING: {what}; skipped", file=sys.stderr, flush=True)
            return
        why = f"{what}; training stops, this step has not touched the weights"
        if policy == "skip":
            why = (
                f"{what}; {values.skipped_in_a_row:.0f} steps in a row were skipped"
                f" (max_skipped_in_a_row {t.max_skipped_in_a_row})"
            )
        if published_folders(self.run.checkpoints):
            further = "`resume` goes on from the last checkpoint"
        else:
            further = "no checkpoint was written yet"
        hint = f"lower training.lr or lengthen lr_warmup_iters; {further}"
        if values.nan:
            why = f"{why}; {self._cause(facts, values)}"
            hint = (
                f"{hint}; `replay {self.run.id} --step {facts.step}` shows the samples of the step"
            )
        raise TrainkitError(why, exit=Exit.RANK_USER, hint=hint)

    def _cause(self, facts: StepInfo, values: StepValues) -> str:
        """What is not finite first when the step is computed once more, in words; all ranks ask
        together. On CUDA a step's numbers come one step late: the weights may have gone one step
        on."""
        self.heartbeat.beat("train", facts.step)
        self.readback.forget()
        first = facts.consumed_samples - facts.samples
        batches = self.train_feed.read(first, facts.samples)
        try:
            self.parts.train()
            found = recompute_step(
                self.maker, batches, facts.samples, values.scale, self.world.rank
            )
        except (RuntimeError, TrainkitError) as error:
            # the step's own error must be told whatever comes of this
            return f"where it begins is not known, for it could not be computed again: {error}"
        return explain(found, self.world.size, self.train_feed.where)

    def _roll_back(self, why: RollbackRequest) -> None:
        """Go back to the last checkpoint and on with the samples after the bad ones (as PaLM
        did, arXiv:2204.02311, section 5.1)."""
        position = self.consumed_samples
        rollbacks = self.rollbacks
        t = self.job.training
        if rollbacks >= t.max_rollbacks:
            raise TrainkitError(
                f"{why}; max_rollbacks {t.max_rollbacks} are used up{why.cause()}",
                exit=Exit.RANK_USER,
                hint="lower training.lr",
            )
        self.readback.forget()
        self.timers.forget()
        self.heartbeat.beat("load", self.step)
        if self.reporter:
            self.reporter.close(failed=True)  # later rows than the checkpoint's are taken back
            self.reporter = None
        if not self._load_newest():
            raise TrainkitError(
                f"{why}; there is no checkpoint to roll back to{why.cause()}",
                exit=Exit.RANK_USER,
                hint="set training.save_interval, or on_nan = 'skip'",
            )
        self.consumed_samples = position
        self.rollbacks = rollbacks + 1
        self.evaluation_due = False
        if self.world.rank == 0:
            print(
                f"WARNING: {why}; rolled back to step {self.step}, going on with sample {position}",
                file=sys.stderr,
                flush=True,
            )
            self.reporter = Reporter(self.run, self.job, self.step)
        self.since.began = time.perf_counter()
        # the next row tells of it: its own is taken back
        self.since.skipped = self.since.skipped + 1
        self.since.nan = self.since.nan + why.nan

    def _log(self, facts: StepInfo, values: StepValues) -> None:
        """Add a step up, and report it where the interval says so."""
        since = self.since
        t = self.job.training
        since.steps = since.steps + 1
        since.samples = since.samples + facts.samples
        since.skipped += bool(values.overflow or values.nan or values.spike)
        since.nan += bool(values.nan)
        if facts.step % t.log_interval and facts.step != t.train_iters:
            return
        times = self.timers.take(since.steps)
        now = time.perf_counter()
        seconds = now - since.began
        self.since = LogInterval(began=now)
        memory = self.memory.now()
        compared = compare_ranks(self.job, self.mesh, times, memory, facts.samples)
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
            "memory_bytes": memory,
            **compared,
        }
        self.reporter.step(row)

    @torch.no_grad()
    def evaluate(self) -> bool:
        """Mean loss over the same eval_iters global batches of every validation set, every time.
        Returns False where a rank was told to stop before the end: then nothing is reported, and
        it is still due."""
        began = time.perf_counter()
        rows = []
        self.parts.train(False)
        for name, feed in self.valid_feeds.items():
            self.heartbeat.beat("eval", self.step)
            with self.timers("evaluation"):
                sums = self._evaluate(feed)
            if sums is None:
                break
            if self.reporter:
                entropy, tokens = sums.tolist()
                rows.append(
                    {
                        "step": self.step,
                        "consumed_samples": self.consumed_samples,
                        "eval": name,
                        "lm_loss": entropy / max(1, tokens),
                    }
                )
        else:
            self.evaluation_due = False
        self.parts.release()
        for row in () if self.evaluation_due else rows:
            assert self.reporter is not None, "it was there when the row was made"
            self.reporter.evaluation(row)
            if math.isfinite(row["lm_loss"]):
                self.validation[row["eval"]] = row["lm_loss"]
        self.since.began += time.perf_counter() - began
        return not self.evaluation_due

    def _note_evaluation(self) -> None:
        """The checkpoint that training went on from said that this evaluation is due: whoever
        goes on from it again finds it made."""
        if self.reporter and self.step:
            try:
                self.reporter.sync()
                checkpoint.note_evaluation(self.run.checkpoints, self.step, self.validation)
            except (OSError, TrainkitError) as error:
                print(
                    f"WARNING: the next `resume` from step {self.step} repeats its evaluation:"
                    f" {error}",
                    file=sys.stderr,
                    flush=True,
                )

    def _evaluate(self, feed: Feed) -> torch.Tensor | None:
        """(summed cross-entropy, tokens) over all ranks; None where one was told to stop."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        batch_size = self.job.global_batch_size
        for i in range(self.job.training.eval_iters):
            if self.told():
                return None
            self.heartbeat.again()
            sums += self.maker.evaluate(feed.read(i * batch_size, batch_size))
        dist.all_reduce(sums)
        return sums

    def save(self, *, last: bool = True) -> None:
        """Publish the checkpoint of this step, then delete what is too old. `last`: it must be
        there when this returns."""
        began = time.perf_counter()
        self.heartbeat.beat("save", self.step)
        degrees = {
            key: value if isinstance(value, str) else int(value)
            for key, value in self.job.parallelism.model_dump(exclude_none=True).items()
        }
        layout = {
            "world_size": self.world.size,
            "data_parallel_size": self.job.data_parallel_size,
            **degrees,
        }
        # the next row tells of them, whoever writes it
        unlogged = {"unlogged_skipped": self.since.skipped, "unlogged_nan": self.since.nan}
        state = {
            **self.maker.state(),
            **unlogged,
            "rollbacks": self.rollbacks,
            "evaluation_due": self.evaluation_due,
        }
        about = {
            "step": self.step,
            "consumed_samples": self.consumed_samples,
            "layout": layout,
            "job": self.job.model_dump(mode="json"),
        }
        # what was trained is saved by then
        after = self.reporter.metrics.refuse_another if self.reporter else lambda: None
        with self.timers("checkpoint"):
            self.saver.save(
                self.maker.tensors(),
                before=self._before_save,
                after=after,
                last=last,
                state=state,
                validation=self.validation,
                **about,
            )
        self.since.began += time.perf_counter() - began

    def _before_save(self) -> None:
        """On rank 0. Raises OSError as the disk does; TrainkitError (exit 17) where another
        attempt has gone on and saved: then it is the one that counts."""
        if self.reporter:
            if self.saver.others():
                self.reporter.metrics.refuse_another()
            self.reporter.sync()
