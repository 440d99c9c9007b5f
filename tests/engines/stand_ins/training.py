"""Real steps of a very small model over gloo, and the checkpoints that NeMo and
neuronx-nemo-megatron write of it and go on from.

Rules: NeMo 1.12, 1.14 (neuronx-nemo-megatron) and 2.1, utils/exp_manager.py (check_resume,
NeMoModelCheckpoint), utils/callbacks/nemo_model_checkpoint.py,
collections/nlp/parts/nlp_overrides.py and serialization.py (xser).
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engines.stand_ins.hydra_command import Refused
from tests.engines.stand_ins.lightning_trainer import Cluster, Progress, checkpoint_name
from tests.engines.stand_ins.nemo_refusals import Layout

# A folder: as long as it has hold-N, step N does not begin. A rank that has come there, all before
# it saved, leaves at-N-RANK.
HOLD = "STAND_IN_HOLD"


@dataclass
class Saver:
    """The checkpoints of one rank.

    Args:
        folder: of all of them.
        layout: where the rank stands.
        kind: "file" (NeMo 1.12), "xser" (neuronx-nemo-megatron), "distributed" (NeMo 2.1).
        params: exp_manager.checkpoint_callback_params.
        rank: the global one.
    """

    folder: Path
    layout: Layout
    kind: str
    params: Mapping[str, Any]
    rank: int

    def save(self, state: dict[str, Any], metrics: dict[str, Any], *, last: bool) -> None:
        """One checkpoint; `last`: the one that is gone on from."""
        template = self.params["filename"] + ("-last" if last else "")
        name = checkpoint_name(template, metrics)
        if self.kind == "distributed":
            self._save_distributed(name.removesuffix(".ckpt"), state)
        elif self.layout.data_rank == 0:
            self._save_file(self.folder / self.layout.folder / name, state)
        self._barrier()
        self._remove(name, last)
        self._barrier()

    @staticmethod
    def _barrier() -> None:
        import torch.distributed

        torch.distributed.barrier()

    def _save_file(self, path: Path, state: dict[str, Any]) -> None:
        import torch

        path.parent.mkdir(parents=True, exist_ok=True)
        if self.kind == "xser":
            tensors = path.with_name(f"{path.name}.tensors")
            tensors.mkdir(exist_ok=True)
            names = {}
            for number, (name, tensor) in enumerate(state["state_dict"].items()):
                torch.save(tensor, tensors / f"tensor_{number}.pt")
                names[name] = number
            state = {**state, "state_dict": names}
        torch.save(state, path)

    def _save_distributed(self, name: str, state: dict[str, Any]) -> None:
        import torch
        from torch.distributed.checkpoint.state_dict_saver import save

        marker = self.folder / f"{name}-unfinished"
        if self.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            marker.touch()
        self._barrier()
        save(dict(state["state_dict"]), checkpoint_id=self.folder / name)
        if self.rank == 0:
            common = {key: value for key, value in state.items() if key != "state_dict"}
            torch.save(common, self.folder / name / "common.pt")
            (self.folder / name / "metadata.json").write_text(
                '{"sharded_backend": "torch_dist", "sharded_backend_version": 1,'
                ' "common_backend": "torch", "common_backend_version": 1}'
            )
        self._barrier()
        if self.rank == 0:
            marker.unlink()

    def _remove(self, newest: str, last: bool) -> None:
        """The former -last, or what save_top_k leaves no room for."""
        if self.kind == "distributed":
            mine, newest = self.rank == 0, newest.removesuffix(".ckpt")
            found = [path for path in self.folder.glob("megatron_gpt--*") if path.is_dir()]
        else:
            mine = self.layout.data_rank == 0
            found = list((self.folder / self.layout.folder).glob("*.ckpt"))
        if not mine:
            return
        found = [each for each in found if is_last(each) == last and each.name != newest]
        found.sort(key=step_of)
        top = int(self.params.get("save_top_k", 3))
        # -1 keeps all; the newest one counts
        room = 0 if last else top - 1
        if not last and top == -1:
            room = len(found)
        for path in found[: len(found) - room]:
            if path.is_dir():
                shutil.rmtree(path)
                continue
            path.unlink()
            shutil.rmtree(path.with_name(f"{path.name}.tensors"), ignore_errors=True)

    def load(self, path: Path) -> dict[str, Any]:
        """What was saved; `path` as the engine names it, without the folder of the rank."""
        import torch

        if self.kind == "distributed":
            from torch.distributed.checkpoint.state_dict_loader import load

            common = torch.load(path / "common.pt", weights_only=True)
            model = {name: torch.zeros(shape) for name, shape in common["shapes"].items()}
            load(model, checkpoint_id=path)
            return {**common, "state_dict": model}
        path = path.parent / self.layout.folder / path.name
        state: dict[str, Any] = torch.load(path, weights_only=True)
        if self.kind == "xser":
            tensors = path.with_name(f"{path.name}.tensors")
            state["state_dict"] = {
                name: torch.load(tensors / f"tensor_{number}.pt", weights_only=True)
                for name, number in state["state_dict"].items()
            }
        return state


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    found = re.search(r"step=(\d+)", path.name)
    if found is None:
        raise Refused(f"{path} names no step")
    return int(found[1])


def is_last(path: Path) -> bool:
    """Whether it is one that is gone on from."""
    return path.name.removesuffix(".ckpt").endswith("-last")


def found_checkpoint(folder: Path, manager: Mapping[str, Any], kind: str) -> Path | None:
    """check_resume: the checkpoint to go on from, without the folder of a rank.

    Raises Refused where the engine raises.
    """
    if not manager.get("resume_if_exists"):
        return None
    if kind == "xser":
        # the newest by its date, whatever its name
        files = sorted(folder.rglob("*.ckpt"), key=lambda path: path.stat().st_mtime)
        if not files:
            _may_begin_anew(folder, manager)
            return None
        return _without_rank(files[-1])
    ends = [*folder.rglob("*end.ckpt"), *folder.glob("*end")]
    if ends and not manager.get("resume_past_end"):
        raise Refused(
            f"Found {ends[0]} indicating that the last training run has already completed"
        )
    found = list(folder.rglob("*last.ckpt"))
    if kind == "distributed":
        found = [path for path in folder.glob("*") if path.is_dir() and is_last(path)]
        whole = [each for each in found if not each.with_name(f"{each.name}-unfinished").exists()]
        if found and not whole:
            raise Refused("Last checkpoint is unfinished and cannot be used to resume")
        found = whole
    if not found:
        _may_begin_anew(folder, manager)
        return None
    names = {_without_rank(path) for path in found}
    if len(found) > 1 and "p_rank" not in str(found[0]):
        raise Refused(f"ValueError: Multiple checkpoints {found} that matches *last.ckpt.")
    # of several it takes the first that the file system names
    return sorted(names)[0]


def _may_begin_anew(folder: Path, manager: Mapping[str, Any]) -> None:
    if not manager.get("resume_ignore_no_checkpoint"):
        raise Refused(f"NotFoundError: There were no checkpoints found in {folder}. Cannot resume.")


def _without_rank(path: Path) -> Path:
    if re.search(r"[mt]p_rank_\d+", path.parent.name):
        return path.parent.parent / path.name
    return path


def train(
    config: Mapping[str, Any],
    cluster: Cluster,
    saver: Saver,
    *,
    version: str,
    start: Path | None,
    interval: int | None,
) -> None:
    """trainer.fit.

    Args:
        config: composed.
        cluster: the environment that pytorch-lightning chose.
        saver: of this rank.
        version: of pytorch-lightning.
        start: the checkpoint to go on from.
        interval: steps between two checkpoints; 0: only at the end; None: none is made.
    """
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{cluster.address}:{cluster.port}",
        rank=cluster.rank,
        world_size=cluster.world_size,
    )
    settings = config["model"]
    torch.manual_seed(int(settings.get("seed", 1234)))
    model = torch.nn.Linear(8, 1)
    first = 0
    if start is not None:
        state = saver.load(start)
        model.load_state_dict(state["state_dict"])
        first = state["global_step"]
        print(f"Restored all states from the checkpoint at {start}", flush=True)
    steps = config["trainer"]["max_steps"]
    batch = settings["global_batch_size"]
    validation = int(config["trainer"].get("limit_val_batches") or 0)
    every = int(config["trainer"].get("val_check_interval") or steps + 1)
    progress = None
    if cluster.rank == 0:
        progress = Progress(version, steps, first, validation, every)
    for step in range(first, steps):
        _wait_to_begin(step + 1, cluster.rank)
        loss = _one_step(model, cluster, step)
        # what is logged within a step counts the steps before it
        metrics = {"reduced_train_loss": loss, "global_step": float(step)}
        metrics["consumed_samples"] = float(step * batch)
        if progress is not None:
            progress.show(step + 1, loss, metrics)
            if validation and (step + 1) % every == 0:
                progress.validate(loss)
        due = interval is not None and interval > 0 and (step + 1) % interval == 0
        # on_train_end saves what no interval has saved, as -last alone
        if due or (interval is not None and step + 1 == steps):
            named = {"step": step + 1, "val_loss": loss}
            named["consumed_samples"] = float((step + 1) * batch)
            weights = {name: each.detach() for name, each in model.state_dict().items()}
            kept = {
                "state_dict": weights,
                "global_step": step + 1,
                "shapes": {name: list(each.shape) for name, each in weights.items()},
                "pytorch-lightning_version": version,
            }
            if due:
                saver.save(kept, named, last=False)
            if saver.params.get("save_last", True):
                saver.save(kept, named, last=True)
    if progress is not None:
        progress.close()
        print(f"`Trainer.fit` stopped: `max_steps={steps}` reached.", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _one_step(model: Any, cluster: Cluster, step: int) -> float:
    """Each rank has its own samples; all have the same weights afterwards. SGD by hand: importing
    torch.optim's costs a rank 1.7 s of a processor, for torch's compiler."""
    import torch
    import torch.distributed as dist

    generator = torch.Generator().manual_seed(1000 * step + cluster.rank)
    inputs = torch.randn(4, 8, generator=generator)
    loss = ((model(inputs) - inputs.sum(dim=1, keepdim=True)) ** 2).mean()
    parameters = list(model.parameters())
    with torch.no_grad():
        for parameter, gradient in zip(
            parameters, torch.autograd.grad(loss, parameters), strict=True
        ):
            dist.all_reduce(gradient)
            parameter -= 0.05 / cluster.world_size * gradient
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / cluster.world_size


def _wait_to_begin(step: int, rank: int) -> None:
    folder = os.environ.get(HOLD)
    if not folder:
        return
    Path(folder, f"at-{step}-{rank}").touch()
    while os.path.exists(f"{folder}/hold-{step}"):
        time.sleep(0.05)
