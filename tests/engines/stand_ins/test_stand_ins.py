"""The stand-ins refuse what the engines refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.engines.stand_ins import neuron_program
from tests.engines.stand_ins.hydra_command import Refused, compose, read_value
from tests.engines.stand_ins.lightning_trainer import checkpoint_name, choose_cluster
from tests.engines.stand_ins.training import found_checkpoint
from tests.engines.stand_ins.trees import NEURON_PLACE, PLACE, SCRIPT, make_nemo, make_neuron

CONF = """
run: {name: gpt3_tiny, results_dir: '/r/${.name}'}
lr: 1e-5
when: 2022-10-14
model:
  hidden_size: 8
  ffn_hidden_size: ${multiply:4, ${.hidden_size}}
  a: {b: '${..hidden_size}'}
top: ${model.a.b}
needed: ???
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    tree = make_nemo(tmp_path / "nemo", "1.12")
    (tree / PLACE / "conf" / "tiny.yaml").write_text(CONF)
    return tree / PLACE / SCRIPT


def composed(script: Path, *words: str) -> dict[str, Any]:
    return compose(["--config-path=conf", "--config-name=tiny", *words], script)


def test_a_configuration_is_composed_as_hydra_does(script: Path) -> None:
    found = composed(script, "model.hidden_size=16", "+model.new=[1.0,/a/b]", "~needed")
    assert found["run"]["results_dir"] == "/r/gpt3_tiny"
    assert found["lr"] == 1e-5 and found["when"] == "2022-10-14"
    assert found["model"] == {
        "hidden_size": 16,
        "ffn_hidden_size": 64,
        "a": {"b": 16},
        "new": [1.0, "/a/b"],
    }
    assert found["top"] == 16 and "needed" not in found


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("model.unknown=1", "'unknown' is not in struct"),
        ("trainer.devices=1", "'trainer' is not in struct"),
        ("+model.hidden_size=4", "An item is already at"),
        ("~model.unknown", "does not exist"),
        ("model.hidden_size", "no KEY=VALUE"),
        ("model.hidden_size=4,8", "a sweep"),
        ("model.hidden_size=[4", "missing|mismatched"),
        ("lr=a=b", "token recognition|mismatched"),
        ("lr='a", "token recognition"),
        ("lr=${no.such}", "not found"),
        ("--unknown=1", "unrecognized arguments"),
        ("--config-name=other", "Cannot find primary config"),
    ],
)
def test_what_hydra_refuses(script: Path, word: str, said: str) -> None:
    with pytest.raises(Refused, match=said):
        composed(script, word)


VALUES = [
    "1", "-7", "1.0", "6e-4", "1.0e-5", ".5", "true", "False", "null", "NULL", "abc", "a/b-c.d",
    "00:23:30:00", "6:11:00:00", "[0.9,0.95]", "[1.0,/a/b,2.0,/c]", "[]", "'a b'", '"a,b"', "a b",
    r"'it\'s'", r"a\=b", r"a\,b", "{a:1,b:[x,y]}", "bf16", "0x1", "1_000", "007", "inf",
    "[null,true,'x']", "980,10,10", "'980,10,10'", "a=b", "[1", "x]", "", "(1)", "a:b", "$x", "50%",
    "'--model-type transformer --x=1'", "~/a", "a;b", "a#b", "!x", "<x>", "[1,]",
]  # fmt: skip


def test_values_are_those_of_hydra() -> None:
    """Where hydra is installed: nothing that it refuses is taken, and what is taken is the same."""
    parser = pytest.importorskip("hydra.core.override_parser.overrides_parser")
    errors = pytest.importorskip("hydra.errors")
    for text in VALUES:
        try:
            (found,) = parser.OverridesParser.create().parse_overrides([f"key={text}"])
            expected = "sweep" if found.is_sweep_override() else found.value()
        except errors.HydraException:
            expected = "refused"
        try:
            ours = read_value(text)
        except Refused:
            continue
        assert (ours, type(ours)) == (expected, type(expected)), text


SLURM = {
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODELIST": "node[1,3]",
    "SLURM_JOB_ID": "123456",
}
TORCH = {
    "RANK": "1",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
ELASTIC = {**TORCH, "TORCHELASTIC_RUN_ID": "x"}


@pytest.mark.parametrize(
    ("variables", "version", "name", "place"),
    [
        (SLURM, "1.7.7", "SLURM", ("node1", 18456)),
        ({**SLURM, **ELASTIC}, "1.7.7", "SLURM", ("node1", 29500)),
        ({**SLURM, **ELASTIC}, "2.4.0", "TorchElastic", ("10.0.0.1", 29500)),
        ({**SLURM, **TORCH}, "2.4.0", "SLURM", ("10.0.0.1", 29500)),
        ({**SLURM, **ELASTIC, "SLURM_NTASKS": "1"}, "1.7.7", "TorchElastic", ("10.0.0.1", 29500)),
        ({**SLURM, **TORCH, "SLURM_JOB_NAME": "bash"}, "1.8.6", "Lightning", ("10.0.0.1", 29500)),
        (ELASTIC, "1.7.7", "TorchElastic", ("10.0.0.1", 29500)),
    ],
)
def test_the_cluster_that_pytorch_lightning_chooses(
    variables: dict[str, str], version: str, name: str, place: tuple[str, int]
) -> None:
    trainer = {"devices": 1, "num_nodes": 2}
    found = choose_cluster(variables, version, trainer)
    assert found.name == f"{name}Environment" and (found.address, found.port) == place
    assert (found.rank, found.world_size) == (1, 2)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "without LOCAL_RANK"),
        ({**ELASTIC, "WORLD_SIZE": "4"}, "wait for ever"),
        ({**ELASTIC, "RANK": "2"}, "wait for ever"),
        ({**ELASTIC, "LOCAL_RANK": "1"}, "is not local rank"),
        ({"TORCHELASTIC_RUN_ID": "x", "RANK": "0"}, "KeyError"),
    ],
)
def test_an_environment_that_would_wait_for_ever(variables: dict[str, str], said: str) -> None:
    with pytest.raises(Refused, match=said):
        choose_cluster(variables, "1.7.7", {"devices": 1, "num_nodes": 2})


def test_names_of_checkpoints() -> None:
    metrics = {"val_loss": 10.978, "step": 2, "consumed_samples": 16.0}
    template = "megatron_gpt--{val_loss:.2f}-{step}-{consumed_samples}"
    name = "megatron_gpt--val_loss=10.98-step=2-consumed_samples=16.0.ckpt"
    assert checkpoint_name(template, metrics) == name


def test_a_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    manager = {"resume_if_exists": True, "resume_ignore_no_checkpoint": True}
    assert found_checkpoint(tmp_path, manager, "file") is None
    with pytest.raises(Refused, match="no checkpoints found"):
        found_checkpoint(tmp_path, {"resume_if_exists": True}, "file")
    for rank in ("tp_rank_00_pp_rank_000", "tp_rank_00_pp_rank_001"):
        (tmp_path / rank).mkdir()
        (tmp_path / rank / "m--step=2-last.ckpt").touch()
    assert found_checkpoint(tmp_path, manager, "file") == tmp_path / "m--step=2-last.ckpt"
    (tmp_path / "m--step=3-last").mkdir()
    (tmp_path / "m--step=3-last-unfinished").touch()
    with pytest.raises(Refused, match="unfinished"):
        found_checkpoint(tmp_path, manager, "distributed")
    (tmp_path / "m--end.ckpt").touch()
    with pytest.raises(Refused, match="already completed"):
        found_checkpoint(tmp_path, manager, "file")


# test.sh and train_setup.sh at f4743ce, with the sizes of a test
PUBLISHED = """
--config-path=conf --config-name=megatron_gpt_config trainer.devices=1 trainer.num_nodes=2
trainer.max_epochs=null trainer.max_steps=3 trainer.val_check_interval=4 trainer.log_every_n_steps=1
trainer.limit_val_batches=1 trainer.limit_test_batches=1 trainer.accumulate_grad_batches=1
trainer.precision=32 model.megatron_amp_O2=false model.micro_batch_size=1 model.global_batch_size=8
model.tensor_model_parallel_size=1 model.pipeline_model_parallel_size=2
model.max_position_embeddings=16 model.encoder_seq_length=16 model.hidden_size=32
model.ffn_hidden_size=128 model.num_layers=2 model.num_attention_heads=2 model.init_method_std=0.021
model.hidden_dropout=0.1 model.layernorm_epsilon=1e-5 model.tokenizer.vocab_file=HERE/vocab.json
model.tokenizer.merge_file=HERE/merges.txt model.data.data_prefix=[1.0,HERE/text_document]
model.data.num_workers=1 model.data.seq_length=16 model.optim.name=adamw model.optim.capturable=True
model.optim.lr=0.00015 model.optim.betas=[0.9,0.95] model.optim.weight_decay=0.01
model.optim.sched.name=CosineAnnealing model.optim.sched.warmup_steps=750
model.optim.sched.constant_steps=80000 model.optim.sched.min_lr=1.0e-5 model.sequence_parallel=True
model.activations_checkpoint_granularity=selective model.activations_checkpoint_method=uniform
model.activations_checkpoint_num_layers=1 model.wrap_with_zero=false
model.zero_use_master_weight=false +model.save_xser=True +model.load_xser=True
exp_manager.create_tensorboard_logger=True exp_manager.resume_if_exists=False
exp_manager.resume_ignore_no_checkpoint=False exp_manager.create_checkpoint_callback=True
exp_manager.explicit_log_dir=null +exp_manager.checkpoint_callback_params.train_time_interval=3600
model.use_cpu_initialization=True
"""


@pytest.fixture
def neuron(tmp_path: Path) -> Path:
    tree = make_neuron(tmp_path / "tree")
    for name in ("vocab.json", "merges.txt", "text_document.bin", "text_document.idx"):
        (tmp_path / name).touch()
    return tree / NEURON_PLACE / SCRIPT


def neuron_words(neuron: Path) -> list[str]:
    return PUBLISHED.replace("HERE", str(neuron.parents[5])).split()


def neuron_variables() -> dict[str, str]:
    fixed = {name: value or "/cache" for name, value in neuron_program.VARIABLES["head"].items()}
    fixed["NEURON_TRANSFER_WITH_STATIC_RING_OPS"] = ""
    return {**ELASTIC, "MASTER_PORT": "41000", "LOCAL_WORLD_SIZE": "1", **fixed}


def test_the_published_command_of_neuron_is_taken(neuron: Path) -> None:
    variables = neuron_variables()
    found = neuron_program.check(neuron_words(neuron), variables, neuron, "head")
    assert found.config["model"]["save_xser"] is True
    assert found.config["exp_manager"]["checkpoint_callback_params"]["model_parallel_size"] == 2
    assert found.layout.folder == "tp_rank_00_pp_rank_001"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("+model.save_xser=True", "model.save_xser=True", "'save_xser' is not in struct"),
        ("trainer.devices=1", "trainer.devices=4", "trainer.devices=4"),
        ("trainer.devices=1", "trainer.devices=2", "--nproc_per_node 1 for 2"),
        ("trainer.num_nodes=2", "trainer.num_nodes=3", "wait for ever"),
        ("trainer.max_steps=3", "trainer.max_steps=3trainer.x=1", "mismatched input '='"),
        ("micro_batch_size=1", "micro_batch_size=3", "is not divisible by 3"),
        ("model.num_layers=2", "model.num_layers=3", "is not divisible by 2"),
        ("encoder_seq_length=16", "encoder_seq_length=32", "beyond max_position"),
        ("text_document]", "no_document]", "FileNotFoundError"),
        ("model.data.data_prefix=", "+model.data.other=", "MissingMandatoryValue"),
        ("train_time_interval", "interval", "not in 'CallbackParams'"),
        ("min_lr=1.0e-5", "min_lr=1.0", "lower than the minimum"),
        ("trainer.precision=32", "trainer.precision=fp32", "precision must be"),
    ],
)
def test_a_command_of_neuron_that_is_changed(neuron: Path, old: str, new: str, said: str) -> None:
    words = [word.replace(old, new) for word in neuron_words(neuron)]
    assert words != neuron_words(neuron)
    with pytest.raises(Refused, match=said):
        neuron_program.check(words, neuron_variables(), neuron, "head")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MASTER_PORT", "29500"),
        ("TORCHELASTIC_RUN_ID", None),
        ("NEURON_RT_EXEC_TIMEOUT", "10"),
        ("NEURON_TRANSFER_WITH_STATIC_RING_OPS", None),
        ("NEURON_COMPILE_CACHE_URL", None),
        ("XLA_USE_BF16", None),
        ("LOCAL_WORLD_SIZE", "32"),
    ],
)
def test_an_environment_of_neuron_that_is_changed(
    neuron: Path, name: str, value: str | None
) -> None:
    variables = neuron_variables()
    del variables[name]
    if value is not None:
        variables[name] = value
    with pytest.raises(Refused):
        neuron_program.check(neuron_words(neuron), variables, neuron, "head")


def test_its_configuration_has_what_trainkit_knows_of_it() -> None:
    """Two lists of the same keys, each from the published file."""
    from trainkit.engines.options import load_table

    conf = Path(neuron_program.__file__).parent / "conf" / "neuronx_nemo.yaml"
    keys = set(_leaves("", yaml.safe_load(conf.read_text())))
    known = set(load_table("neuronx-nemo", "2.21").options)
    assert keys <= known
    assert not [key for key in known - keys if "_ds" not in key]


def _leaves(path: str, value: object) -> list[str]:
    if isinstance(value, dict) and value:
        return [leaf for key in value for leaf in _leaves(f"{path}.{key}".lstrip("."), value[key])]
    return [path]
