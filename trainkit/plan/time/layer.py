"""The time that one micro-batch spends in a block and in the head, on one rank: matrix products,
attention, what is bound by memory, launches."""

from __future__ import annotations

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.plan.time.setup import Hardware, Setup, Shape

HALF = 2  # bytes of an activation
CPU = "cpu"  # the generation of processors
OLD = "megatron-2021"
TILE = 128 * 128  # results that a multiprocessor computes at a time
ALIGNED = 64  # numbers: 128 bytes of 16-bit ones, a line of the cache
TENSOR_CORES = 8  # numbers: 16 bytes, which rows must be multiples of
FUSED_BATCHES = 4  # heads x samples that Megatron-LM's fused softmax takes at a time
EXPERT_ROWS = 64  # of a tile, that an expert's tokens leave empty on average


@dataclass(frozen=True)
class Work:
    """Seconds of a forward pass. `products`: matrix products; `attention`; `memory`: everything
    else; `launches`: that the host takes to start it all."""

    products: float
    attention: float
    memory: float
    launches: float

    def waits(self, passes: float, messages: float) -> float:
        """What the device waits for the host beyond its own work, of which `messages` of tensor
        parallelism are a part: they lie in the same queue."""
        busy = passes * (self.products + self.attention + self.memory) + messages
        return max(0.0, passes * self.launches - busy)


@dataclass(frozen=True)
class Pace:
    """What is reached of a machine: FLOP/s of products, of attention, bytes a second, and how
    much of a product's time its edges cost."""

    products: float
    half: float
    attention: float
    memory: float
    wave: float
    depth: float
    odd: float
    unaligned: float
    cores: int

    def product(self, rows: float, depth: float, columns: float, *, half: bool = False) -> float:
        """(rows x depth) @ (depth x columns).

        The last wave of tiles is half empty (1 + wave x cores x tile / results), and a tile's
        start and end cost as much as `depth` of its inner steps; widths that are not a multiple of
        ALIGNED leave tensor cores idle, those that are none of TENSOR_CORES most of them; never
        faster than memory.

        Args:
            rows, depth, columns: of the product.
            half: in 16 bits, whatever the precision is.
        """
        speed = self.half if half else self.products
        tiles = 1 + self.wave * self.cores * TILE / (rows * columns)
        time = 2 * rows * depth * columns / speed * tiles * (1 + self.depth / depth)
        if depth % ALIGNED or columns % ALIGNED:
            time *= 1 + self.odd
        if depth % TENSOR_CORES or columns % TENSOR_CORES:
            time *= 1 + self.unaligned
        size = HALF * (rows * depth + depth * columns + rows * columns)
        return max(time, size / self.memory)


def pace_of(machine: Hardware, software: str, fitted: dict[str, float]) -> Pace:
    """What is reached of a machine."""
    part = fitted[f"efficiency.{machine.generation}"] / fitted[f"slower.{software}"]
    narrow = fitted.get(f"narrow.{machine.narrow}", 1.0)
    return Pace(
        products=machine.peak * part * narrow,
        half=machine.peak16 * part,
        attention=machine.peak16 * part * fitted["attention"],
        memory=machine.memory * fitted["memory"],
        wave=fitted["wave"],
        depth=fitted["depth"],
        odd=fitted["odd"],
        unaligned=fitted["unaligned"],
        cores=machine.cores,
    )


def _mlp(setup: Setup, pace: Pace, fitted: dict[str, float], tokens: float) -> tuple[float, float]:
    """Seconds of the products, and results of them that are read and written again."""
    shape = setup.shape
    if not shape.experts:
        return _dense(setup, pace, tokens, shape.ffn)
    products, results = _sparse(setup, pace, fitted, tokens)
    products, results = (1 - shape.dense) * products, (1 - shape.dense) * results
    for part, width in ((1 - shape.dense, shape.shared), (shape.dense, shape.dense_ffn)):
        if part and width:
            more = _dense(setup, pace, tokens, width)
            products, results = products + part * more[0], results + part * more[1]
    return products, results


def _dense(setup: Setup, pace: Pace, tokens: float, ffn: int) -> tuple[float, float]:
    """`_mlp` of one that all tokens take."""
    hidden, projections = setup.shape.hidden, setup.shape.projections
    width = ffn / setup.split.tensor
    up = pace.product(tokens, hidden, projections * width)
    return up + pace.product(tokens, width, hidden), tokens * width * (projections + 1)


def _sparse(
    setup: Setup, pace: Pace, fitted: dict[str, float], tokens: float
) -> tuple[float, float]:
    """`_mlp` of a rank's experts, whose loads are even."""
    shape, split = setup.shape, setup.split
    here = shape.experts / split.expert
    width = shape.ffn / split.expert_parts
    rows = tokens * shape.topk * split.expert_parts / split.tensor
    padded = rows + EXPERT_ROWS * here
    products = pace.product(padded, shape.hidden, shape.projections * width)
    products += pace.product(padded, width, shape.hidden)
    products *= 1 + fitted["grouped"] / width  # many small products, of unequal sizes
    weights = HALF * here * shape.hidden * width * (shape.projections + 1) / pace.memory
    return max(products, weights), rows * (width * (shape.projections + 1) + 2 * shape.hidden)


def block(setup: Setup, pace: Pace, fitted: dict[str, float]) -> Work:
    """The forward of one block.

    Args:
        setup: what is computed where.
        pace: what is reached of the machine.
        fitted: constants.
    """
    shape, split = setup.shape, setup.split
    tokens = split.micro_batch * shape.seq / split.context
    share = split.tensor
    products = pace.product(tokens, shape.hidden, (shape.query + 2 * shape.key) / share)
    products += pace.product(tokens, shape.query / share, shape.hidden)
    mlp, results = _mlp(setup, pace, fitted, tokens)
    attention = _attention(setup, pace, fitted, tokens)
    between = tokens * shape.hidden / (split.tensor if split.sequence else 1)
    results += tokens * (shape.query + 2 * shape.key) / share
    passes = fitted[f"passes.{setup.software}"]
    if setup.machine.narrow < 16:
        passes *= fitted["casts"]
    memory = passes * HALF * (4 * between + results) / pace.memory
    launches = fitted[f"launches.{setup.software}"]
    if _unfused(setup):
        launches *= 1 + fitted["unfused"]
    if setup.machine.generation == CPU:  # nothing is queued: what starts work does it
        return Work(products + mlp, attention, memory + launches, 0.0)
    return Work(products + mlp, attention, memory, launches)


def _attention(setup: Setup, pace: Pace, fitted: dict[str, float], tokens: float) -> float:
    """Fused: half of the products, since it is causal, and the exponential of each score, which
    a multiprocessor computes few of at a time; no scores in memory. Else: two whole products, and
    the scores read and written by mask, softmax and dropout."""
    shape, split = setup.shape, setup.split
    size = shape.query / split.tensor
    seen = shape.seq * shape.windows
    flops = 4 * tokens * seen * size
    scores = tokens * seen * shape.heads / split.tensor
    if setup.software != OLD:
        exponentials = scores / 2 / (setup.machine.cores * fitted["exponentials"])
        return flops / 2 / pace.attention + exponentials
    head = shape.query / shape.heads
    edges = 1 + pace.depth / head
    passes = fitted["scores"]
    if _unfused(setup):
        passes *= 1 + fitted["unfused"]
    return flops / pace.half * edges + passes * HALF * scores / pace.memory


def _unfused(setup: Setup) -> bool:
    """Whether scores pass one operation after the other: the fused softmax takes so many heads
    x samples at a time (Megatron-LM, megatron/model/fused_softmax.py)."""
    batches = setup.split.micro_batch * setup.shape.heads // setup.split.tensor
    return setup.software == OLD and batches % FUSED_BATCHES != 0


def head(setup: Setup, pace: Pace, fitted: dict[str, float]) -> float:
    """Forward and backward of the last product and its loss."""
    shape, split = setup.shape, setup.split
    tokens = split.micro_batch * shape.seq / split.context
    vocab = shape.vocab / split.tensor
    logits = fitted["logits"] * 4 * tokens * vocab / pace.memory
    return 3 * pace.product(tokens, shape.hidden, vocab, half=True) + logits


def parameters_of_rank(shape: Shape, setup: Setup, layers: float) -> tuple[float, float]:
    """Of a rank with `layers` and an embedding: those that all data-parallel ranks hold, and
    those of its experts."""
    split = setup.split
    dense = layers * shape.attention_parameters + shape.vocab * shape.hidden
    if shape.experts:
        each = (1 - shape.dense) * shape.experts / split.expert * shape.expert_parameters
        dense += layers * shape.always_parameters
        return dense / split.tensor, layers * each / split.expert_parts
    return (dense + layers * shape.expert_parameters) / split.tensor, 0.0
