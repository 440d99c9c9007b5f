"""Claim: the plan's parameter, optimizer and checkpoint bytes are exact, its activation bytes within 15 %, and it answers in under 0.5 s without torch.

    python benchmarks/plan.py [--quick] [--rows FILE]

Trains demo-sized models of all three families on this machine by the real trainer, on 1, 2 and 4 data-parallel ranks, and prints what the plan says beside
what the run logged and wrote. Activations are those of one rank under fully_shard: all that torch.autograd.graph.saved_tensors_hooks sees, each storage once,
weights left out; under selective recomputation, whose cache the hooks do not see, every storage that lives after forward. The peak is shown without a claim:
on a CPU it is the process's, of which the plan assumes the interpreter's part. Then every job of jobs.toml is planned by the task itself.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
ACTIVATIONS, SECONDS = 0.15, 0.5  # the claims
RANKS = (1, 2, 4)
REPEATS = 5
STEPS = 4
FAMILIES = {"demo": "gpt", "demo-neox": "gpt-neox", "demo-llama": "llama"}
VARIANTS: dict[str, list[str]] = {
    "": [],
    "dropout": ["model.hidden_dropout=0.1"],
    "bf16": ['training.precision="bf16"'],
    "full": ['training.recompute_granularity="full"'],
    "selective": ['training.recompute_granularity="selective"'],
}
Row = dict[str, Any]


def invoke(folder: Path, *words: str) -> str:
    """stdout of a task that must succeed."""
    done = subprocess.run([sys.executable, "-m", "invoke", *words], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"invoke {' '.join(words)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def project(folder: Path) -> None:
    """The models of this checkout's jobs.toml in a folder of their own, on random tokens, for a few steps."""
    (folder / "tasks.py").write_text("from trainkit.cli.tasks import namespace\n")
    text = (CHECKOUT / "jobs.toml").read_text().replace('include = ["jobs/*.toml"]', "")
    text += "".join(
        f'\n[models.{name}-mock]\nextends = "{name}"\nvocab_size = 4096\n'
        f'\n[jobs.plan-{name}]\ncluster = "here"\nmodel = "{name}-mock"\ndataset = "mock"\n'
        f"training = {{ micro_batch_size = 4, global_batch_size = 16, train_iters = {STEPS}, lr = 1e-3, eval_iters = 0 }}\n"
        for name in FAMILIES
    )
    (folder / "jobs.toml").write_text(text)


def trained(folder: Path, name: str, ranks: int, sets: list[str]) -> list[Row]:
    """Train one layout; what the plan said and what the run logged and wrote."""
    words = [word for value in (f"cluster.ranks_per_node={ranks}", *sets) for word in ("--set", value)]
    plan = json.loads(invoke(folder, "plan", f"plan-{name}", *words, "--json"))
    run = Path(json.loads(invoke(folder, "train", f"plan-{name}", *words, "--share", "--json"))["folder"])
    logged = [json.loads(line)["memory_bytes"] for line in (run / "metrics.jsonl").read_text().splitlines()][-1]
    manifest = json.loads(next((run / "checkpoints").glob("step-*/manifest.json")).read_text())
    written = sum(chunk["bytes"] for tensor in manifest["tensors"].values() for chunk in tensor["chunks"])
    rank, case = plan["memory"]["fullest_rank"], f"{FAMILIES[name]} on {ranks}{' ' + ' '.join(sets) if sets else ''}"
    return [
        row(case, "parameters, shard of rank 0", rank["parameter_bytes"], logged["parameters"], 0.0),
        row(case, "optimizer, shard of rank 0", rank["optimizer_bytes"], logged["optimizer"], 0.0),
        row(case, "checkpoint", plan["checkpoint_bytes"], written, 0.0),
        row(case, "peak of the process", rank["total_bytes"], logged["max_resident"], None),
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


def saved_bytes(job_json: str) -> dict[str, int]:
    """In a process of its own: bytes that forward leaves for backward on one rank, {"hooks": ..., "alive": ...}."""
    import torch
    from torch.autograd.graph import saved_tensors_hooks
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from trainkit.jobs.schema import Job
    from trainkit.train.data_parallel import World, join, prepare_backward, shard
    from trainkit.train.loss import Labels
    from trainkit.train.model import build_on_meta
    from trainkit.train.recompute import wrap_blocks

    job = Job.model_validate_json(job_json)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(probe.getsockname()[1]))
    _, mesh = join(World(0, 1), "cpu")
    model = build_on_meta(job.model, job.model.vocab_size or 0)
    wrap_blocks(model, job.model, job.training)
    sharded = shard(model, mesh, job.training.precision)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    found: dict[int, int] = {}
    kept: list[torch.Tensor] = []
    made: list[weakref.ref[torch.UntypedStorage]] = []

    class Living(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            made.extend(weakref.ref(leaf.untyped_storage()) for leaf in tree_leaves(result) if type(leaf) is torch.Tensor)
            return result

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)  # a storage that is freed would lend its address to the next
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tokens = torch.zeros(job.training.micro_batch_size, job.model.seq_length, dtype=torch.int64)

    def forward() -> Any:
        prepare_backward(sharded, last=False)
        return model(tokens, Labels(tokens))

    forward()  # gathers the weights, which stay
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with Living():  # type: ignore[no-untyped-call]
        held = forward()
    storages = {storage.data_ptr(): storage.nbytes() for ref in made if (storage := ref()) is not None}
    del held
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return {name: sum(size for address, size in each.items() if address not in own) for name, each in (("hooks", found), ("alive", storages))}


def activations(folder: Path, name: str, variant: str) -> Row:
    """What forward saves, beside the plan's activations (less the block that is computed again) and the head's gradient."""
    from trainkit.jobs.load import load
    from trainkit.plan.activations import head_gradient_bytes
    from trainkit.plan.activations import saved_bytes as predicted_bytes
    from trainkit.plan.layout import layout_of, padded_vocab_size
    from trainkit.plan.rules import Rules

    job = load(folder).resolve(f"plan-{name}", ["cluster.ranks_per_node=1", *VARIANTS[variant]]).job
    argv = [sys.executable, str(Path(__file__).resolve()), "--saved"]
    done = subprocess.run(argv, cwd=folder, input=job.model_dump_json(), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{argv} ended with {done.returncode}\n{done.stderr}")
    measured = json.loads(done.stdout.splitlines()[-1])["alive" if variant == "selective" else "hooks"]
    layout, vocab = layout_of(job), job.model.vocab_size or 0
    padded = padded_vocab_size(vocab, job.model.make_vocab_size_divisible_by, 1)
    predicted = predicted_bytes(job, layout, Rules(), 0) + head_gradient_bytes(job, layout, vocab, padded)
    return row(f"{FAMILIES[name]} {variant}".strip(), "saved by forward", predicted, measured, ACTIVATIONS)


def answers(quick: bool) -> list[Row]:
    """Seconds of `plan` for every job of this checkout, the whole process, best of several; and whether it imports torch or numpy."""
    from trainkit.jobs.load import load

    rows = []
    for name in load(CHECKOUT).names()[:: 6 if quick else 1]:
        argv = ["-m", "invoke", "plan", name, "--json"]
        times = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            subprocess.run([sys.executable, *argv], cwd=CHECKOUT, capture_output=True, check=False)
            times.append(time.perf_counter() - began)
        told = subprocess.run([sys.executable, "-X", "importtime", *argv], cwd=CHECKOUT, capture_output=True, text=True, check=False)
        imported = {line.rpartition("|")[2].strip() for line in told.stderr.splitlines()}
        heavy = sorted(imported & {"torch", "numpy"})
        seconds, answered = min(times), told.stdout.startswith('{"schema": "plan/1"')
        rows.append(
            {"case": name, "what": "plan", "seconds": seconds, "limit": SECONDS, "imports": heavy, "holds": answered and seconds < SECONDS and not heavy}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer layouts and jobs")
    parser.add_argument("--rows", type=Path, help="write the table as JSON into this file")
    parser.add_argument("--saved", action="store_true", help=argparse.SUPPRESS)  # a process of its own
    arguments = parser.parse_args()
    if arguments.saved:
        print(json.dumps(saved_bytes(sys.stdin.read())))
        return
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        project(folder)
        for name in FAMILIES:
            for ranks in RANKS[1:2] if arguments.quick else RANKS:
                rows += show(trained(folder, name, ranks, []))
            if not arguments.quick:
                rows += show(trained(folder, name, 2, ['training.optimizer="sgd"']))
            rows += [each for variant in VARIANTS for each in show([activations(folder, name, variant)])]
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
            print(f"{each['case']:42s} {f'plan, best of {REPEATS}':30s} {each['seconds']:14.2f} s {'under':>10s} {each['limit']:.1f} s   {verdict}", flush=True)
        else:
            sizes = f"{each['predicted']:14,.0f} {each['measured']:14,.0f}"
            print(f"{each['case']:42s} {each['what']:30s} {sizes} {each['error']:+8.2%}   {verdict}", flush=True)
    return rows


if __name__ == "__main__":
    main()
