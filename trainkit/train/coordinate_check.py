"""Sizes of activations at several widths in the first steps of training: flat under muP, growing
with the width where rates or deviations do not suit it (Yang et al. 2022, arXiv:2203.03466,
appendix D.1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import psutil
import torch
from torch import Tensor, nn

from trainkit.base.errors import ConfigError
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.jobs.optimizers import role_of
from trainkit.jobs.schema import Job, Model
from trainkit.plan.arithmetic import parameters_of
from trainkit.train.model.head_loss import Labels, Losses
from trainkit.train.model.transformer import Block, Transformer
from trainkit.train.parallel.initialize import initialize
from trainkit.train.parallel.shards import sharded_parameters
from trainkit.train.update.muon import Matrices
from trainkit.train.update.optimizer import UPDATES, Optimizer, divisor, squared_norm

STEPS = (0, 1, 2, 4, 8)  # updates before each look
WIDTHS = (64, 1024, 5)  # the narrowest, the widest and how many, where the heads allow
SAMPLES = 4
TOKENS = 128  # of a sample, at most
VOCABULARY = 1024  # ids, at most: sizes do not depend on it
BYTES = 16  # of a parameter: fp32, its gradient and two moments
GROWS = 0.25  # slopes above it: half of what a root of the width, the least mistake, would give


@dataclass(frozen=True)
class Coordinates:
    """Means of |x| over all numbers of an activation.

    Args:
        widths: hidden sizes.
        sizes: by activation ("attention": of all layers), then by updates made before, then in
            the order of `widths`.
    """

    widths: Sequence[int]
    sizes: Mapping[str, Mapping[int, Sequence[float]]]

    def slope(self, name: str) -> float:
        """By how many powers of the width the activation grows after the last update."""
        ys = [math.log(size) for size in self.sizes[name][STEPS[-1]]]
        xs = [math.log(width) for width in self.widths]
        x_mean = sum(xs) / len(xs)
        y_mean = sum(ys) / len(ys)
        products = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
        return products / sum((x - x_mean) ** 2 for x in xs)

    def growing(self) -> list[str]:
        """The activations of which that is more than noise."""
        return [name for name in self.sizes if self.slope(name) > GROWS]

    def shrinking(self) -> list[str]:
        """Those that fall as clearly: their weights learn less, the wider they are. (Logits do,
        under muP, until they have been learned.)"""
        return [name for name in self.sizes if self.slope(name) < -GROWS and name != "logits"]


def of_width(model: Model, width: int) -> Model:
    """The model with another hidden size, with MLP and experts that go with it, and as many heads
    of the same size as suit it.

    Raises ConfigError for a width that is no whole number of heads.
    """
    heads = width * model.num_attention_heads / model.hidden_size
    if heads < 1 or heads % 1:
        unit = model.hidden_size / math.gcd(model.hidden_size, model.num_attention_heads)
        raise ConfigError(
            f"width {width} would have {heads:g} heads", hint=f"a multiple of {unit:g} has whole"
        )
    groups = max(1, int(heads) * model.query_groups // model.num_attention_heads)
    while int(heads) % groups:
        groups -= 1

    def scaled(size: int) -> int:
        return round(size * width / model.hidden_size)

    changed: dict[str, object] = {
        "hidden_size": width,
        "num_attention_heads": int(heads),
        "num_query_groups": groups,
        "kv_channels": model.head_size,
        "ffn_hidden_size": scaled(model.ffn_width),
    }
    if moe := model.moe:
        keys = ("ffn_hidden_size", "shared_expert_intermediate_size")
        sizes = {key: scaled(size) for key in keys if (size := getattr(moe, key))}
        changed["moe"] = moe.model_copy(update=sizes)
    return model.model_copy(update=changed)


def usual_widths(model: Model) -> list[int]:
    """Five up to 1,024, each twice the one before, from 64 or the base of muP: below it rates are
    higher than they were tuned; three where that is wide."""
    least, most, count = WIDTHS
    least = max(least, model.mup_base_hidden_size or 0)
    unit = model.hidden_size // math.gcd(model.hidden_size, model.num_attention_heads)
    first = unit * 2 ** max(0, math.ceil(math.log2(least / unit)))
    widths = [first * 2**number for number in range(count)]
    return [width for number, width in enumerate(widths) if width <= most or number < 3]


def check_coordinates(
    job: Job, widths: Sequence[int], progress: Callable[[int], None] = lambda width: None
) -> Coordinates:
    """Train the job's model for a few steps at each width, in fp32 on this machine's CPU: its
    optimizer at its highest rate, on one batch of random ids again and again.

    Args:
        job: the job.
        widths: hidden sizes, two or more, from narrow to wide.
        progress: called with each before it begins.

    Raises ConfigError as `of_width`, where the widest needs more memory than is free here, and
    where training diverges.
    """
    models = [of_width(job.model, width) for width in widths]
    _need_memory(models[-1], widths[-1])
    sizes: dict[str, dict[int, list[float]]] = {}
    for model in models:
        progress(model.hidden_size)
        for step, found in _train(model, job).items():
            for name, size in found.items():
                if not math.isfinite(size) or size == 0:
                    raise ConfigError(
                        f"width {model.hidden_size}: {name} is {size} after {step} steps",
                        hint="lower training.lr, for one: --set training.lr=1e-3",
                    )
                sizes.setdefault(name, {}).setdefault(step, []).append(size)
    return Coordinates(widths, sizes)


def _need_memory(model: Model, width: int) -> None:
    needed = BYTES * parameters_of(model, VOCABULARY)
    free = psutil.virtual_memory().available
    if needed > free:
        raise ConfigError(
            f"width {width} needs {needed / 2**30:,.1f} GiB of memory for weights and optimizer,"
            f" of which {free / 2**30:,.1f} are free here",
            hint="give --widths that are narrower",
        )


def _train(model: Model, job: Job) -> dict[int, dict[str, float]]:
    """Means of |x| by updates made before, and by activation."""
    training = job.training
    vocabulary = min(model.vocab_size or VOCABULARY, VOCABULARY)
    module = Transformer(model, vocabulary)
    initialize(module, model, training.seed)
    parameters = dict(module.named_parameters())
    matrices = []
    if UPDATES[training.optimizer].of_matrices:
        whole = {
            name: sharded
            for name, sharded in sharded_parameters(module, 1).items()
            if role_of(name, len(sharded.layout.shape)) == "matrix"
        }
        matrices = [Matrices(model, whole)]
    optimizer = Optimizer(parameters, training, matrices=matrices, width_factor=model.width_factor)
    generator = torch.Generator().manual_seed(training.seed)
    shape = (SAMPLES, min(model.seq_length, TOKENS) + 1)
    ids = torch.randint(vocabulary, shape, generator=generator)
    labels = Labels(ids[:, 1:], training.z_loss, 1 / ids[:, 1:].numel())
    rate = torch.tensor(training.lr)
    found = {}
    for step in range(STEPS[-1] + 1):
        if step in STEPS:
            found[step] = _sizes(module, ids[:, :-1])
        losses = module(ids[:, :-1], labels)
        assert isinstance(losses, Losses)
        losses.objective.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in parameters.values() if p.grad is not None]
        norm = squared_norm(gradients).sqrt()
        by = divisor(norm, training.clip_grad, torch.ones(()))
        optimizer.step(rate, by, torch.zeros(()))
        optimizer.zero_grad()
    return found


@torch.no_grad()
def _sizes(module: Transformer, ids_BS: Tensor) -> dict[str, float]:
    """Means of |x|: of what enters the first block, of what attention and MLP of all blocks make
    (before a norm that follows), of what leaves the last block, of the logits."""
    seen: dict[str, list[float]] = {}

    def look(name: str) -> Callable[[nn.Module, object, Tensor], None]:
        return lambda _, __, x: seen.setdefault(name, []).append(x.abs().mean().item())

    watched: list[tuple[nn.Module, str]] = []
    for block in list(module.layers.values())[: module.shape.num_layers]:
        assert isinstance(block, Block)
        watched += [(block.attention, "attention"), (block.mlp, "MLP")]
    watched.append((block, "last block"))
    module.eval()
    hooks = [each.register_forward_hook(look(name)) for each, name in watched]
    logits_BSV = module(ids_BS)
    positions_BS = torch.arange(ids_BS.shape[1]).expand(ids_BS.shape)
    seen["embedding"] = [module.embed(ids_BS, positions_BS).abs().mean().item()]
    for hook in hooks:
        hook.remove()
    module.train()
    seen["logits"] = [logits_BSV.abs().mean().item()]
    order = ("embedding", "attention", "MLP", "last block", "logits")
    return {name: sum(seen[name]) / len(seen[name]) for name in order}
