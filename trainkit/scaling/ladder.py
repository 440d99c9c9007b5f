"""Sizes by one dial, depth, and what each is trained on: jobs for a budget, and smaller ones that
are trained before to measure a law."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from pydantic import JsonValue

from trainkit.base.errors import ConfigError
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.base.toml_text import toml_value
from trainkit.jobs.load import Jobs
from trainkit.jobs.local_jobs import job_lines
from trainkit.jobs.schema import Job
from trainkit.jobs.sweeps import Point, overrides_of
from trainkit.launch.job_plan import plan_of, prepared
from trainkit.plan.arithmetic import model_flops_per_token_of, parameters_of
from trainkit.plan.planner import Plan
from trainkit.scaling.points import counted_parameters
from trainkit.scaling.report import Prediction, ScalingLaw


@dataclass(frozen=True)
class Rates:
    """What a rule gives.

    Args:
        batch: sequences of an optimizer step.
        lr: the highest learning rate.
        weight_decay: decoupled, as torch's AdamW has it.
    """

    batch: int
    lr: float
    weight_decay: float


@dataclass(frozen=True)
class RuledSize:
    """What rules ask of a size.

    Args:
        matrices: its parameters without the vocabulary's.
        tokens: that it is trained on.
        flops: of all of them.
        base: rates of the job that the ladder extends.
        base_tokens: tokens of that job.
        seq_length: of a sequence.
        unit: sequences of one micro-batch on every data-parallel rank.
    """

    matrices: int
    tokens: float
    flops: float
    base: Rates
    base_tokens: float
    seq_length: int
    unit: int

    def batch(self, tokens: float) -> int:
        """Sequences of a step of about so many tokens: 1, 2, 4, 8, ... micro-batches."""
        doublings = round(math.log2(tokens / self.seq_length / self.unit))
        return self.unit << max(0, doublings)


def _nanochat(size: RuledSize) -> Rates:
    """karpathy/nanochat, scripts/base_train.py: from a base that was tuned, B by D^0.383, rates by
    sqrt(B), decay by sqrt(B) / D, where B is the batch that is trained with."""
    grown = size.tokens / size.base_tokens
    base = size.base
    batch = size.batch(base.batch * size.seq_length * grown**0.383)
    wider = math.sqrt(batch / base.batch)
    return Rates(batch, base.lr * wider, base.weight_decay * wider / grown)


def _deepseek(size: RuledSize) -> Rates:
    """DeepSeek LLM, arXiv:2401.02954, section 3.1."""
    lr = 0.3118 * size.flops**-0.1250
    return Rates(size.batch(0.2920 * size.flops**0.3271), lr, size.base.weight_decay)


def _step_law(size: RuledSize) -> Rates:
    """Step Law, arXiv:2503.04715: N without the vocabulary."""
    lr = 1.79 * size.matrices**-0.713 * size.tokens**0.307
    return Rates(size.batch(0.58 * size.tokens**0.571), lr, size.base.weight_decay)


RULES: Mapping[str, Callable[[RuledSize], Rates]] = {
    "nanochat": _nanochat,
    "deepseek": _deepseek,
    "step-law": _step_law,
}


RUNGS = 5  # sizes that are measured
PARTS = (0.5, 1.0, 2.0)  # of a rung's tokens: what N does and what D does can be separated
SCALED = (  # keys of training that stay the same part of the steps
    "lr_warmup_iters",
    "lr_decay_iters",
    "lr_wsd_decay_iters",
    "eval_interval",
    "save_interval",
)


@dataclass(frozen=True)
class Budget:
    """What the big run may cost: one of the two.

    Args:
        flops: of the model's products.
        device_hours: of all devices together.
    """

    flops: float | None = None
    device_hours: float | None = None


@dataclass(frozen=True)
class LadderRung:
    """One run.

    Args:
        depth: the dial.
        job: as it would be trained.
        values: that differ from the base job's, by dotted key.
        plan: of it.
        parameters: N, as a law counts them.
        tokens: D, in whole steps.
        flops: of all of them.
    """

    depth: int
    job: Job
    values: Point
    plan: Plan
    parameters: int
    tokens: int
    flops: float

    def predicted(self, law: ScalingLaw) -> Prediction:
        """Raises ConfigError as `ScalingLaw.predict`."""
        return law.predict(self.parameters, self.tokens)


@dataclass(frozen=True)
class _Size:
    """A depth, before its tokens are known."""

    depth: int
    values: Point
    parameters: int
    matrices: int
    flops_per_token: int
    tokens_per_device_hour: float | None


class Dial:
    """Sizes of one job's shape: width by depth, heads of one size, everything else as the job says.

    Args:
        jobs: those of a jobs.toml.
        name: of the base job.
        sets: overrides of all sizes.
        rule: of batch and learning rate, a key of RULES.

    Raises:
        ConfigError: the job's vocabulary is not known, its shape or schedule has more than one
            dial, or the rule is none (exit 3).
    """

    def __init__(self, jobs: Jobs, name: str, sets: Sequence[str], rule: str) -> None:
        if rule not in RULES:
            raise ConfigError(f"--rule {rule}: expected one of {', '.join(RULES)}")
        self.rule = RULES[rule]
        self.base = jobs.resolve(name, sets).job
        self._resolve: Callable[[Point], Job] = lambda values: (
            jobs.resolve(name, [*sets, *overrides_of(values)]).job
        )
        model = self.base.model
        for what, given in (
            ("model.moe", model.moe),
            ("model.mla", model.mla),
            ("training.rampup_batch_size", self.base.training.rampup_batch_size),
            ("sweep", self.base.sweep),
            ("evaluations.every", any(each.every for each in self.base.evaluations) or None),
        ):
            if given is not None:
                raise ConfigError(f"job {name} has {what}: a ladder cannot extend it")
        tokenizer = self.base.dataset.tokenizer
        known = prepared(self.base).vocab_size
        vocab = model.vocab_size or known or (tokenizer and tokenizer.vocab_size)
        if not vocab:
            raise ConfigError(
                f"job {name}: the size of its vocabulary is not known",
                hint="give model.vocab_size, or prepare the data",
            )
        self.vocab = vocab

    def shape(self, depth: int) -> dict[str, JsonValue]:
        """The model of a depth: as wide for it as the base, in whole heads."""
        model = self.base.model
        head = model.hidden_size // model.num_attention_heads
        width = math.ceil(depth * model.hidden_size / model.num_layers / head) * head
        heads = width // head
        values: dict[str, JsonValue] = {
            "model.num_layers": depth,
            "model.hidden_size": width,
            "model.num_attention_heads": heads,
        }
        if model.num_query_groups:
            share = heads * model.num_query_groups / model.num_attention_heads
            fits = [each for each in range(1, heads + 1) if heads % each == 0 and each <= share]
            values["model.num_query_groups"] = max(fits, default=1)
        if model.ffn_hidden_size:
            part = width * model.ffn_hidden_size / model.hidden_size
            values["model.ffn_hidden_size"] = max(8, round(part / 8) * 8)
        return values

    def size(self, depth: int, *, timed: bool) -> _Size:
        """A depth. `timed`: its speed counts.

        Raises ConfigError (exit 3): no speed is known.
        """
        values = self.shape(depth)
        job = self._resolve(values)
        per_hour = None
        if timed:
            duration = plan_of(job).duration
            if duration is None:
                raise ConfigError(
                    f"no speed is known of device {job.cluster.device.name}",
                    hint="give the budget in FLOPs, or devices.X.peak_tflops",
                )
            per_hour = duration.speed.tokens_per_second * 3600 / job.world_size
        return _Size(
            depth,
            values,
            counted_parameters(job, self.vocab),
            parameters_of(job.model, 0),
            model_flops_per_token_of(job.model, self.vocab),
            per_hour,
        )

    def rung(self, size: _Size, tokens: float) -> LadderRung:
        """A size, trained on about so many tokens."""
        values = size.values | self._schedule(size, tokens)
        job = self._resolve(values)
        trained = job.training.train_iters * job.global_batch_size * job.model.seq_length
        flops = float(size.flops_per_token) * trained
        return LadderRung(size.depth, job, values, plan_of(job), size.parameters, trained, flops)

    def _schedule(self, size: _Size, tokens: float) -> dict[str, JsonValue]:
        base = self.base
        training = base.training
        unit = training.micro_batch_size * base.data_parallel_size
        seq_length = base.model.seq_length
        rates = self.rule(
            RuledSize(
                size.matrices,
                tokens,
                tokens * size.flops_per_token,
                Rates(base.global_batch_size, training.lr, training.weight_decay),
                base.global_batch_size * seq_length * training.train_iters,
                seq_length,
                unit,
            )
        )
        iters = max(1, round(tokens / seq_length / rates.batch))
        values: dict[str, JsonValue] = {
            "training.train_iters": iters,
            "training.lr": _short(rates.lr),
            "training.min_lr": _short(training.min_lr * rates.lr / (training.lr or 1.0)),
            "training.weight_decay": _short(rates.weight_decay),
        }
        if training.gradient_accumulation_steps:
            values["training.gradient_accumulation_steps"] = rates.batch // unit
        else:
            values["training.global_batch_size"] = rates.batch
        for key in SCALED:
            if given := getattr(training, key):
                part = given / training.train_iters
                values[f"training.{key}"] = max(1, min(iters, round(part * iters)))
        return values


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _affords(budget: Budget, size: _Size) -> float:
    """Tokens that a size can be trained on."""
    if budget.flops is not None:
        return budget.flops / size.flops_per_token
    assert budget.device_hours is not None and size.tokens_per_device_hour is not None
    return budget.device_hours * size.tokens_per_device_hour


def best_size(dial: Dial, budget: Budget, ratio: float, law: ScalingLaw | None) -> LadderRung:
    """The largest size with `ratio` tokens to a parameter within the budget; by a law, the one with
    the least loss for all of the budget.

    Raises ConfigError (exit 3): not even one layer is within it.
    """
    best: tuple[_Size, float] | None = None
    least = math.inf
    for depth in itertools.count(1):
        size = dial.size(depth, timed=budget.flops is None)
        tokens = _affords(budget, size)
        if law is not None:
            loss = law.law.loss(size.parameters, tokens)
            if loss >= least:
                break
            best = size, tokens
            least = loss
        elif tokens < ratio * size.parameters:
            break
        else:
            best = size, ratio * size.parameters
    if best is None:
        raise ConfigError(
            f"the budget is too small for one layer of job {dial.base.name}:"
            f" {size.parameters:,} parameters, {tokens:,.3g} tokens",
            hint="give more, or a base job that is narrower for its depth",
        )
    return dial.rung(*best)


def rungs_below(top: int) -> Sequence[int]:
    """RUNGS depths, evenly, from about a sixth to half of the big model's: they cost a few per cent
    of it. Raises ConfigError (exit 3) where there are not so many smaller ones."""
    high = max(top // 2, RUNGS)
    if high >= top:
        raise ConfigError(
            f"the budget's model has {top} layers: there are no {RUNGS} smaller ones to measure",
            hint="give --ladder with fewer, a larger budget, or a base job that is narrower",
        )
    low = min(max(1, top // 6), high - RUNGS + 1)
    return [round(low + (high - low) * step / (RUNGS - 1)) for step in range(RUNGS)]


def measured_rungs(dial: Dial, depths: Sequence[int], ratio: float) -> Iterator[LadderRung]:
    """Each depth with PARTS of `ratio` tokens to a parameter, the smallest first."""
    for depth in depths:
        size = dial.size(depth, timed=False)
        for part in PARTS:
            yield dial.rung(size, part * ratio * size.parameters)


def ladder_toml(
    name: str,
    sets: Mapping[str, JsonValue],
    dial: Dial,
    top: LadderRung,
    rungs: Sequence[LadderRung],
) -> str:
    """Tables that jobs.toml can include: [jobs.NAME], the big run, and [jobs.NAME-ladder], whose
    sweep are the runs to measure.

    Args:
        name: of the big job.
        sets: overrides of all runs, by dotted key.
        dial: whose base they extend.
        top: the big run.
        rungs: the others.
    """
    ladder = f"{name}-ladder"
    big = f"{top.parameters:,} parameters, {top.tokens:,} tokens"
    small = f"{len(rungs)} runs whose law says the loss of {name}"
    return "\n".join(
        [
            *job_lines(name, dial.base, {"description": big, **sets, **top.values}),
            *job_lines(ladder, dial.base, {"description": small, **sets}),
            f"[jobs.{ladder}.sweep]",
            "list = [",
            *(f"  {toml_value(_nested(rung.values))}," for rung in rungs),
            "]",
            "",
        ]
    )


def _nested(values: Point) -> dict[str, object]:
    """Dotted keys of two words as tables."""
    tables: dict[str, dict[str, object]] = {}
    for key, value in values.items():
        table, _, rest = key.partition(".")
        tables.setdefault(table, {})[rest] = value
    return dict(tables)
