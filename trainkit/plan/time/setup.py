"""What the time model is given: a model's shape, its split over ranks, machines, software."""

from __future__ import annotations

from trainkit.base.lazy_dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A model, as its matrix products see it.

    Args:
        layers: blocks.
        hidden: width between blocks.
        query: heads x head size; `key`: the same of key and value heads.
        heads: of queries.
        ffn: width of the MLP, or of one expert.
        projections: into the MLP: 1, or 2 where it is gated.
        seq: tokens of a sample.
        vocab: padded vocabulary.
        experts: of a layer; 0: dense.
        shared: width of an expert that all tokens take besides; 0: none.
        dense: part of the layers that have no experts, but an MLP of width `dense_ffn`.
        topk: experts that a token goes to.
        windows: part of a sample's tokens that attention of a layer is over, on average: 1 but
            where layers have a window.
    """

    layers: int
    hidden: int
    query: int
    key: int
    heads: int
    ffn: int
    projections: int
    seq: int
    vocab: int
    experts: int = 0
    topk: int = 1
    windows: float = 1.0
    shared: int = 0
    dense: float = 0.0
    dense_ffn: int = 0

    @property
    def attention_parameters(self) -> int:
        """Of one layer."""
        return self.hidden * (2 * self.query + 2 * self.key)

    @property
    def expert_parameters(self) -> int:
        """Of one layer's MLP, or of one of its experts."""
        return self.hidden * self.ffn * (self.projections + 1)

    @property
    def always_parameters(self) -> float:
        """Of a layer of a model with experts, on average: of the MLPs that all tokens take."""
        widths = (1 - self.dense) * self.shared + self.dense * self.dense_ffn
        return self.hidden * widths * (self.projections + 1)


@dataclass(frozen=True)
class RankSplit:
    """How ranks share the model and a step.

    Args:
        world: ranks.
        tensor, pipeline, virtual, data, context, expert: degrees; world = tensor x pipeline x
            context x data.
        shard: ranks that optimizer state (`zero` 1, 2) or all state (`zero` 3) is split over.
        sequence: activations between blocks are split over tensor-parallel ranks.
        recompute: none, selective or full.
        micro_batch: samples of a rank's pass.
        global_batch: samples of a step.
        zero_bubble: the schedule is ZB-V.
        recomputed: part of the layers that full recomputation is for.
        stage_layers: of the fullest stage; `last_layers`: of that with the head. 0: as equal as can
            be.
        moments: numbers that the optimizer keeps of an element of a matrix.
        update_flops: of an update's matrix products on the rank with most.
        expert_tensor: ranks that an expert is split over, which lie beside one another in a group
            of expert x expert_tensor; None: tensor of them where experts lie on data-parallel
            ranks, else one.
        expert_shard: ranks that experts' state is split over; None: `shard`.
        exchanges: context-parallel ranks exchange tokens for heads; False: keys and values go
            round.
    """

    world: int
    tensor: int
    pipeline: int
    virtual: int
    data: int
    context: int
    expert: int
    zero: int
    shard: int
    sequence: bool
    recompute: str
    micro_batch: int
    global_batch: int
    zero_bubble: bool = False
    recomputed: float = 1.0
    stage_layers: int = 0
    last_layers: int = 0
    moments: int = 2
    update_flops: float = 0.0
    expert_tensor: int | None = None
    expert_shard: int | None = None
    exchanges: bool = False

    @property
    def micro_batches(self) -> float:
        """Of one rank in a step."""
        return max(1.0, self.global_batch / (self.data * self.micro_batch))

    @property
    def expert_parts(self) -> int:
        """Ranks that an expert is split over."""
        if self.expert_tensor is not None:
            return self.expert_tensor
        return self.tensor if self.expert <= self.data * self.context else 1

    @property
    def expert_group(self) -> tuple[int, int]:
        """(ranks that tokens are sent among, stride between them)."""
        if self.expert_tensor is not None:
            return self.expert * self.expert_tensor, 1
        return self.expert, self.tensor

    @property
    def expert_copies(self) -> tuple[int, int]:
        """(ranks that hold the same experts, stride between them)."""
        if self.expert_tensor is not None:
            ranks = self.expert * self.expert_tensor
            return max(1, self.data * self.context * self.tensor // ranks), ranks
        return max(1, self.data * self.context // self.expert), self.tensor * self.expert


@dataclass(frozen=True)
class Hardware:
    """A device and the links between devices: data-sheet figures, in FLOP/s, bytes a second and
    seconds; what is reached of them is fitted.

    Args:
        generation: key of `efficiency` among the fitted constants.
        peak: dense, at the precision of the products; `peak16`: at 16 bits.
        narrow: bits of the products' operands: 32, 16, 8 or 4.
        memory: bandwidth.
        link: of a device to others in its domain, one way.
        network: of a device to the others, one way: its share of the node's.
        domain: devices that `link` joins.
        cores: streaming multiprocessors.
        per_node: devices of a node.
        remote_memory: the network writes into devices' memory (InfiniBand, RoCE); False: sockets.
        known: no figure was assumed.
        crowd: ranks that share a core, on a CPU: what one waits, another computes.
    """

    generation: str
    peak: float
    peak16: float
    narrow: int
    memory: float
    link: float
    network: float
    domain: int
    cores: int
    per_node: int
    remote_memory: bool = True
    known: bool = True
    crowd: float = 1.0


@dataclass(frozen=True)
class Setup:
    """All of it. `software` is a key of `software` among the constants; `parts`: the trainer sends
    each rank's new weights by themselves under ZeRO 1 (InternEvo)."""

    shape: Shape
    split: RankSplit
    machine: Hardware
    software: str
    parts: bool = False
