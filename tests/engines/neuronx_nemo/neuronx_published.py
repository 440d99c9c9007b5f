"""The commands and variables of neuronx-nemo-megatron's scripts, word for word.

What torchrun is given by gpt_SIZE.sh under run.slurm and compile.slurm, at f4743ce and on the
branch 2.13.1_release, node 0, HOME=/home/ubuntu; they were run with programs in the place of
torchrun, neuron_parallel_compile, sudo, scontrol, nslookup and lctl that record their words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

HOME = "/home/ubuntu"
DATA = f"{HOME}/examples_datasets/gpt2"


@dataclass(frozen=True)
class Size:
    """gpt_SIZE.sh, and how many nodes its document runs it on."""

    nodes: int
    tensor: int
    pipeline: int
    layers: int
    hidden: int
    heads: int
    recompute: str
    batch: int  # at f4743ce; 32 a node on 2.13.1
    lr: str = "0.00015"  # at f4743ce; 0.00015 on 2.13.1


SIZES = {
    "6-7b": Size(1, 8, 1, 32, 4096, 32, "full", 32),
    "23b": Size(4, 8, 4, 28, 8192, 64, "selective", 128),
    "46b": Size(8, 8, 8, 56, 8192, 64, "full", 256),
    "175b": Size(8, 32, 8, 96, 12288, 96, "selective", 64, "5e-5"),
}


def distributed_args(size: Size) -> list[str]:
    """DISTRIBUTED_ARGS, whose node and address only a node knows."""
    return (
        f"--nproc_per_node 32 --nnodes {size.nodes} --node_rank ${{NODE_RANK}}"
        " --master_addr ${MASTER_ADDR} --master_port ${MASTER_PORT}"
    ).split()


def _model(size: Size, batch: int) -> str:
    return f"""
model.micro_batch_size=1
model.global_batch_size={batch}
model.tensor_model_parallel_size={size.tensor}
model.pipeline_model_parallel_size={size.pipeline}
model.max_position_embeddings=2048
model.encoder_seq_length=2048
model.hidden_size={size.hidden}
model.ffn_hidden_size={4 * size.hidden}
model.num_layers={size.layers}
model.num_attention_heads={size.heads}
model.init_method_std=0.021
model.hidden_dropout=0.1
model.layernorm_epsilon=1e-5
model.tokenizer.vocab_file={DATA}/gpt2-vocab.json
model.tokenizer.merge_file={DATA}/gpt2-merges.txt
model.data.data_prefix=[1.0,{DATA}/my-gpt2_text_document]
model.data.num_workers=1
model.data.seq_length=2048
model.optim.name=adamw
model.optim.capturable=True
"""


def _rest(size: Size, lr: str) -> str:
    return f"""
model.optim.lr={lr}
model.optim.betas=[0.9,0.95]
model.optim.weight_decay=0.01
model.optim.sched.name=CosineAnnealing
model.optim.sched.warmup_steps=750
model.optim.sched.constant_steps=80000
model.optim.sched.min_lr=1.0e-5
model.sequence_parallel=True
model.activations_checkpoint_granularity={size.recompute}
model.activations_checkpoint_method=uniform
model.activations_checkpoint_num_layers=1
"""


def head_words(size: Size, *, compiling: bool) -> list[str]:
    """test.sh at f4743ce."""
    steps, validation, creates = ("4", "5", "False") if compiling else ("300000", "300001", "True")
    return f"""
megatron_gpt_pretraining.py
--config-path=conf
--config-name=megatron_gpt_config
trainer.devices=32
trainer.num_nodes={size.nodes}
trainer.max_epochs=null
trainer.max_steps={steps}
trainer.val_check_interval={validation}
trainer.log_every_n_steps=1
trainer.limit_val_batches=1
trainer.limit_test_batches=1
trainer.accumulate_grad_batches=1
trainer.precision=32
model.megatron_amp_O2=false
{_model(size, size.batch)}
{_rest(size, size.lr)}
model.wrap_with_zero=false
model.zero_use_master_weight=false
+model.save_xser=True
+model.load_xser=True
exp_manager.create_tensorboard_logger={creates}
exp_manager.resume_if_exists=False
exp_manager.resume_ignore_no_checkpoint=False
exp_manager.create_checkpoint_callback={creates}
exp_manager.explicit_log_dir=null
+exp_manager.checkpoint_callback_params.train_time_interval=3600
model.use_cpu_initialization=True
""".split()


def older_words(size: Size, *, compiling: bool) -> list[str]:
    """test.sh of 2.13.1_release."""
    steps, logger = ("4", "False") if compiling else ("300000", "True")
    return f"""
megatron_gpt_pretraining.py
--config-path=conf
--config-name=megatron_gpt_config
trainer.devices=32
trainer.num_nodes={size.nodes}
trainer.max_epochs=null
trainer.max_steps={steps}
trainer.val_check_interval={steps}
trainer.log_every_n_steps=1
trainer.limit_val_batches=1
trainer.limit_test_batches=1
trainer.accumulate_grad_batches=1
trainer.precision=32
{_model(size, 32 * size.nodes)}
{_rest(size, "0.00015")}
+model.save_xser=False
exp_manager.create_tensorboard_logger={logger}
exp_manager.resume_if_exists=False
exp_manager.resume_ignore_no_checkpoint=False
exp_manager.create_checkpoint_callback=False
exp_manager.explicit_log_dir=null
+exp_manager.checkpoint_callback_params.train_time_interval=3600
model.use_cpu_initialization=True
""".split()


# exported by train_setup.sh, without what only the scripts read (TP, OPTIM_NAME, DISTRIBUTED_ARGS,
# ...) and MASTER_ADDR and MASTER_PORT, which the agents set
HEAD_ENV: Mapping[str, str] = {
    "BUCKET_CAP_MB": "1024",
    "FI_EFA_FORK_SAFE": "1",
    "FI_EFA_USE_DEVICE_RDMA": "1",
    "FI_PROVIDER": "efa",
    "HYDRA_FULL_ERROR": "1",
    "MALLOC_ARENA_MAX": "128",
    "NEURON_CC_FLAGS": (
        "--model-type transformer --distribution-strategy=llm-training"
        " --enable-mixed-precision-accumulation"
    ),
    "NEURON_COMPILE_CACHE_URL": "${node:HOME}/neuron_cache",
    "NEURON_FUSE_SOFTMAX": "1",
    "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "5",
    "NEURON_RT_EXEC_TIMEOUT": "100",
    "NEURON_RT_STOCHASTIC_ROUNDING_EN": "1",
    "NEURON_TRANSFER_WITH_STATIC_RING_OPS": "",
    "TF_NUM_INTEROP_THREADS": "1024",
    "XLA_IO_THREAD_POOL_SIZE": "4",
    "XLA_THREAD_POOL_SIZE": "4",
    "XLA_USE_BF16": "1",
}
OLDER_ENV: Mapping[str, str] = {
    "FI_EFA_FORK_SAFE": "1",
    "FI_EFA_USE_DEVICE_RDMA": "1",
    "FI_PROVIDER": "efa",
    "HYDRA_FULL_ERROR": "1",
    "MALLOC_ARENA_MAX": "128",
    "NEURON_CC_FLAGS": "--model-type transformer --distribution-strategy=nemo",
    "NEURON_COMPILE_CACHE_URL": "${node:HOME}/neuron_cache",
    "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "3",
    "NEURON_RT_EXEC_TIMEOUT": "10",
    "NEURON_RT_STOCHASTIC_ROUNDING_EN": "1",
    "NEURON_TRANSFER_WITH_STATIC_RING_OPS": "",
    "TF_NUM_INTEROP_THREADS": "8192",
    "XLA_USE_BF16": "1",
}
