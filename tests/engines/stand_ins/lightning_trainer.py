"""What pytorch-lightning makes of a process's environment and of trainer's settings, by version,
and how it shows its progress.

Rules: pytorch-lightning 1.7.7, 1.8.6 and 2.4.0: trainer/trainer.py,
trainer/connectors/accelerator_connector.py, plugins/environments (lightning_lite and
lightning_fabric), callbacks/progress/tqdm_progress.py, callbacks/model_checkpoint.py.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.engines.stand_ins.hydra_command import Refused

COMMON = """
logger enable_checkpointing callbacks default_root_dir gradient_clip_val gradient_clip_algorithm
num_nodes devices enable_progress_bar overfit_batches check_val_every_n_epoch fast_dev_run
accumulate_grad_batches max_epochs min_epochs max_steps min_steps max_time limit_train_batches
limit_val_batches limit_test_batches limit_predict_batches val_check_interval log_every_n_steps
accelerator sync_batchnorm precision enable_model_summary num_sanity_val_steps profiler benchmark
deterministic reload_dataloaders_every_n_epochs detect_anomaly
"""
UNTIL_1 = """
num_processes gpus auto_select_gpus tpu_cores ipus track_grad_norm resume_from_checkpoint
auto_lr_find replace_sampler_ddp auto_scale_batch_size amp_backend amp_level move_metrics_to_cpu
multiple_trainloader_mode
"""
# what Trainer takes; strategy and plugins are the script's own
TRAINER = {
    "1.7.7": {*COMMON.split(), *UNTIL_1.split(), "weights_save_path"},
    "1.8.6": {*COMMON.split(), *UNTIL_1.split(), "inference_mode"},
    "2.4.0": {*COMMON.split(), "inference_mode", "use_distributed_sampler", "barebones"},
}
DURATION = re.compile(r"\d+:\d\d:\d\d:\d\d")  # callbacks/timer.py


@dataclass(frozen=True)
class Cluster:
    """The cluster environment that was chosen.

    Args:
        name: of its class.
        rank: global.
        local_rank: on its node.
        world_size: of all nodes.
        address: where rank 0 listens.
        port: and on which port.
    """

    name: str
    rank: int
    local_rank: int
    world_size: int
    address: str
    port: int


def check_trainer(trainer: Mapping[str, Any], version: str) -> None:
    """Refuse what Trainer(**cfg.trainer) would."""
    for key in trainer:
        if key not in TRAINER[version]:
            raise Refused(f"TypeError: __init__() got an unexpected keyword argument '{key}'")
    for key in ("devices", "num_nodes", "max_steps", "log_every_n_steps"):
        value = trainer.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise Refused(f"trainer.{key}={value!r} is not a number of them")
    duration = trainer.get("max_time")
    if duration is not None and not (isinstance(duration, str) and DURATION.fullmatch(duration)):
        raise Refused(f"trainer.max_time={duration!r} is not dd:hh:mm:ss")
    if trainer.get("logger") is not False or trainer.get("enable_checkpointing") is not False:
        raise Refused("exp_manager makes logger and callback: trainer must have neither")


def choose_cluster(
    environment: Mapping[str, str], version: str, trainer: Mapping[str, Any]
) -> Cluster:
    """_choose_and_init_cluster_environment.

    Args:
        environment: of the process.
        version: of pytorch-lightning.
        trainer: its settings.
    """
    world = trainer["devices"] * trainer["num_nodes"]
    elastic = "TORCHELASTIC_RUN_ID" in environment
    slurm = "SLURM_NTASKS" in environment and environment.get("SLURM_JOB_NAME") != "bash"
    if version != "2.4.0":
        slurm = slurm and int(environment["SLURM_NTASKS"]) == world
    # 2.x looks for torch's first
    order = (("elastic", elastic), ("slurm", slurm))
    if version != "2.4.0":
        order = (order[1], order[0])
    chosen = next((name for name, there in order if there), "lightning")
    makers = {"slurm": _slurm, "elastic": _elastic, "lightning": _lightning}
    cluster = makers[chosen](environment, version, trainer)
    if cluster.world_size != world or not 0 <= cluster.rank < world:
        raise Refused(
            f"{cluster.name}: rank {cluster.rank} of {cluster.world_size}, and trainer has"
            f" {trainer['num_nodes']} nodes of {trainer['devices']} devices: it would wait for ever"
        )
    if cluster.rank % trainer["devices"] != cluster.local_rank:
        raise Refused(f"{cluster.name}: rank {cluster.rank} is not local rank {cluster.local_rank}")
    return cluster


def _needed(environment: Mapping[str, str], *names: str) -> list[str]:
    missing = [name for name in names if name not in environment]
    if missing:
        raise Refused(f"KeyError: {', '.join(missing)}")
    return [environment[name] for name in names]


def _slurm(environment: Mapping[str, str], version: str, trainer: Mapping[str, Any]) -> Cluster:
    if version != "1.7.7" and int(environment["SLURM_NTASKS"]) > 1:
        _needed(environment, "SLURM_NTASKS_PER_NODE")
    rank, local, tasks, nodes = _needed(
        environment, "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NODELIST"
    )
    if version == "2.4.0" and "MASTER_ADDR" in environment:
        first = environment["MASTER_ADDR"]
    else:
        # 1.x ignores MASTER_ADDR
        first = re.sub(r"\[([^],-]*)[^]]*\].*", r"\1", nodes).split(",")[0]
    job = environment.get("SLURM_JOB_ID", "")
    port = environment.get("MASTER_PORT", str(int(job[-4:] or 0) + 15000))
    return Cluster("SLURMEnvironment", int(rank), int(local), int(tasks), first, int(port))


def _elastic(environment: Mapping[str, str], version: str, trainer: Mapping[str, Any]) -> Cluster:
    rank, local, world = _needed(environment, "RANK", "LOCAL_RANK", "WORLD_SIZE")
    address, port = _needed(environment, "MASTER_ADDR", "MASTER_PORT")
    return Cluster("TorchElasticEnvironment", int(rank), int(local), int(world), address, int(port))


def _lightning(environment: Mapping[str, str], version: str, trainer: Mapping[str, Any]) -> Cluster:
    if "LOCAL_RANK" not in environment:
        raise Refused("LightningEnvironment without LOCAL_RANK starts processes of its own")
    local = int(environment["LOCAL_RANK"])
    node = int(environment.get("NODE_RANK", environment.get("GROUP_RANK", "0")))
    world = trainer["devices"] * trainer["num_nodes"]
    address, port = _needed(environment, "MASTER_ADDR", "MASTER_PORT")
    rank = node * trainer["devices"] + local
    return Cluster("LightningEnvironment", rank, local, world, address, int(port))


def padded_bar() -> Any:
    """The real tqdm, whose numbers pytorch-lightning pads."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    class Padded(tqdm):  # type: ignore[misc]
        """Tqdm of tqdm_progress.py."""

        @staticmethod
        def format_num(n: Any) -> str:
            padded = isinstance(n, (float, str))
            text = n if isinstance(n, str) else tqdm.format_num(n)
            if padded and "e" not in text:
                if "." not in text and len(text) < 5:
                    try:
                        float(text)
                    except ValueError:
                        return str(text)
                    text += "."
                text += "0" * (5 - len(text))
            return str(text)

    return Padded


class Progress:
    """The bars of rank 0.

    Args:
        version: of pytorch-lightning.
        steps: of the training.
        done: of these before.
        validation: batches of one.
        every: steps between two.
    """

    def __init__(self, version: str, steps: int, done: int, validation: int, every: int) -> None:
        self.new = padded_bar()
        self.version = version
        # until 1.9 the bar of training counts the batches of validations too
        self.counted = 0 if version == "2.4.0" else validation
        self.validation = validation
        self.validated = done // every
        self.metrics: dict[str, Any] = {}
        self.bar = self.new(desc="Training", dynamic_ncols=True, file=sys.stdout, smoothing=0)
        if version == "2.4.0":
            self.bar.bar_format = (
                "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}"
                " [{elapsed}<{remaining}{postfix}]"
            )
        self.bar.reset(steps + self.counted * (steps // every))
        self.bar.initial = 0
        self.bar.n = done + self.counted * self.validated
        self.bar.set_description("Epoch 0: " if version == "2.4.0" else "Epoch 0")

    def show(self, done: int, loss: float, metrics: Mapping[str, Any]) -> None:
        """After a step: drawn with what was known, then with what is."""
        standard: dict[str, Any] = {"v_num": ""}
        if self.version != "2.4.0":
            standard = {"loss": f"{loss:.3g}", "v_num": ""}
        self.metrics = {**self.metrics, **standard, **metrics}
        self.bar.n = done + self.counted * self.validated
        self.bar.refresh()
        self.bar.set_postfix(self.metrics)

    def validate(self, loss: float) -> None:
        """A validation, whose bar stands below and goes again."""
        bar = self.new(desc="Validation", dynamic_ncols=True, file=sys.stdout, leave=False)
        bar.reset(self.validation)
        bar.set_description("Validation DataLoader 0")
        bar.n = self.validation
        bar.refresh()
        self.validated += 1
        self.bar.n += self.counted
        self.bar.refresh()
        self.metrics["val_loss"] = loss
        self.bar.set_postfix(self.metrics)
        bar.close()

    def close(self) -> None:
        """After the last."""
        self.bar.close()


def checkpoint_name(template: str, metrics: Mapping[str, Any]) -> str:
    """format_checkpoint_name: {step} becomes step=3."""
    for group in re.findall(r"\{.*?[:\}]", template):
        name = group[1:-1]
        template = template.replace(group, f"{name}={{{name}" + group[-1])
        if name not in metrics:
            metrics = {**metrics, name: 0}
    return f"{template.format(**metrics)}.ckpt"
