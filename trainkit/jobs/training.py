"""How a model is trained: batches, schedule, precision, guards. Key names are Megatron's, where
it has one."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from trainkit.jobs.devices import Precision
from trainkit.jobs.table import Table, needs, wrong


def ramp_problem(ramp: tuple[int, int, int], total: int) -> str | None:
    """Why a batch cannot grow by (start, increment, samples) to the global batch; None: it can.
    Megatron-LM asserts it (core/num_microbatches_calculator.py)."""
    start, increment, samples = ramp
    if min(start, increment) < 1 or samples < 0 or start > total or (total - start) % increment:
        return f"{start} does not grow to global_batch_size {total} in steps of {increment}"
    return None


def native_float8(engine: str) -> Exception:
    """Of fp8 for an engine that has words of its own for it."""
    return wrong(
        "training.precision",
        f"training.precision = 'fp8' is engine native's: for engine = '{engine}' set 'bf16', and"
        " what the engine itself calls it in engine_args",
    )


class Training(Table):
    """How long, how fast, how exact."""

    micro_batch_size: int = Field(
        1, ge=1, description="samples of one forward pass on one data-parallel rank"
    )
    global_batch_size: int | None = Field(
        None, ge=1, description="samples of one optimizer step over all ranks"
    )
    gradient_accumulation_steps: int | None = Field(
        None,
        ge=1,
        description="micro-batches of one step; give this or global_batch_size, not both",
    )
    rampup_batch_size: Annotated[tuple[int, int, int] | None, Field(strict=False)] = Field(
        None,
        description=(
            "[start, increment, samples]: the global batch grows from start in equal steps over so"
            " many samples, as Megatron's"
        ),
    )
    train_iters: int = Field(ge=1, le=10**12, description="optimizer steps")
    optimizer: Literal["adam", "sgd", "muon"] = Field(
        "adam",
        description=(
            "adam: AdamW; sgd: with sgd_momentum; muon: of the blocks' matrices, AdamW of all else"
        ),
    )
    lr: float = Field(ge=0, description="highest learning rate")
    min_lr: float = Field(0.0, ge=0, description="learning rate at the end of the decay")
    lr_decay_style: Literal["cosine", "linear", "constant", "inverse-square-root", "WSD"] = Field(
        "cosine", description="shape of the decay"
    )
    lr_decay_iters: int | None = Field(
        None, ge=1, description="steps until min_lr is reached; by default train_iters"
    )
    lr_warmup_iters: int = Field(0, ge=0, description="steps of linear warmup")
    lr_warmup_fraction: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="warmup as a part of lr_decay_iters, instead of lr_warmup_iters",
    )
    lr_warmup_init: float = Field(0.0, ge=0, description="learning rate at which the warmup begins")
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = Field(
        "exponential", description="WSD: shape of the last part"
    )
    lr_wsd_decay_iters: int | None = Field(
        None, ge=1, description="WSD: steps of the last part, in which the rate falls"
    )
    weight_decay: float = Field(
        0.01, ge=0, description="decoupled weight decay; not on biases and norms"
    )
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    adam_beta2: float = Field(0.95, ge=0, lt=1, description="decay of the second moment")
    adam_eps: float = Field(1e-8, gt=0, description="epsilon of Adam")
    sgd_momentum: float = Field(0.9, ge=0, lt=1, description="momentum of SGD")
    muon_momentum: float = Field(0.95, ge=0, lt=1, description="momentum of Muon")
    muon_nesterov: bool = Field(True, description="Nesterov's momentum in Muon")
    muon_scale_mode: Literal["match_rms_adamw", "spectral", "original"] = Field(
        "match_rms_adamw",
        description=(
            "what an update is multiplied with. spectral: sqrt(max(rows, columns));"
            " match_rms_adamw: 0.2 of it, so that rates are AdamW's; original: sqrt(max(1, rows /"
            " columns))"
        ),
    )
    muon_num_ns_steps: int = Field(5, ge=1, le=100, description="Newton-Schulz iterations of Muon")
    muon_coefficient_type: Literal["simple", "quintic", "polar_express"] = Field(
        "simple",
        description="their coefficients: Jordan's for all steps, or others for each step",
    )
    muon_precision: Literal["bf16", "fp32"] | None = Field(
        None,
        description="arithmetic of the iterations; by default fp32 where training is, else bf16",
    )
    muon_scalar_lr: float | None = Field(
        None,
        ge=0,
        description="with muon: AdamW's highest learning rate, on the same schedule; by default lr",
    )
    clip_grad: float = Field(1.0, ge=0, description="highest global gradient norm; 0: no clipping")
    ema_decay: float | None = Field(
        None,
        gt=0,
        lt=1,
        description=(
            "keep an exponential moving average of all weights, which an update moves by 1 -"
            " ema_decay; `--weights ema` evaluates and exports it"
        ),
    )
    z_loss: float = Field(
        0.0,
        ge=0,
        description=(
            "weight of the mean square of log(sum(exp(logits))) added to the loss (PaLM: 1e-4)"
        ),
    )
    precision: Precision = Field(
        "fp32",
        description=(
            "arithmetic; weights and optimizer state are fp32 in all of them. fp8: bf16, and the"
            " products of the blocks' linear layers in float8, on a CPU emulated and slow"
        ),
    )
    fp8_recipe: Literal["tensorwise", "rowwise"] | None = Field(
        None,
        description=(
            "fp8: what has a scale, as torchao names it. tensorwise, the default: a tensor, with"
            " gradients in E5M2; rowwise: a row, all in E4M3, closer and slower"
        ),
    )
    loss_scale: float | None = Field(
        None, gt=0, le=2.0**127, description="fp16: a fixed loss scale instead of a dynamic one"
    )
    initial_loss_scale: float = Field(
        2.0**32,
        gt=0,
        le=2.0**127,
        description="fp16: the dynamic loss scale at the start (2**initial_scale_power)",
    )
    min_loss_scale: float = Field(
        1.0, gt=0, description="fp16: the dynamic loss scale falls no lower"
    )
    loss_scale_window: int = Field(
        1000, ge=1, description="fp16: steps without overflow after which the scale doubles"
    )
    hysteresis: int = Field(2, ge=1, description="fp16: overflows before the scale halves")
    on_nan: Literal["stop", "skip", "rollback"] = Field(
        "stop",
        description=(
            "after a loss or gradient norm that is not finite; the weights are never touched by it"
        ),
    )
    on_spike: Literal["ignore", "stop", "skip", "rollback"] = Field(
        "ignore", description="after a loss above spike_factor times its running mean"
    )
    spike_factor: float = Field(2.0, gt=1, description="how many times the running mean is a spike")
    spike_window: int = Field(
        128,
        ge=2,
        description="steps the running mean looks back; none is a spike before it is full",
    )
    max_skipped_in_a_row: int = Field(
        50, ge=1, description="steps skipped one after another until training stops all the same"
    )
    max_rollbacks: int = Field(3, ge=1, description="rollbacks until training stops all the same")
    recompute_granularity: Literal["none", "full", "selective"] = Field(
        "none",
        description=(
            "activations recomputed in backward: of whole blocks, or all but matrix products and"
            " attention"
        ),
    )
    recompute_every: int = Field(1, ge=1, description="recompute every n-th block only")
    compile: bool = Field(False, description="torch.compile every block; for GPUs")
    deterministic: bool = Field(
        False,
        description=(
            "on GPUs: only kernels that give the same bits every time, slower; an operation that"
            " has none ends the run. On CPUs it always is so"
        ),
    )
    replay_interval: int | None = Field(
        None,
        ge=1,
        description=(
            "steps between those whose first micro-batch is computed by another data-parallel rank"
            " too: gradients of other bits are a silent fault of a host, which is named"
        ),
    )
    reset_attention_mask: bool = Field(
        False, description="tokens attend within their own document only"
    )
    reset_position_ids: bool = Field(False, description="positions restart in every document")
    eod_mask_loss: bool = Field(
        False, description="the end-of-document token as input gives no loss"
    )
    seed: int = Field(
        1234, ge=0, lt=2**63, description="seeds initial weights, dropout and the order of samples"
    )
    log_interval: int = Field(
        1, ge=1, description="steps between log lines and rows of metrics.jsonl"
    )
    eval_interval: int | None = Field(
        None, ge=1, description="steps between evaluations; one is always made at the end"
    )
    eval_iters: int = Field(10, ge=0, description="global batches of one evaluation; 0: none")
    save_interval: int | None = Field(
        None, ge=1, description="steps between checkpoints; one is always written at the end"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Training:
        if self.global_batch_size is not None and self.gradient_accumulation_steps is not None:
            raise wrong(
                "gradient_accumulation_steps",
                "global_batch_size and gradient_accumulation_steps are both given; one is derived"
                " from the other",
            )
        if self.min_lr > self.lr:
            raise wrong("min_lr", f"min_lr {self.min_lr} is above lr {self.lr}")
        if self.lr_warmup_init > self.lr:
            raise wrong(
                "lr_warmup_init", f"lr_warmup_init {self.lr_warmup_init} is above lr {self.lr}"
            )
        if self.lr_warmup_fraction is not None and self.lr_warmup_iters:
            raise wrong(
                "lr_warmup_fraction",
                "lr_warmup_iters and lr_warmup_fraction are both given; one is derived from the"
                " other",
            )
        if self.lr_decay_style == "WSD" and (
            self.lr_wsd_decay_iters is None
            or self.lr_wsd_decay_iters > self.decay_iters - self.warmup_iters
        ):
            raise needs(
                "lr_wsd_decay_iters",
                "lr_decay_style = 'WSD' needs lr_wsd_decay_iters, up to"
                f" {self.decay_iters - self.warmup_iters}",
            )
        if self.recompute_every > 1 and self.recompute_granularity != "full":
            raise wrong("recompute_every", "recompute_every is for recompute_granularity = 'full'")
        if self.loss_scale is not None and self.precision != "fp16":
            raise wrong(
                "loss_scale", f"loss_scale is for precision = 'fp16', not {self.precision!r}"
            )
        if self.fp8_recipe is not None and self.precision != "fp8":
            raise wrong(
                "fp8_recipe", f"fp8_recipe is for precision = 'fp8', not {self.precision!r}"
            )
        if self.min_loss_scale > self.initial_loss_scale:
            raise wrong(
                "min_loss_scale",
                f"min_loss_scale {self.min_loss_scale} is above initial_loss_scale"
                f" {self.initial_loss_scale}",
            )
        self._check_rampup()
        return self

    def _check_rampup(self) -> None:
        """Megatron-LM, core/num_microbatches_calculator.py
        RampupBatchsizeNumMicroBatchesCalculator: what it asserts."""
        if self.rampup_batch_size is None:
            return
        total = self.global_batch_size
        if total is None:
            raise needs(
                "rampup_batch_size",
                "rampup_batch_size needs global_batch_size, the batch it grows to",
            )
        if problem := ramp_problem(self.rampup_batch_size, total):
            raise wrong("rampup_batch_size", f"rampup_batch_size: {problem}")

    @property
    def decay_iters(self) -> int:
        """Steps until min_lr is reached."""
        return self.lr_decay_iters or self.train_iters

    @property
    def warmup_iters(self) -> int | float:
        """Steps of warmup; a fraction of lr_decay_iters need not be whole, as in Megatron."""
        if self.lr_warmup_fraction is None:
            return self.lr_warmup_iters
        return self.lr_warmup_fraction * self.decay_iters
