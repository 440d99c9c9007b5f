"""Text from a run's newest checkpoint, in one process.

Shapes: B = 1, S tokens so far, V vocabulary.
"""

from __future__ import annotations

import sys

import torch
from tokenizers import Tokenizer
from torch import Tensor

from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.data.tokenizer import end_of_document, load_tokenizer
from trainkit.jobs.resolved import read_job
from trainkit.jobs.schema import Job
from trainkit.runs.folder import RunFolder
from trainkit.train import checkpoint
from trainkit.train.feed import data_folder
from trainkit.train.model import GPT


def generate(run: RunFolder, prompt: str, *, max_new_tokens: int, temperature: float, top_k: int, seed: int) -> str:
    """What the model writes after `prompt`, without the prompt; it ends early at the end of a document.

    Args:
        run: the run, with at least one checkpoint.
        prompt: the text to go on from; empty: the beginning of a document.
        max_new_tokens: how many tokens at most.
        temperature: 0: always the likeliest token; else logits are divided by it.
        top_k: sample among the k likeliest only; 0: among all.
        seed: of the samples.

    Raises:
        ConfigError: exit 3, the run has mock data, or its tokenizer is gone.
        TrainkitError: exit 16, no valid checkpoint.
    """
    job = read_job(run.job)
    tokenizer, end = _tokenizer(job)
    newest = checkpoint.newest_valid(run.checkpoints, lambda words: print(f"WARNING: passed over: {words}", file=sys.stderr))
    if newest is None:
        raise TrainkitError(f"run {run.id} has no checkpoint yet", exit=Exit.NO_CHECKPOINT, hint="the first is written after training.save_interval steps")
    model = load_model(job, newest)
    ids = tokenizer.encode(prompt).ids or [end]
    new = sample(model, ids, job.model.seq_length, max_new_tokens, temperature, top_k, seed, end)
    return str(tokenizer.decode(new))


def load_model(job: Job, saved: checkpoint.Checkpoint) -> GPT:
    """The whole model of a checkpoint on the CPU, whatever layout wrote it."""
    rows = saved.manifest.tensors["model.embed_tokens.weight"].shape[0]
    with torch.device("meta"):
        model = GPT(job.model, rows)
    model.to_empty(device="cpu")
    checkpoint.load(saved, {f"model.{name}": p.detach() for name, p in model.named_parameters()})
    return model


@torch.inference_mode()
def sample(model: GPT, prompt: list[int], window: int, max_new_tokens: int, temperature: float, top_k: int, seed: int, end: int) -> list[int]:
    """Ids that follow `prompt`, at most `max_new_tokens`, up to `end`. The model sees the last `window` tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    for _ in range(max_new_tokens):
        logits_V = model(torch.tensor([ids[-window:]]))[0, -1]
        if (following := _choose(logits_V, temperature, top_k, generator)) == end:
            break
        ids.append(following)
    return ids[len(prompt) :]


def _choose(logits_V: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    likeliest, ids = (logits_V / temperature).topk(min(top_k or len(logits_V), len(logits_V)))
    return int(ids[torch.multinomial(likeliest.softmax(-1), 1, generator=generator)])


def _tokenizer(job: Job) -> tuple[Tokenizer, int]:
    """The tokenizer of the job's dataset, and the id that ends a document."""
    if job.dataset.tokenizer is None:
        raise ConfigError(f"dataset {job.dataset.name or 'mock'!r} is random tokens without a tokenizer: there is no text to generate")
    path = data_folder(job).tokenizer
    if not path.is_file():
        raise ConfigError(f"the tokenizer of dataset {job.dataset.name!r} is gone: {path}", hint="run prep-data again")
    tokenizer = load_tokenizer(path)
    return tokenizer, end_of_document(tokenizer, job.dataset.tokenizer.eod_token, path)
