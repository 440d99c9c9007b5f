"""The stand-in of neuronx-nemo-megatron's megatron_gpt_pretraining.py, which torchrun starts."""

from __future__ import annotations

import os
import resource
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.engines.stand_ins.hydra_command import Refused, compose
from tests.engines.stand_ins.lightning_trainer import check_trainer, choose_cluster
from tests.engines.stand_ins.nemo_program import Checked
from tests.engines.stand_ins.nemo_refusals import at, check_manager, check_model, needs
from tests.engines.stand_ins.training import Saver, found_checkpoint, train

LIGHTNING = "1.8.6"
PORT = "41000"
# what train_setup.sh sets, by generation; None: any value
BOTH = {
    "FI_EFA_USE_DEVICE_RDMA": "1",
    "FI_PROVIDER": "efa",
    "FI_EFA_FORK_SAFE": "1",
    "NEURON_RT_STOCHASTIC_ROUNDING_EN": "1",
    "NEURON_TRANSFER_WITH_STATIC_RING_OPS": "",
    "MALLOC_ARENA_MAX": "128",
    "HYDRA_FULL_ERROR": "1",
    "XLA_USE_BF16": "1",
    "NEURON_COMPILE_CACHE_URL": None,
}
VARIABLES: dict[str, dict[str, str | None]] = {
    "head": {
        **BOTH,
        "NEURON_CC_FLAGS": "--model-type transformer --distribution-strategy=llm-training"
        " --enable-mixed-precision-accumulation",
        "NEURON_RT_EXEC_TIMEOUT": "100",
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "5",
        "NEURON_FUSE_SOFTMAX": "1",
        "BUCKET_CAP_MB": "1024",
        "TF_NUM_INTEROP_THREADS": "1024",
        "XLA_THREAD_POOL_SIZE": "4",
        "XLA_IO_THREAD_POOL_SIZE": "4",
    },
    "2.13.1": {
        **BOTH,
        "NEURON_CC_FLAGS": "--model-type transformer --distribution-strategy=nemo",
        "NEURON_RT_EXEC_TIMEOUT": "10",
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "3",
        "TF_NUM_INTEROP_THREADS": "8192",
    },
}
# ulimit -n 65535; where the hard limit is lower nobody can have more
FILES = 65535


def check(
    words: list[str], environment: Mapping[str, str], script: Path, generation: str
) -> Checked:
    """All that would end the real one before its first step.

    Args:
        words: its arguments.
        environment: of its process, with what torchrun adds.
        script: its path.
        generation: of the scripts: head or 2.13.1.

    Raises Refused.
    """
    for name, value in VARIABLES[generation].items():
        if name not in environment:
            raise Refused(f"{name} is not set")
        if value is not None and environment[name] != value:
            raise Refused(f"{name} is {environment[name]!r}; train_setup.sh has {value!r}")
    needs("TORCHELASTIC_RUN_ID" in environment, "without torchrun it takes XLAEnvironment")
    if environment.get("MASTER_PORT") != PORT:
        raise Refused(
            f"MASTER_PORT is {environment.get('MASTER_PORT')}; {PORT} is what is reserved"
        )
    config = compose(words, script)
    trainer = at(config, "trainer")
    check_trainer(trainer, LIGHTNING)
    # what lightning_neuron_patch.py lets through
    needs(trainer["devices"] in (1, 2, 8, 32), f"trainer.devices={trainer['devices']}")
    needs(trainer.get("accelerator") == "tpu", f"accelerator {trainer.get('accelerator')!r}")
    local = environment.get("LOCAL_WORLD_SIZE")
    needs(local == str(trainer["devices"]), f"--nproc_per_node {local} for {trainer['devices']}")
    check_manager(config, "1.14")
    given = {name: each for name, each in environment.items() if not name.startswith("SLURM_")}
    cluster = choose_cluster(given, LIGHTNING, trainer)
    layout = check_model(config, cluster.world_size, cluster.rank)
    if config["model"].get("use_emha"):
        raise Refused("use_emha is not yet supported please set to False")
    return Checked(config, cluster, layout)


def main(script: str, generation: str) -> None:
    """The program. Exits with 1 where the real one raises."""
    try:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        needs(soft >= min(FILES, hard), f"ulimit -n is {soft}; train_setup.sh has {FILES}")
        found = check(sys.argv[1:], os.environ, Path(script).resolve(), generation)
        if os.environ.get("NEURON_EXTRACT_GRAPHS_ONLY"):
            _extract(found.config)
            return
        _fit(found)
    except Refused as error:
        traceback.print_exc()
        sys.stderr.write(f"{error}\n")
        sys.exit(1)


def _extract(config: Mapping[str, Any]) -> None:
    """Under neuron_parallel_compile: a few steps that trace graphs and save nothing."""
    needs(config["trainer"]["max_steps"] == 4, "a compilation makes 4 steps")
    manager = config["exp_manager"]
    needs(not manager.get("create_checkpoint_callback"), "a compilation saves nothing")
    needs(not manager.get("create_tensorboard_logger"), "a compilation logs nothing")


def _fit(found: Checked) -> None:
    config, cluster = found.config, found.cluster
    manager = config["exp_manager"]
    logs = manager.get("explicit_log_dir")
    version = os.environ.get("NEMO_EXPM_VERSION")
    if not logs:
        needs(bool(version), "without NEMO_EXPM_VERSION each rank makes a folder of its own")
        base = Path(manager.get("exp_dir") or Path.cwd() / "nemo_experiments")
        logs = base / (manager.get("name") or "default")
        if not manager.get("resume_if_exists"):
            logs = logs / str(version)
    params = manager.get("checkpoint_callback_params") or {}
    folder = Path(params.get("dirpath") or Path(logs) / "checkpoints")
    start = found_checkpoint(folder, manager, "xser")
    explicit = config["model"].get("resume_from_checkpoint")
    if explicit:
        start = Path(explicit)
        needs(bool(config["model"].get("load_xser")), "a checkpoint of save_xser needs load_xser")
    interval = None
    if manager.get("create_checkpoint_callback", True):
        # no run of a test lasts as long as an interval of time
        interval = params.get("every_n_train_steps") or 0
        both = interval and params.get("train_time_interval") is not None
        needs(not both, "every_n_train_steps and train_time_interval should be mutually exclusive")
    needs(bool(config["model"].get("save_xser")), "this stand-in writes what save_xser writes")
    saver = Saver(folder, found.layout, "xser", params, cluster.rank)
    train(config, cluster, saver, version=LIGHTNING, start=start, interval=interval)
