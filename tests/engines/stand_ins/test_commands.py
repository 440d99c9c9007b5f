"""The commands that trainkit makes of a job are taken by the stand-ins, and refused as soon as a
word of them is another."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.engines.stand_ins import nemo_program, neuron_program
from tests.engines.stand_ins.hydra_command import Refused
from tests.engines.stand_ins.jobs import tables, write_data
from tests.engines.stand_ins.nemo_program import Checked
from tests.engines.stand_ins.test_stand_ins import ELASTIC
from tests.engines.stand_ins.trees import NEURON_PLACE, PLACE, SCRIPT, make_nemo, make_neuron
from trainkit.engines.contract import Engine
from trainkit.engines.nemo.engine import Nemo
from trainkit.engines.neuronx_nemo.engine import NeuronxNemo
from trainkit.jobs.load import load
from trainkit.runs.folder import RunFolder

CLUSTER = """
[clusters.pair]
launcher = "ssh"
hostfile = "hostfile"
ranks_per_node = 1
root = "{folder}"
env = {{ NEURON_COMPILE_CACHE_URL = "/cache" }}
"""
ENGINES: dict[str, Engine] = {"nemo": Nemo(), "neuronx-nemo": NeuronxNemo()}
RELEASES = {"1.12": "22.09", "2.1": "24.12"}


@dataclass
class Made:
    """A command, and who checks it.

    Args:
        words: behind the script.
        variables: of its process.
        script: of the tree.
        version: of the stand-in.
        config: the composed configuration, where the command has a file of it.
    """

    words: list[str]
    variables: dict[str, str]
    script: Path
    version: str
    config: Path | None

    def check(self) -> Checked:
        if self.script.parent.parts[-4] == "nemo":
            return neuron_program.check(self.words, self.variables, self.script, self.version)
        return nemo_program.check(self.words, self.variables, self.script, self.version)


def made(folder: Path, engine: str, version: str) -> Made:
    """What trainkit makes of the job `stand-in`."""
    write_data(folder)
    (folder / "hostfile").write_text("a slots=1\nb slots=1\n")
    if engine == "nemo":
        tree = make_nemo(folder / "tree", version)
        script = tree / PLACE / SCRIPT
        said = f'version = "{RELEASES[version]}"\n'
    else:
        tree = make_neuron(folder / "tree", version)
        script = tree / NEURON_PLACE / SCRIPT
        said = ""
    source = f'[engines.{engine}]\nsource = "{tree}"\npython = "{sys.executable}"\n{said}'
    text = CLUSTER.format(folder=folder) + source + tables(folder, engine, "pair")
    (folder / "jobs.toml").write_text(text)
    job = load(folder, environ={}).resolve("stand-in").job
    run = RunFolder(folder / "run")
    command = ENGINES[engine].command(job, run, 1)
    for name, content in command.files.items():
        path = run.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    spec = json.loads((run.path / "launch" / "engine-rank-1.json").read_text())
    at = next(i for i, word in enumerate(spec["argv"]) if word.endswith(SCRIPT))
    variables = {**ELASTIC, "LOCAL_WORLD_SIZE": "1", **command.env}
    if command.port:
        variables["MASTER_PORT"] = str(command.port)
    config = next(iter((run.path / "launch").glob("*_hydra.yaml")), None)
    return Made(spec["argv"][at + 1 :], variables, script, version, config)


@pytest.mark.parametrize(
    ("engine", "version"),
    [("nemo", "1.12"), ("nemo", "2.1"), ("neuronx-nemo", "head"), ("neuronx-nemo", "2.13.1")],
)
def test_the_command_is_taken(tmp_path: Path, engine: str, version: str) -> None:
    found = made(tmp_path, engine, version).check()
    assert found.config["trainer"]["max_steps"] == 3
    assert found.cluster.name == "TorchElasticEnvironment"
    assert found.layout.folder == "tp_rank_00_pp_rank_001"
    assert found.config["model"]["data"]["data_prefix"][-1] == str(tmp_path / "made_text_document")


GONE = object()


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("model.num_layers", GONE, "Key 'num_layers' is not in struct"),
        ("model.tokenizer.vocab_file", GONE, "Key 'vocab_file' is not in struct"),
        ("model.resume_from_checkpoint", GONE, "'resume_from_checkpoint' is not in struct"),
        ("model.data.splits_string", GONE, "Key 'splits_string' is not in struct"),
        ("trainer.max_steps", GONE, "trainer.max_steps=None"),
        ("trainer.use_distributed_sampler", False, "unexpected keyword argument"),
        ("trainer.num_nodes", 4, "wait for ever"),
        ("trainer.max_time", 84600, "is not dd:hh:mm:ss"),
        ("exp_manager.resume_exists", True, "not in 'ExpManagerConfig'"),
        ("exp_manager.checkpoint_callback_params.every_n_train_steps", 1, "'CallbackParams'"),
        ("exp_manager.checkpoint_callback_params.model_parallel_size", 3, "AssertionError"),
        ("model.max_position_embeddings", 8, "beyond max_position"),
        ("model.micro_batch_size", 3, "is not divisible by 3"),
        ("model.data.data_prefix", [1.0, "/no/such"], "FileNotFoundError"),
        ("model.optim.sched.min_lr", 1.0, "lower than the minimum"),
    ],
)
def test_a_configuration_of_nemo_that_is_changed(
    tmp_path: Path, path: str, value: object, said: str
) -> None:
    given = made(tmp_path, "nemo", "1.12")
    assert given.config is not None
    config = yaml.safe_load(given.config.read_text())
    *parents, last = path.split(".")
    table = config
    for key in parents:
        table = table[key]
    if value is GONE:
        del table[last]
    else:
        table[last] = value
    given.config.write_text(yaml.safe_dump(config))
    with pytest.raises(Refused, match=said):
        given.check()


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "MASTER_PORT"])
def test_an_environment_of_nemo_without_a_variable(tmp_path: Path, name: str) -> None:
    given = made(tmp_path, "nemo", "1.12")
    del given.variables[name]
    with pytest.raises(Refused, match=f"KeyError: {name}"):
        given.check()


def test_words_of_nemo_that_are_changed(tmp_path: Path) -> None:
    given = made(tmp_path, "nemo", "1.12")
    words = given.words
    given.words = [*words, "model.no_such_key=1"]
    with pytest.raises(Refused, match="is not in struct"):
        given.check()
    given.words = [word for word in words if not word.startswith("--config-path")]
    with pytest.raises(Refused, match="Cannot find primary config"):
        given.check()


def test_words_of_neuron_that_are_missing(tmp_path: Path) -> None:
    """Each of those that the small size needs, left out; then another port."""
    given = made(tmp_path, "neuronx-nemo", "head")
    words = given.words
    needed = ("trainer.num_nodes", "model.tokenizer.vocab_file", "model.data.data_prefix")
    for key in (*needed, "model.num_attention_heads", "model.encoder_seq_length"):
        given.words = [word for word in words if not word.startswith(f"{key}=")]
        assert len(given.words) == len(words) - 1, key
        with pytest.raises(Refused):
            given.check()
    given.words = words
    given.variables["MASTER_PORT"] = "29500"
    with pytest.raises(Refused, match="41000 is what is reserved"):
        given.check()
