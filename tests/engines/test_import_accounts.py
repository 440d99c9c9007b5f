"""No option of another engine is lost by `import`: each becomes a key of the job, stays in
engine_args, is refused by its name, or is named in what was not taken."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from trainkit.base.errors import ConfigError
from trainkit.engines.gpt_neox.import_yaml import import_neox
from trainkit.engines.hydra_words import hydra_value
from trainkit.engines.imported import ImportedJob
from trainkit.engines.megatron_lm.import_script import import_megatron
from trainkit.engines.nemo.import_config import import_nemo
from trainkit.engines.neuronx_nemo.import_script import import_neuronx
from trainkit.engines.options import Option, OptionTable, load_table, tables_of

Values = Mapping[str, object]
Importer = Callable[[Path, OptionTable, Values], ImportedJob]
SHAPE = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64}
MEGATRON = {
    **{key.replace("_", "-"): value for key, value in SHAPE.items()},
    "global-batch-size": 8,
    "train-iters": 2000,
}
NEOX = {
    **SHAPE,
    "max_position_embeddings": 64,
    "train_iters": 2000,
    "train_micro_batch_size_per_gpu": 1,
    "vocab_file": "v.json",
    "merge_file": "m.txt",
    "data_path": "d",
}
NEMO = {
    "trainer.num_nodes": 2,
    "trainer.max_steps": 2000,
    "trainer.val_check_interval": 10,
    "trainer.limit_val_batches": 2,
    "trainer.limit_test_batches": 2,
    "trainer.precision": 32,
    "model.micro_batch_size": 2,
    "model.global_batch_size": 32,
    "model.tensor_model_parallel_size": 1,
    "model.pipeline_model_parallel_size": 1,
    "model.encoder_seq_length": 64,
    "model.max_position_embeddings": 64,
    "model.num_layers": 2,
    "model.hidden_size": 64,
    "model.num_attention_heads": 4,
    "model.optim.name": "adamw",
    "model.optim.betas": [0.9, 0.95],
    "model.optim.sched.name": "CosineAnnealing",
    "model.optim.sched.constant_steps": 0,
    "model.data.data_prefix": [1.0, "/d/a"],
}
# each as the engine has it, and what nothing of a job or a line changes with: the command of every
# job says the same, or another option of this configuration has said it already
LLAMA_MEGATRON = {
    "swiglu": True,
    "disable-bias-linear": True,
    "normalization": "RMSNorm",
    "position-embedding-type": "rope",
    "bf16": True,
}
LLAMA_NEOX = {
    "norm": "rmsnorm",
    "activation": "swiglu",
    "pos_emb": "rotary",
    "use_bias_in_norms": False,
    "use_bias_in_mlp": False,
    "use_bias_in_attn_linear": False,
    "precision": "bfloat16",
}
CASES: Mapping[str, tuple[str, Values, Values]] = {
    "megatron gpt": ("megatron-lm", {**MEGATRON, "fp16": True}, {}),
    "megatron llama": (
        "megatron-lm",
        {**MEGATRON, **LLAMA_MEGATRON},
        {"use-rotary-position-embeddings": True},
    ),
    "megatron experts": (
        "megatron-lm",
        {
            **MEGATRON,
            **LLAMA_MEGATRON,
            "num-experts": 64,
            "moe-router-num-groups": 4,
            "moe-router-group-topk": 2,
            "moe-aux-loss-coeff": 0.5,
            "moe-router-dtype": "fp64",
        },
        {"use-rotary-position-embeddings": True},
    ),
    "neox gpt": (
        "gpt-neox",
        {**NEOX, "precision": "fp16", "fp16": {"enabled": True}},
        {"data_impl": "mmap"},
    ),
    "neox llama": ("gpt-neox", {**NEOX, **LLAMA_NEOX}, {"data_impl": "mmap"}),
    "nemo fp32": (
        "nemo",
        NEMO,
        {
            "model.gradient_accumulation_fusion": True,
            "model.apply_query_key_layer_scaling": True,
            "model.transformer_engine": True,
            "model.megatron_amp_O2": False,
        },
    ),
    "nemo fp16": (
        "nemo",
        {**NEMO, "trainer.precision": 16, "model.optim.name": "distributed_fused_adam"},
        {
            "model.gradient_accumulation_fusion": True,
            "model.apply_query_key_layer_scaling": True,
            "model.transformer_engine": True,
            "model.megatron_amp_O2": True,
        },
    ),
    "neuronx": (
        "neuronx-nemo",
        {**NEMO, "model.megatron_amp_O2": False},
        {
            "exp_manager.create_checkpoint_callback": False,
            "exp_manager.resume_if_exists": False,
            "exp_manager.resume_ignore_no_checkpoint": False,
            "model.optim.capturable": True,
            "model.use_cpu_initialization": True,
        },
    ),
}


def read_megatron(folder: Path, table: OptionTable, values: Values) -> ImportedJob:
    words: list[str] = []
    for name, value in values.items():
        option = table.find(name) or Option(name, action="store_true" if value is True else "store")
        words += option.words(value) if option.action == "store" else [f"--{name}"]
    return import_megatron(f"torchrun pretrain_gpt.py {shlex.join(words)}\n", "x", table)


def read_neox(folder: Path, table: OptionTable, values: Values) -> ImportedJob:
    path = folder / "x.yml"
    path.write_text(json.dumps(values))
    return import_neox([path], "x", table.version)


def read_nemo(folder: Path, table: OptionTable, values: Values) -> ImportedJob:
    tree: dict[str, dict[str, object]] = {}
    for key, value in values.items():
        *above, last = key.split(".")
        place = tree
        for name in above:
            place = place.setdefault(name, {})  # type: ignore[assignment]
        place[last] = value  # type: ignore[assignment]
    path = folder / "x.yaml"
    path.write_text(json.dumps(tree))
    return import_nemo(path, [], "x", table.version)


def read_neuronx(folder: Path, table: OptionTable, values: Values) -> ImportedJob:
    words = shlex.join(f"{key}={hydra_value(value)}" for key, value in values.items())
    path = folder / "x.sh"
    path.write_text(f"torchrun megatron_gpt_pretraining.py {words}\n")
    return import_neuronx(path, ["SLURM_NNODES=2"], "x", table.version)


READ: Mapping[str, Importer] = {
    "megatron-lm": read_megatron,
    "gpt-neox": read_neox,
    "nemo": read_nemo,
    "neuronx-nemo": read_neuronx,
}


def other_values(option: Option) -> Iterator[object]:
    """Values that an option can have, and that are not its default."""
    usual = option.default
    number = usual if isinstance(usual, (int, float)) else 1
    if option.action != "store":
        values: list[object] = [True]
    elif option.choices is not None:
        values = [each for each in option.choices if each not in (usual, None, "")]
    else:
        of_kind = {
            "int": int(number) + 6,
            "float": number + 0.25,
            "bool": not usual,
            "list": ["elsewhere"],
            "dict": {"elsewhere": 1},
        }
        values = [of_kind.get(option.type.split("|")[0], "elsewhere")]
    for value in values:
        if option.nargs is None:
            yield value
        else:
            yield [value] * (option.nargs if isinstance(option.nargs, int) else 2)


def plain(text: str) -> str:
    return text.replace("-", "_").lower()


def is_accounted_for(before: ImportedJob, read: Callable[[], ImportedJob], name: str) -> bool:
    try:
        after = read()
    except ConfigError as error:
        return plain(name) in plain(str(error))
    named = set(after.not_taken) - set(before.not_taken)
    changed = replace(after, not_taken=()) != replace(before, not_taken=())
    return changed or any(plain(name) in plain(line) for line in named)


@pytest.mark.parametrize("case", CASES)
def test_each_option_of_each_table(tmp_path: Path, case: str) -> None:
    engine, base, implied = CASES[case]
    seen = set()
    lost = []
    for version in reversed(tables_of(engine)):
        table = load_table(engine, version)
        before = READ[engine](tmp_path, table, base)
        for name, option in table.options.items():
            if (name, json.dumps(option.to_json())) in seen:
                continue
            seen.add((name, json.dumps(option.to_json())))
            for value in other_values(option):
                values = {**base, name: value}
                if (name in base and base[name] == value) or implied.get(name) == value:
                    continue
                read = partial(READ[engine], tmp_path, table, values)
                if not is_accounted_for(before, read, name):
                    lost.append((version, name, value))
    assert len(seen) > 100 and not lost


def test_files_of_another_tokenizer_are_named(tmp_path: Path) -> None:
    """As of GPT-NeoX's own pythia configurations with local_setup.yml."""
    table = load_table("gpt-neox", "2.0.0")
    found = read_neox(tmp_path, table, {**NEOX, "tokenizer_type": "HFTokenizer"})
    assert found.tokenizer == {"type": "file", "path": "v.json"}
    assert any(line.startswith("merge_file = 'm.txt'") for line in found.not_taken)


@pytest.mark.parametrize(
    ("block", "given", "said"),
    [
        ("fp16", {"enabled": True, "type": "bfloat16"}, "fp16.type = 'bfloat16': bf16"),
        ("fp16", {"enabled": False, "loss_scale": 7}, "fp16 = {'loss_scale': 7}: the precision"),
        ("bf16", {"enabled": True, "other": 1}, "bf16 = {'other': 1}"),
        ("bf16", {"enabled": True, "immediate": 1}, "bf16"),
        ("optimizer", {"params": {"lr": 0.1, "other": 1}}, "optimizer"),
        ("zero_optimization", {"stage": 1, "other": 1}, "zero_optimization"),
        ("data_types", {"grad_accum_dtype": "fp16"}, "data_types"),
    ],
)
def test_each_key_of_deepspeeds_tables(
    tmp_path: Path, block: str, given: Values, said: str
) -> None:
    """It stays in engine_args, or is named; a block that is on decides the precision."""
    table = load_table("gpt-neox", "2.0.0")
    base = {**NEOX, "precision": "bfloat16"} if block == "data_types" else NEOX
    found = read_neox(tmp_path, table, {**base, block: given})
    kept = f"{block} = {found.engine_args.get(block)}"
    assert said in kept or any(line.startswith(said) for line in found.not_taken)
    bf16 = given.get("enabled") or block == "data_types"
    assert found.training["precision"] == ("bf16" if bf16 else "fp32")
