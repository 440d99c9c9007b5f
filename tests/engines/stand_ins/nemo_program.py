"""The stand-in of NeMo's examples/nlp/language_modeling/megatron_gpt_pretraining.py."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engines.stand_ins.hydra_command import Refused, compose
from tests.engines.stand_ins.lightning_trainer import Cluster, check_trainer, choose_cluster
from tests.engines.stand_ins.nemo_refusals import Layout, at, check_manager, check_model, needs
from tests.engines.stand_ins.training import Saver, found_checkpoint, train

# NeMo's version: pytorch-lightning's
LIGHTNING = {"1.12": "1.7.7", "2.1": "2.4.0"}


@dataclass(frozen=True)
class Checked:
    """What was found right."""

    config: dict[str, Any]
    cluster: Cluster
    layout: Layout


def check(words: list[str], environment: Mapping[str, str], script: Path, version: str) -> Checked:
    """All that would end the real one before its first step.

    Args:
        words: its arguments.
        environment: of its process.
        script: its path.
        version: of NeMo.

    Raises Refused.
    """
    config = compose(words, script)
    check_trainer(at(config, "trainer"), LIGHTNING[version])
    check_manager(config, version)
    # read before the trainer is there
    if version == "1.12":
        at(config, "model.resume_from_checkpoint")
    cluster = _cluster(config, environment, version)
    if config["trainer"].get("accelerator") != "gpu":
        raise Refused("trainer.accelerator is gpu in all published configurations")
    devices = environment.get("CUDA_VISIBLE_DEVICES")
    if devices is not None:
        count = config["trainer"]["devices"]
        needs(len(set(devices.split(","))) >= count, f"CUDA_VISIBLE_DEVICES={devices} for {count}")
    if at(config, "model").get("tensor_model_parallel_size", 1) > 1:
        one = environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
        needs(one, "CUDA_DEVICE_MAX_CONNECTIONS=1 goes with tensor parallelism in both launchers")
    layout = check_model(config, cluster.world_size, cluster.rank)
    return Checked(config, cluster, layout)


def _cluster(config: Mapping[str, Any], environment: Mapping[str, str], version: str) -> Cluster:
    trainer = config["trainer"]
    if config.get("cluster_type") != "BCP":
        return choose_cluster(environment, LIGHTNING[version], trainer)
    # plugins.append(TorchElasticEnvironment()): nothing is detected
    given = {name: each for name, each in environment.items() if not name.startswith("SLURM_")}
    return choose_cluster({"TORCHELASTIC_RUN_ID": "", **given}, LIGHTNING[version], trainer)


def main(script: str, version: str) -> None:
    """The program. Exits with 1 where the real one raises."""
    try:
        found = check(sys.argv[1:], os.environ, Path(script).resolve(), version)
        _fit(found, version)
    except Refused as error:
        traceback.print_exc()
        sys.stderr.write(f"{error}\n")
        sys.exit(1)


def _fit(found: Checked, version: str) -> None:
    config, cluster = found.config, found.cluster
    if version == "1.12" and cluster.name == "SLURMEnvironment":
        # signal_connector.py: "bypassing SIGTERM"
        signal.signal(signal.SIGTERM, lambda number, frame: print("Bypassing SIGTERM", flush=True))
    manager = config["exp_manager"]
    logs = manager.get("explicit_log_dir")
    if not logs:
        raise Refused("without explicit_log_dir each start has a folder of its own")
    folder = Path(logs) / "checkpoints"
    params = manager.get("checkpoint_callback_params") or {}
    if params.get("dirpath"):
        folder = Path(params["dirpath"])
    kind = "distributed" if version == "2.1" and config["model"].get("mcore_gpt") else "file"
    start = found_checkpoint(folder, manager, kind)
    explicit = config["model"].get("resume_from_checkpoint")
    if explicit:
        start = Path(explicit)
    interval = None
    if manager.get("create_checkpoint_callback", True):
        # a checkpoint follows each validation
        interval = int(config["trainer"]["val_check_interval"])
    saver = Saver(folder, found.layout, kind, params, cluster.rank)
    train(config, cluster, saver, version=LIGHTNING[version], start=start, interval=interval)
