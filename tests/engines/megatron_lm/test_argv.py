"""engine = "megatron-lm": the published commands word by word, what each version has, what is
refused.

Traps of the published set-ups that are tested elsewhere: 2 (sizes) and 20 (whole multiples of 16
nodes) in tests/plan/test_published.py; 12 and 18 (variables and tasks of Azure's scripts) in
tests/jobs/test_references.py and tests/launch/slurm/test_batch_script.py; 14, 15 and 16 (its
downloads) in tests/data/sources; 19 (the fixed number of positions) in
tests/cli/config/test_plan.py; 23 (the address of the first rank) in
tests/launch/slurm/test_batch_script.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engines.megatron_lm.megatron_published import (
    AZURE,
    AZURE_COMMON,
    AZURE_ENVIRONMENT,
    JEAN_ZAY,
    JEAN_ZAY_COMMON,
    JEAN_ZAY_ENVIRONMENT,
    Options,
    options_of,
    published,
)
from trainkit.base.errors import ConfigError
from trainkit.engines.megatron_lm.argv import (
    RunPlaces,
    argv_problems,
    leaves_muon_blockwise,
    megatron_argv,
)
from trainkit.engines.megatron_lm.data import MegatronData, data_of
from trainkit.engines.megatron_lm.engine import MegatronLm
from trainkit.engines.options import load_table
from trainkit.engines.registry import ENGINES
from trainkit.jobs.datasets import BlendPart
from trainkit.jobs.load import load
from trainkit.jobs.schema import Dataset, Job
from trainkit.plan.planner import make_plan
from trainkit.runs.folder import RunFolder

CHECKOUT = Path(__file__).resolve().parents[3]
JOBS = load(CHECKOUT, {})
# What trainkit adds to every published command, and what it leaves out, with the reasons.
ADDED_IN_CORE: Options = {
    # saves and ends with 0 when the agents send TERM; the published runs lose what was not saved
    "--exit-signal-handler": (),
}
ADDED_TO_JEAN_ZAY = {
    # the published one had no reports; every run of trainkit has a folder for them
    "--tensorboard-dir",
}
LEFT_OUT = {
    # a folder without a checkpoint is not loaded: the engine would warn once and train from
    # random weights (published: --load of the folder that is saved to, always)
    "--load",
}


def job_of(name: str, *sets: str) -> Job:
    return JOBS.resolve(name, sets).job


def places_of(run: RunFolder, **more: str) -> dict[str, str]:
    return {
        "CKPT": str(run.checkpoints),
        "TENSORBOARD": str(run.tensorboard),
        "CACHE": str(run.root / "data" / "megatron-lm-cache"),
        "VOCAB": str(CHECKOUT / "data/tokenizers/gpt2/vocab.json"),
        "MERGE": str(CHECKOUT / "data/tokenizers/gpt2/merges.txt"),
        **more,
    }


def run_of(root: Path, name: str) -> RunFolder:
    return RunFolder(root / "runs" / name / "20261122-120000-abcd")


def engine_words(argv: Sequence[str]) -> list[str]:
    """What stands behind pretrain_gpt.py in the argv of a spec."""
    at = next(i for i, word in enumerate(argv) if word.endswith("pretrain_gpt.py"))
    return list(argv[at + 1 :])


def commanded(job: Job, run: RunFolder) -> tuple[Options, dict[str, str]]:
    """(options, environment) of the first attempt, as the ranks' spec has them."""
    command = MegatronLm().command(job, run, 1)
    spec = json.loads(command.files["launch/engine-rank-1.json"])
    return options_of(engine_words(spec["argv"])), dict(command.env)


def pair(folder: Path, name: str) -> Path:
    """An empty .bin and .idx: nothing is read of them but their names."""
    folder.mkdir(parents=True, exist_ok=True)
    for ending in (".bin", ".idx"):
        (folder / f"{name}{ending}").write_bytes(b"")
    return folder / name


def files_of_azure(folder: Path, tokenizer: Any) -> tuple[Dataset, list[str]]:
    """The 72 prepared files of the published run, each with the weight 1.0: the first 42 of the
    sorted names for training, then 15 for the test, 15 for validation."""
    prefixes = sorted(str(pair(folder, f"train_chunk_{i}.jsonl_text_document")) for i in range(72))
    parts = {
        f"f{i}": BlendPart(
            weight=1.0,
            dataset=Dataset(
                name=f"f{i}", source="indexed", prefixes=(prefix,), tokenizer=tokenizer
            ),
        )
        for i, prefix in enumerate(prefixes)
    }
    names = list(parts)
    return (
        Dataset(
            name="slimpajama-files",
            source="blend",
            blend={name: parts[name] for name in names[:42]},
            test_blend={name: parts[name] for name in names[42:57]},
            valid_blend={name: parts[name] for name in names[57:]},
            tokenizer=tokenizer,
        ),
        prefixes,
    )


def weighted(prefixes: Sequence[str]) -> tuple[object, ...]:
    return tuple(word for prefix in prefixes for word in (1.0, prefix))


@pytest.mark.parametrize("name", sorted(AZURE))
def test_the_commands_of_azure_are_as_published(tmp_path: Path, name: str) -> None:
    job = job_of(name, f"cluster.root={tmp_path}")
    dataset, prefixes = files_of_azure(tmp_path / "robin" / "preprocessed", job.dataset.tokenizer)
    run = run_of(tmp_path, name)
    options, environment = commanded(job.model_copy(update={"dataset": dataset}), run)
    expected = published(AZURE_COMMON + AZURE[name], **places_of(run))
    expected |= ADDED_IN_CORE
    expected |= {
        "--train-data-path": weighted(prefixes[:42]),
        "--test-data-path": weighted(prefixes[42:57]),
        "--valid-data-path": weighted(prefixes[57:]),
    }
    for option in LEFT_OUT:
        del expected[option]
    if name != "azure-gpt3-175b":
        del expected["--sequence-parallel"]  # trap 19: with TP 1 the engine turns it off
    assert options == expected
    assert environment == AZURE_ENVIRONMENT


def test_azures_own_dataset_is_one_pair_and_a_split(tmp_path: Path) -> None:
    """prep-data joins the 72 files into one pair; 44, 15 and 15 parts of its documents are what 42,
    15 and 15 of the 72 files were (trap 15: by the published count there are 74)."""
    job = job_of("azure-gpt3-175b", f"cluster.root={tmp_path}")
    options, _ = commanded(job, run_of(tmp_path, "azure-gpt3-175b"))
    prefix = tmp_path / "data/slimpajama/gpt2/slimpajama_text_document"
    assert options["--data-path"] == (str(prefix),)
    assert options["--split"] == ("44,15,15",)
    assert not {"--train-data-path", "--valid-data-path", "--test-data-path"} & set(options)


@pytest.mark.parametrize("name", sorted(JEAN_ZAY))
def test_the_commands_of_jean_zay_are_as_published(tmp_path: Path, name: str) -> None:
    data = pair(tmp_path / "datasets-custom", "meg-gpt2_text_document")
    job = job_of(name, f"cluster.root={tmp_path}", f'dataset.prefixes=["{data}"]')
    run = run_of(tmp_path, name)
    options, environment = commanded(job, run)
    expected = published(JEAN_ZAY_COMMON + JEAN_ZAY[name], **places_of(run, DATA=str(data)))
    for option in LEFT_OUT:
        del expected[option]
    assert {
        key: value for key, value in options.items() if key not in ADDED_TO_JEAN_ZAY
    } == expected
    assert set(options) - set(expected) == ADDED_TO_JEAN_ZAY
    assert environment == JEAN_ZAY_ENVIRONMENT


def test_the_76b_of_jean_zay_is_refused_with_the_engines_reason() -> None:
    """Trap 1."""
    (problem,) = MegatronLm().problems(job_of("jean-zay-76b"))
    assert "model.num_layers 60" in problem.message and "32" in problem.message
    assert "Number of layers should be divisible by the pipeline-model-parallel size" in str(
        problem
    )
    assert "30" in problem.hint
    assert MegatronLm().problems(job_of("jean-zay-76b-pp30")) == []


def test_merges_that_are_a_vocabulary_are_refused() -> None:
    """Trap 11: Azure's MERGE_FILE is a vocab.json."""
    with pytest.raises(ConfigError, match=r"merge_file .* is a vocabulary"):
        job_of("azure-gpt3-check", "dataset.tokenizer.merge_file=/v/bpe/vocab.json")


# ---- versions


def tiny(*sets: str, version: str = "core-0.12.0", **args: Any) -> Job:
    """A small job on this machine's CPUs: 2 ranks, random tokens."""
    given = [
        "engine=megatron-lm",
        "parallelism.zero_stage=0",
        f"engine_source.version={version}",
        *sets,
    ]
    return JOBS.resolve("mock", given).job.model_copy(update=args)


def argv_of(
    job: Job, version: str | None = None, data: MegatronData | None = None, load: bool = False
) -> Options:
    table = load_table("megatron-lm", version) if version else MegatronLm().table_of(job)
    if data is None:
        data = MegatronData({"train": (), "valid": (), "test": ()}, "9,1,0")
        if job.dataset.source == "mock":
            data = MegatronData({}, None, mock=True)
    places = RunPlaces(Path("/fs/runs/j/r"), "j-r", load=load)
    return options_of(megatron_argv(job, table, data, places))


def refusals(job: Job, version: str) -> list[str]:
    return [str(each) for each in argv_problems(job, load_table("megatron-lm", version))]


CORE = ["core-0.12.0rc0", "core-0.12.0", "core-0.13.0", "core-0.14.0", "core-0.15.0"]
CORE += ["core-0.16.1", "core-0.17.1", "core-0.18.0", "core-0.19.0"]


@pytest.mark.parametrize("version", CORE)
def test_a_cpu_has_gloo_and_no_fused_kernels(version: str) -> None:
    words = argv_of(tiny(), version)
    assert words["--distributed-backend"] == ("gloo",)
    assert words["--transformer-impl"] == ("local",)
    assert words["--ckpt-format"] == ("torch",)
    assert "--no-gradient-accumulation-fusion" in words
    assert words["--mock-data"] == ()
    # model.vocab_size 512, and the end of a document is the last id
    assert words["--tokenizer-type"] == ("NullTokenizer",)
    if version in ("core-0.18.0", "core-0.19.0"):
        assert (words["--vocab-size"], words["--null-tokenizer-eod-id"]) == ((512.0,), (511.0,))
    else:
        assert words["--vocab-size"] == (511.0,)
        assert "--null-tokenizer-eod-id" not in words


@pytest.mark.parametrize("version", CORE)
def test_a_llama_on_gpus(version: str) -> None:
    job = JOBS.resolve(
        "llama-8b", ["engine=megatron-lm", "training.compile=false", "parallelism.zero_stage=1"]
    ).job
    words = argv_of(job, version)
    assert words["--position-embedding-type"] == ("rope",)
    assert words["--rotary-base"] == (500000.0,)
    assert words["--normalization"] == ("RMSNorm",)
    assert words["--ffn-hidden-size"] == (14336.0,)
    assert words["--num-query-groups"] == (8.0,)
    for flag in ("--swiglu", "--disable-bias-linear", "--group-query-attention", "--bf16"):
        assert words[flag] == ()
    assert words["--untie-embeddings-and-output-weights"] == ()
    assert words["--recompute-granularity"] == ("selective",)
    assert "--transformer-impl" not in words and "--distributed-backend" not in words
    assert words["--attention-dropout"] == words["--hidden-dropout"] == (0.0,)


@pytest.mark.parametrize("version", CORE)
def test_a_qwen3_norms_its_heads(version: str) -> None:
    sets = ["engine=megatron-lm", "training.compile=false", "parallelism.zero_stage=1"]
    words = argv_of(JOBS.resolve("qwen3-8b", sets).job, version)
    assert words["--qk-layernorm"] == ()
    assert words["--rotary-base"] == (1000000.0,)
    assert "--add-qkv-bias" not in words and "--squared-relu" not in words
    other = JOBS.resolve("qwen3-8b", [*sets, "model.activation=squared_relu"]).job
    assert argv_of(other, version)["--squared-relu"] == ()
    assert argv_of(other, version)["--no-bias-gelu-fusion"] == ()
    whole = JOBS.resolve("olmo2-7b", sets).job
    assert any("qk_norm = 'projection'" in text for text in refusals(whole, version))


def test_a_llama_is_more_than_2021_has() -> None:
    job = JOBS.resolve("llama-8b", ["engine=megatron-lm"]).job
    found = "\n".join(refusals(job, "2021"))
    for key in (
        "model.num_query_groups",
        "its rotary positions",
        "its normalization",
        "its SwiGLU",
        "its lack of biases",
        "model.untie_embeddings_and_output_weights",
        "training.recompute_granularity = 'selective'",
        "parallelism.zero_stage",
        "knows GPT-2's tokenizer only",
        "training.compile",
    ):
        assert key in found, found
    assert "Megatron-LM 2021" in found


def test_recomputation_was_called_otherwise_in_2021() -> None:
    job = job_of("jean-zay-7-5b")
    assert argv_of(job, "2021")["--checkpoint-activations"] == ()
    words = argv_of(job, "core-0.16.1")
    assert words["--recompute-granularity"] == ("full",)
    assert words["--recompute-method"] == ("uniform",)
    assert words["--recompute-num-layers"] == (1.0,)
    assert "--checkpoint-activations" not in words


def test_gpt2s_files_are_read_by_the_versions_that_read_them_offline() -> None:
    """engines.md, false success 4: 0.16's GPT2BPETokenizer asks a hub for "gpt2"."""
    job = job_of("azure-gpt3-check")
    for version in ("2021", "core-0.12.0", "core-0.14.0"):
        words = argv_of(
            job.model_copy(update={"engine_args": {}, "parallelism": tiny().parallelism}), version
        )
        assert words["--vocab-file"] and words["--merge-file"]
        assert "--tokenizer-type" not in words and "--legacy-tokenizer" not in words
    assert argv_of(job, "core-0.16.1")["--legacy-tokenizer"] == ()
    words = argv_of(job, "core-0.17.1")
    assert words["--tokenizer-type"] == ("NullTokenizer",)
    assert words["--vocab-size"] == (50256.0,)
    assert "--vocab-file" not in words


def test_defaults_are_left_out_only_where_the_table_is_of_that_version() -> None:
    job = job_of("azure-gpt3-check")
    exact, near = argv_of(job, "core-0.12.0"), argv_of(job, "core-0.12.3")
    assert "--hidden-dropout" not in exact
    assert near["--hidden-dropout"] == (0.1,)
    assert near["--seed"] == (1234.0,)


MUON = ("--optimizer", "muon")


@pytest.mark.parametrize("version", CORE[CORE.index("core-0.16.1") :])
def test_muon_is_the_same_in_every_layout_unless_the_job_says_otherwise(version: str) -> None:
    """By default these versions update each tensor-parallel shard alone."""
    for args in (MUON, ("--optimizer=adaptive_muon",)):
        job = tiny(version=version, args=args)
        assert argv_of(job)["--muon-tp-mode"] == ("duplicated",)
        assert "follow the layout" in " ".join(MegatronLm().notes(job))
    own = tiny(version=version, args=MUON, engine_args={"muon_tp_mode": "blockwise"})
    assert argv_of(own)["--muon-tp-mode"] == ("blockwise",)
    raw = tiny(version=version, args=(*MUON, "--muon-tp-mode=distributed"))
    assert "--muon-tp-mode" not in argv_of(raw)
    for job in (own, raw, tiny(version=version)):
        assert "follow the layout" not in " ".join(MegatronLm().notes(job))


def test_muon_of_a_version_whose_own_mode_is_the_same_in_every_layout() -> None:
    table = load_table("megatron-lm", "core-0.19.0")
    mode = replace(table.options["muon-tp-mode"], default="duplicated")
    newer = replace(table, options={**table.options, "muon-tp-mode": mode})
    assert not leaves_muon_blockwise(tiny(args=MUON), newer)
    assert leaves_muon_blockwise(tiny(args=MUON), table)


def test_an_optimizer_without_words_of_the_engine_is_refused_by_name() -> None:
    """It does not become Adam."""
    job = tiny()
    other = job.training.model_copy(update={"optimizer": "lion"})
    with pytest.raises(ConfigError, match=r"training\.optimizer = 'lion' has no counterpart"):
        argv_of(job.model_copy(update={"training": other}))


def test_a_loss_scale_and_betas_of_ones_own() -> None:
    job = job_of("jean-zay-7-5b", "training.initial_loss_scale=65536.0", "training.adam_beta1=0.8")
    words = argv_of(job)
    assert words["--initial-loss-scale"] == (65536.0,)
    assert words["--adam-beta1"] == (0.8,)
    assert words["--adam-beta2"] == (0.999,)
    fixed = argv_of(job_of("jean-zay-7-5b", "training.loss_scale=1024.0"))
    assert fixed["--loss-scale"] == (1024.0,)


def test_exact_gelu_is_without_the_fusion() -> None:
    assert "--no-bias-gelu-fusion" in argv_of(tiny("model.gelu=exact"), "core-0.12.0")
    assert "--no-bias-gelu-fusion" not in argv_of(tiny(), "core-0.12.0")


def test_interleaved_stages() -> None:
    job = job_of(
        "azure-gpt3-175b",
        "parallelism.virtual_pipeline_model_parallel_size=3",
    )
    assert argv_of(job)["--num-layers-per-virtual-pipeline-stage"] == (2.0,)
    uneven = job_of("azure-gpt3-175b", "parallelism.virtual_pipeline_model_parallel_size=4")
    assert "do not divide" in "".join(refusals(uneven, "core-0.12.0"))


def test_what_has_no_interval_happens_at_the_end_only() -> None:
    words = argv_of(tiny("training.log_interval=50"), "core-0.12.0")
    assert words["--train-iters"] == (20.0,)
    assert words["--eval-interval"] == (21.0,)
    assert words["--log-interval"] == (20.0,)  # else no line would say what was trained


@pytest.mark.parametrize(
    ("sets", "version", "said"),
    [
        (["model=demo-neox", "model.vocab_size=512", "model.init_method=normal",
          "model.output_layer_init_method=scaled"], "core-0.12.0", "gpt_j_residual"),
        (["model.init_method=small_init"], "core-0.12.0", "model.init_method = 'small_init'"),
        (["training.z_loss=1e-4"], "core-0.12.0", "training.z_loss"),
        (["training.z_loss=1e-4", "training.optimizer=sgd"], "core-0.12.0", "training.z_loss"),
        (["training.on_nan=skip"], "core-0.12.0", "training.on_nan = 'skip'"),
        (["training.on_spike=stop"], "core-0.12.0", "training.on_spike"),
        (["training.recompute_granularity=full", "training.recompute_every=2"],
         "core-0.12.0", "training.recompute_every"),
        (["training.rampup_batch_size=[4,4,64]"], "core-0.12.0", "rampup_batch_size"),
        (["training.seed=4294967296"], "core-0.12.0", "training.seed"),
        (["parallelism.zero_stage=2"], "core-0.12.0", "parallelism.zero_stage 2"),
        (["parallelism.zero_stage=1"], "2021", "2021 has no distributed optimizer"),
        (["training.lr_decay_style=inverse-square-root"], "2021",
         "takes constant, linear, cosine"),
        (["checkpoint.save_first=true"], "core-0.12.0", "checkpoint.save_first"),
        (["init_from=hf:gpt2"], "core-0.12.0", "init_from"),
        (["validation={more=\"mock\"}"], "core-0.12.0", "validation = {more}"),
        (["wandb={project=\"p\",entity=\"e\"}"], "core-0.14.0", ""),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_refused_with_the_key(
    sets: list[str], version: str, said: str
) -> None:
    job = tiny(*sets)
    found = refusals(job, version)
    if version == "2021":
        found = [each for each in found if "tokenizer" not in each]
    if not said:
        assert found == []
        return
    assert len(found) == 1, found
    assert said in found[0]


GPUS = ("cluster.device=h100-sxm-80gb", "cluster.gpus_per_node=2")


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        ((), "without Apex or Transformer Engine"),
        (("training.precision=fp32",), "without Apex or Transformer Engine"),
        ((*GPUS, "training.precision=fp32"), "in fp32"),
        ((*GPUS, "training.optimizer=sgd"), "takes Adam only"),
    ],
)
def test_a_distributed_optimizer_that_could_not_go_on_is_objected_to(
    sets: tuple[str, ...], why: str
) -> None:
    """With DP 1 there is nothing to share: it is left out, and the plan says so."""
    sets = ("parallelism.zero_stage=1", *sets)
    plan = make_plan(tiny(*sets), rules=ENGINES["megatron-lm"].rules)
    (objection,) = plan.objections
    assert why in objection.message and objection.changes == ({"parallelism.zero_stage": 0},)
    alone = tiny(*sets, "cluster.ranks_per_node=1")
    assert not make_plan(alone, rules=ENGINES["megatron-lm"].rules).objections
    for version in CORE:
        assert "--use-distributed-optimizer" not in argv_of(alone, version)
    (note,) = MegatronLm().notes(alone)
    assert why in note and "is left out" in note


def test_a_distributed_optimizer_that_can_is_not_objected_to() -> None:
    job = tiny("parallelism.zero_stage=1", "training.precision=bf16", *GPUS)
    assert not make_plan(job, rules=ENGINES["megatron-lm"].rules).objections
    assert all("--use-distributed-optimizer" in argv_of(job, version) for version in CORE)


def test_an_interleaved_schedule_on_cpus_is_objected_to() -> None:
    """Its outputs are freed while gloo sends them: NaN after some steps."""
    stages = ("parallelism.pipeline_model_parallel_size=2", "model.num_layers=4")
    sets = (*stages, "parallelism.virtual_pipeline_model_parallel_size=2")
    (objection,) = make_plan(tiny(*sets), rules=ENGINES["megatron-lm"].rules).objections
    assert objection.code == "no-virtual-stages" and "gloo" in objection.message
    assert not make_plan(tiny(*stages), rules=ENGINES["megatron-lm"].rules).objections
    assert not make_plan(tiny(*sets, *GPUS), rules=ENGINES["megatron-lm"].rules).objections


def test_sequence_parallelism_on_cpus_is_objected_to() -> None:
    sets = ("parallelism.tensor_model_parallel_size=2", "parallelism.sequence_parallel=true")
    (objection,) = make_plan(tiny(*sets), rules=ENGINES["megatron-lm"].rules).objections
    assert objection.code == "no-sequence-parallelism"
    assert objection.changes == ({"parallelism.sequence_parallel": False},)
    assert not make_plan(tiny(*sets, *GPUS), rules=ENGINES["megatron-lm"].rules).objections


def test_a_distributed_optimizer_asks_each_node_for_what_it_is_resumed_with(tmp_path: Path) -> None:
    for stage, asked in {0: False, 1: True}.items():
        sets = (f"cluster.root={tmp_path}", f"parallelism.zero_stage={stage}")
        run = run_of(tmp_path, "azure-gpt3-check")
        command = MegatronLm().command(job_of("azure-gpt3-check", *sets), run, 1)
        spec = json.loads(command.files["launch/engine-rank-1.json"])
        mends = {each["name"]: each["mend"] for each in spec["modules"]}
        assert ("transformer_engine or apex" in mends) == asked
        if asked:
            assert "parallelism.zero_stage = 0" in mends["transformer_engine or apex"]


def test_options_of_other_versions_are_named_with_the_nearest() -> None:
    job = job_of("azure-gpt3-check").model_copy(
        update={"engine_args": {"ckpt-fully-parallel-laod": True}}
    )
    (said,) = refusals(job, "core-0.12.0")
    assert "did you mean 'ckpt-fully-parallel-load'?" in said
    many = refusals(job_of("azure-gpt3-check"), "2021")
    assert "engine_args.attention-backend: megatron-lm 2021 has no option" in "".join(many)


def test_what_trainkit_sets_itself_is_refused_with_its_key() -> None:
    job = tiny(engine_args={"lr": 3.0, "save": "/x", "use-checkpoint-args": True})
    found = "\n".join(refusals(job, "core-0.12.0"))
    assert "training.lr" in found and "engine_args.save" in found
    assert "use-checkpoint-args" not in found
    (raw,) = refusals(tiny(args=("--spam", "--load=/y")), "core-0.12.0")
    assert "--load=/y" in raw


def test_the_jobs_own_word_replaces_trainkits() -> None:
    job = tiny(engine_args={"ckpt-format": "torch_dist", "transformer_impl": "transformer_engine"})
    words = argv_of(job, "core-0.16.1")
    assert words["--ckpt-format"] == ("torch_dist",)
    assert words["--transformer-impl"] == ("transformer_engine",)
    raw = argv_of(tiny(args=("--raw", "1")), "core-0.16.1")
    assert raw["--raw"] == (1.0,)


def test_environment_of_deterministic_gpus(tmp_path: Path) -> None:
    job = job_of("azure-gpt3-check", f"cluster.root={tmp_path}", "training.deterministic=true")
    options, environment = commanded(job, run_of(tmp_path, "azure-gpt3-check"))
    assert options["--deterministic-mode"] == ()
    assert environment["NCCL_ALGO"] == "Ring"
    assert environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_notes_say_what_is_passed_on_otherwise() -> None:
    (kept,) = MegatronLm().notes(job_of("azure-gpt3-check"))
    assert "checkpoint.keep_last has no effect" in kept
    (near,) = MegatronLm().notes(tiny(version="core-0.12.3"))
    assert "core-0.12.3" in near and "core-0.12.0" in near
    (late,) = MegatronLm().notes(tiny("training.log_interval=50"))
    assert "training.log_interval 50 becomes train_iters 20" in late
    (old,) = MegatronLm().notes(job_of("jean-zay-7-5b", "parallelism.zero_stage=1"))
    assert "parallelism.zero_stage 1 is left out" in old


def test_the_job_decides_the_schedule_of_a_resumed_run() -> None:
    """engines.md, false success 6: 0.16 compares it with the checkpoint's and stops."""
    core = argv_of(job_of("azure-gpt3-check"), load=True)
    assert core["--load"] == core["--save"]
    assert core["--override-opt_param-scheduler"] == ()
    old = argv_of(job_of("jean-zay-7-5b"), load=True)
    assert old["--load"] == old["--save"]
    assert old["--override-lr-scheduler"] == ()
    assert "--override-opt_param-scheduler" not in argv_of(job_of("azure-gpt3-check"))


# ---- data


def indexed(name: str, *prefixes: Path, **keys: Any) -> Dataset:
    tokenizer = job_of("azure-gpt3-check").dataset.tokenizer
    return Dataset(
        name=name,
        source="indexed",
        prefixes=tuple(str(prefix) for prefix in prefixes),
        tokenizer=tokenizer,
        **keys,
    )


def with_data(dataset: Dataset, version: str) -> Options:
    job = reading(dataset)
    return argv_of(job, version, data_of(job))


def reading(dataset: Dataset) -> Job:
    """The small job on a dataset with GPT-2's vocabulary."""
    return tiny(dataset=dataset, model=tiny().model.model_copy(update={"vocab_size": None}))


def test_several_files_by_size(tmp_path: Path) -> None:
    """Core weighs them by their samples; 2021 has to be told, and takes weights only."""
    a, b = pair(tmp_path, "a"), pair(tmp_path, "b")
    Path(f"{b}.bin").write_bytes(b"12345678")
    Path(f"{a}.bin").write_bytes(b"1234")
    dataset = indexed("d", a, b, split="9,1,0")
    assert with_data(dataset, "core-0.12.0")["--data-path"] == (str(a), str(b))
    assert with_data(dataset, "core-0.12.0")["--split"] == ("9,1,0",)
    assert with_data(dataset, "2021")["--data-path"] == (4.0, str(a), 8.0, str(b))


def test_files_held_out_are_lists_of_their_own(tmp_path: Path) -> None:
    prefixes = [pair(tmp_path, f"p{i}") for i in range(5)]
    words = with_data(indexed("d", *prefixes, valid_files=1, test_files=1), "core-0.12.0")
    assert words["--train-data-path"] == tuple(str(each) for each in prefixes[:3])
    assert words["--test-data-path"] == (str(prefixes[3]),)
    assert words["--valid-data-path"] == (str(prefixes[4]),)
    assert "--split" not in words and "--data-path" not in words
    with pytest.raises(ConfigError, match="--train-data-path, which Megatron-LM 2021"):
        with_data(indexed("d", *prefixes, valid_files=1), "2021")


def test_a_blend_has_weights_and_one_split(tmp_path: Path) -> None:
    a, b = indexed("a", pair(tmp_path, "a")), indexed("b", pair(tmp_path, "b"))
    blend = Dataset(
        name="ab",
        source="blend",
        blend={"a": BlendPart(weight=0.3, dataset=a), "b": BlendPart(weight=0.7, dataset=b)},
        tokenizer=a.tokenizer,
    )
    words = with_data(blend, "core-0.12.0")
    assert words["--data-path"] == (0.3, str(tmp_path / "a"), 0.7, str(tmp_path / "b"))
    assert words["--split"] == ("969,30,1",)
    other = b.model_copy(update={"split": "1,1,1"})
    uneven = blend.model_copy(
        update={"blend": {**blend.blend, "b": BlendPart(weight=0.7, dataset=other)}}
    )
    with pytest.raises(ConfigError, match="one --split for all of a blend"):
        with_data(uneven, "core-0.12.0")


def test_prefixes_with_an_ending_are_refused(tmp_path: Path) -> None:
    """Trap 17: Azure's script cuts ".bin" out of whole paths by a regular expression, and any
    letter before "bin" with it. Here nothing is cut, and an ending is an error."""
    dataset = indexed("d", tmp_path / "robin" / "x_text_document.bin")
    (said,) = refusals(reading(dataset), "core-0.12.0")
    assert "ends with .bin" in said and "x_text_document'" in said
    there = pair(tmp_path / "robin", "train_chunk_0.jsonl_text_document")
    assert with_data(indexed("d", there), "core-0.12.0")["--data-path"] == (str(there),)


def test_a_vocabulary_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    vocab = tmp_path / "vocab.json"
    vocab.write_text('{"a": 0, "b": 1}')
    job = job_of("azure-gpt3-check", f"dataset.tokenizer.vocab_file={vocab}")
    (said,) = refusals(job, "core-0.12.0rc0")
    assert "vocab_size 50257" in said and "has 2 ids" in said
    (said,) = refusals(job_of("azure-gpt3-check", "model.vocab_size=60000"), "core-0.12.0rc0")
    assert "model.vocab_size 60000" in said and "50304" in said
    assert refusals(job_of("azure-gpt3-check", "model.vocab_size=50300"), "core-0.12.0rc0") == []


def test_a_vocabulary_has_tokens_of_any_name(tmp_path: Path) -> None:
    """GPT-2's own has "model" and "added"."""
    vocab = tmp_path / "vocab.json"
    vocab.write_text('{"model": 0, "added_tokens": 1, "<|endoftext|>": 2}')
    job = job_of(
        "azure-gpt3-check",
        f"dataset.tokenizer.vocab_file={vocab}",
        "dataset.tokenizer.vocab_size=50257",
        "training.reset_position_ids=true",
    )
    (said,) = refusals(job.model_copy(update={"engine_args": {}}), "core-0.17.1")
    assert "takes the last id, 50256, for the end of a document, which is 2" in said


def test_the_end_of_a_document_is_the_tokenizers(tmp_path: Path) -> None:
    """Only the resets read it. NullTokenizer's is the last id up to 0.17, and can be said since."""
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(
        '{"added_tokens": [{"content": "<|endoftext|>", "id": 0}], "model": {"vocab": {"a": 1}}}'
    )
    base = job_of("gpt-neox-20b").dataset.tokenizer
    assert base is not None
    dataset = Dataset(
        name="d",
        source="indexed",
        prefixes=(str(pair(tmp_path, "d")),),
        tokenizer=base.model_copy(update={"path": str(tokenizer), "type": "file"}),
    )
    job = tiny("training.reset_attention_mask=true").model_copy(
        update={
            "dataset": dataset,
            "model": tiny().model.model_copy(update={"vocab_size": None}),
        }
    )
    (said,) = refusals(job, "core-0.12.0")
    assert "training.reset_attention_mask" in said and "which is 0" in said
    assert argv_of(job, "core-0.19.0")["--null-tokenizer-eod-id"] == (0.0,)
    own = job.model_copy(
        update={"engine_args": {"tokenizer-type": "HuggingFaceTokenizer", "tokenizer-model": "/t"}}
    )
    words = argv_of(own, "core-0.12.0")
    assert words["--tokenizer-type"] == ("HuggingFaceTokenizer",)
    assert "--vocab-size" not in words


@pytest.mark.parametrize(
    ("version", "refused"), [("core-0.12.0", True), ("core-0.16.1", True), ("core-0.19.0", False)]
)
def test_scaled_positions_that_a_version_ignores_are_refused(version: str, refused: bool) -> None:
    job = tiny(
        "model.family=llama",
        'model.rope_scaling={type="linear",factor=4.0}',
        version=version,
    )
    assert any("ignores it" in each for each in refusals(job, version)) is refused


def test_what_has_no_effect_is_said() -> None:
    """Nothing of a job is dropped in silence."""
    job = tiny("checkpoint.keep_last=1", "checkpoint.keep_every=4", 'generate={prompt="x"}')
    notes = "\n".join(MegatronLm().notes(job))
    for key in ("checkpoint.keep_last", "checkpoint.keep_every", "generate"):
        assert f"{key} has no effect" in notes
    assert "no effect" not in "\n".join(MegatronLm().notes(tiny()))
