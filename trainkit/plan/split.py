"""How the layers of a model are split into the chunks of a pipeline's stages.

Megatron-LM has three ways beside equal chunks, which jobs ask for by its own names in
`engine_args` (megatron/training/arguments.py;
core/transformer/pipeline_parallel_layer_layout.py): account-for-embedding-in-pipeline-split and
account-for-loss-in-pipeline-split count the embedding and the loss as a layer each (Llama 3
405B: 126 layers on 16 stages; BLOOM: 70 on 12); decoder-first-pipeline-num-layers and
decoder-last-pipeline-num-layers give the ends' numbers; pipeline-model-parallel-layout spells
every chunk: "Et*3|(tt|)*29L".
"""

from __future__ import annotations

import re

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.jobs.schema import Job

EMBEDDING = "account-for-embedding-in-pipeline-split"
LOSS = "account-for-loss-in-pipeline-split"
FIRST = "decoder-first-pipeline-num-layers"
LAST = "decoder-last-pipeline-num-layers"
MEGATRON_LAYOUT = "pipeline-model-parallel-layout"
MOST = 2**16  # symbols of a layout


@dataclass(frozen=True)
class Split:
    """Layers of each chunk, in the model's order.

    Args:
        chunks: as many as the stages have together; equal ones where there is a problem.
        key: the argument of the engine that asks for another split; "" for equal chunks.
        problem: why that cannot be, "" where it can.
    """

    chunks: tuple[int, ...]
    key: str = ""
    problem: str = ""


def split_layers(layers: int, parts: int) -> list[int]:
    """Layers of each part in order, as equal as can be, the larger ones first: 44 over 6 are
    8 8 7 7 7 7, as DeepSpeed's `type:transformer|mlp`."""
    each, more = divmod(layers, parts)
    return [each + (part < more) for part in range(parts)]


def split_of(job: Job, pipeline: int, virtual: int) -> Split:
    """The split that a job asks for.

    Args:
        pipeline: stages.
        virtual: chunks of each stage.
    """
    layers = job.model.num_layers
    given = job.engine_args if job.engine == "megatron-lm" else {}
    equal = tuple(split_layers(layers, pipeline * virtual))
    try:
        if text := given.get(MEGATRON_LAYOUT):
            return Split(_spelled(str(text), layers, pipeline, virtual), MEGATRON_LAYOUT)
        if FIRST in given or LAST in given:
            first = given.get(FIRST)
            last = given.get(LAST)
            return Split(
                _ends(first, last, layers, pipeline, virtual), FIRST if FIRST in given else LAST
            )
        if given.get(EMBEDDING) or given.get(LOSS):
            ends = bool(given.get(EMBEDDING)), bool(given.get(LOSS))
            return Split(
                _counted(*ends, layers, pipeline * virtual), EMBEDDING if ends[0] else LOSS
            )
    except _Impossible as error:
        return Split(equal, error.key, str(error))
    return Split(equal)


class _Impossible(Exception):
    """A split that cannot be made."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def _counted(embedding: bool, loss: bool, layers: int, parts: int) -> tuple[int, ...]:
    """Equal chunks of layers, embedding and loss."""
    each, rest = divmod(layers + embedding + loss, parts)
    if rest or each < embedding + loss * (parts == 1):
        what = " and ".join(
            word for word, there in (("embedding", embedding), ("loss", loss)) if there
        )
        key = EMBEDDING if embedding else LOSS
        raise _Impossible(key, f"{layers} layers with {what} do not divide over {parts} chunks")
    chunks = [each] * parts
    chunks[0] -= embedding
    chunks[-1] -= loss
    return tuple(chunks)


def _ends(first: object, last: object, layers: int, pipeline: int, virtual: int) -> tuple[int, ...]:
    """So many layers on the first and last stage, the others equal."""
    head = _layers_of_end(FIRST, first)
    tail = _layers_of_end(LAST, last)
    key = LAST if first is None else FIRST
    left = layers - sum(head) - sum(tail)
    inner = pipeline - len(head) - len(tail)
    if not _divides(left, inner):
        message = (
            f"{left} layers are left for {inner} of {pipeline} stages, which they do not divide"
        )
        raise _Impossible(key, message)
    stages = [*head, *([left // inner] * inner if inner else []), *tail]
    if any(stage % virtual for stage in stages):
        raise _Impossible(
            key, f"stages of {stages} layers do not divide into {virtual} chunks each"
        )
    return tuple(stage // virtual for _ in range(virtual) for stage in stages)


def _layers_of_end(key: str, value: object) -> list[int]:
    """The layers of a stage at an end, empty where the job does not give them."""
    if value is None:
        return []
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _Impossible(key, f"{key} = {value!r} is not a number of layers")
    return [value]


def _divides(layers: int, stages: int) -> bool:
    """Whether each of the stages gets as many of the layers, and none is left over."""
    if layers < 0 or stages < 0:
        return False
    if stages == 0:
        return layers == 0
    return layers % stages == 0


def _spelled(text: str, layers: int, pipeline: int, virtual: int) -> tuple[int, ...]:
    """Chunks as Megatron-LM spells them: E embedding, t layer, L loss, | the next chunk, x*n and
    (xy)*n repeat, commas mean nothing."""
    plain = re.sub(r"[,\s]", "", text)
    while found := re.search(r"\(([^()]*)\)\*(\d+)|([EtLm|])\*(\d+)", plain):
        part = found[1] or found[3] or ""
        times = int(found[2] or found[4])
        if len(plain) + len(part) * times > MOST:
            raise _Impossible(MEGATRON_LAYOUT, f"{MEGATRON_LAYOUT} has more than {MOST} parts")
        plain = plain[: found.start()] + part * times + plain[found.end() :]
    if wrong := sorted(set(plain) - set("EtL|")):
        message = (
            f"{MEGATRON_LAYOUT} has {wrong[0]!r}: E, t, L, |, ( ) and * with a number are known"
            " here"
        )
        raise _Impossible(MEGATRON_LAYOUT, message)
    chunks = plain.split("|")
    marks = plain.replace("|", "").replace("t", "")
    if marks != "EL" or not chunks[0].startswith("E") or not chunks[-1].endswith("L"):
        raise _Impossible(
            MEGATRON_LAYOUT,
            f"{MEGATRON_LAYOUT} needs one E, at its beginning, and one L, at its end",
        )
    if len(chunks) != pipeline * virtual:
        message = (
            f"{MEGATRON_LAYOUT} has {len(chunks)} chunks, {pipeline} stages of {virtual} are"
            f" {pipeline * virtual}"
        )
        raise _Impossible(MEGATRON_LAYOUT, message)
    if plain.count("t") != layers:
        raise _Impossible(
            MEGATRON_LAYOUT, f"{MEGATRON_LAYOUT} has {plain.count('t')} layers, the model {layers}"
        )
    return tuple(chunk.count("t") for chunk in chunks)
