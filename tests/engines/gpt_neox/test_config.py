"""The reference jobs of Lambda's GPT-NeoX guide in GPT-NeoX's own words.

The literals are those of the published files: EleutherAI/gpt-neox at ea7aefd, configs/20B.yml,
2-7B.yml and local_setup.yml; LambdaLabsML/gpt-neox, branch lambda at 66fe501, 20B_lambda.yml.
Traps 3, 4, 5, 7, 8 and 9 of docs/references.md are here; 6 (a dataset that does not exist is
refused by name) is tests/jobs/test_references.py's, 10 (hostfiles) tests/launch/hosts's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.engines.gpt_neox.neox_words import rank_words
from trainkit.engines.gpt_neox.arguments import Values, decode
from trainkit.engines.gpt_neox.engine import GptNeox
from trainkit.engines.registry import ENGINES, refuse_unlaunchable
from trainkit.jobs.load import Jobs, load
from trainkit.jobs.schema import Job
from trainkit.runs.folder import RunFolder

ROOT = Path(__file__).resolve().parents[3]
RUN = RunFolder(Path("/fs/runs/job/run-1"))


@pytest.fixture(scope="module")
def jobs() -> Jobs:
    return load(ROOT, environ={})


def as_neox(jobs: Jobs, name: str, *sets: str) -> Job:
    return jobs.resolve(name, ["engine=gpt-neox", *sets]).job


def resolved(job: Job) -> Values:
    """Every value that a rank of the job has: GPT-NeoX's defaults below those it is given."""
    table = GptNeox().known_table(job)
    defaults = {option.name: option.default for option in table.options.values()}
    return {**defaults, **rank_words(job, RUN)[1]}


# What all four files say alike.
ALL: Mapping[str, object] = {
    "seq_length": 2048,
    "max_position_embeddings": 2048,
    "norm": "layernorm",
    "layernorm_epsilon": 1e-5,
    "pos_emb": "rotary",
    "rotary_emb_base": 10000,
    "no_weight_tying": True,
    "output_layer_parallelism": "column",
    "init_method": "small_init",
    "output_layer_init_method": "wang_init",
    "zero_stage": 1,
    "zero_reduce_scatter": True,
    "zero_contiguous_gradients": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "gradient_clipping": 1.0,
    "clip_grad": 1.0,
    "precision": "fp16",
    "lr_decay_style": "cosine",
    "warmup": 0.01,
    "checkpoint_activations": True,
    "checkpoint_num_layers": 1,
    "synchronize_each_layer": True,
    "eval_interval": 1000,
    "eval_iters": 10,
    "data_impl": "mmap",
    "distributed_backend": "nccl",
    "train_micro_batch_size_per_gpu": 4,
    # trap 9: Lambda's local_setup.yml of 2022 reports to W&B; without the key ea7aefd would too,
    # wherever it finds one's API key
    "use_wandb": False,
    "optimizer_type": "Adam",
    "is_pipe_parallel": True,
    "dynamic_loss_scale": True,
}
FP16: Mapping[str, object] = {
    "enabled": True,
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
NEOX_20B: Mapping[str, object] = {
    **ALL,
    "pipe_parallel_size": 4,
    "model_parallel_size": 2,
    "global_num_gpus": 96,
    "num_layers": 44,
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "rotary_pct": 0.25,
    "gpt_j_residual": True,
    "gpt_j_tied": False,
    "scaled_upper_triang_masked_softmax_fusion": True,
    "bias_gelu_fusion": True,
    "optimizer": {"type": "Adam", "params": {"lr": 0.97e-4, "betas": [0.9, 0.95], "eps": 1e-8}},
    "lr": 0.97e-4,
    "min_lr": 0.97e-5,
    "zero_optimization": {
        "stage": 1,
        "allgather_partitions": True,
        "allgather_bucket_size": 1260000000,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 1260000000,
        "contiguous_gradients": True,
    },
    "gradient_accumulation_steps": 32,
    "train_batch_size": 1536,
    "split": "995,4,1",
    "partition_activations": False,
    "weight_decay": 0.01,
    "fp16": {**FP16, "initial_scale_power": 12},
    "train_iters": 150000,
    "lr_decay_iters": 150000,
    "checkpoint_factor": 500,
    "log_interval": 2,
    "steps_per_print": 2,
    "wall_clock_breakdown": False,
    "tokenizer_type": "HFTokenizer",
}
NEOX_2_7B: Mapping[str, object] = {
    **ALL,
    "pipe_parallel_size": 1,
    "model_parallel_size": 1,
    "global_num_gpus": 8,
    "num_layers": 32,
    "hidden_size": 2560,
    "num_attention_heads": 32,
    "rotary_pct": 1.0,
    "gpt_j_residual": False,
    "gpt_j_tied": False,
    "scaled_upper_triang_masked_softmax_fusion": False,
    "bias_gelu_fusion": False,
    "optimizer": {"type": "Adam", "params": {"lr": 1.6e-4, "betas": [0.9, 0.95], "eps": 1e-8}},
    "lr": 1.6e-4,
    "min_lr": 1.6e-5,
    "zero_optimization": {
        "stage": 1,
        "allgather_partitions": True,
        "allgather_bucket_size": 500000000,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 500000000,
        "contiguous_gradients": True,
    },
    "gradient_accumulation_steps": 1,
    "train_batch_size": 32,
    "split": "969,30,1",
    "partition_activations": True,
    "weight_decay": 0.1,
    # the file leaves it to DeepSpeed, whose default was 2**32 then and is 2**16 today
    "fp16": {**FP16, "initial_scale_power": 32},
    "train_iters": 320000,
    "lr_decay_iters": 320000,
    "checkpoint_factor": 10000,
    "keep_last_n_checkpoints": 4,
    "log_interval": 100,
    "steps_per_print": 10,
    "wall_clock_breakdown": True,
    "tokenizer_type": "GPT2BPETokenizer",
}
LAMBDA: Mapping[str, object] = {
    **NEOX_20B,
    "pipe_parallel_size": 6,
    "model_parallel_size": 4,
    "global_num_gpus": 24,
    "train_batch_size": 128,
}
GOLDEN: Sequence[tuple[str, Sequence[str], Mapping[str, object]]] = [
    ("gpt-neox-20b", (), NEOX_20B),
    ("gpt-neox-20b-lambda", (), LAMBDA),
    # trap 5: Lambda's text does not say so, but its file has gpt_j_tied: true
    ("gpt-neox-20b-lambda", ("model.gpt_j_tied=true",), {**LAMBDA, "gpt_j_tied": True}),
    *(
        # trap 3: published as 13B. Trap 4: 1, 2 and 3 nodes
        (
            "gpt-neox-9b-lambda",
            (f"nodes={nodes}",),
            {
                **NEOX_20B,
                "hidden_size": 4096,
                "global_num_gpus": 8 * nodes,
                "train_batch_size": 128 * nodes,
            },
        )
        for nodes in (1, 2, 3)
    ),
    ("gpt-neox-2-7b", (), NEOX_2_7B),
    (
        "gpt-neox-2-7b",
        ("nodes=1",),
        {**NEOX_2_7B, "global_num_gpus": 4, "train_batch_size": 16},
    ),
]


@pytest.mark.parametrize(("name", "sets", "published"), GOLDEN)
def test_a_rank_is_told_what_was_published(
    jobs: Jobs, name: str, sets: Sequence[str], published: Mapping[str, object]
) -> None:
    job = as_neox(jobs, name, *sets)
    refuse_unlaunchable(job)
    told = resolved(job)
    assert {key: told[key] for key in published} == dict(published)
    assert told["attention_config"] == ["global"] * job.model.num_layers
    assert told["batch_size"] == 4


def test_paths_are_those_of_prepare_data_below_the_root(jobs: Jobs) -> None:
    """Trap 5: 20B_lambda.yml has absolute paths below /home/ubuntu/shared. Trap 8: the default
    dataset was enron."""
    told = resolved(as_neox(jobs, "gpt-neox-20b-lambda"))
    assert told["data_path"] == "/home/ubuntu/shared/data/pile/neox-20b/pile_text_document"
    assert told["vocab_file"] == str(ROOT / "data/tokenizers/neox-20b/20B_tokenizer.json")
    assert told["save"] == told["load"] == str(RUN.checkpoints)
    assert told["tensorboard_dir"] == str(RUN.tensorboard)
    small = resolved(as_neox(jobs, "gpt-neox-2-7b"))
    assert small["data_path"] == str(ROOT / "data/enron/gpt2/enron_text_document")
    assert small["vocab_file"] == str(ROOT / "data/tokenizers/gpt2/vocab.json")
    assert small["merge_file"] == str(ROOT / "data/tokenizers/gpt2/merges.txt")


def test_what_equals_the_default_is_left_out_of_both_words(jobs: Jobs) -> None:
    deepspeed, megatron = rank_words(as_neox(jobs, "gpt-neox-2-7b"), RUN)
    assert not {"gradient_clipping", "gradient_accumulation_steps", "deepspeed"} & {
        *deepspeed,
        *megatron,
    }
    assert set(deepspeed) == {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "optimizer",
        "fp16",
        "zero_optimization",
        "wall_clock_breakdown",
    }
    assert megatron["user_script"] == "train.py"
    files = megatron["config_files"]
    assert isinstance(files, dict) and list(files) == ["gpt-neox-2-7b.yml"]
    assert "git_hash" not in megatron


def test_the_files_of_a_run(jobs: Jobs) -> None:
    job = as_neox(jobs, "gpt-neox-20b-lambda")
    command = GptNeox().command(job, RUN, 1)
    text = command.files["launch/gpt-neox-20b-lambda.yml"]
    assert '"eps": 1.0e-08' in text  # YAML 1.1 takes 1e-08 for a text
    assert command.spawn == "per_rank"
    # trap: on-demand nodes have no InfiniBand; the cluster's own NCCL_* stay
    extensions = command.env["TORCH_EXTENSIONS_DIR"]
    assert extensions.startswith("/home/ubuntu/shared/engines/extensions/gpt-neox-ea7aefd-")
    assert command.env == {
        "PYTHONUNBUFFERED": "1",
        "TORCH_EXTENSIONS_DIR": extensions,
        "NCCL_IB_DISABLE": "1",
        "NCCL_DEBUG": "INFO",
    }
    assert rank_words(job, RUN)[1]["config_files"] == {"gpt-neox-20b-lambda.yml": text}


def test_44_layers_on_6_stages_are_no_objection(jobs: Jobs) -> None:
    """Trap 7: DeepSpeed splits them 8, 8, 7, 7, 7, 7, where Megatron-LM refuses."""
    job = as_neox(jobs, "gpt-neox-20b-lambda")
    assert (job.model.num_layers, job.parallelism.pipeline_model_parallel_size) == (44, 6)
    assert ENGINES["gpt-neox"].problems(job) == []


def problems_of(job: Job) -> list[str]:
    return [str(problem) for problem in ENGINES["gpt-neox"].problems(job)]


REFUSED: Sequence[tuple[str, str]] = [
    ("training.z_loss=0.0001", "training.z_loss = 0.0001 has no counterpart"),
    ("training.on_nan=skip", "training.on_nan = 'skip' has no counterpart"),
    ("training.on_spike=skip", "training.on_spike = 'skip' has no counterpart"),
    ("training.max_skipped_in_a_row=7", "it stops after 50"),
    ("training.recompute_every=2", "training.recompute_every = 2 has no counterpart"),
    ("training.recompute_granularity=selective", "it knows none, full"),
    ("training.deterministic=true", "training.deterministic = true has no counterpart"),
    ("training.reset_attention_mask=true", "training.reset_attention_mask = true"),
    ("training.reset_position_ids=true", "training.reset_position_ids = true"),
    ("training.optimizer=sgd", "training.optimizer = 'sgd' has no counterpart"),
    ("training.lr_decay_style=inverse-square-root", "it knows cosine, linear, constant"),
    ("training.lr_warmup_init=1e-6", "training.lr_warmup_init = 1e-06 has no counterpart"),
    ("training.seed=0", "training.seed = 0: gpt-neox takes 1 to 2^32 - 1"),
    ("training.initial_loss_scale=5000.0", "this is not a power of two"),
    ("training.train_iters=400000", "gpt-neox's cosine rises again after its end"),
    ("model.kv_channels=64", "model.kv_channels = 64 has no counterpart"),
    ("model.rotary_base=500.5", "model.rotary_base = 500.5: gpt-neox takes a whole number"),
    ("model.vocab_size=60000", "gpt-neox takes the tokenizer's, 50257"),
    ("checkpoint.keep_every=1000", "it keeps the newest only, keep_last"),
    ("checkpoint.keep_best=1", "checkpoint.keep_best = 1 has no counterpart"),
    ("checkpoint.save_async=true", "it waits for its saves"),
    ("sample_order=megatron", "it builds its own index of samples"),
    ("init_from=hf:EleutherAI/gpt-neox-20b", "it begins with weights of its own format only"),
    ("generate.prompt=Hello", "generate = {...} has no counterpart"),
    ("dataset=slimpajama", ""),
    ("engine_args.num_layers=3", "trainkit sets num_layers itself"),
    ("engine_args.gpt_j_redisual=true", "has no option 'gpt_j_redisual'"),
    ("engine_args.log_grad_norm=3", "engine_args.log_grad_norm: expected true or false"),
    ("engine_args.zero_optimization.stage=2", "use parallelism.zero_stage for it"),
    ("engine_args.fp16.hysteresis=1", "use training.hysteresis for it"),
    ("engine_args.pipe_parallel_size=2", "parallelism.pipeline_model_parallel_size = 1"),
    ("engine_args.pipe_parallel_size=0", ""),
]


@pytest.mark.parametrize(("given", "said"), REFUSED)
def test_what_it_has_no_word_for_is_refused_by_name(jobs: Jobs, given: str, said: str) -> None:
    found = problems_of(as_neox(jobs, "gpt-neox-2-7b", given))
    if not said:
        assert found == []
        return
    assert len(found) == 1 and said in found[0], found


def test_random_tokens_are_refused(jobs: Jobs) -> None:
    assert "dataset 'mock' has no tokenizer" in "".join(problems_of(as_neox(jobs, "mock")))


def test_fusions_for_cuda_are_refused_on_cpus(jobs: Jobs) -> None:
    job = as_neox(jobs, "gpt-neox-20b", "cluster.device=cpu", "cluster.gpus_per_node=0")
    assert "its kernel is compiled for CUDA" in "".join(problems_of(job))


def test_the_warmup_in_steps_is_a_part_of_the_decay(jobs: Jobs) -> None:
    job = as_neox(jobs, "demo-neox", "training.lr_warmup_iters=6", "training.lr_decay_iters=600")
    assert resolved(job)["warmup"] == 0.01


@pytest.mark.parametrize(
    ("precision", "told"),
    [
        ("fp32", {"precision": "fp32", "fp16": None, "bf16": None}),
        (
            "bf16",
            {
                "precision": "bfloat16",
                "bf16": {"enabled": True},
                "data_types": {"grad_accum_dtype": "fp32"},
            },
        ),
    ],
)
def test_other_number_formats(jobs: Jobs, precision: str, told: Mapping[str, object]) -> None:
    found = resolved(as_neox(jobs, "gpt-neox-2-7b", f"training.precision={precision}"))
    assert {key: found[key] for key in told} == dict(told)


def test_a_cpu_cluster_uses_gloo(jobs: Jobs) -> None:
    job = as_neox(jobs, "demo-neox")
    told = resolved(job)
    assert told["distributed_backend"] == "gloo"
    command = GptNeox().command(job, RUN, 1)
    assert command.env["DS_ACCELERATOR"] == "cpu"


def test_llama_in_its_words(jobs: Jobs) -> None:
    job = as_neox(jobs, "demo-llama")
    told = resolved(job)
    wanted = {
        "norm": "rmsnorm",
        "activation": "swiglu",
        "use_bias_in_mlp": False,
        "use_bias_in_attn_linear": False,
        "use_bias_in_norms": False,
        "gpt_j_residual": False,
        "intermediate_size": 3 * job.model.ffn_width,
        "rms_norm_epsilon": job.model.layernorm_epsilon,
    }
    assert {key: told[key] for key in wanted} == wanted


def test_zero_2_goes_without_the_pipeline_engine(jobs: Jobs) -> None:
    assert (
        resolved(as_neox(jobs, "gpt-neox-2-7b", "parallelism.zero_stage=2"))["pipe_parallel_size"]
        == 0
    )


def test_decode_is_the_inverse_of_the_launchers_words() -> None:
    assert decode("eyJhIjogWzEsIDFlLTA4XX0=") == {"a": [1, 1e-08]}
