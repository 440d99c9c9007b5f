"""What torchtitan's ranks read: the splits of a job's dataset as inside/samples.py takes them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.base.documents import read_document
from trainkit.base.errors import ConfigError
from trainkit.data.indexed.paths import DataFolder
from trainkit.engines.torchtitan.values import Values
from trainkit.jobs.schema import Job

if TYPE_CHECKING:  # it imports numpy, which planning does without
    from trainkit.data.order.native import SplitName


def vocabulary(job: Job) -> int:
    """Rows of the embedding: the model's vocab_size, else as many ids as the tokens were made
    with. Raises ConfigError where neither is known, or the tokens have more ids."""
    model = job.model
    tokenizer = job.dataset.tokenizer
    known = tokenizer.vocab_size if tokenizer else None
    if (
        tokenizer
        and (manifest := DataFolder(job.cluster.root_folder, job.dataset).manifest).exists()
    ):
        known = int(read_document(manifest, "dataset/1")["vocab_size"])
    rows = model.vocab_size or known
    if rows is None or rows < (known or 0):
        raise ConfigError(
            f"model '{model.name}' has {rows or 'an unknown number of'} ids, its tokens {known}",
            hint=f"set models.{model.name}.vocab_size",
        )
    return rows


def splits_of(job: Job, vocab: int) -> Values:
    """`train`, `valid` ({} where nothing is evaluated) and `end_of_document` (None where
    positions go through the whole sample). Raises as `open_mixture`."""
    end = None
    if job.training.reset_attention_mask:
        end = _end_of_document(job)
    return {
        "train": _split(job, "train", vocab),
        "valid": _split(job, "valid", vocab) if job.training.eval_iters else {},
        "end_of_document": end,
    }


def _split(job: Job, name: SplitName, vocab: int) -> Values:
    from trainkit.data.order.native import NativeOrder
    from trainkit.data.order.open import open_mixture
    from trainkit.data.order.samples import MockSamples, NativeSamples

    mixture = open_mixture(job, job.dataset, name, vocab)
    order = mixture.order
    assert isinstance(order, NativeOrder)
    found: Values = {
        "names": list(order.names),
        "sizes": list(order.sizes),
        "weights": order.shares.tolist(),
        "split": order.split,
        "seed": order.seed,
    }
    pairs = []
    for part in mixture.samples:
        if isinstance(part, MockSamples):
            return {**found, "mock": {"seed": part.seed, "vocab_size": part.vocab_size}}
        assert isinstance(part, NativeSamples)
        pairs.append(
            {
                "prefix": str(part.dataset.prefix),
                "dtype": part.dataset.dtype.name,
                "first_window": part.first_window,
            }
        )
    return {**found, "pairs": pairs}


def _end_of_document(job: Job) -> int:
    """Raises ConfigError where the dataset has no tokenizer that says it."""
    from trainkit.data.tokenizer import end_of_document, load_tokenizer

    if job.dataset.tokenizer is None:
        raise ConfigError(
            f"training.reset_attention_mask: dataset '{job.dataset.name}' has no tokenizer that"
            " says where documents end",
            hint="leave it out, or use a dataset with a tokenizer",
        )
    path = DataFolder(job.cluster.root_folder, job.dataset).tokenizer
    return end_of_document(load_tokenizer(path), job.dataset.tokenizer.eod_token, path)


def read_by(splits: Values) -> tuple[Path, ...]:
    """The files that every node must see."""
    both = (splits["train"], splits["valid"])
    pairs = [pair for split in both if isinstance(split, dict) for pair in split.get("pairs", ())]
    return tuple(dict.fromkeys(Path(f"{pair['prefix']}.bin") for pair in pairs))
