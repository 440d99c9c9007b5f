"""A run with a checkpoint, and prepared text: made directly, without training and without
stages."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as write_tensors

from trainkit.base.documents import document
from trainkit.base.files import write_json, write_text
from trainkit.data.indexed.dataset import IndexedWriter, best_dtype
from trainkit.data.indexed.paths import DataFolder
from trainkit.data.tokenizer import load_tokenizer, train_bpe
from trainkit.jobs.schema import Cluster, Dataset, Job, Model, Tokenizer as TokenizerTable, Training
from trainkit.runs.checkpoints import checkpoint_folder
from trainkit.runs.folder import RunFolder
from trainkit.runs.manifest import Manifest
from trainkit.train.checkpoint.dcp_storage import DcpWriter, TensorSavePlanner

TEXTS = [
    f"def f{i}(ä, b):\n    return ä ** {i} + b  # größer als 日本語 {i * 7}" for i in range(60)
]
EOD = "<|endoftext|>"
MODEL = Model(
    name="small",
    family="llama",
    num_layers=2,
    hidden_size=16,
    num_attention_heads=2,
    seq_length=16,
    vocab_size=301,
)


def text_job(root: Path, model: Model = MODEL, split: str = "80,20,0", **training: Any) -> Job:
    """A job on text below `root`."""
    values = {"micro_batch_size": 3, "train_iters": 4, "lr": 1e-3, **training}
    return Job(
        name="words",
        cluster=Cluster(name="here", root=str(root)),
        model=model,
        dataset=Dataset(
            name="code",
            source="files",
            paths=("x",),
            tokenizer=TokenizerTable(name="bpe", type="bpe", vocab_size=300),
            split=split,
        ),
        training=Training(**values),
    )


def prepare(
    root: Path, dataset: Dataset, texts: Sequence[str] = TEXTS, *, tokenizer: Path | None = None
) -> DataFolder:
    """What prep-data leaves of these documents; with a tokenizer trained on them, or a copy of
    `tokenizer`."""
    folder = DataFolder(root, dataset)
    assert dataset.tokenizer is not None
    made = (
        load_tokenizer(tokenizer)
        if tokenizer
        else train_bpe(iter(texts), dataset.tokenizer.vocab_size or 300, EOD)
    )
    write_text(folder.tokenizer, made.to_str(pretty=True))
    read = load_tokenizer(folder.tokenizer)
    with IndexedWriter(folder.prefix, best_dtype(read.get_vocab_size())) as writer:
        for text in texts:
            writer.add_document(
                np.array([*read.encode(text, add_special_tokens=False).ids, read.token_to_id(EOD)])
            )
    write_json(folder.manifest, document("dataset/1", vocab_size=read.get_vocab_size()))
    return folder


def new_run(job: Job) -> RunFolder:
    """The job's run folder with job.json in it."""
    run = RunFolder(Path(str(job.cluster.root)) / "runs" / job.name / "20261120-104500-3fa9")
    write_json(run.job, document("job/1", job=job.model_dump(mode="json"), origins={}))
    return run


def write_checkpoint(run: RunFolder, model: nn.Module, step: int) -> Path:
    """A checkpoint of these weights, whole and with hashes; only what is read after training is
    in it."""
    folder = checkpoint_folder(run.checkpoints, step)
    folder.mkdir(parents=True)
    writer = DcpWriter(folder, 0)
    tensors = {f"model.{name}": p.detach().float() for name, p in model.named_parameters()}
    with warnings.catch_warnings():
        # one process is meant
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        write_tensors(tensors, storage_writer=writer, planner=TensorSavePlanner(), no_dist=True)
    assert writer.files[0].xxh128 == xxhash.xxh3_128_hexdigest(
        (folder / writer.files[0].path).read_bytes()
    )
    manifest = Manifest(
        step=step,
        consumed_samples=step,
        files=tuple(writer.files),
        tensors=writer.tensors,
        layout={},
        job={},
        versions={},
        state={},
    )
    manifest.write(folder)
    return folder
