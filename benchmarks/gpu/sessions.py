"""Jobs of the proof, and a Trainer of one rank in this process."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from trainkit.jobs.devices import built_in_device
from trainkit.jobs.job_tables import CheckpointSettings
from trainkit.jobs.schema import Cluster, Dataset, Job, Model, Tokenizer, Training

if TYPE_CHECKING:
    from trainkit.train.trainer import Trainer

DeviceType = Literal["cpu", "cuda"]
Size = Literal["small", "full"]
Family = Literal[
    "gpt",
    "gpt-neox",
    "llama",
    "qwen3",
    "olmo2",
    "gemma3",
    "mixtral",
    "olmoe",
    "qwen3-moe",
    "deepseek-v3",
    "gpt-oss",
]
FAMILIES: tuple[Family, ...] = get_args(Family)
SPARSE = ("mixtral", "olmoe", "qwen3-moe", "deepseek-v3", "gpt-oss")
MANY = 10**6  # steps: a run that the part ends itself


def small_model(family: Family, size: Size = "small", *, vocab: int = 512) -> Model:
    """A model of a family whose fp64 reference a CPU computes in seconds.

    Args:
        family: of FAMILIES.
        size: "full" has the head size and the depth that GPU kernels are made for.
        vocab: rows of the embedding.
    """
    wide: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    length = 64
    if size == "full":
        wide = {"num_layers": 4, "hidden_size": 512, "num_attention_heads": 8}
        length = 256
    if family in ("llama", "qwen3", "gemma3", "mixtral", "gpt-oss"):
        wide["num_query_groups"] = 2
    if family in ("gemma3", "gpt-oss"):
        wide.update(sliding_window=length // 4, sliding_window_pattern=2)
    if family in SPARSE:
        # all of them, for of two that are nearly equal another dtype may choose the other
        width = int(wide["hidden_size"]) // 2
        wide["moe"] = {"num_experts": 4, "router_topk": 4, "ffn_hidden_size": width}
        wide["moe"] |= {"aux_loss_coeff": 0.01, "z_loss_coeff": 0.01}
    if family == "deepseek-v3":
        head = int(wide["hidden_size"]) // int(wide["num_attention_heads"])
        wide["mla"] = {
            "q_lora_rank": 2 * head,
            "kv_lora_rank": head,
            "qk_head_dim": head,
            "qk_pos_emb_head_dim": head // 2,
            "v_head_dim": head,
        }
        wide["moe"] |= {"z_loss_coeff": 0.0, "shared_expert_intermediate_size": width}
    return Model(name=f"small-{family}", family=family, seq_length=length, vocab_size=vocab, **wide)


def make_job(
    name: str,
    model: Model,
    device: DeviceType,
    root: Path,
    *,
    dataset: Dataset | None = None,
    save_async: bool = True,
    **training: Any,
) -> Job:
    """A job of one rank.

    Args:
        name: its name.
        model: what is trained.
        device: where.
        root: the folder of its cluster.
        dataset: by default random tokens.
        save_async: write checkpoints behind training.
        training: keys of [jobs.X.training] that are not these defaults.
    """
    values: dict[str, Any] = {
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "train_iters": MANY,
        "lr": 1e-3,
        "lr_decay_style": "constant",
        "eval_iters": 0,
        "log_interval": MANY,
        **training,
    }
    return Job(
        name=name,
        cluster=Cluster(
            name="here", device=built_in_device(device), ranks_per_node=1, root=str(root)
        ),
        model=model,
        dataset=dataset or Dataset(name="mock", source="mock"),
        training=Training(**values),
        checkpoint=CheckpointSettings(save_async=save_async),
    )


def text_dataset() -> Dataset:
    """The text of the packed folder."""
    return Dataset(
        name="guides",
        source="files",
        paths=("guides.jsonl",),
        tokenizer=Tokenizer(name="guides-bpe", type="bpe", vocab_size=2048),
        split="90,10,0",
    )


@contextlib.contextmanager
def trainer(job: Job) -> Iterator[Trainer]:
    """A Trainer as rank 0 of 1 in a new run folder. Its process group is gone afterwards, so that
    another may follow in this process."""
    import torch
    import torch.distributed as dist

    from trainkit.runs.folder import new_run_folder
    from trainkit.train.metrics.heartbeat import Heartbeat
    from trainkit.train.parallel.data_parallel import World
    from trainkit.train.trainer import Trainer

    # a trainer is in circles, and the caller that had the last one held it to the end: its tensors
    # would count in the peak of this one
    gc.collect()
    if job.cluster.device_type == "cuda":
        torch.cuda.empty_cache()
    # 0: the store of one rank takes a free port itself, and nobody else must know it
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    run = new_run_folder(Path(str(job.cluster.root)), job.name)
    try:
        made = Trainer(job, run, World(0, 1), Heartbeat(None, 0), threading.Event())
        try:
            yield made
        finally:
            made.checkpoints.close()
            made.train_feed.close()
            made.validator.close()
            if made.reporter:
                made.reporter.close(failed=False)
            del made
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        torch._dynamo.reset()
