"""The training loop of one rank: from a job to a trained model, or to the step where it was asked
to stop."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.printable import warn
from trainkit.base.process import FlatHeap
from trainkit.jobs.ranks import degrees_of
from trainkit.jobs.schema import Job
from trainkit.ops.kernels import Choice, choose_for
from trainkit.runs.checkpoints import published_folders
from trainkit.runs.folder import RunFolder
from trainkit.runs.sample_windows import SampleWindow
from trainkit.train.batches import Feed, vocab_size
from trainkit.train.checkpoint import save_load as checkpoint
from trainkit.train.checkpoint.manager import CheckpointManager, CheckpointObserver
from trainkit.train.checkpoint.memory import MemoryCopies
from trainkit.train.checkpoint.save_load import CheckpointMetadata, layout_entry
from trainkit.train.compiled_graphs import report_compilation
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
from trainkit.train.ready_graphs import ReadyGraphs
from trainkit.train.step_log import StepLog
from trainkit.train.text_samples import TextSampler
from trainkit.train.torch_compat import be_deterministic
from trainkit.train.torch_compiler import on_compilation
from trainkit.train.update.build import build_model_parts
from trainkit.train.update.gradient_replay import GradientReplay
from trainkit.train.update.loss_policy import RollbackRequest, StepInfo, apply_loss_policy
from trainkit.train.update.recheck import RecheckedStep, find_cause
from trainkit.train.update.schedule import global_batch_size
from trainkit.train.update.step import Step, StepValues
from trainkit.train.validation import Validator


class Trainer:
    """Model, optimizer, data and reports of one rank. Afterwards `step` is the number of
    completed optimizer steps, skipped ones included.

    Args:
        job: what to train.
        run: where it is recorded.
        heartbeat: says where this rank is.
        stop_requested: set when the rank shall save and stop.
        graphs: those compiled before; None: there are none.
    """

    def __init__(
        self,
        job: Job,
        run: RunFolder,
        world: World,
        heartbeat: Heartbeat,
        stop_requested: threading.Event,
        graphs: ReadyGraphs | None = None,
    ) -> None:
        heartbeat.beat("load", 0)
        refuse_what_cannot_run(job, world, begins=not published_folders(run.checkpoints))
        self.job = job
        self.run = run
        self.world = world
        self.heartbeat = heartbeat
        self.stop_requested = stop_requested
        self.device, self.chosen = _meet(job, world)
        self.mesh = mesh = Mesh.of(
            degrees_of(job),
            world,
            self.device,
            sequence=job.parallelism.sequence_parallel,
            tied_at=tied_at(job),
            experts=job.model.moe is not None,
        )
        vocab = vocab_size(job)
        self.graphs = graphs or ReadyGraphs()
        kernels = self.chosen.kernels
        self.model_parts = build_model_parts(job, mesh, vocab, kernels=kernels, graphs=self.graphs)
        self.timers = heartbeat.watch(Timers(self.device), compiled=job.training.compile)
        if job.training.compile:
            on_compilation(heartbeat.surprise)
        self.step_runner = Step(job, self.model_parts, mesh, self.timers)
        self.train_feed = Feed(job, None, "train", mesh.data_world, self.device)
        self.replay = GradientReplay(self.step_runner, self.train_feed)
        self.validator = Validator(job, mesh, self.step_runner, heartbeat, self.any_rank_stopping)
        self.texts = TextSampler(job, run, self.model_parts, reports=world.rank == 0)
        self.step = self.consumed_samples = self.rollbacks = 0
        self.evaluation_due = True  # the next thing to do at this step
        self.validation: dict[str, float] = {}  # losses measured at this step (rank 0)
        states = self.step_runner.optimizer.state_tensors().values()
        whole = data_parallel.accumulates_whole(job)
        memory = MemoryStats(self.model_parts.parameters, states, self.device, accumulates=whole)
        utilization = Utilization(job, vocab, self.device)
        self.heap = FlatHeap()
        self.step_log = StepLog(job, mesh, self.timers, memory, utilization)
        tensors = self.step_runner.tensors()
        copies = MemoryCopies(job, run, world, tensors) if job.checkpoint.memory_interval else None
        observer = _TrainerObserver(self)
        self.checkpoints = CheckpointManager(job.checkpoint, run.checkpoints, observer, copies)
        self.begins = not self._load_newest()
        if self.begins:
            begin_weights(job, self.model_parts)
        self.readback: Readback[StepInfo] = Readback(self.device)
        self.profiler = StepProfiler(job.profile, world.rank, run.path / "profile")
        self.reporter = (
            Reporter(run, job, self.step or -1, evaluated=not self.evaluation_due)
            if world.rank == 0
            else None
        )

    def _load_newest(self, *, memory: bool = True) -> bool:
        """Go on from the newest valid state; returns whether there is one."""
        runner = self.step_runner
        saved = self.checkpoints.load_newest(runner.tensors(), runner.expected(), memory=memory)
        if saved is None:
            return False
        runner.after_loading()
        runner.load_state(saved.state)
        self.step = saved.step
        self.consumed_samples = saved.consumed_samples
        self.validation = dict(saved.validation)
        self.evaluation_due = bool(saved.state.get("evaluation_due", False))
        self.rollbacks = int(saved.state.get("rollbacks", 0))
        self.step_log.load_state(saved.state)
        self.heartbeat.unsaved = self.checkpoints.unsaved
        return True

    def train(self) -> Exit:
        """Train to the last step. Returns DONE, or PREEMPTED when asked to stop: then the
        checkpoint of the step reached exists."""
        failed = True
        try:
            self.step_log.start_clock()
            self._train()
            failed = False
        finally:
            self.heartbeat.surprise()
            self.checkpoints.close()
            self.train_feed.close()
            self.validator.close()
            self.profiler.close()
            if self.reporter:
                self.reporter.close(failed=failed)
        if self.step >= self.job.training.train_iters and not self.evaluation_due:
            return Exit.DONE
        return Exit.PREEMPTED

    def _train(self) -> None:
        """Steps, evaluations and checkpoints, to the last step or until asked to stop."""
        stopping = self._before_first_step()
        while self.step < self.job.training.train_iters and not stopping:
            self.train_step()
            try:
                stopping = self._after_step()
            except RollbackRequest as request:
                self._roll_back(request)  # a rank that shall stop says so again at the next step
        if stopping:
            self.checkpoints.prepare_to_stop()
        self.checkpoints.wait_for_save(last=True)

    def _after_step(self) -> bool:
        """Judge the step, evaluate and save where that is due. Returns whether any rank was asked
        to stop. Raises RollbackRequest, and what `process_results` raises."""
        t = self.job.training
        last = self.step == t.train_iters
        evaluating = last or _is_due(self.step, t.eval_interval)
        saving = last or _is_due(self.step, t.save_interval)
        copying = not last and self.checkpoints.copy_is_due(self.step)
        stopping = self._judge_results(all=evaluating or saving or copying)
        self.evaluation_due = evaluating
        # before the save: what resumes from it finds this evaluation made, or still due
        if evaluating and not stopping:
            stopping = not self.evaluate()
        if stopping:
            self.checkpoints.prepare_to_stop()
        elif saving and self.texts.active:
            self.write_texts()
        if saving or stopping:
            self.save(last=last or stopping)
            # a save takes long: do not wait for another step to hear of a stop
            stopping = stopping or self.any_rank_stopping()
        if copying and not stopping:
            with self.timers("checkpoint"):
                self.checkpoints.copy(self._metadata())
        return stopping

    def _before_first_step(self) -> bool:
        """What a run begins or goes on with. Returns whether any rank was asked to stop."""
        if self._save_first():
            return True
        if not self.evaluation_due:
            return False
        if not self.evaluate():
            return True
        self._note_evaluation()
        return False

    def _judge_results(self, *, all: bool) -> bool:
        """As `process_results`. What a stop saves must have been judged, whatever the interval."""
        if not self.process_results(all=all):
            return False
        self.process_results(all=True)
        return True

    def _save_first(self) -> bool:
        """Where the job wants it, the checkpoint that a run begins with: before the first
        evaluation, which may be the first to compile; or one that was lost as training goes on from
        memory. Returns whether any rank was asked to stop meanwhile. Raises NotSaved."""
        wanted = self.begins and self.job.checkpoint.save_first
        if not (wanted or self.checkpoints.owes_save(self.job.training.save_interval)):
            return False
        self.save(last=wanted)
        return self.any_rank_stopping()

    def any_rank_stopping(self) -> bool:
        """Whether any rank was asked to stop, asked by all together where the next step is far.
        Nothing waits for the device."""
        ranks = torch.tensor(int(self.stop_requested.is_set()))
        dist.all_reduce(ranks)
        return bool(ranks)

    def train_step(self) -> None:
        """Set one optimizer step going; `process_results` looks at how it went."""
        self.validation = {}
        self.heartbeat.beat("train", self.step)
        self.heap.before_step()
        self.model_parts.train()
        self.profiler.before(self.step + 1)
        if self.profiler.running:
            self.heartbeat.surprise()
        samples = global_batch_size(self.job, self.consumed_samples)
        if self.reporter:
            self.reporter.on_step_begin(SampleWindow(self.step + 1, self.consumed_samples, samples))
        values = self.step_runner.run(
            self.replay.read(self.step + 1, self.consumed_samples, samples),
            samples,
            self.stop_requested.is_set(),
            self._before_update,
        )
        if self.job.training.compile:
            report_compilation(self.graphs, prints=self.reporter is not None)
        self.step_log.exclude(self.profiler.after(self.step + 1))
        self.step += 1
        self.consumed_samples += samples
        self.readback.push(StepInfo(self.step, self.consumed_samples, samples), values)

    def _before_update(self) -> None:
        """What is saved behind training was copied beside forward and backward so far, and may
        not be any more when the weights change. Nor may they by what was computed wrong."""
        if self.checkpoints.staging:
            with self.timers("checkpoint"):
                self.checkpoints.wait_for_staging()
        self.replay.compare()

    def process_results(self, *, all: bool = False) -> bool:
        """Log and judge the steps whose numbers are due; with `all` every one. Returns whether
        any rank was asked to stop.

        Raises TrainkitError (exit 9) or RollBack where on_nan or on_spike says so.
        """
        stopping = False
        for info, numbers in self.readback.take(all=all):
            count = len(StepValues._fields)
            values = StepValues(*numbers[:count])
            loads = numbers[count:]
            reports = self.reporter is not None
            row = self.step_log.add(info, values, loads, self.rollbacks, reports=reports)
            if self.reporter and row:
                self.reporter.step(row, self.step_log.compute_ms, self.step_log.expert_loads)
            self._apply_policy(info, values)
            stopping = stopping or values.stops > 0
        return stopping

    def _apply_policy(self, info: StepInfo, values: StepValues) -> None:
        """Judge a step whose update was withheld. A dynamic scale's overflow needs nothing."""
        if not (values.nan or values.spike or (values.overflow and self.job.training.loss_scale)):
            return
        warning = apply_loss_policy(
            self.job.training, self.run, info, values, partial(self._find_cause, info, values)
        )
        if self.reporter:
            warn(warning)

    def _find_cause(self, info: StepInfo, values: StepValues) -> str:
        """Where a step's numbers went wrong, asked by all ranks together. On CUDA they come one
        step late: the weights may have gone one step on."""
        self.heartbeat.beat("train", info.step, regular=False)
        self.readback.forget()
        batches = self.train_feed.read(info.consumed_samples - info.samples, info.samples)
        again = RecheckedStep(self.step_runner, batches, info.samples, values.scale)
        return find_cause(again, self.world, self.train_feed.where)

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
        if not self._load_newest(memory=False):
            raise TrainkitError(
                f"{why}; there is no checkpoint to roll back to{why.cause()}",
                exit=Exit.RANK_USER,
                hint="set training.save_interval, or on_nan = 'skip'",
            )
        self.consumed_samples = position
        self.rollbacks = rollbacks + 1
        self.evaluation_due = False
        if self.world.rank == 0:
            warn(f"{why}; rolled back to step {self.step}, going on with sample {position}")
            self.reporter = Reporter(self.run, self.job, self.step)
        self.step_log.start_clock()
        self.step_log.count_rolled_back(why.nan)

    @torch.no_grad()
    def evaluate(self) -> bool:
        """Mean loss over the same eval_iters global batches of every validation set, every time.
        Returns False where a rank was asked to stop before the end: then nothing is reported, and
        it is still due."""
        began = time.perf_counter()
        losses: dict[str, float] = {}
        self.model_parts.train(False)
        for name in self.validator.feeds:
            self.heartbeat.beat("eval", self.step)
            with self.timers("evaluation"):
                sums = self.validator.measure(name)
            if sums is None:
                break
            if self.reporter:
                entropy, tokens = sums.tolist()
                losses[name] = entropy / max(1, tokens)
        else:
            self.evaluation_due = False
        self.model_parts.release()
        if self.reporter and not self.evaluation_due:
            for name, loss in losses.items():
                self.reporter.evaluation(self.step, self.consumed_samples, name, loss)
                if math.isfinite(loss):
                    self.validation[name] = loss
        self.step_log.exclude(time.perf_counter() - began)
        return not self.evaluation_due

    def write_texts(self) -> None:
        """What the model says now, for the run's report; a part of evaluation."""
        with self.timers("evaluation"):
            seconds = self.texts.write(self.step, self.heartbeat)
        self.step_log.exclude(seconds)

    def _note_evaluation(self) -> None:
        """The checkpoint that training went on from said that this evaluation is due: the next
        attempt that goes on from it finds it made."""
        if self.reporter and self.step:
            try:
                self.reporter.sync()
                checkpoint.note_evaluation(self.run.checkpoints, self.step, self.validation)
            except (OSError, TrainkitError) as error:
                warn(f"the next `resume` from step {self.step} repeats its evaluation: {error}")

    def save(self, *, last: bool = True) -> None:
        """Publish the checkpoint of this step, then delete what is too old. `last`: it must be
        there when this returns."""
        began = time.perf_counter()
        self.heartbeat.beat("save", self.step, regular=not last)
        metadata = replace(self._metadata(), job=self.job.model_dump(mode="json"))
        with self.timers("checkpoint"):
            self.checkpoints.save(self.step_runner.tensors(), metadata, last=last)
        self.step_log.exclude(time.perf_counter() - began)

    def _metadata(self) -> CheckpointMetadata:
        """What the next step depends on besides the tensors."""
        state = {"rollbacks": self.rollbacks, "evaluation_due": self.evaluation_due}
        return CheckpointMetadata(
            step=self.step,
            consumed_samples=self.consumed_samples,
            layout=layout_entry(self.job, self.world.size),
            state={**self.step_runner.state(), **self.step_log.state(), **state},
            validation=self.validation,
        )


def _meet(job: Job, world: World) -> tuple[torch.device, Choice]:
    """Have all ranks agree on what they are about to do; this one's device and kernels."""
    chosen = choose_for(job)
    device = data_parallel.join(world, job.cluster.device_type)
    refuse_disagreement(job, world, chosen)
    if job.training.deterministic:
        be_deterministic()
    return device, chosen


class _TrainerObserver(CheckpointObserver):
    """Ties what is saved to the run's metrics and to the heartbeat."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def before_write(self) -> None:
        """Raises OSError as the disk does; TrainkitError (exit 17) where another attempt has gone
        on and saved: then it is the one that counts."""
        reporter = self.trainer.reporter
        if reporter:
            if self.trainer.checkpoints.has_foreign_checkpoints():
                reporter.metrics.refuse_another()
            reporter.sync()

    def before_shipping(self) -> None:
        if reporter := self.trainer.reporter:
            reporter.metrics.make_durable()

    def after_publish(self) -> None:
        """As `before_write`; what was trained is saved by then."""
        if self.trainer.reporter:
            self.trainer.reporter.metrics.refuse_another()

    def on_saved(self, stop_seconds: float) -> None:
        self.trainer.heartbeat.on_saved(stop_seconds)

    def on_progress(self) -> None:
        self.trainer.heartbeat.refresh()


def _is_due(step: int, interval: int | None) -> bool:
    return bool(interval and step % interval == 0)
