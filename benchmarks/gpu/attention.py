"""Attention on the device: each path beside fp64 on the CPU, which of torch's kernels take what the
model gives them, and how often a compiled model is compiled again for documents of other lengths.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.findings import Finding, judged, not_shown
from benchmarks.gpu.packed_text import write_text_data
from benchmarks.gpu.sessions import (
    DeviceType,
    Size,
    make_job,
    small_model,
    text_dataset,
    trainer,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor

    from trainkit.train.model.attention import DocumentBounds

# distance of outputs and gradients from fp64's, |x - x64| / |x64|, by dtype
BOUNDS = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 2e-3}
REPEATS = 10
STEPS = 6  # with documents of other lengths in each
MOST_GRAPHS = 8  # a block's graphs by then: forward again for dynamic lengths, and the loss


@dataclass(frozen=True)
class Shape:
    """B samples of S tokens, A heads of which G have keys, D channels."""

    batch: int
    length: int
    heads: int
    groups: int
    size: int

    @property
    def words(self) -> str:
        return f"{self.length} x {self.heads}/{self.groups} heads of {self.size}"


SHAPES = {
    "small": [Shape(2, 48, 4, 4, 16), Shape(2, 48, 4, 2, 16)],
    "full": [Shape(2, 1024, 12, 12, 64), Shape(1, 2048, 32, 8, 128)],
}


def _documents(shape: Shape, device: DeviceType) -> DocumentBounds:
    """Documents of many lengths, one of a single token among them."""
    import torch

    from trainkit.train.model.attention import DocumentBounds

    whole = shape.length
    cuts = [0, 1, whole // 5, whole // 2, whole - 3]
    bounds = [b * whole + cut for b in range(shape.batch) for cut in cuts] + [shape.batch * whole]
    longest = max(end - start for start, end in itertools.pairwise(bounds))
    on_device = torch.tensor(bounds, dtype=torch.int32, device=device)
    return DocumentBounds(tuple(bounds), on_device, longest)


def _inputs(shape: Shape, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys and values as the model has them: views of one projection."""
    import torch

    torch.manual_seed(0)
    heads = shape.heads + 2 * shape.groups
    qkv = torch.randn(shape.batch, shape.length, heads * shape.size).to(dtype)
    widths = [n * shape.size for n in (shape.heads, shape.groups, shape.groups)]
    parts = torch.split(qkv, widths, dim=-1)
    return [t.view(*t.shape[:2], -1, shape.size).transpose(1, 2) for t in parts]


def _attended(
    inputs: list[Tensor], documents: DocumentBounds | None, device: str, dtype: torch.dtype
) -> list[Tensor]:
    """The result of `attend` and the gradients of its three inputs, on the CPU in fp64."""
    import torch

    from trainkit.train.model.attention import attend

    leaves = [t.to(device, dtype).requires_grad_() for t in inputs]
    y = attend(leaves[0], leaves[1], leaves[2], documents, 0.0)
    torch.manual_seed(1)
    y.backward(torch.randn(y.shape).to(device, dtype))  # type: ignore[no-untyped-call]
    found = [y, *(leaf.grad for leaf in leaves)]
    return [t.detach().cpu().double() for t in found if t is not None]


def _path(shape: Shape, name: str, *, split: bool, device: DeviceType) -> Finding:
    """One path in one dtype beside fp64."""
    import torch

    dtype: torch.dtype = getattr(torch, name)
    inputs = _inputs(shape, dtype)
    documents = None
    reference = None
    if split:
        documents = _documents(shape, device)
        reference = _documents(shape, "cpu")
    exact = _attended(inputs, reference, "cpu", torch.float64)
    found = _attended(inputs, documents, device, dtype)
    off = max(float((x - y).norm() / y.norm()) for x, y in zip(found, exact, strict=True))
    words = f"{shape.words} {name}" + (", documents" if split else "")
    return judged(words, off <= BOUNDS[name], off, goal=f"{BOUNDS[name]:.0e} from fp64")


def _flash(shape: Shape) -> Iterator[Finding]:
    """Whether the flash kernel alone takes the model's tensors: torch falls back without a word."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    inputs = _inputs(shape, torch.bfloat16)
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        name = f"{shape.words}: {backend.name.lower()} takes it"
        try:
            with sdpa_kernel(backend):
                _attended(inputs, None, "cuda", torch.bfloat16)
        except RuntimeError as error:
            yield judged(name, backend is not SDPBackend.FLASH_ATTENTION, "no", note=str(error))
            continue
        yield judged(name, True, "yes", goal="forward and backward")


def _document_speed(shape: Shape, device: DeviceType) -> Finding:
    """The variable-length kernel beside one call a document."""
    import torch

    from trainkit.train.model import attention

    q, k, v = (t.to(device) for t in _inputs(shape, torch.bfloat16))
    documents = _documents(shape, device)
    whole = partial(attention.attend, dropout=0.0)

    def seconds(by_document: bool) -> float:
        for repeat in range(REPEATS + 2):
            if repeat == 2:
                _wait(device)
                began = time.perf_counter()
            if by_document:
                attention._document_by_document(q, k, v, documents, whole)
            else:
                attention.attend(q, k, v, documents, 0.0)
        _wait(device)
        return (time.perf_counter() - began) / REPEATS

    ratio = seconds(True) / seconds(False)
    return Finding(f"{shape.words}: documents by one kernel", "shown", ratio, "x as fast")


def _wait(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def _compiled_again(device: DeviceType, size: Size, folder: Path) -> Iterator[Finding]:
    """Train on documents of ever other lengths, compiled, and count the graphs."""
    import torch
    from torch._dynamo.utils import counters

    dataset = text_dataset()
    model = small_model("llama", size, vocab=2048)
    job = make_job(
        "documents",
        model,
        device,
        folder,
        dataset=dataset,
        precision="bf16",
        compile=True,
        reset_attention_mask=True,
        reset_position_ids=True,
    )
    write_text_data(folder, dataset)
    counters.clear()
    with trainer(job) as made:
        for _ in range(STEPS):
            made.train_step()
            made.process_results(all=True)
        graphs = counters["stats"]["unique_graphs"]
        finite = bool(torch.isfinite(made.step_runner.optimizer.steps.float()))
    yield judged(
        f"graphs of {STEPS} compiled steps over documents",
        finite and graphs <= MOST_GRAPHS,
        float(graphs),
        goal=f"at most {MOST_GRAPHS}",
    )


def run(device: DeviceType, size: Size, folder: Path) -> Iterator[Finding]:
    """All paths, the kernels, and compiling."""
    for shape in SHAPES[size]:
        for name in BOUNDS:
            for split in (False, True):
                yield _path(shape, name, split=split, device=device)
        if device == "cuda":
            yield from _flash(shape)
            yield _document_speed(shape, device)
    if device == "cuda":
        yield from _compiled_again(device, size, folder)
    else:
        yield not_shown("flash and variable-length kernels", "they are of CUDA alone")
        yield not_shown(
            "compiled steps over documents", "on a CPU each document is a call of its own"
        )
