"""The formats of other engines, by the engine's name, and one conversion from what a run has to
any of them; a Hugging Face folder as named weights, to compare with what was written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from trainkit.base.errors import Exit, TrainkitError, raise_problems
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.engines.convert import gpt_neox, megatron_lm, torchtitan
from trainkit.engines.convert.files import new_folder
from trainkit.engines.convert.megatron_dist import DistributedWeights
from trainkit.engines.convert.options import FileLayout
from trainkit.engines.convert.torchtitan import TorchtitanWeights
from trainkit.engines.convert.weights import EngineWeights
from trainkit.jobs.schema import Job, Model
from trainkit.runs.folder import RunFolder
from trainkit.train.batches import vocab_size
from trainkit.train.huggingface.folder import open_weights, problems_of
from trainkit.train.huggingface.names import Shape, TensorMapping, table
from trainkit.train.huggingface.quantized import StoredTensor
from trainkit.train.huggingface.reading import TensorFiles
from trainkit.train.huggingface.weights import (
    CheckpointWeights,
    NamedWeights,
    in_dtype,
    refuse_another_model,
    vocabulary,
)
from trainkit.train.huggingface.writing import TokenizerFile, export
from trainkit.train.inference.load import choose_checkpoint

ReadWeights = EngineWeights | DistributedWeights | TorchtitanWeights


@dataclass(frozen=True)
class HuggingFaceWeights:
    """Named weights that lie in safetensors files, which are open."""

    folder: Path
    entries: Mapping[str, TensorMapping]
    stored: Mapping[str, StoredTensor]
    files: TensorFiles

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return {name: entry.shape for name, entry in self.entries.items()}

    def read(self, name: str) -> Tensor:
        entry = self.entries[name]
        columns = (slice(None),) * (len(entry.shape) - 1)
        rows = []
        for piece in entry.pieces:
            stop = piece.start + piece.rows
            rows.append(
                self.files.read(self.stored[piece.source], piece, piece.start, stop, columns)
            )
        return torch.cat(rows)


@contextmanager
def open_hugging_face(folder: Path, model: Model, vocab_size: int) -> Iterator[HuggingFaceWeights]:
    """Open a folder until the block ends. Raises ConfigError where it is of another model."""
    weights = open_weights(folder, model.architecture.hugging_face)
    raise_problems(problems_of(folder, weights, model, vocab_size))
    with TensorFiles() as files:
        yield HuggingFaceWeights(folder, table(model, vocab_size), weights.tensors, files)


@dataclass(frozen=True)
class ReadFormat:
    """Checkpoints of one engine.

    Args:
        choose: the folder and the step of a run's checkpoint: of that step, or the one that the
            engine would load.
        read: the weights of such a folder, for a model and its vocabulary.
    """

    choose: Callable[[Path, int | None], tuple[Path, int]]
    read: Callable[[Path, Model, int], ReadWeights]


@dataclass(frozen=True)
class EngineFormat(ReadFormat):
    """Checkpoints of one engine, also to be written.

    Args:
        refuse_impossible: raises ConfigError where it cannot say a model, or be cut so.
        write: weights of a model into a new folder.
        written: the folder in it that `read` takes.
        use: how the engine begins with them.
        begin: the same as `engine_args` of a job, of the folder.
    """

    refuse_impossible: Callable[[Model, FileLayout], None]
    write: Callable[[NamedWeights, Model, FileLayout, Path], None]
    written: str
    use: str
    begin: Callable[[Path], dict[str, str | bool]]


ENGINE_FORMATS: Mapping[str, EngineFormat] = {
    "megatron-lm": EngineFormat(
        megatron_lm.choose,
        megatron_lm.read,
        megatron_lm.refuse_impossible,
        megatron_lm.write,
        megatron_lm.RELEASE,
        "Megatron-LM begins with it by --pretrained-checkpoint {folder}",
        lambda folder: {"pretrained-checkpoint": str(folder)},
    ),
    "gpt-neox": EngineFormat(
        gpt_neox.choose,
        gpt_neox.read,
        gpt_neox.refuse_impossible,
        gpt_neox.write,
        gpt_neox.STEP,
        'GPT-NeoX begins with it by "load": "{folder}", "finetune": true',
        lambda folder: {"load": str(folder), "finetune": True},
    ),
}
READ_FORMATS: Mapping[str, ReadFormat] = {
    **ENGINE_FORMATS,
    "megatron-bridge": ReadFormat(megatron_lm.choose, megatron_lm.read),
    "torchtitan": ReadFormat(torchtitan.choose, torchtitan.read),
}
# whose order of samples an engine can read
SAMPLE_ORDERS: Mapping[str, str] = {
    "native": "any",
    "torchtitan": "native",
    "megatron-lm": "megatron",
    "megatron-bridge": "megatron",
    "gpt-neox": "megatron",
}
# steps of a run begun with given weights whose loss an engine prints as a mean with others': from
# core 0.16 on the line of the first is printed without beginning a new sum
MEAN_LOSSES: Mapping[str, tuple[int, ...]] = {"megatron-lm": (2,)}
HUGGING_FACE = "hf"
TARGETS = (HUGGING_FACE, *ENGINE_FORMATS)


@dataclass(frozen=True)
class RunWeights:
    """Weights of a run.

    Args:
        weights: by our names.
        model: the shape that they have.
        step: after which they were saved.
        notes: what a reader should know of how they were read.
    """

    weights: NamedWeights
    model: Model
    step: int
    notes: tuple[str, ...] = ()


def open_run(run: RunFolder, job: Job, step: int | None) -> RunWeights:
    """The weights of a run's checkpoint.

    Args:
        run: its folder.
        job: its job, whose engine says what its checkpoints are.
        step: of which step; None: of the newest.

    Raises:
        TrainkitError: exit 16, there is no such checkpoint; exit 3, it is damaged, of another
        model, or would execute something.
    """
    if job.is_native:
        saved = choose_checkpoint(run, step)
        weights = CheckpointWeights(saved, job.model)
        refuse_another_model(weights, job.model, vocabulary(weights))
        return RunWeights(weights, job.model, saved.manifest.step)
    if job.engine not in READ_FORMATS:
        raise TrainkitError(
            f"checkpoints of engine {job.engine!r} are not read",
            exit=Exit.CONFIG,
            hint=f"those of native, {', '.join(READ_FORMATS)} are",
        )
    format_ = READ_FORMATS[job.engine]
    folder, found_step = format_.choose(run.checkpoints, step)
    found = format_.read(folder, job.model, vocab_size(job))
    return RunWeights(found, found.model, found_step, found.notes)


@dataclass(frozen=True)
class Converted:
    """What was written. `bytes` are those of the files."""

    folder: Path
    parameters: int
    bytes: int
    files: tuple[str, ...]


@dataclass(frozen=True)
class HuggingFaceExtras:
    """What a Hugging Face folder has besides weights: arguments of `export`."""

    shard_bytes: int
    tokenizer: TokenizerFile | None
    about: Mapping[str, str]


def convert(
    source: RunWeights,
    target: str,
    layout: FileLayout,
    folder: Path,
    extras: HuggingFaceExtras,
) -> Converted:
    """Write weights in another format: whole and read back, or not at all.

    Args:
        source: of a run.
        target: one of `TARGETS`.
        layout: how the files are cut; of "hf" only the dtype counts.
        folder: where; nothing may be there but an empty folder.
        extras: for "hf".

    Raises:
        ConfigError: exit 3, the format has no such model, or something is there.
        TrainkitError: exit 10, the disk gave back something else than was written.
    """
    model = source.model
    vocab = vocabulary(source.weights)
    format_ = None if target == HUGGING_FACE else ENGINE_FORMATS[target]
    if format_ is not None:
        format_.refuse_impossible(model, layout)
    with new_folder(folder) as temporary:
        opened: AbstractContextManager[NamedWeights]
        if format_ is None:
            _write_hugging_face(source, layout.dtype, temporary, extras)
            opened = open_hugging_face(temporary, model, vocab)
        else:
            format_.write(source.weights, model, layout, temporary)
            opened = nullcontext(format_.read(temporary / format_.written, model, vocab))
        with opened as back:
            _refuse_different(source.weights, back, layout.dtype)
        paths = sorted(path for path in temporary.rglob("*") if path.is_file())
        files = tuple(str(path.relative_to(temporary)) for path in paths)
        size = sum(path.stat().st_size for path in paths)
    parameters = sum(torch.Size(shape).numel() for shape in source.weights.shapes.values())
    return Converted(folder, parameters, size, files)


def _write_hugging_face(
    source: RunWeights, dtype: torch.dtype, folder: Path, extras: HuggingFaceExtras
) -> None:
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    export(
        source.weights,
        source.model,
        folder,
        dtype=names[dtype],
        shard_bytes=extras.shard_bytes,
        tokenizer=extras.tokenizer,
        about=extras.about,
    )


def _refuse_different(source: NamedWeights, back: NamedWeights, dtype: torch.dtype) -> None:
    """Raise TrainkitError unless what was written is what was meant, bit by bit."""
    for name in source.shapes:
        meant = in_dtype(name, source.read(name), dtype)
        if not _same_bits(back.read(name), meant):
            raise TrainkitError(
                f"{name} reads otherwise than it was written to {back.folder}; nothing is left of"
                " it",
                exit=Exit.RANK_INFRA,
                hint="try again, on another disk if it happens twice",
            )


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether shape, dtype and every bit agree: nan is equal to itself, 0.0 not to -0.0."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    of_one, of_other = (each.contiguous().flatten().view(torch.uint8) for each in (one, other))
    return torch.equal(of_one, of_other)
