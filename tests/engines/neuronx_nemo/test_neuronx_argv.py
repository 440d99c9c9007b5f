"""The command of a job is that of neuronx-nemo-megatron's scripts, word for word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engines.neuronx_nemo.neuronx_published import (
    DATA,
    HEAD_ENV,
    OLDER_ENV,
    SIZES,
    distributed_args,
    head_words,
    older_words,
)
from trainkit.base.errors import ConfigError
from trainkit.engines.contract import Command
from trainkit.engines.foreign import spec_name
from trainkit.engines.neuronx_nemo.engine import NeuronxNemo
from trainkit.engines.registry import ENGINES
from trainkit.jobs.load import Jobs, load
from trainkit.jobs.schema import Job
from trainkit.runs.folder import RunFolder

RUN = RunFolder(Path("/fsx/runs/job/run-1"))
DIRPATH = f"+exp_manager.checkpoint_callback_params.dirpath={RUN.checkpoints}"
LAST = "exp_manager.checkpoint_callback_params.save_last=True"
OLDER = ("engine_source=neuronx-2-13", "training.lr=1.5e-4")
# where the scripts' own data lie
PLACES = (
    f"dataset.prefixes=['{DATA}/my-gpt2_text_document']",
    "dataset.urls=[]",
    f"dataset.tokenizer.vocab_file='{DATA}/gpt2-vocab.json'",
    f"dataset.tokenizer.merge_file='{DATA}/gpt2-merges.txt'",
)


@pytest.fixture(scope="module")
def jobs() -> Jobs:
    return load(Path(__file__).parents[3], environ={})


def resolved(jobs: Jobs, size: str, *changes: str) -> Job:
    return jobs.resolve(f"neuron-gpt3-{size}", [*PLACES, *changes]).job


def older(jobs: Jobs, size: str, *changes: str) -> Job:
    """The same with the scripts of 2.13.1, whose batch is 32 a node for all."""
    batch = f"training.gradient_accumulation_steps={8 if size == '6-7b' else 32}"
    published = SIZES[size]
    steps = published.tensor * published.pipeline
    batch = f"training.gradient_accumulation_steps={steps}"
    return resolved(jobs, size, *OLDER, batch, *changes)


def spec_of(command: Command) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(command.files[spec_name(1)])
    return value


def argv_of(job: Job) -> list[str]:
    argv: list[str] = spec_of(NeuronxNemo().command(job, RUN, 1))["argv"]
    return argv


def ours(words: list[str]) -> list[str]:
    """The published words with the run's own folder for what the engine writes."""
    published = "exp_manager.explicit_log_dir=null"
    assert published in words
    return [
        f"exp_manager.explicit_log_dir={RUN.path}/nemo" if word == published else word
        for word in words
    ]


@pytest.mark.parametrize("size", SIZES)
def test_training_at_head(jobs: Jobs, size: str) -> None:
    job = resolved(jobs, size)
    assert ENGINES["neuronx-nemo"].problems(job) == []
    published = [
        "torchrun",
        *distributed_args(SIZES[size]),
        *head_words(SIZES[size], compiling=False),
    ]
    assert argv_of(job) == [*ours(published), DIRPATH, LAST]


@pytest.mark.parametrize("size", SIZES)
def test_compiling_at_head(jobs: Jobs, size: str) -> None:
    published = [
        "torchrun",
        *distributed_args(SIZES[size]),
        *head_words(SIZES[size], compiling=True),
    ]
    argv = argv_of(resolved(jobs, size, "precompile=true"))
    assert argv == ["neuron_parallel_compile", *ours(published)]


@pytest.mark.parametrize("size", SIZES)
def test_training_with_2_13_1(jobs: Jobs, size: str) -> None:
    job = older(jobs, size)
    assert ENGINES["neuronx-nemo"].problems(job) == []
    published = [
        "torchrun",
        *distributed_args(SIZES[size]),
        *older_words(SIZES[size], compiling=False),
    ]
    assert argv_of(job) == ours(published)


@pytest.mark.parametrize("size", SIZES)
def test_compiling_with_2_13_1(jobs: Jobs, size: str) -> None:
    published = [
        "torchrun",
        *distributed_args(SIZES[size]),
        *older_words(SIZES[size], compiling=True),
    ]
    argv = argv_of(older(jobs, size, "precompile=true"))
    assert argv == ["neuron_parallel_compile", *ours(published)]


@pytest.mark.parametrize("compiling", ["true", "false"])
def test_the_environment(jobs: Jobs, compiling: str) -> None:
    run = {"NEMO_EXPM_VERSION": "run-1"}
    command = NeuronxNemo().command(resolved(jobs, "23b", f"precompile={compiling}"), RUN, 1)
    report = {"NEURON_PARALLEL_COMPILE_DUMP_RESULTS": "1"} if compiling == "true" else {}
    assert command.env == {**HEAD_ENV, **run, **report}
    command = NeuronxNemo().command(older(jobs, "23b", f"precompile={compiling}"), RUN, 1)
    assert command.env == {**OLDER_ENV, **run}


def test_how_it_is_started(jobs: Jobs) -> None:
    command = NeuronxNemo().command(resolved(jobs, "23b"), RUN, 1)
    assert (command.spawn, command.port, command.ranks_per_node) == ("per_node", 41000, 32)
    spec = spec_of(command)
    assert spec["cwd"].endswith("neuronx-nemo-f4743ce/nemo/examples/nlp/language_modeling")
    assert spec["python"].endswith("/aws_neuron_venv_pytorch/bin/python")
    assert spec["starts_ranks"] and spec["saves"]
    node = spec["node"]
    assert (node["open_files"], node["reserve_port"], node["max_dirty_mb"]) == (65535, True, 64)
    assert node["devices"] == "/dev/neuron[0-9]*"
    older_node = spec_of(NeuronxNemo().command(older(jobs, "23b"), RUN, 1))["node"]
    assert (older_node["open_files"], older_node["max_dirty_mb"]) == (65535, 0)
    here = resolved(jobs, "6-7b", "cluster=here", "nodes=1", "cluster.ranks_per_node=8")
    local = spec_of(NeuronxNemo().command(here, RUN, 1))
    assert local["argv"][7:9] == ["--master_addr", "localhost"]
    assert (local["node"]["reserve_port"], local["node"]["devices"]) == (False, "")


PRECISIONS = {
    # by training_precision: what train_setup.sh exports, and the words it puts into test.sh's
    "bf16SR": ({"XLA_USE_BF16": "1"}, "adamw false false false", "1"),
    "fp32_ZeroOptMaster": ({"XLA_DOWNCAST_BF16": "1"}, "adamw false true true", "1"),
    "fp32_ZeroOptMasterGradAcc": (
        {"XLA_DOWNCAST_BF16": "1", "zero_use_fp32_grad_accum": "true"},
        "adamw false true true",
        "0",
    ),
    "megatron_amp_O2": ({"XLA_DOWNCAST_BF16": "1"}, "adamw true false false", "1"),
    "fp32_OptStates": ({"XLA_DOWNCAST_BF16": "1"}, "adamw_fp32OptState false false false", "1"),
    "fp32": ({"XLA_USE_BF16": "0"}, "adamw false false false", "1"),
}


@pytest.mark.parametrize("mode", PRECISIONS)
def test_the_precisions_of_head(jobs: Jobs, mode: str) -> None:
    variables, words, rounding = PRECISIONS[mode]
    optimizer, amp, wraps, master = words.split()
    changes = [f"engine_args.training_precision={mode}"]
    changes += [f"parallelism.zero_stage={int(wraps == 'true')}"]
    if mode == "fp32":
        changes = ["training.precision=fp32"]
    job = resolved(jobs, "23b", *changes)
    command = NeuronxNemo().command(job, RUN, 1)
    argv = spec_of(command)["argv"]
    assert {
        f"model.optim.name={optimizer}",
        f"model.megatron_amp_O2={amp}",
        f"model.wrap_with_zero={wraps}",
        f"model.zero_use_master_weight={master}",
        "trainer.precision=32",
    } <= set(argv)
    names = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16", "zero_use_fp32_grad_accum")
    assert {name: command.env[name] for name in names if name in command.env} == variables
    assert command.env["NEURON_RT_STOCHASTIC_ROUNDING_EN"] == rounding
    ends = "--auto-cast none" if mode == "fp32" else "--enable-mixed-precision-accumulation"
    assert command.env["NEURON_CC_FLAGS"].endswith(f"--distribution-strategy=llm-training {ends}")


def test_zero_alone_is_the_line_of_its_readme(jobs: Jobs) -> None:
    """Trap 21: off by default, and `model.wrap_with_zero=True` in test.sh turns it on."""
    assert "model.wrap_with_zero=false" in argv_of(resolved(jobs, "175b"))
    argv = argv_of(resolved(jobs, "23b", "parallelism.zero_stage=1"))
    assert "model.wrap_with_zero=true" in argv and "model.zero_use_master_weight=false" in argv
    assert "model.wrap_with_zero=True" in argv_of(older(jobs, "23b", "parallelism.zero_stage=1"))


def test_the_batch_and_rate_of_the_175b(jobs: Jobs) -> None:
    """Trap 21: 8 samples a node at 5e-5 at f4743ce, 32 at 1.5e-4 in the document and 2.13.1."""
    head = argv_of(resolved(jobs, "175b"))
    assert "model.global_batch_size=64" in head and "model.optim.lr=5e-5" in head
    before = argv_of(older(jobs, "175b"))
    assert "model.global_batch_size=256" in before and "model.optim.lr=0.00015" in before


def test_the_last_step_is_a_word_of_its_own(jobs: Jobs) -> None:
    """Trap 22: `trainer.max_steps=$TRAIN_ITERS\\` has no space before the backslash."""
    argv = argv_of(resolved(jobs, "23b"))
    at = argv.index("trainer.max_steps=300000")
    assert argv[at + 1] == "trainer.val_check_interval=300001"


def test_what_the_job_says_beyond_the_scripts(jobs: Jobs) -> None:
    job = resolved(
        jobs,
        "23b",
        "training.save_interval=500",
        "training.eval_interval=1000",
        "training.recompute_granularity=none",
        "training.clip_grad=0.5",
        "training.seed=7",
        "training.adam_eps=1e-7",
        "checkpoint.keep_last=3",
        "dataset.split='949,50,1'",
        "model.attention_dropout=0.0",
        "model.untie_embeddings_and_output_weights=true",
        "engine_args.model.data.num_workers=4",
        "engine_args.model.log_gradient_norm=true",
        'engine_args={ "+model.save_xser" = false, "+model.activation" = "geglu" }',
    )
    argv = argv_of(job)
    published = head_words(SIZES["23b"], compiling=False)
    begins = argv.index(published[0])
    assert [word for word in argv[begins:] if word not in published] == [
        "trainer.val_check_interval=1000",
        "model.data.num_workers=4",
        "model.activations_checkpoint_granularity=null",
        "model.activations_checkpoint_method=null",
        "+model.save_xser=False",
        f"exp_manager.explicit_log_dir={RUN.path}/nemo",
        "+exp_manager.checkpoint_callback_params.every_n_train_steps=500",
        "model.attention_dropout=0.0",
        "+model.share_embeddings_and_output_weights=False",
        "model.seed=7",
        "trainer.gradient_clip_val=0.5",
        "+model.optim.eps=1e-7",
        "model.data.splits_string='949,50,1'",
        DIRPATH,
        "exp_manager.checkpoint_callback_params.save_top_k=3",
        LAST,
        "model.log_gradient_norm=True",
        "+model.activation=geglu",
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["engine_args.model.hidden_size=1"], "trainkit sets model.hidden_size itself"),
        (["engine_args.model.save_xser=true"], "'+model.save_xser' adds a key"),
        (['engine_args={ "+model.seed" = 1 }'], "trainkit sets model.seed itself"),
        (['engine_args={ "+model.onnx_safe" = true }'], "hydra adds no key that is there"),
        (["engine_args.model.megatron_amp_o2=true"], "'model.megatron_amp_O2'"),
        (["engine_args.model.data.num_workers='4'"], "expected an integer"),
        (["engine_args.training_precision=fp8"], "have bf16SR, fp32_ZeroOptMaster,"),
        (["engine_args.training_precision=fp32"], "do not go together"),
        (["engine_args.training_precision=fp32_ZeroOptMaster"], "shares its optimizer out"),
        (["training.precision=fp16"], "training.precision = 'fp16'"),
        (["training.lr_decay_style=linear"], "has no counterpart in neuronx-nemo"),
        (["training.z_loss=1e-4"], "training.z_loss = 0.0001"),
        ([*OLDER, "training.precision=fp32"], "the scripts of 2.13.1 have bf16SR"),
        (["cluster.device=cuda"], "is planned for, but not launched"),
    ],
)
def test_what_it_cannot_do_is_refused(jobs: Jobs, changes: list[str], said: str) -> None:
    found = [
        str(each) for each in ENGINES["neuronx-nemo"].problems(resolved(jobs, "23b", *changes))
    ]
    assert len(found) == 1 and said in found[0], found


def test_other_engines_have_no_way_to_trainium(jobs: Jobs) -> None:
    job = resolved(jobs, "23b", "engine=megatron-lm", "engine_source=megatron-lm")
    found = [str(each) for each in ENGINES["megatron-lm"].problems(job)]
    assert any("engine = 'megatron-lm' on cluster.device = 'trn1-core'" in each for each in found)
    other = jobs.resolve("llama-8b", ["precompile=true", "training.compile=false"]).job
    (problem,) = ENGINES["native"].problems(other)
    assert "precompile without training.compile" in problem.message
    assert "training.compile=true" in problem.hint


def test_a_run_without_checkpoints_says_so(jobs: Jobs) -> None:
    assert NeuronxNemo().notes(resolved(jobs, "23b")) == []
    (note,) = NeuronxNemo().notes(older(jobs, "23b"))
    assert "writes no checkpoint" in note
    writes = "engine_args.exp_manager.create_checkpoint_callback=true"
    job = older(jobs, "23b", writes)
    assert NeuronxNemo().notes(job) == []
    assert DIRPATH in argv_of(job) and spec_of(NeuronxNemo().command(job, RUN, 1))["saves"]
    assert not spec_of(NeuronxNemo().command(older(jobs, "23b"), RUN, 1))["saves"]


def test_graphs_are_known_by_what_they_depend_on(jobs: Jobs) -> None:
    """Not by the run, by its length or by where it saves; by the model, the layout, the flags of
    the compiler and all else that is compiled in."""

    def key(*changes: str) -> str:
        compiled_for = spec_of(NeuronxNemo().command(resolved(jobs, "23b", *changes), RUN, 1))
        return str(compiled_for["compiled_for"])

    assert key() == key("precompile=true") == key("training.save_interval=7")
    assert key() == key("training.train_iters=400000", "training.lr_decay_iters=320000")
    others = [
        key("training.micro_batch_size=2"),
        key("nodes=8"),
        key("parallelism.tensor_model_parallel_size=16"),
        key("engine_args.training_precision=megatron_amp_O2"),
        key("env.NEURON_CC_FLAGS='-O2'"),
        key("engine_source.python='/other/bin/python'"),
    ]
    assert len({key(), *others}) == len(others) + 1


def test_a_version_that_nobody_knows_is_refused(jobs: Jobs) -> None:
    job = resolved(jobs, "23b", "engine_source.revision=feature/x")
    with pytest.raises(ConfigError, match="is not at"):
        NeuronxNemo().command(job, RUN, 1)
    assert ENGINES["neuronx-nemo"].problems(job) == []
