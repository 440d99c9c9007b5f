"""GPT-NeoX's files as jobs, and jobs as its files and back."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.engines.gpt_neox.neox_words import rank_words
from tests.engines.real import RealEngine, parameters
from trainkit.base.errors import ConfigError
from trainkit.engines.gpt_neox.arguments import Values, both_configurations, decode, encode, resolve
from trainkit.engines.gpt_neox.config import NeoxData, neox_config, yaml_text
from trainkit.engines.gpt_neox.engine import GptNeox
from trainkit.engines.gpt_neox.import_yaml import import_neox
from trainkit.engines.hydra_config import read_config
from trainkit.engines.imported import ImportRequest
from trainkit.jobs.load import Jobs, load
from trainkit.jobs.schema import Job
from trainkit.runs.folder import RunFolder

ROOT = Path(__file__).resolve().parents[3]
RUN = RunFolder(Path("/fs/runs/job/run-1"))
DATA = NeoxData("/data/pile_text_document", "995,4,1", {})
PLACE = """
[engines.gpt-neox]
source = "https://github.com/EleutherAI/gpt-neox"
revision = "ea7aefd"

[clusters.there]
launcher = "pdsh"
device = "a100-sxm-40gb"
gpus_per_node = {ranks}

[defaults]
job = "taken"
"""


@pytest.fixture(scope="module")
def jobs() -> Jobs:
    return load(ROOT, environ={})


def job_of(folder: Path, files: Sequence[Path], ranks: int) -> tuple[Job, tuple[str, ...]]:
    """The job that files become, in a jobs.toml of its own; and what was not taken."""
    imported = import_neox(files, "taken")
    folder.mkdir(exist_ok=True)
    (folder / "jobs.toml").write_text(PLACE.format(ranks=ranks) + imported.to_toml())
    sets = ["cluster=there"]
    job = load(folder, environ={}).resolve("taken", sets).job
    return job, imported.not_taken


REFERENCES = ["gpt-neox-20b", "gpt-neox-20b-lambda", "gpt-neox-9b-lambda", "gpt-neox-2-7b"]
ROUND: Sequence[tuple[str, Sequence[str]]] = [
    *((name, ()) for name in REFERENCES),
    ("gpt-neox-20b-lambda", ("model.gpt_j_tied=true",)),
    ("gpt-neox-2-7b", ("training.precision=bf16", "parallelism.zero_stage=2")),
    ("gpt-neox-2-7b", ("training.precision=fp32", "parallelism.zero_stage=0")),
    ("gpt-neox-2-7b", ("training.loss_scale=1024.0", "training.eod_mask_loss=true")),
    ("gpt-neox-2-7b", ("training.recompute_granularity=none", "checkpoint.save_first=true")),
    ("gpt-neox-2-7b", ("engine_args.pipe_parallel_size=0", "wandb.project=neox")),
    ("gpt-neox-2-7b", ('engine_args.optimizer={type="OneBitAdam",params={freeze_step=4}}',)),
    ("demo-neox", ("training.lr_decay_style=constant",)),
    ("demo", ()),
    ("demo-llama", ()),
]


@pytest.mark.parametrize(("name", "sets"), ROUND)
def test_what_a_job_writes_becomes_the_job_again(
    tmp_path: Path, jobs: Jobs, name: str, sets: Sequence[str]
) -> None:
    before = jobs.resolve(name, ["engine=gpt-neox", *sets]).job
    words = neox_config(before, RUN, DATA)
    (tmp_path / "one.yml").write_text(yaml_text(words))
    after, left = job_of(tmp_path / "project", [tmp_path / "one.yml"], before.world_size)
    assert {line.partition(" = ")[0] for line in left} == {
        "global_num_gpus",
        "save",
        "tensorboard_dir",
    }
    again = neox_config(after, RUN, DATA)
    cluster = {"distributed_backend", "global_num_gpus"}  # the job's new cluster has GPUs
    assert {k: v for k, v in again.items() if k not in cluster} == {
        k: v for k, v in words.items() if k not in cluster
    }
    assert after.dataset.prefixes == ("/data/pile_text_document",)
    assert after.dataset.split == "995,4,1"


def test_the_published_form_is_read(tmp_path: Path) -> None:
    """JSON-like braces with a last comma, True beside true, dashes, comments; two files."""
    (tmp_path / "model.yml").write_text("""
    # GPT-2 pretraining setup
    {
      "pipe-parallel-size": 1,
      "model-parallel-size": 2,
      "num-layers": 12, "hidden-size": 768, "num-attention-heads": 12,
      "seq-length": 2048, "max-position-embeddings": 2048,
      "norm": "layernorm", "pos-emb": "rotary", "no-weight-tying": true,
      "optimizer": {"type": "Adam", "params": {"lr": 0.0006, "betas": [0.9, 0.95], "eps": 1e-8}},
      "zero_optimization": {"stage": 1, "overlap_comm": True, "contiguous_gradients": True},
      "train_micro_batch_size_per_gpu": 4,
      "fp16": {"enabled": true, "fp16": true, "loss_scale": 0, "loss_scale_window": 1000},
      "train-iters": 320000, "lr-decay-iters": 320000, "lr-decay-style": "cosine",
      "checkpoint-factor": 10000, "log-interval": 100, "wall_clock_breakdown": true,
    }
    """)
    (tmp_path / "local_setup.yml").write_text("""
    {
      "data-path": "data/enron/enron_text_document",
      "vocab-file": "data/gpt2-vocab.json", "merge-file": "data/gpt2-merges.txt",
      "save": "checkpoints", "load": "checkpoints",
      "tensorboard-dir": "tensorboard", "log-dir": "logs",
      "use_wandb": True, "wandb_host": "https://api.wandb.ai", "wandb_project": "neox",
      "num-workerz": 3, "momentum-of-loss": 1,
    }
    """)
    job, left = job_of(
        tmp_path / "project", [tmp_path / "model.yml", tmp_path / "local_setup.yml"], 8
    )
    assert job.model.family == "gpt-neox" and job.model.rotary_percent == 1.0
    assert job.model.gpt_j_residual is False and job.model.untied
    assert job.parallelism.tensor_model_parallel_size == 2
    assert job.training.initial_loss_scale == 2.0**16  # DeepSpeed's default
    assert (job.training.adam_eps, job.training.weight_decay) == (1e-8, 0.1)
    assert (job.training.eval_iters, job.training.eval_interval) == (100, 1000)
    assert job.checkpoint.keep_last == 33  # all of them: 32 and one more
    assert job.wandb and job.wandb.project == "neox"  # trap 9
    assert job.engine_args == {"wall_clock_breakdown": True}
    said = "\n".join(left)
    assert "num_workerz = 3: gpt-neox 2.0.0 has no such option" in said and "num_workers" in said
    (line,) = [line for line in left if line.startswith("momentum_of_loss = 1: ")]
    assert "the nearest of " in line and line.count(",") == 2, "three of hundreds"
    assert "save = 'checkpoints': a run keeps its checkpoints in its own folder" in said


def test_a_script_names_its_files(tmp_path: Path) -> None:
    """As deepy.py reads them: below -d, with or without their ending."""
    (tmp_path / "configs").mkdir()
    model = "num_layers: 2\nhidden_size: 64\nnum_attention_heads: 4\nseq_length: 64\n"
    model += "max_position_embeddings: 64\ntrain_iters: 10\nlr_decay_iters: 10\n"
    (tmp_path / "configs" / "19M.yml").write_text(model)
    (tmp_path / "configs" / "local.yml").write_text("log_interval: 7\n")
    script = tmp_path / "scripts" / "run.sh"
    script.parent.mkdir()
    script.write_text(
        "export WANDB_API_KEY=abc\nSIZE=${SIZE:-2B}\n"
        "python ./deepy.py train.py -d configs $SIZE local.yml\n"
    )
    assert GptNeox().is_its_file(script, script.read_text())
    found = GptNeox().import_job(ImportRequest((script,), ("SIZE=19M",)))
    assert found.name == "run" and found.model["num_layers"] == 2
    assert found.training["log_interval"] == 7
    assert "abc" not in found.to_toml()
    with pytest.raises(ConfigError, match=r"configs/2B\.yml, configs/local\.yml, which are not"):
        GptNeox().import_job(ImportRequest((script,)))
    script.write_text("deepspeed train.py\n")
    with pytest.raises(ConfigError, match=r"runs deepy\.py"):
        GptNeox().import_job(ImportRequest((script,)))


def test_flash_attention_is_written_layer_by_layer(tmp_path: Path) -> None:
    path = tmp_path / "flash.yml"
    path.write_text(MINIMAL.replace("}", ', "attention_config": [[["flash", "global"], 1]]}'))
    job, _ = job_of(tmp_path / "project", [path], 1)
    assert job.engine_args["attention_config"] == ["flash", "global"]


def test_a_micro_batch_that_is_not_given_is_one_and_said_to_be(tmp_path: Path) -> None:
    path = tmp_path / "bare.yml"
    path.write_text(MINIMAL.replace(' "train_micro_batch_size_per_gpu": 1,', ""))
    job, left = job_of(tmp_path / "project", [path], 1)
    assert job.training.micro_batch_size == 1
    assert any("micro_batch_size = 1 stands for it" in line for line in left)


MINIMAL = (
    '{"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64,'
    ' "max_position_embeddings": 64, "train_iters": 10, "train_micro_batch_size_per_gpu": 1,'
    ' "vocab_file": "v.json", "merge_file": "m.txt", "data_path": "d"}'
)
BAD: Sequence[tuple[str, str]] = [
    ("{", "is not YAML"),
    ("[1, 2]", "is not a table of names"),
    ('{"train_iters": 3}', "no num_layers"),
    (MINIMAL.replace('"train_iters"', '"train_epochs"'), "give no train_iters"),
    (MINIMAL.replace("}", ', "norm": "scalenorm"}'), "no family of models has norm"),
    (MINIMAL.replace("}", ', "precision": "fp8"}'), "precision = 'fp8' is none of"),
    (MINIMAL.replace("}", ', "optimizer": 3}'), "optimizer = 3: a table is needed"),
    (MINIMAL.replace("}", ', "min_lr": "low"}'), "min_lr = 'low': a number is needed"),
    (MINIMAL.replace("}", ', "min_lr": .nan}'), "min_lr = nan: a number is needed"),
    (MINIMAL.replace("}", ', "min_lr": 0, "num_layers": 3}'), "has num_layers twice in one table"),
    *(
        (MINIMAL.replace("}", f', "optimizer": {{"params": {params}}}}}'), f"optimizer.{said}")
        for params, said in [
            ("[1]", r"params = \[1\]: a table"),
            ("{lr: null}", "params.lr = None: a number"),
            ("{eps: x}", "params.eps = 'x': a number"),
            ("{betas: [0.9]}", r"params.betas = \[0.9\]: two numbers"),
            ("{betas: [a, b]}", "params.betas = 'a': a number"),
        ]
    ),
    (MINIMAL.replace("}", ', "fp16": {enabled: true, hysteresis: x}}'), "fp16.hysteresis = 'x'"),
    *(
        (MINIMAL.replace("}", f', "attention_config": [{part}]}}'), "and the model has 2")
        for part in ("5", "[[global], x]", "[[], all]", "[[global], 99999999999]")
    ),
]


def test_a_date_is_a_text(tmp_path: Path) -> None:
    """As a group of W&B may be called."""
    path = tmp_path / "dated.yml"
    path.write_text(MINIMAL.replace("}", ', "use_wandb": true, "wandb_group": 2024-01-31}'))
    assert import_neox([path], "x").job["wandb"] == {"project": "neox", "group": "2024-01-31"}


@pytest.mark.parametrize(("text", "said"), BAD)
def test_what_is_no_job_is_said(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.yml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        import_neox([path], "taken")


def test_a_key_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("a.yml", "b.yml"):
        (tmp_path / name).write_text(MINIMAL)
    with pytest.raises(ConfigError, match=r"b\.yml: num_layers is in .*a\.yml too"):
        import_neox([tmp_path / "a.yml", tmp_path / "b.yml"], "taken")


# ---- beside GPT-NeoX's own code, where a tree is named

PROGRAM = """
import json, sys
from megatron.neox_arguments import NeoXArgs

def told(case):
    if "words" in case:
        args = NeoXArgs.consume_neox_args(input_args=case["words"])
        return args.all_config
    args = NeoXArgs.from_ymls(case["files"], overwrite_values=case["values"])
    return args.get_deepspeed_main_args()

found = []
for case in json.load(sys.stdin):
    try:
        found.append(told(case))
    except (Exception, SystemExit) as error:
        found.append(f"{type(error).__name__}: {error}")
print("FOUND" + json.dumps(found, default=str))
"""


def ask(real: RealEngine, folder: Path, cases: Sequence[Mapping[str, object]]) -> list[object]:
    """What GPT-NeoX's own NeoXArgs makes of each case."""
    environment = {**os.environ, **real.environment}
    environment["PYTHONPATH"] = f"{real.tree}{os.pathsep}{environment['PYTHONPATH']}"
    done = subprocess.run(
        [real.python, "-c", PROGRAM],
        input=json.dumps(cases),
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    found: list[object] = json.loads(line.removeprefix("FOUND"))
    return found


def stock_files(tree: Path) -> list[list[Path]]:
    """Each configuration of the tree, alone and with the local setup."""
    alone = sorted((tree / "configs").rglob("*.yml"))
    local = tree / "configs" / "local_setup.yml"
    return [[path] for path in alone] + [[path, local] for path in alone if path.stat().st_size]


@pytest.mark.slow
@pytest.mark.parametrize("real", parameters("gpt-neox"))
def test_the_encoded_words_are_those_of_its_own_launcher(
    tmp_path: Path, jobs: Jobs, real: RealEngine
) -> None:
    table = GptNeox().known_table(jobs.resolve("gpt-neox-20b", ["engine=gpt-neox"]).job)
    everything = stock_files(real.tree)
    values = {"global_num_gpus": 96, "user_script": "train.py"}
    cases = [{"files": [str(path) for path in files], "values": values} for files in everything]
    equal = 0
    for files, told in zip(everything, ask(real, tmp_path, cases), strict=True):
        if isinstance(told, str):
            continue  # it refuses them itself: fragments, packages that are not here
        assert isinstance(told, list)
        config: dict[str, object] = {"global_num_gpus": 96}
        for path in files:
            config |= {key.replace("-", "_"): each for key, each in read_config(path).items()}
        texts = {path.name: path.read_text() for path in files}
        assert both_configurations(config, table, texts) == (decode(told[-3]), decode(told[-1]))
        equal += 1
    assert equal >= 20


# Of the 20B's and the 2.7B's published files, and why ours are otherwise.
OURS_DIFFER: Mapping[str, str] = {
    "config_files": "the text of our file",
    "data_path": "below the run's root",
    "vocab_file": "below the run's root",
    "merge_file": "below the run's root",
    "save": "the run's folder",
    "load": "the run's folder",
    "tensorboard_dir": "the run's folder",
    "log_dir": "our agents keep what each rank prints",
    "split": "without spaces",
    "use_wandb": "not given, it reports wherever it finds a key (trap 9)",
    "keep_last_n_checkpoints": "the published run keeps every one of its 268 GiB",
    "fp16": 'the file has a key "fp16" that DeepSpeed does not read; 2-7B leaves the first scale',
    "attention_dropout": "0 and 0.0",
    "hidden_dropout": "0 and 0.0",
}


@pytest.mark.slow
@pytest.mark.parametrize("real", parameters("gpt-neox"))
def test_its_own_code_resolves_our_words_to_the_stock_values(
    tmp_path: Path, jobs: Jobs, real: RealEngine
) -> None:
    """NeoXArgs.consume_neox_args of ours beside that of what its launcher makes of the file."""
    configs = real.tree / "configs"
    pairs = [
        ("gpt-neox-20b", 96, [configs / "20B.yml"]),
        ("gpt-neox-2-7b", 8, [configs / "2-7B.yml", configs / "local_setup.yml"]),
    ]
    stock = ask(
        real,
        tmp_path,
        [
            {
                "files": [str(path) for path in files],
                "values": {"global_num_gpus": ranks, "user_script": "train.py"},
            }
            for _, ranks, files in pairs
        ],
    )
    commands: list[Mapping[str, object]] = []
    for (name, _, _), words in zip(pairs, stock, strict=True):
        assert isinstance(words, list)
        job = jobs.resolve(name, ["engine=gpt-neox"]).job
        deepspeed, megatron = rank_words(job, RUN)
        commands.append({"words": words[1:]})
        commands.append(
            {
                "words": [
                    "--deepspeed_config",
                    encode(deepspeed),
                    "--megatron_config",
                    encode(megatron),
                ]
            }
        )
    told = ask(real, tmp_path, commands)
    for theirs, ours in zip(told[::2], told[1::2], strict=True):
        assert isinstance(theirs, dict) and isinstance(ours, dict)
        differ = {key for key in theirs if theirs[key] != ours[key]}
        assert differ <= set(OURS_DIFFER), {key: (theirs[key], ours[key]) for key in differ}


@pytest.mark.slow
@pytest.mark.parametrize("real", parameters("gpt-neox"))
def test_its_stock_files_become_jobs_that_say_the_same(tmp_path: Path, real: RealEngine) -> None:
    setup = real.tree / "configs" / "local_setup.yml"
    taken = 0
    for path in sorted((real.tree / "configs").rglob("*.yml")):
        files = [path, setup]
        if "data_path" in path.read_text() or "data-path" in path.read_text():
            files = [path]
        try:
            job, left = job_of(tmp_path / path.stem, files, 96)
        except ConfigError as error:
            assert any(said in str(error) for said in NO_JOBS), f"{path}: {error}"
            continue
        config: dict[str, object] = {"global_num_gpus": 96}
        for each in files:
            config |= {key.replace("-", "_"): value for key, value in read_config(each).items()}
        table = GptNeox().known_table(job)
        defaults = {option.name: option.default for option in table.options.values()}
        theirs = resolve(config, defaults)
        ours = resolve(neox_config(job, RUN, DATA), defaults)
        named = {line.partition(" = ")[0] for line in left}
        assert differing(theirs, ours) <= named | IMPORT_DIFFERS, path
        taken += 1
    assert taken >= 20


NO_JOBS = (
    "no num_layers",
    "no family",
    "give no train_iters",
    "missing key 'dataset'",
    "needs tokenizer",
    "is in",
)
IMPORT_DIFFERS = {
    *("save", "load", "tensorboard_dir"),  # the run's own
    *("data_path", "split"),  # DATA
    *("train_data_paths", "train_data_weights", "valid_data_paths", "valid_data_weights"),
    *("test_data_paths", "test_data_weights"),
    *("vocab_file", "merge_file"),  # absolute below jobs.toml
    "use_wandb",  # false where the file is silent
    "keep_last_n_checkpoints",  # as many as there will be
    "fp16",  # DeepSpeed's defaults in words, a key that it does not read left out
    *("bf16", "deepspeed_extra_args", "data_types"),  # the same said in DeepSpeed's own block
}


def differing(theirs: Values, ours: Values) -> set[str]:
    return {key for key in theirs if theirs[key] != ours.get(key)}
