"""What the model writes at its checkpoints while it trains: samples.jsonl of the run.

The weights in training are read as an evaluation reads them. Nothing is drawn at random: the
likeliest token follows each time, and no loss hangs on it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from tokenizers import Tokenizer
from torch.distributed.fsdp import FSDPModule

from trainkit.base.errors import TrainkitError
from trainkit.base.printable import warn
from trainkit.data.tokenizer import end_of_document, load_tokenizer
from trainkit.jobs.schema import Job
from trainkit.runs.folder import RunFolder
from trainkit.runs.samples import SampleText, add_samples
from trainkit.train.batches import data_folder
from trainkit.train.decoding.continuation import Continuations, continued_text
from trainkit.train.decoding.sampling import Sampling
from trainkit.train.metrics.heartbeat import Heartbeat
from trainkit.train.model.transformer import Transformer
from trainkit.train.parallel.data_parallel import COMPUTE
from trainkit.train.update.build import ModelParts


class TextSampler:
    """Writes texts; every rank calls everything.

    Args:
        job: its `generate` says after which prompts, and whether at all.
        run: the run.
        parts: what this rank holds of the model.
        reports: whether this is rank 0, which alone writes.

    Raises ConfigError where the dataset's tokenizer cannot be read.
    """

    def __init__(self, job: Job, run: RunFolder, parts: ModelParts, *, reports: bool) -> None:
        self.run = run
        self.parts = parts
        self.prompts = job.generate.prompts or (job.generate.prompt,)
        why_not = reason_against(job)
        self.active = job.generate.while_training and not why_not
        self._tokenizer: Tokenizer | None = None
        if not (reports and job.generate.while_training):
            return
        if not self.active or job.dataset.tokenizer is None:
            warn(
                f"no texts while it trains: {why_not}; `invoke report {run.id} --samples` has"
                " its checkpoints write them"
            )
            return
        path = data_folder(job).tokenizer
        self._tokenizer = load_tokenizer(path)
        self._asked = Continuations(
            Sampling(temperature=0.0),
            job.generate.max_new_tokens,
            end_of_document(self._tokenizer, job.dataset.tokenizer.eod_token, path),
            job.training.reset_attention_mask,
            COMPUTE[job.training.precision] or torch.float32,
        )

    def write(self, step: int, heartbeat: Heartbeat) -> float:
        """Go on from each prompt; the seconds that took. What goes wrong costs the texts, not the
        training.

        Args:
            step: steps done so far.
            heartbeat: shows that this goes on.
        """
        began = time.perf_counter()
        heartbeat.beat("eval", step, regular=False)
        (model,) = self.parts.modules
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.unshard()  # after that no rank needs another
        if self._tokenizer is not None:
            model.train(False)
            try:
                add_samples(self.run, self._texts(model, self._tokenizer, step, heartbeat))
            except (TrainkitError, OSError, RuntimeError) as error:  # out of memory, say
                warn(f"no texts of step {step}: {error}")
        self.parts.release()
        return time.perf_counter() - began

    def _texts(
        self, model: Transformer, tokenizer: Tokenizer, step: int, heartbeat: Heartbeat
    ) -> Iterator[SampleText]:
        for prompt in self.prompts:
            heartbeat.refresh()
            found = continued_text(model, tokenizer, prompt, self._asked)
            yield SampleText(step, prompt, found.text, found.tokens)


def reason_against(job: Job) -> str:
    """Why a job writes no texts while it trains; "" where it can."""
    p = job.parallelism
    if job.dataset.tokenizer is None:
        return "its dataset has random tokens, which stand for no text"
    if p.tensor_model_parallel_size > 1 or p.pipeline_model_parallel_size > 1:
        return "its model is split over ranks"
    if p.context_parallel_size > 1:
        return "its attention sees the tokens of several ranks"
    if p.zero_stage == 3:
        return "with ZeRO 3 every token would gather the whole model again"
    if job.training.compile:
        return "its blocks are compiled for samples, and would be again for texts of each length"
    return ""
