"""What the launchers of 22.09 and 24.12 write for GPT-3: values of <results>/gpt3_SIZE_hydra.yaml
by dotted keys, and the words of the batch script.

Sources: NeMo-Framework-Launcher at 0d03943e, conf/training/gpt3/SIZE.yaml, and at tag 24.12,
launcher_scripts/conf/training/gpt3/SIZE.yaml; both were run with `stages=[training]
training=gpt3/SIZE data_dir=/fsx/data/the_pile_gpt3 base_results_dir=/fsx/results` and a stand-in
of sbatch. AWS: awsome-distributed-training's former nemo-megatron run.sh.
"""

from __future__ import annotations

Values = dict[str, object]

DATA = "/fsx/data/the_pile_gpt3"
RESULTS = "/fsx/results"
PREFIXES = [f"{DATA}/my-gpt3_{number:02d}_text_document" for number in range(30)]
BLEND: list[object] = []
for _number, _prefix in enumerate(PREFIXES):
    BLEND += [0.0334 if _number == 29 else 0.0333, _prefix]

COMMON: Values = {
    "run.dependency": "singleton",
    "trainer.devices": 8,
    "trainer.accelerator": "gpu",
    "trainer.precision": "bf16",
    "trainer.logger": False,
    "trainer.enable_checkpointing": False,
    "trainer.max_epochs": None,
    "trainer.log_every_n_steps": 10,
    "trainer.val_check_interval": 2000,
    "trainer.accumulate_grad_batches": 1,
    "trainer.gradient_clip_val": 1.0,
    "exp_manager.exp_dir": None,
    "exp_manager.name": "megatron_gpt",
    "exp_manager.create_wandb_logger": False,
    "exp_manager.wandb_logger_kwargs.project": "nemo_gpt3",
    "exp_manager.resume_if_exists": True,
    "exp_manager.resume_ignore_no_checkpoint": True,
    "exp_manager.create_checkpoint_callback": True,
    "exp_manager.checkpoint_callback_params.monitor": "val_loss",
    "exp_manager.checkpoint_callback_params.mode": "min",
    "exp_manager.checkpoint_callback_params.always_save_nemo": False,
    "exp_manager.checkpoint_callback_params.save_nemo_on_train_end": False,
    "exp_manager.checkpoint_callback_params.filename": (
        "megatron_gpt--{val_loss:.2f}-{step}-{consumed_samples}"
    ),
    "exp_manager.log_step_timing": True,
    "exp_manager.step_timing_kwargs.sync_cuda": True,
    "exp_manager.step_timing_kwargs.buffer_size": 5,
    "model.resume_from_checkpoint": None,
    "model.encoder_seq_length": 2048,
    "model.max_position_embeddings": 2048,
    "model.hidden_dropout": 0.1,
    "model.kv_channels": None,
    "model.apply_query_key_layer_scaling": True,
    "model.layernorm_epsilon": 1e-5,
    "model.make_vocab_size_divisible_by": 128,
    "model.pre_process": True,
    "model.post_process": True,
    "model.persist_layer_norm": True,
    "model.grad_div_ar_fusion": True,
    "model.gradient_as_bucket_view": True,
    "model.gradient_accumulation_fusion": True,
    "model.tokenizer.library": "megatron",
    "model.tokenizer.type": "GPT2BPETokenizer",
    "model.tokenizer.model": None,
    "model.tokenizer.delimiter": None,
    "model.tokenizer.vocab_file": f"{DATA}/bpe/vocab.json",
    "model.tokenizer.merge_file": f"{DATA}/bpe/merges.txt",
    "model.native_amp_init_scale": 4294967296,
    "model.native_amp_growth_interval": 1000,
    "model.hysteresis": 2,
    "model.fp32_residual_connection": False,
    "model.fp16_lm_cross_entropy": False,
    "model.megatron_amp_O2": True,
    "model.grad_allreduce_chunk_size_mb": 125,
    "model.seed": 1234,
    "model.use_cpu_initialization": False,
    "model.onnx_safe": False,
    "model.apex_transformer_log_level": 30,
    "model.nsys_profile.enabled": False,
    "model.nsys_profile.trace": ["nvtx", "cuda"],
    "model.nsys_profile.start_step": 10,
    "model.nsys_profile.end_step": 10,
    "model.nsys_profile.ranks": [0],
    "model.nsys_profile.gen_shape": False,
    "model.optim.weight_decay": 0.1,
    "model.optim.betas": [0.9, 0.95],
    "model.optim.sched.name": "CosineAnnealing",
    "model.data.data_impl": "mmap",
    "model.data.splits_string": "99990,8,2",
    "model.data.seq_length": 2048,
    "model.data.skip_warmup": True,
    "model.data.num_workers": 2,
    "model.data.dataloader_type": "single",
    "model.data.reset_position_ids": False,
    "model.data.reset_attention_mask": False,
    "model.data.eod_mask_loss": False,
    "model.data.index_mapping_dir": None,
    "model.data.data_prefix": BLEND,
}
# by size: time_limit, nodes, max_steps, max_time, validation batches, save_top_k
RUNS = {
    "126m": ("1-00:00:00", 8, 600000, "00:23:30:00", 50, 10),
    "5b": ("6-00:00:00", 16, 75000, "05:23:30:00", 50, 10),
    "20b": ("7-00:00:00", 64, 75000, "06:23:30:00", 50, 10),
    "40b": ("6-12:00:00", 128, 75000, "6:11:00:00", 20, 5),
    "175b": ("26-00:00:00", 128, 75000, "25:23:00:00", 20, 5),
}
# layers, hidden, heads, init_method_std, lr, min_lr, warmup, constant steps, global batch
SHAPES = {
    "126m": (12, 768, 12, 0.023, 6e-4, 6e-5, 636, 100000, 256),
    "5b": (24, 4096, 32, 0.01, 1.6e-4, 1.6e-5, 115, 12500, 2048),
    "20b": (44, 6144, 48, 0.008165, 1.4e-4, 1.4e-5, 115, 12500, 2048),
    "40b": (48, 8192, 64, 0.007, 1.1e-4, 1.1e-5, 115, 12500, 2048),
    "175b": (96, 12288, 96, 0.006, 0.9e-4, 0.9e-5, 115, 12500, 2048),
}
# of 22.09: micro-batch, TP, PP
LAYOUTS_22 = {
    "126m": (4, 1, 1),
    "5b": (2, 1, 1),
    "20b": (4, 4, 1),
    "40b": (2, 4, 2),
    "175b": (2, 8, 8),
}
# of 24.12: micro-batch, TP, PP, chunks, sequence_parallel, bucket_cap_mb
LAYOUTS_24: dict[str, tuple[int, int, int, int | None, bool, int]] = {
    "126m": (4, 1, 1, None, False, 200),
    "5b": (4, 1, 1, None, False, 400),
    "175b": (1, 4, 8, 6, True, 220),
}
NEWER: Values = {
    "model.rampup_batch_size": None,
    "model.context_parallel_size": 1,
    "model.attention_dropout": 0.1,
    "model.bias_activation_fusion": True,
    "model.bias_dropout_add_fusion": True,
    "model.masked_softmax_fusion": True,
    "model.fsdp": False,
    "model.fsdp_sharding_strategy": "full",
    "model.fsdp_grad_reduce_dtype": 32,
    "model.fsdp_sharded_checkpoint": False,
    "model.activations_checkpoint_granularity": None,
    "model.activations_checkpoint_method": None,
    "model.activations_checkpoint_num_layers": None,
    "model.num_micro_batches_with_partial_activation_checkpoints": None,
    "model.activations_checkpoint_layers_per_pipeline": None,
    "model.num_query_groups": None,
    "model.sharp": False,
    "model.mcore_gpt": True,
    "model.transformer_engine": True,
    "model.fp8": False,
    "model.fp8_e4m3": False,
    "model.fp8_hybrid": True,
    "model.fp8_margin": 0,
    "model.fp8_interval": 1,
    "model.fp8_amax_history_len": 1024,
    "model.fp8_amax_compute_algo": "max",
    "model.fp8_wgrad": True,
    "model.ub_tp_comm_overlap": False,
    "model.sync_batch_comm": False,
    "model.optim.name": "mcore_distributed_optim",
    "model.optim.overlap_grad_sync": True,
    "model.optim.overlap_param_sync": True,
    "model.optim.contiguous_grad_buffer": True,
    "trainer.use_distributed_sampler": False,
}


def published_22(size: str) -> Values:
    """The configuration of 22.09."""
    micro, tensor, stages = LAYOUTS_22[size]
    found = _of_size(size, micro, tensor, stages)
    small = size in ("126m", "5b")
    return {
        **found,
        "trainer.replace_sampler_ddp": False,
        "model.sequence_parallel": not small,
        "model.activations_checkpoint_granularity": "full" if small else "selective",
        "model.activations_checkpoint_method": "block" if small else None,
        "model.activations_checkpoint_num_layers": 0 if small else None,
        "model.optim.name": "distributed_fused_adam",
    }


def published_24(size: str) -> Values:
    """The configuration of 24.12, without `hydra.searchpath` and, of the 175B, without
    ub_tp_comm_overlap_cfg, which both ask NeMo's folder of configurations."""
    micro, tensor, stages, chunks, sequence, bucket = LAYOUTS_24[size]
    found = {**_of_size(size, micro, tensor, stages), **NEWER}
    found |= {
        "model.virtual_pipeline_model_parallel_size": chunks,
        "model.sequence_parallel": sequence,
        "model.overlap_p2p_comm": chunks is not None,
        "model.batch_p2p_comm": chunks is None,
        "model.optim.bucket_cap_mb": bucket,
    }
    if size == "126m":
        found |= {"model.hidden_dropout": 0.2, "model.attention_dropout": 0.2}
    else:
        found["model.optim.contiguous_param_buffer"] = True
    if size == "175b":
        found["model.gc_interval"] = 100
    return found


def _of_size(size: str, micro: int, tensor: int, stages: int) -> Values:
    limit, nodes, steps, time, batches, kept = RUNS[size]
    layers, hidden, heads, std, lr, min_lr, warmup, constant, batch = SHAPES[size]
    name = f"gpt3_{size}"
    return {
        **COMMON,
        "run.name": name,
        "run.results_dir": f"{RESULTS}/{name}",
        "run.time_limit": limit,
        "trainer.num_nodes": nodes,
        "trainer.max_steps": steps,
        "trainer.max_time": time,
        "trainer.limit_val_batches": batches,
        "trainer.limit_test_batches": batches,
        "exp_manager.explicit_log_dir": f"{RESULTS}/{name}/results",
        "exp_manager.wandb_logger_kwargs.name": name,
        "exp_manager.checkpoint_callback_params.save_top_k": kept,
        "exp_manager.checkpoint_callback_params.model_parallel_size": tensor * stages,
        "model.micro_batch_size": micro,
        "model.global_batch_size": batch,
        "model.tensor_model_parallel_size": tensor,
        "model.pipeline_model_parallel_size": stages,
        "model.num_layers": layers,
        "model.hidden_size": hidden,
        "model.ffn_hidden_size": 4 * hidden,
        "model.num_attention_heads": heads,
        "model.init_method_std": std,
        "model.optim.lr": lr,
        "model.optim.sched.warmup_steps": warmup,
        "model.optim.sched.constant_steps": constant,
        "model.optim.sched.min_lr": min_lr,
    }


# run.sh of AWS: what it puts over conf/training/gpt3/175b.yaml, for job 7 on 16 nodes
AWS_175B16: Values = {
    "run.results_dir": "/fsx/results/results-7/gpt3_175b",
    "exp_manager.explicit_log_dir": "/fsx/results/results-7/gpt3_175b/results",
    "trainer.num_nodes": 16,
    "trainer.enable_checkpointing": False,
    "exp_manager.resume_if_exists": False,
    "trainer.max_steps": 40,
    "trainer.val_check_interval": 40,
    "exp_manager.create_checkpoint_callback": False,
    "model.tokenizer.vocab_file": "/fsx/data/bpe/vocab.json",
    "model.tokenizer.merge_file": "/fsx/data/bpe/merges.txt",
    "model.data.index_mapping_dir": "/fsx/index_mapping_dir/job-7",
}
NUMA_22 = (
    "python3 -u /opt/bignlp/bignlp-scripts/bignlp/collections/numa_mapping.py enable=True"
    " mode=unique_contiguous scope=node cores=all_logical balanced=True min_cores=1 max_cores=8"
)
COMMAND_22 = (
    "CUDA_DEVICE_MAX_CONNECTIONS=1 CUDA_VISIBLE_DEVICES=0,4,2,6,1,5,3,7 python3 -u"
    " /opt/bignlp/NeMo/examples/nlp/language_modeling/megatron_gpt_pretraining.py"
    " --config-path=/fsx/results/gpt3_175b --config-name=gpt3_175b_hydra.yaml"
)
COMMAND_24 = (
    "CUDA_DEVICE_MAX_CONNECTIONS=1 CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7"
    " NVTE_FWD_LAYERNORM_SM_MARGIN=8 NVTE_BWD_LAYERNORM_SM_MARGIN=8 python3 -u"
    " /opt/NeMo/examples/nlp/language_modeling/megatron_gpt_pretraining.py"
    " --config-path=/fsx/results/gpt3_175b --config-name=nemo-megatron-gpt3_175b_hydra.yaml"
    " model.gc_interval=100"
)
# the batch script: what each task's bash runs, a statement each
SCRIPT_22 = [
    "cd /opt/bignlp/NeMo",
    "git rev-parse HEAD",
    "export PYTHONPATH=/opt/bignlp/NeMo:${PYTHONPATH}",
    NUMA_22,
    COMMAND_22,
]
EXPORTS_24 = {
    "TRANSFORMERS_OFFLINE": "0",
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
    "NCCL_NVLS_ENABLE": "0",
}
