"""The contenders of benchmarks/train_step.py: each runs in a process of its own that this file
is the program of, and steps when asked.

    python benchmarks/peers/train_step.py NAME CASE PRECISION DEVICE THREADS      (CASE as JSON)

What each is stands in benchmarks/train_step.py. On stdout it says one JSON object when it is
warm, then one for every line "STEPS" on its stdin.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import math
import os
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Case:
    """What is trained.

    Args:
        model: keys of a [models.X] table.
        micro_batch: samples of one forward.
        accumulation: micro-batches of a step.
        recompute: training.recompute_granularity.
    """

    model: dict[str, Any]
    micro_batch: int
    accumulation: int
    recompute: str


WARMUP = 2  # steps before the first that counts
GATED = ("llama", "qwen3", "qwen3-moe")  # families of gated MLPs and RMSNorm
BETAS, EPSILON, DECAY, RATE = (0.9, 0.95), 1e-8, 0.1, 1e-4


class Contender(Protocol):
    """Something that trains. `seconds` of `steps` steps; `loss` of the last one, nats per token."""

    parameters: int
    flops_per_token: int

    def steps(self, count: int) -> float: ...

    def loss(self) -> float: ...


def _model(case: Case) -> Any:
    from trainkit.jobs.schema import Model

    return Model(name="bench", **case.model)


def _job(case: Case, precision: str, device: str, folder: str | None, kernels: str) -> Any:
    from trainkit.jobs.devices import built_in_device
    from trainkit.jobs.schema import Cluster, Dataset, Job, Training

    many = 2**40  # steps: the run has no last one, whose end would write a checkpoint
    training = Training(
        micro_batch_size=case.micro_batch,
        gradient_accumulation_steps=case.accumulation,
        train_iters=2**20,
        lr=RATE,
        lr_decay_style="constant",
        weight_decay=DECAY,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_eps=EPSILON,
        precision=precision,  # type: ignore[arg-type]
        recompute_granularity=case.recompute,  # type: ignore[arg-type]
        compile=device == "cuda",
        eval_iters=0,
        log_interval=many,
    )
    cluster = Cluster(name="here", device=built_in_device(device), ranks_per_node=1, root=folder)
    return Job(
        name="bench",
        kernels=kernels,  # type: ignore[arg-type]
        cluster=cluster,
        model=_model(case),
        dataset=Dataset(name="mock", source="mock"),
        training=training,
    )


class Trainkit:
    """The Trainer of a run, as rank 0 of 1."""

    def __init__(self, case: Case, precision: str, device: str, kernels: str = "auto") -> None:
        from trainkit.plan.arithmetic import model_flops_per_token_of
        from trainkit.runs.folder import new_run_folder
        from trainkit.train.metrics.heartbeat import Heartbeat
        from trainkit.train.parallel.data_parallel import World
        from trainkit.train.trainer import Trainer

        # 0: the store of one rank takes a free port itself, and nobody else must know it
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        self.folder = tempfile.TemporaryDirectory()
        job = _job(case, precision, device, self.folder.name, kernels)
        run = new_run_folder(Path(self.folder.name), "bench")
        self.trainer = Trainer(job, run, World(0, 1), Heartbeat(None, 0), threading.Event())
        self.parameters = sum(
            math.prod(shape) for shape in self.trainer.model_parts.shapes.values()
        )
        self.flops_per_token = model_flops_per_token_of(job.model, case.model["vocab_size"])
        self.last: list[float] = []

    def steps(self, count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            self.trainer.train_step()
            self._look(all=False)
        self._look(all=True)
        return time.perf_counter() - began

    def _look(self, *, all: bool) -> None:
        """What the loop does with a step's numbers, but for the log line."""
        for _, numbers in self.trainer.readback.take(all=all):
            self.last = numbers

    def loss(self) -> float:
        return self.last[0]


class PlainLoop:
    """The loop that everyone writes around a model.

    Args:
        model: on the device, in training mode.
        vocab: columns of its logits.
        loss_of: (tokens_BS, labels_BS) -> the mean loss of a micro-batch.
        autocast: cast products to bf16 on the fly.
    """

    def __init__(
        self,
        case: Case,
        device: str,
        model: Any,
        vocab: int,
        loss_of: Callable[[Any, Any], Any],
        *,
        autocast: bool,
    ) -> None:
        import torch

        from trainkit.plan.arithmetic import model_flops_per_token_of

        self.case, self.device, self.model, self.loss_of = case, device, model, loss_of
        self.casting = torch.autocast(device, torch.bfloat16, enabled=autocast)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=RATE, betas=BETAS, eps=EPSILON, weight_decay=DECAY, fused=True
        )
        self.parameters = sum(p.numel() for p in model.parameters())
        self.flops_per_token = model_flops_per_token_of(_model(case), vocab)
        self.feed = self._tokens()
        self.last: Any = None

    def _tokens(self) -> Iterator[list[tuple[Any, Any]]]:
        """The micro-batches of every step: the tokens that trainkit reads."""
        import torch

        from trainkit.train.batches import Feed
        from trainkit.train.parallel.data_parallel import World

        job = _job(self.case, "fp32", self.device, None, "reference")
        feed = Feed(job, job.dataset, "train", World(0, 1), torch.device(self.device))
        for consumed in itertools.count(0, job.global_batch_size):
            yield [
                (batch.tokens_BS, batch.labels_BS)
                for batch in feed.read(consumed, job.global_batch_size)
            ]

    def steps(self, count: int) -> float:
        from torch.nn.utils import clip_grad_norm_

        batches = [next(self.feed) for _ in range(count)]
        self._wait()
        began = time.perf_counter()
        for step in batches:
            for tokens_BS, labels_BS in step:
                with self.casting:
                    self.last = self.loss_of(tokens_BS, labels_BS)
                (self.last / self.case.accumulation).backward()
            clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self._wait()
        return time.perf_counter() - began

    def _wait(self) -> None:
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()

    def loss(self) -> float:
        return float(self.last.detach())


def _hf_llama(hf: Any, m: dict[str, Any]) -> Any:
    """LlamaForCausalLM, or Qwen3ForCausalLM with its own theta and heads of a size apart, or with
    experts, by its own grouped products and without a loss of balance."""
    qwen3 = m["family"].startswith("qwen3")
    more = {"head_dim": m["kv_channels"], "rope_theta": 1e6} if qwen3 else {}
    kind = "Qwen3" if qwen3 else "Llama"
    if moe := m.get("moe"):
        kind = "Qwen3Moe"
        more |= {
            "num_experts": moe["num_experts"],
            "num_experts_per_tok": moe["router_topk"],
            "moe_intermediate_size": moe["ffn_hidden_size"],
            "norm_topk_prob": True,
        }
    config = getattr(hf, f"{kind}Config")(
        vocab_size=m["vocab_size"],
        hidden_size=m["hidden_size"],
        intermediate_size=m["ffn_hidden_size"],
        num_hidden_layers=m["num_layers"],
        num_attention_heads=m["num_attention_heads"],
        num_key_value_heads=m["num_query_groups"],
        max_position_embeddings=m["seq_length"],
        attn_implementation="sdpa",
        use_cache=False,
        tie_word_embeddings=qwen3,
        **more,
    )
    return getattr(hf, f"{kind}ForCausalLM")(config)


def transformers_loop(case: Case, precision: str, device: str, *, pure: bool) -> PlainLoop:
    """GPT2LMHeadModel or one of `_hf_llama` with its own loss: of the tokens it is given, each but
    the last against the next."""
    import torch

    hf = importlib.import_module("transformers")
    m = case.model
    shape = {
        "n_layer": m["num_layers"],
        "n_embd": m["hidden_size"],
        "n_head": m["num_attention_heads"],
        "n_positions": m["seq_length"],
    }
    plain = {
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "use_cache": False,
    }
    if m["family"] in GATED:
        model = _hf_llama(hf, m)
    else:
        config = hf.GPT2Config(
            vocab_size=m["vocab_size"], attn_implementation="sdpa", **shape, **plain
        )
        model = hf.GPT2LMHeadModel(config)
    model = model.to(device, torch.bfloat16 if pure else torch.float32).train()
    forward: Any = torch.compile(model) if device == "cuda" else model

    def loss_of(tokens_BS: Any, labels_BS: Any) -> Any:
        return forward(input_ids=tokens_BS, labels=tokens_BS).loss

    return PlainLoop(
        case, device, model, m["vocab_size"], loss_of, autocast=precision == "bf16" and not pure
    )


def litgpt_loop(case: Case, precision: str, device: str, *, pure: bool) -> PlainLoop:
    """litgpt's GPT with chunked_cross_entropy, as its pretrain.py; initial weights by its own
    _init_weights."""
    import torch

    config, gpt, utils = (
        importlib.import_module(f"litgpt.{name}") for name in ("config", "model", "utils")
    )
    m = case.model
    shape = {
        "n_layer": m["num_layers"],
        "n_embd": m["hidden_size"],
        "n_head": m["num_attention_heads"],
        "block_size": m["seq_length"],
    }
    if m["family"] in GATED:
        like = {
            "parallel_residual": False,
            "rotary_percentage": 1.0,
            "bias": False,
            "norm_class_name": "RMSNorm",
            "mlp_class_name": "LLaMAMLP",
            "intermediate_size": m["ffn_hidden_size"],
            "n_query_groups": m["num_query_groups"],
        }
        if m["family"] == "qwen3":
            like |= {"norm_qk": True, "head_size": m["kv_channels"], "rope_base": 1000000}
    else:
        like = {"parallel_residual": False, "rotary_percentage": 0.25, "gelu_approximate": "tanh"}
    vocab = {"vocab_size": m["vocab_size"], "padded_vocab_size": -(-m["vocab_size"] // 128) * 128}
    with torch.device(device):
        model = gpt.GPT(config.Config(name="bench", **vocab, **shape, **like)).train()
    model.apply(model._init_weights)
    if m["family"] != "llama":  # tied
        model.transformer.wte.weight = model.lm_head.weight
    model.to(torch.bfloat16 if pure else torch.float32)
    forward: Any = torch.compile(model) if device == "cuda" else model

    def loss_of(tokens_BS: Any, labels_BS: Any) -> Any:
        return utils.chunked_cross_entropy(forward(tokens_BS), labels_BS)

    return PlainLoop(
        case,
        device,
        model,
        vocab["padded_vocab_size"],
        loss_of,
        autocast=precision == "bf16" and not pure,
    )


def plain_loop(case: Case, precision: str, device: str) -> PlainLoop:
    """peers/plain_model.py: a GPT or Llama of torch alone. On CUDA a GPT is compiled whole, as
    nanoGPT does, a Llama block by block, as torchtitan does: a deep one would take minutes."""
    import torch

    # -P keeps this folder off the path
    spec = importlib.util.spec_from_file_location(
        "plain_model", Path(__file__).with_name("plain_model.py")
    )
    assert spec is not None and spec.loader is not None
    plain = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plain)
    with torch.device(device):
        model = plain.PlainModel(case.model, recompute=case.recompute == "full")
    forward: Any = model
    if device == "cuda" and case.model["family"] == "llama":
        for block in model.blocks:
            block.compile()
        model.loss = torch.compile(model.loss)
    elif device == "cuda":
        forward = torch.compile(model)
    return PlainLoop(
        case, device, model, case.model["vocab_size"], forward, autocast=precision == "bf16"
    )


class Products:
    """The matrix products of a step and nothing else: each that is there once in a micro-batch
    or layer is timed once, and counts as often as it is."""

    def __init__(self, case: Case, precision: str, device: str) -> None:
        import torch

        model, vocab = _model(case), case.model["vocab_size"]
        h, f, padded = model.hidden_size, model.ffn_width, -(-vocab // 128) * 128
        qkv, out = (
            (model.num_attention_heads + 2 * model.query_groups) * model.head_size,
            model.num_attention_heads * model.head_size,
        )
        up = model.mlp.projections * f
        layers = model.num_layers
        tokens = case.micro_batch * model.seq_length
        # (rows, in, out, how often)
        self.layers = [
            (tokens, h, qkv, layers),
            (tokens, out, h, layers),
            (tokens, h, padded, 1),
        ]
        if model.moe is None:
            self.layers += [(tokens, h, up, layers), (tokens, f, h, layers)]
        else:  # evenly loaded
            experts, width = model.moe.num_experts, model.moe.ffn_hidden_size
            rows = tokens * model.moe.router_topk // experts
            self.layers += [
                (tokens, h, experts, layers),
                (rows, h, 2 * width, layers * experts),
                (rows, width, h, layers * experts),
            ]
        self.accumulation, self.device = case.accumulation, device
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self.parameters = 0
        self.flops_per_token = 3 * sum(2 * r * i * o * n for r, i, o, n in self.layers) // tokens

    def steps(self, count: int) -> float:
        import torch

        total = 0.0
        for rows, i, o, often in self.layers:
            x, y, w = (
                torch.randn(*shape, device=self.device).to(self.dtype)
                for shape in ((rows, i), (rows, o), (o, i))
            )
            # forward, the input's gradient, the weight's
            for left, right in ((x, w.T), (y, w), (y.T, x)):
                product = torch.mm(left, right)
                began = time.perf_counter()
                torch.mm(left, right, out=product)
                total += (time.perf_counter() - began) * often
        return total * self.accumulation * count

    def loss(self) -> float:
        return float("nan")


BUILDERS: dict[str, Callable[[Case, str, str], Any]] = {
    "trainkit": Trainkit,
    "trainkit, plain torch kernels": partial(Trainkit, kernels="reference"),
    "transformers": lambda *words: transformers_loop(*words, pure=False),
    "litgpt": lambda *words: litgpt_loop(*words, pure=False),
    "transformers, bf16 weights": lambda *words: transformers_loop(*words, pure=True),
    "litgpt, bf16 weights": lambda *words: litgpt_loop(*words, pure=True),
    "plain loop": plain_loop,
    "products": Products,
}


def serve(name: str, case: Case, precision: str, device: str, threads: int) -> None:
    """Build a contender, then read "STEPS" lines and answer each with seconds; ends with its
    input."""
    words = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print does not disturb the answers
    import torch

    def say(**answer: object) -> None:
        print(json.dumps(answer), file=words, flush=True)

    if device == "cpu":
        torch.set_num_threads(threads)
    torch.manual_seed(0)
    contender: Contender = BUILDERS[name](case, precision, device)
    contender.steps(1)
    loss = contender.loss()
    contender.steps(WARMUP - 1)
    say(first_loss=loss, parameters=contender.parameters, flops_per_token=contender.flops_per_token)
    for line in sys.stdin:
        before = time.process_time()
        seconds = contender.steps(int(line))
        cpu = time.process_time() - before
        peak = (
            torch.cuda.max_memory_allocated()
            if device == "cuda"
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        )
        say(seconds=seconds, cpu_seconds=cpu, peak_bytes=peak)
    os._exit(0)  # the process group's threads may not end by themselves


if __name__ == "__main__":
    serve(sys.argv[1], Case(**json.loads(sys.argv[2])), sys.argv[3], sys.argv[4], int(sys.argv[5]))
