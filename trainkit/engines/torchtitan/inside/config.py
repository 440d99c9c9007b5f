"""torchtitan's configuration of a job, from the document that engine.py wrote."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models import llama3, qwen3
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.trainer import Trainer

from trainkit.engines.torchtitan.inside.metrics import Metrics
from trainkit.engines.torchtitan.inside.native_rules import rate_factor
from trainkit.engines.torchtitan.inside.samples import SampleLoader

RECOMPUTE = {"full": FullAC.Config, "selective": SelectiveAC.Config}
NORMS = r"norm"  # in the names of all their weights, and of no others


class NoTokenizer(BaseTokenizer):
    """The tokens are there already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        def build(self, **_: Any) -> NoTokenizer:
            return NoTokenizer()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise NotImplementedError

    decode = get_vocab_size = encode


class Schedule(LRSchedulersContainer):
    """The learning rate of engine native at each step."""

    @dataclass(kw_only=True, slots=True)
    class Config(LRSchedulersContainer.Config):
        rates: dict[str, object] = field(default_factory=dict)
        """as `rate_factor` takes them"""

        def build(self, *, optimizers: Any, training_steps: int) -> Schedule:
            return Schedule(optimizers, partial(rate_factor, self.rates))


class NativeValidator(Validator):
    """Every `freq` steps and at the last one, as trainkit's own; its time counts for no step."""

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        last: int = 0
        """the last step"""

    def should_validate(self, step: int) -> bool:
        return bool(step % self.config.freq == 0 or step == self.config.last)

    def validate(self, *given: Any, **named: Any) -> None:
        began = time.perf_counter()
        super().validate(*given, **named)
        self.metrics_processor.since += time.perf_counter() - began


def model_spec(shape: Mapping[str, Any]) -> Any:
    """The specification of a model, with torchtitan's own initial values."""
    dim = shape["dim"]
    vocab = shape["vocab_size"]
    common = {key: shape[key] for key in ("n_layers", "dim", "n_heads", "n_kv_heads", "hidden_dim")}
    common["attn_backend"] = "flex"
    turned = {"dim": shape["head_dim"], **shape["scaling"]}
    turned |= {key: shape[key] for key in ("max_seq_len", "theta")}
    if shape["family"] == "llama":
        family: Any = llama3
        layers = llama3._build_llama3_layers(**common, rope=ComplexRoPE.Config(**turned))
        build = llama3.Llama3Model.Config
        head = llama3._output_linear_init(dim)
    else:
        family = qwen3
        layers = qwen3._build_qwen3_layers(
            **common, head_dim=shape["head_dim"], rope=CosSinRoPE.Config(**turned)
        )
        build = qwen3.Qwen3Model.Config
        head = qwen3._LINEAR_INIT
    eps = shape["eps"]
    for layer in layers:
        layer.attention_norm = replace(layer.attention_norm, eps=eps)
        layer.ffn_norm = replace(layer.ffn_norm, eps=eps)
        if shape["family"] == "qwen3":
            layer.attention.qk_norm = replace(layer.attention.qk_norm, eps=eps)
    tied = shape["tied"]
    start = family._EMBEDDING_SKIP_INIT if tied else family._EMBEDDING_INIT
    model = build(
        dim=dim,
        vocab_size=vocab,
        enable_weight_tying=tied,
        tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=dim, param_init=start),
        norm=RMSNorm.Config(normalized_shape=dim, eps=eps, param_init=family._NORM_INIT),
        lm_head=Linear.Config(in_features=dim, out_features=vocab, param_init=head),
        layers=layers,
    )
    return replace(family.model_registry("debugmodel"), flavor="job", model=model)


def _optimizer(said: Mapping[str, Any]) -> OptimizersContainer.Config:
    """AdamW, without weight decay on norms; these models have no biases."""
    adamw = said["adamw"]
    groups = [
        ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs=adamw | more)
        for pattern, more in ((NORMS, {"weight_decay": 0.0}), (r".*", {}))
    ]
    return OptimizersContainer.Config(param_groups=groups, implementation=said["implementation"])


def config_of(document: str) -> Trainer.Config:
    """The configuration that a document says."""
    said = json.loads(Path(document).read_text())
    steps = said["training"]["steps"]
    policy = RECOMPUTE.get(said["recompute"])
    end = said["end_of_document"]
    return Trainer.Config(
        model_spec=model_spec(said["model"]),
        hf_assets_path=said["dump_folder"],
        dump_folder=said["dump_folder"],
        tokenizer=NoTokenizer.Config(),
        loss=ChunkedLossWrapper.Config(
            loss_fn=CrossEntropyLoss.Config(global_vocab_size=said["model"]["vocab_size"])
        ),
        optimizer=_optimizer(said),
        lr_scheduler=Schedule.Config(rates=said["schedule"]),
        training=TrainingConfig(**said["training"]),
        parallelism=ParallelismConfig(**said["parallelism"]),
        checkpoint=CheckpointManager.Config(**said["checkpoint"]),
        activation_checkpoint=policy() if policy else None,
        compile=CompileConfig(enable=said["compile"]),
        metrics=Metrics.Config(**said["metrics"], train_iters=steps),
        debug=DebugConfig(**said["debug"]),
        dataloader=SampleLoader.Config(split=said["train"], end_of_document=end),
        validator=NativeValidator.Config(
            **said["validation"],
            last=steps,
            dataloader=SampleLoader.Config(split=said["valid"], end_of_document=end),
        ),
    )
