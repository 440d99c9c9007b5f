"""A Hugging Face folder held against a job before any weight is read: config.json, the
safetensors files' headers, nothing else.

Nothing in such a folder is ever executed or unpickled. Imports torch only where two tensors must
be compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from trainkit.base.errors import Problem, SourceLocation
from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.families.contract import HuggingFace
from trainkit.jobs.schema import Model
from trainkit.train.huggingface.config import contradictions
from trainkit.train.huggingface.names import (
    PublishedTensor,
    TensorMapping,
    canonical,
    published,
    table,
)
from trainkit.train.huggingface.quantized import DTYPES, StoredTensor, join_scales, quantization

CONFIG = "config.json"
WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
NAMED = 5  # tensors named in one problem
COMPARED_BYTES = 2**26  # of one tensor at a time


@dataclass(frozen=True)
class WeightFiles:
    """What was found in a folder. `tensors` are by the table's names; `problems` say what could
    not be read."""

    config: dict[str, Any] | None
    tensors: dict[str, StoredTensor]
    problems: list[Problem] = field(default_factory=list)


def read_config(path: Path) -> tuple[dict[str, Any] | None, list[Problem]]:
    """A config.json, or what is wrong with it."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        return None, [
            Problem(
                f"cannot be read: {error.strerror}",
                SourceLocation(str(path)),
                "init_from names a folder that transformers' save_pretrained wrote",
            )
        ]
    except (ValueError, RecursionError) as error:
        return None, [Problem(f"is not JSON: {error}", SourceLocation(str(path)))]
    if isinstance(value, dict):
        return (value, [])
    return (None, [Problem("is not a JSON object", SourceLocation(str(path)))])


def config_problems(path: Path, model: Model, vocab_size: int | None) -> list[Problem]:
    """Everything in which a config.json contradicts the job; an empty list if it fits."""
    config, problems = read_config(path)
    found = contradictions(config, model, vocab_size) if config is not None else []
    return problems + [Problem(p.message, SourceLocation(str(path)), p.hint) for p in found]


def safetensors_files(names: set[str], index: object) -> list[str]:
    """The files of weights among `names`, as transformers chooses them. `index` is the content
    of model.safetensors.index.json, where there is one.

    Raises ValueError where the index names no files, or files that are not plain names in this
    folder.
    """
    if WHOLE in names:
        return [WHOLE]
    if INDEX not in names:
        return []
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if isinstance(weight_map, dict) and all(isinstance(v, str) for v in weight_map.values()):
        files = set(weight_map.values())
    else:
        files = set()
    if not files or any(
        name != Path(name).name or not name.endswith(".safetensors") for name in files
    ):
        raise ValueError("its weight_map does not map tensors to .safetensors files beside it")
    return sorted(files)


def no_safetensors(names: set[str], place: SourceLocation | None) -> Problem:
    """What to say of a folder without safetensors: that pickles are not read, where it has some."""
    pickles = sorted(
        name for name in names if any(Path(name).match(pattern) for pattern in PICKLES)
    )
    if not pickles:
        return Problem(f"has no weights: neither {WHOLE} nor {INDEX}", place)
    how = (
        "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER), where its origin"
        " is trusted, writes safetensors"
    )
    return Problem(
        f"has weights as pickles only ({', '.join(pickles[:NAMED])}): loading them would execute"
        " code, so they are not read",
        place,
        how,
    )


def open_weights(folder: Path, hugging_face: HuggingFace) -> WeightFiles:
    """Read the headers of a folder's weights. What is wrong stands in `problems`."""
    place = SourceLocation(str(folder))
    if not folder.is_dir():
        return WeightFiles(
            None,
            {},
            [
                Problem(
                    "there is no such folder",
                    place,
                    "init_from names a folder, or hf:NAME for a model of the hub",
                )
            ],
        )
    config, problems = read_config(folder / CONFIG)
    names = {path.name for path in folder.iterdir()}
    try:
        if INDEX in names and WHOLE not in names:
            index = json.loads((folder / INDEX).read_bytes())
        else:
            index = None
        files = safetensors_files(names, index)
    except OSError as error:
        return WeightFiles(
            config,
            {},
            [
                *problems,
                Problem(f"cannot be read: {error.strerror}", SourceLocation(str(folder / INDEX))),
            ],
        )
    except (ValueError, RecursionError) as error:
        return WeightFiles(
            config, {}, [*problems, Problem(str(error), SourceLocation(str(folder / INDEX)))]
        )
    if not files:
        return WeightFiles(config, {}, [*problems, no_safetensors(names, place)])
    tensors: dict[str, StoredTensor] = {}
    for name in files:
        problems += _read_header(folder / name, hugging_face, tensors)
    problems += join_scales(tensors, quantization(config or {}))
    return WeightFiles(config, tensors, problems)


def _read_header(
    path: Path, hugging_face: HuggingFace, tensors: dict[str, StoredTensor]
) -> list[Problem]:
    """Add a file's tensors to `tensors`, buffers left out."""
    problems = []
    try:
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118  # it is not a dict
                known = canonical(name, hugging_face)
                part = file.get_slice(name)
                if hugging_face.buffers.fullmatch(known):
                    continue
                if known in tensors:
                    problems.append(
                        Problem(
                            f"holds {name} once more: it is in {tensors[known].file.name} too, as"
                            f" {tensors[known].name}",
                            SourceLocation(str(path)),
                        )
                    )
                tensors[known] = StoredTensor(path, name, tuple(part.get_shape()), part.get_dtype())
    except FileNotFoundError:
        problems.append(Problem("is missing", SourceLocation(str(path)), f"{INDEX} names it"))
    except (SafetensorError, OSError, ValueError) as error:
        # ValueError: a name from the index that no file can have
        problems.append(
            Problem(
                f"cannot be read as safetensors: {error}",
                SourceLocation(str(path)),
                "it may be cut off: copy or fetch it again",
            )
        )
    return problems


def check_weights(folder: Path, model: Model, vocab_size: int | None) -> list[Problem]:
    """Everything that keeps a job from beginning with the weights of `folder`, an empty list if
    nothing does. Values are not looked at for NaN.

    Args:
        folder: config.json, and model.safetensors or its shards with their index.
        model: the job's model.
        vocab_size: rows of the job's embedding; None: as many as the folder has.
    """
    return problems_of(
        folder, open_weights(folder, model.architecture.hugging_face), model, vocab_size
    )


def problems_of(
    folder: Path, weights: WeightFiles, model: Model, vocab_size: int | None
) -> list[Problem]:
    """As `check_weights`, of an opened folder.

    Args:
        folder: to name it in messages.
        weights: what was found in it.
        model, vocab_size: as of `check_weights`.
    """
    problems = list(weights.problems)
    config = weights.config
    if config is not None:
        found = contradictions(config, model, vocab_size)
        problems += [
            Problem(p.message, SourceLocation(str(folder / CONFIG)), p.hint) for p in found
        ]
        if config.get("model_type") != model.architecture.hugging_face.model_type:
            return problems  # all its tensors have other names: that says nothing more
    if not weights.tensors:
        return problems
    there = (config or {}).get("vocab_size")
    entries = table(model, vocab_size or (there if isinstance(there, int) and there > 0 else 1))
    return problems + [
        Problem(p.message, SourceLocation(str(folder)), p.hint)
        for p in _tensor_problems(weights.tensors, entries, model)
    ]


def further_layers(tensors: Mapping[str, StoredTensor], model: Model) -> dict[str, int]:
    """Tensors of layers after the model's last, where its family may have some, and the layers'
    numbers: they predict further tokens, and are not read."""
    names = model.architecture.hugging_face
    layer = re.compile(re.escape(names.block).replace(r"\{\}", r"(\d+)"))
    numbers = {name: int(found[1]) for name in tensors if (found := layer.match(name))}
    return {n: number for n, number in numbers.items() if names.further and number >= model.blocks}


def _tensor_problems(
    tensors: Mapping[str, StoredTensor], entries: Mapping[str, TensorMapping], model: Model
) -> Iterator[Problem]:
    wanted = published(entries)
    modules = model.architecture.hugging_face.outside
    head = f"{modules['head']}.weight"
    embedding = f"{modules['embed_tokens']}.weight"
    if missing := [name for name in wanted if name not in tensors]:
        yield Problem(f"lacks {_some(missing)}")
    known = {*wanted, *further_layers(tensors, model)}
    copies = [tensors[name] for name in (embedding, head) if name in tensors]
    if len(copies) == 2 and not any(copy.scales for copy in copies):  # packed ones are not compared
        known.add(head)
    if surplus := [name for name in tensors if name not in known]:
        yield Problem(f"has, and the job's model has not, {_some(surplus)}")
    fitting = yield from _fitting(tensors, wanted)
    yield from _copy_problems(fitting, entries, "" if head in wanted else head, embedding)


def _fitting(
    tensors: Mapping[str, StoredTensor], wanted: Mapping[str, PublishedTensor]
) -> Generator[Problem, None, dict[str, StoredTensor]]:
    """Other shapes and dtypes than wanted; returns the tensors that can be compared."""
    other = [
        name for name, s in tensors.items() if name in wanted and s.shape != wanted[name].shape
    ]
    for name in other:
        there = tensors[name]
        yield Problem(
            f"{there.name} is {list(there.shape)} there, {list(wanted[name].shape)} in the job's"
            " model"
        )
    plain = {name: stored for name, stored in tensors.items() if stored.scales is None}
    if odd := [f"{s.name} ({s.dtype})" for s in plain.values() if s.dtype not in DTYPES]:
        yield Problem(f"only {', '.join(DTYPES)} are taken, not {_some(odd)}")
    return {n: s for n, s in plain.items() if s.dtype in DTYPES and n not in other}


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _copy_problems(
    tensors: Mapping[str, StoredTensor],
    entries: Mapping[str, TensorMapping],
    head: str,
    embedding: str,
) -> Iterator[Problem]:
    """Tensors that are one tensor here must be equal there: the head of a tied model, where it
    is stored at all, the two norms of gpt_j_tied, and what a layer that predicts one token more has
    a copy of.

    `tensors` have the shapes of the table, but for such a head.
    """
    if head in tensors and embedding in tensors and not _equal(tensors[head], tensors[embedding]):
        hint = "set untie_embeddings_and_output_weights = true for the job's model"
        yield Problem(
            f"has a head of its own, {tensors[head].name} is not {tensors[embedding].name}; the"
            " job's model has none",
            hint=hint,
        )
    for name, entry in entries.items():
        norm = ".attention_norm." in name
        hint = "leave mtp_num_layers out of the job's model"
        if norm:
            hint = "set gpt_j_tied = false for the job's model"
        for copy in entry.again:
            first = entry.pieces[0].source
            if copy in tensors and first in tensors and not _equal(tensors[copy], tensors[first]):
                yield Problem(
                    f"{tensors[copy].name} is not {tensors[first].name}, one"
                    f" {'norm' if norm else 'tensor'} in the job's model",
                    hint=hint,
                )


def _equal(left: StoredTensor, right: StoredTensor) -> bool:
    """Whether two stored tensors have the same elements; some rows at a time."""
    if left.shape != right.shape:
        return False
    import torch

    with (
        safe_open(left.file, framework="pt") as one,
        safe_open(right.file, framework="pt") as other,
    ):
        a = one.get_slice(left.name)
        b = other.get_slice(right.name)
        rows = max(1, COMPARED_BYTES // (4 * max(1, *left.shape[1:], 1)))
        return all(
            torch.equal(a[i : i + rows].float(), b[i : i + rows].float())
            for i in range(0, left.shape[0], rows)
        )
