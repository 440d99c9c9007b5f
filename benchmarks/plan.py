"""Claim: the plan's parameter, optimizer and checkpoint bytes are exact, its activation bytes
within 15 %, and it answers in under 0.5 s without torch.

    python benchmarks/plan.py [--quick] [--rows FILE]

Trains demo-sized models of all three families on this machine by the real trainer, on 1, 2 and 4
data-parallel ranks and in every other kind of layout, and prints what the plan says beside what
the run logged and wrote. Activations are those of one rank under fully_shard, in every layout
under every mode of recomputation: all that torch.autograd.graph.saved_tensors_hooks sees and
what selective recomputation keeps in a cache of its own, each storage once, weights left out, in
a pipeline at the fullest moment of a step. The peak of these few steps is shown without a claim:
on a CPU it is the process's, of which the plan assumes the interpreter's part. What a rank has
after 10 steps, and at most in 150, is within 5 % of the plan. Then every job of jobs.toml is
planned by the task itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from trainkit.train.update.build import ModelParts

CHECKOUT = Path(__file__).resolve().parent.parent
ACTIVATIONS, SECONDS, RESIDENT = 0.15, 0.5, 0.05  # the claims
RANKS = (1, 2, 4)
REPEATS = 5
STEPS = 4
MANY_STEPS = 150
FAMILIES = {"demo": "gpt", "demo-neox": "gpt-neox", "demo-llama": "llama"}
VARIANTS: dict[str, list[str]] = {
    "": [],
    "dropout": ["model.hidden_dropout=0.1"],
    "bf16": ['training.precision="bf16"'],
}
MODES: dict[str, list[str]] = {
    "": [],
    **{mode: [f'training.recompute_granularity="{mode}"'] for mode in ("full", "selective")},
}
TENSOR, SEQUENCE, PIPELINE = (
    "parallelism.tensor_model_parallel_size=2",
    "parallelism.sequence_parallel=true",
    "parallelism.pipeline_model_parallel_size=2",
)
CONTEXT = "parallelism.context_parallel_size=2"
LONG = "model.seq_length=2048"  # of samples that are split
# Ranks, and what makes them one model's.
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "TP2": (2, [TENSOR]),
    "TP2 + SP": (2, [TENSOR, SEQUENCE]),
    "CP2 ring": (2, [CONTEXT]),
    "CP2 all-to-all": (2, [CONTEXT, 'parallelism.cp_comm_type="a2a"']),
    "PP2 1F1B": (2, [PIPELINE]),
    "PP2 interleaved": (2, [PIPELINE, "parallelism.virtual_pipeline_model_parallel_size=2"]),
    "PP2 ZBV": (2, [PIPELINE, 'parallelism.pipeline_schedule="zbv"']),
    "TP2 + SP, PP2 1F1B": (4, [TENSOR, SEQUENCE, PIPELINE]),
    "HSDP 2x2 ZeRO 3": (
        4,
        ["parallelism.data_parallel_replicate_size=2", "parallelism.zero_stage=3"],
    ),
}
Row = dict[str, Any]


def invoke(folder: Path, *words: str) -> str:
    """stdout of a task that must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "invoke", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(
            f"invoke {' '.join(words)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
    return done.stdout


def project(folder: Path) -> None:
    """The models of this checkout's jobs.toml in a folder of their own, on random tokens, for a
    few steps."""
    (folder / "tasks.py").write_text("from trainkit.cli.tasks import namespace\n")
    text = (CHECKOUT / "jobs.toml").read_text().replace('include = ["jobs/*.toml"]', "")
    text += "".join(
        f'\n[models.{name}-mock]\nextends = "{name}"\nvocab_size ='
        f' 4096\n\n[jobs.plan-{name}]\ncluster = "here"\nmodel = "{name}-mock"\ndataset ='
        ' "mock"\ntraining = { micro_batch_size = 4, global_batch_size = 16, train_iters ='
        f" {STEPS}, lr = 1e-3, eval_iters = 0 }}\n"
        for name in FAMILIES
    )
    (folder / "jobs.toml").write_text(text)


def trained(folder: Path, name: str, ranks: int, sets: list[str], what: str = "") -> list[Row]:
    """Train one layout; what the plan said of each stage and what the run logged and wrote."""
    words = [
        word for value in (f"cluster.ranks_per_node={ranks}", *sets) for word in ("--set", value)
    ]
    plan = json.loads(invoke(folder, "plan", f"plan-{name}", *words, "--json"))
    run = Path(
        json.loads(invoke(folder, "train", f"plan-{name}", *words, "--share", "--json"))["folder"]
    )
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    logged, stages = last["memory_bytes"], plan["memory"]["stages"]
    peaks = [
        last.get("pipeline", {}).get(f"memory_stage_{stage['stage']}", logged["max_resident"])
        for stage in stages
    ]
    manifest = json.loads(next((run / "checkpoints").glob("step-*/manifest.json")).read_text())
    written = sum(
        chunk["bytes"] for tensor in manifest["tensors"].values() for chunk in tensor["chunks"]
    )
    case = f"{FAMILIES[name]} on {ranks}{' ' + (what or ' '.join(sets)) if sets else ''}"
    return [
        row(
            case,
            "parameters, shard of rank 0",
            stages[0]["parameter_bytes"],
            logged["parameters"],
            0.0,
        ),
        row(
            case,
            "optimizer, shard of rank 0",
            stages[0]["optimizer_bytes"],
            logged["optimizer"],
            0.0,
        ),
        row(case, "checkpoint", plan["checkpoint_bytes"], written, 0.0),
        *(
            row(case, f"peak of a process, stage {s['stage']}", s["total_bytes"], peak, None)
            for s, peak in zip(stages, peaks, strict=True)
        ),
    ]


def kept(folder: Path, name: str, what: str = "", sets: Iterable[str] = ()) -> list[Row]:
    """Train many steps on two ranks; what the plan said beside what the process of rank 0 had
    after ten steps, and at most from then on."""
    sets = (f"training.train_iters={MANY_STEPS}", *sets)
    words = [word for value in sets for word in ("--set", value)]
    plan = json.loads(invoke(folder, "plan", f"plan-{name}", *words, "--json"))
    run = Path(
        json.loads(invoke(folder, "train", f"plan-{name}", *words, "--share", "--json"))["folder"]
    )
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    resident = [each["memory_bytes"]["resident"] for each in rows if "memory_bytes" in each][9:]
    planned = plan["memory"]["fullest_rank"]["total_bytes"]
    return [
        row(f"{FAMILIES[name]} {what}".strip(), found, planned, seen, RESIDENT)
        for found, seen in (
            ("resident after 10 steps", resident[0]),
            (f"resident, most until {MANY_STEPS}", max(resident)),
        )
    ]


def row(case: str, what: str, predicted: float, measured: float, limit: float | None) -> Row:
    """One line of the table; `limit` is the largest error that is claimed."""
    error = predicted / measured - 1
    return {
        "case": case,
        "what": what,
        "predicted": predicted,
        "measured": measured,
        "error": error,
        "limit": limit,
        "holds": limit is None or abs(error) <= limit,
    }


class Saved:
    """One saved tensor, until backward has used it."""

    def __init__(self, tensor: torch.Tensor, holders: dict[int, list[int]]) -> None:
        # Detached: an operation that saves its own result would be held by it for good.
        self.tensor, self.address, self.holders = (
            tensor.detach(),
            tensor.untyped_storage().data_ptr(),
            holders,
        )
        holders.setdefault(self.address, [tensor.untyped_storage().nbytes(), 0])[1] += 1

    def __del__(self) -> None:
        self.holders[self.address][1] -= 1
        if not self.holders[self.address][1]:
            del self.holders[self.address]


class Watch:
    """What forwards hold for backward, each storage once, and the most of it at a time."""

    def __init__(self) -> None:
        self.holders: dict[int, list[int]] = {}  # by address: bytes, and how many hold them
        # of blocks under selective recomputation, until backward has gone through them
        self.caches: weakref.WeakSet[Any] = weakref.WeakSet()
        self.most = 0

    def saved(self) -> Any:
        """A context in which saved tensors are watched."""
        from torch.autograd.graph import saved_tensors_hooks

        return saved_tensors_hooks(
            lambda tensor: Saved(tensor, self.holders), lambda saved: saved.tensor
        )

    def watch_caches(self) -> None:
        """From now on, what selective recomputation keeps is seen, too: torch tells nobody of
        its caches."""
        from torch.utils import checkpoint

        mode: Any = getattr(checkpoint, "_CachedTorchDispatchMode", None)
        if mode is None:
            sys.exit(
                "this torch has no torch.utils.checkpoint._CachedTorchDispatchMode: see what"
                " create_selective_checkpoint_contexts makes instead"
            )
        begin = mode.__init__

        def begin_watched(cache: Any, *words: Any, **more: Any) -> None:
            self.caches.add(cache)
            begin(cache, *words, **more)

        mode.__init__ = begin_watched

    def look(self, own: set[int], kept: Iterable[torch.Tensor] = ()) -> None:
        """Add up what is there now, and `kept`, without storages at the addresses `own`."""
        from torch import Tensor
        from torch.utils._pytree import tree_leaves

        cached = (
            leaf.val
            for cache in self.caches
            for leaf in tree_leaves(cache.storage)
            if isinstance(getattr(leaf, "val", None), Tensor)
        )
        there = {address: size for address, (size, _) in self.holders.items()}
        there |= {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in (*kept, *cached)
        }
        self.most = max(
            self.most, sum(size for address, size in there.items() if address not in own)
        )


def saved_bytes(job_json: str, rank: int) -> int:
    """In a process of its own: the most bytes that one rank's forwards of a step hold for
    backward at a time.

    The rank has no peers: its collectives and transfers do nothing (torch's fake process group),
    so that the sizes are true and the values are not.
    """
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from trainkit.jobs.ranks import degrees_of
    from trainkit.jobs.schema import Job
    from trainkit.ops.kernels import choose
    from trainkit.train.metrics.timers import Timers
    from trainkit.train.parallel.data_parallel import World
    from trainkit.train.parallel.mesh import Mesh
    from trainkit.train.parallel.pipeline import tied_at
    from trainkit.train.update.build import build_model_parts
    from trainkit.train.update.step import Step

    job, device = Job.model_validate_json(job_json), torch.device("cpu")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=job.world_size)
    mesh = Mesh.of(
        degrees_of(job),
        World(rank, job.world_size),
        device,
        sequence=job.parallelism.sequence_parallel,
        tied_at=tied_at(job),
    )
    kernels = choose(job.kernels, "cpu").kernels
    parts = build_model_parts(job, mesh, job.model.vocab_size or 0, kernels=kernels)
    parts.train()
    for held in parts.parameters.values():
        torch.nn.init.zeros_(held.parameter)
    step = Step(job, parts, mesh, Timers(device))
    length = job.model.seq_length // mesh.degrees.context
    tokens = torch.zeros(job.training.micro_batch_size, length, dtype=torch.int64)
    watch = Watch()
    watch.watch_caches()
    if step.pipeline is None:
        watch_model(watch, parts, tokens)
    else:
        watch_pipeline(watch, parts, step.pipeline, [tokens] * job.gradient_accumulation_steps)
    return watch.most


def watch_model(watch: Watch, parts: ModelParts, tokens: torch.Tensor) -> None:
    """One forward of a model that is whole on this rank, the weights gathered."""
    from trainkit.train.model.head_loss import Labels
    from trainkit.train.parallel.data_parallel import prepare_backward

    (module,), (unit,) = parts.modules, parts.units

    def once() -> Any:
        prepare_backward(unit, last=False)
        return module(tokens, Labels(tokens))

    once()  # gathers the weights, which stay
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    with watch.saved():
        result = once()
    watch.look(own)
    del result


def watch_pipeline(
    watch: Watch, parts: ModelParts, pipeline: Any, micro_batches: list[torch.Tensor]
) -> None:
    """One step of this rank's stage, looked at after each forward."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from trainkit.train.model.batch import Batch
    from trainkit.train.parallel.pipeline_stage import LeanStage

    stages: list[LeanStage] = []
    forward = LeanStage.forward_one_chunk

    def watched(stage: LeanStage, *words: Any, **more: Any) -> Any:
        result = forward(stage, *words, **more)
        gc.collect()  # torch's split backward leaves cycles, which Python frees when it comes by
        stages.extend([stage] if stage not in stages else [])
        # gathered
        weights = {
            p.untyped_storage().data_ptr()
            for module in parts.modules
            for p in module.parameters()
            if not isinstance(p, DTensor)
        }
        # what a stage sends, it keeps
        watch.look(
            weights,
            (
                tensor
                for each in stages
                for outputs, _ in each.fwd_cache.values()
                for tensor in outputs
            ),
        )
        return result

    LeanStage.forward_one_chunk = watched  # type: ignore[method-assign, assignment]
    # stages ask each other whether all know their shapes: yes
    dist.recv = lambda tensor, **_: tensor.fill_(1)
    with watch.saved():
        pipeline.run(
            [Batch(tokens, tokens, 0, i) for i, tokens in enumerate(micro_batches)],
            learning=True,
            z_loss=0.0,
            scale=1.0,
        )


def activations(folder: Path, name: str, sets: list[str], what: str, rank: int = 0) -> Row:
    """What forward saves on a rank, beside the plan's activations of its stage (less the block
    that is computed again) and the head's gradient."""
    from trainkit.jobs.load import load
    from trainkit.jobs.ranks import coordinates_of, degrees_of
    from trainkit.plan.activations import head_gradient_bytes, saved_bytes as predicted_bytes
    from trainkit.plan.layout import layout_of, padded_vocab_size
    from trainkit.plan.rules import Rules

    job = load(folder).resolve(f"plan-{name}", sets).job
    argv = [sys.executable, str(Path(__file__).resolve()), "--saved", str(rank)]
    done = subprocess.run(
        argv, cwd=folder, input=job.model_dump_json(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{argv} ended with {done.returncode}\n{done.stderr}")
    measured = json.loads(done.stdout.splitlines()[-1])
    layout, vocab = layout_of(job), job.model.vocab_size or 0
    stage = coordinates_of(rank, degrees_of(job)).pipeline
    predicted = predicted_bytes(job, layout, Rules(), stage)
    if stage == layout.last_stage:
        predicted += head_gradient_bytes(
            job,
            layout,
            vocab,
            padded_vocab_size(vocab, job.model.make_vocab_size_divisible_by, layout.tensor),
        )
    return row(
        f"{FAMILIES[name]} {what}".strip(),
        f"saved by forward, stage {stage}",
        predicted,
        measured,
        ACTIVATIONS,
    )


def layout_activations(folder: Path, name: str, what: str, mode: str) -> list[Row]:
    """`activations` of the first and the last rank of a layout under a mode of recomputation."""
    ranks, sets = LAYOUTS[what]
    if "DP" in what or (mode == "selective" and "ZBV" in what):  # as one rank; not to be had
        return []
    sets = [f"cluster.ranks_per_node={ranks}", *sets, *MODES[mode]]
    return [
        each
        for rank in sorted({0, ranks - 1} if "PP" in what else {0})
        for each in show([activations(folder, name, sets, f"{what} {mode}", rank)])
    ]


def answers(quick: bool) -> list[Row]:
    """Seconds of `plan` for every job of this checkout, the whole process, best of several; and
    whether it imports torch or numpy."""
    from trainkit.jobs.load import load

    rows = []
    for name in load(CHECKOUT).names()[:: 6 if quick else 1]:
        argv = ["-m", "invoke", "plan", name, "--json"]
        times = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            subprocess.run([sys.executable, *argv], cwd=CHECKOUT, capture_output=True, check=False)
            times.append(time.perf_counter() - began)
        done = subprocess.run(
            [sys.executable, "-X", "importtime", *argv],
            cwd=CHECKOUT,
            capture_output=True,
            text=True,
            check=False,
        )
        imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        heavy = sorted(imported & {"torch", "numpy"})
        seconds, answered = min(times), done.stdout.startswith('{"schema": "plan/1"')
        rows.append(
            {
                "case": name,
                "what": "plan",
                "seconds": seconds,
                "limit": SECONDS,
                "imports": heavy,
                "holds": answered and seconds < SECONDS and not heavy,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer layouts and jobs")
    parser.add_argument("--rows", type=Path, help="write the table as JSON into this file")
    # a process of its own, as this rank
    parser.add_argument("--saved", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.saved is not None:
        print(json.dumps(saved_bytes(sys.stdin.read(), arguments.saved)))
        return
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        project(folder)
        for name in FAMILIES:
            for ranks in RANKS[1:2] if arguments.quick else RANKS:
                rows += show(trained(folder, name, ranks, []))
            if not arguments.quick:
                rows += show(kept(folder, name))
                for what in ("CP2 ring", "CP2 all-to-all"):
                    ranks, sets = LAYOUTS[what]
                    words = [f"cluster.ranks_per_node={ranks}", *sets, LONG]
                    rows += show(kept(folder, name, f"{what}, {LONG}", words))
                rows += show(trained(folder, name, 2, ['training.optimizer="sgd"']))
            rows += [
                each
                for what, sets in {**VARIANTS, **MODES}.items()
                for each in show(
                    [activations(folder, name, ["cluster.ranks_per_node=1", *sets], what)]
                )
            ]
            for what, (ranks, sets) in LAYOUTS.items():
                rows += show(trained(folder, name, ranks, sets, what))
                rows += [
                    each for mode in MODES for each in layout_activations(folder, name, what, mode)
                ]
    rows += show(answers(arguments.quick))
    if arguments.rows:
        arguments.rows.write_text(json.dumps(rows))
    failed = [f"{each['case']}: {each['what']}" for each in rows if not each["holds"]]
    sys.exit(f"not as claimed: {', '.join(failed)}" if failed else 0)


def show(rows: list[Row]) -> list[Row]:
    """Print rows as they come."""
    for each in rows:
        verdict = "" if each["limit"] is None else "ok" if each["holds"] else "NOT AS CLAIMED"
        if "seconds" in each:
            print(
                f"{each['case']:42s} {f'plan, best of {REPEATS}':30s} {each['seconds']:14.2f} s"
                f" {'under':>10s} {each['limit']:.1f} s   {verdict}",
                flush=True,
            )
        else:
            sizes = f"{each['predicted']:14,.0f} {each['measured']:14,.0f}"
            print(
                f"{each['case']:42s} {each['what']:30s} {sizes} {each['error']:+8.2%}   {verdict}",
                flush=True,
            )
    return rows


if __name__ == "__main__":
    main()
