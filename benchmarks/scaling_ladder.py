"""Claim: a ladder of five sizes, killed twice, gives a law that says the loss of a sixth, more than
twice as large as the largest, within 2 %.

    python benchmarks/scaling_ladder.py FOLDER [--picture docs/scaling.svg]

What a person does, with trainkit's own commands in FOLDER: `scale` writes the jobs for a budget,
`sweep` trains the ladder (five depths, each with half, once and twice its tokens) on one rank and
Python's standard library, `scaling-law` fits it and says the loss of the big run, `train` trains
that. The sweep is killed twice (SIGKILL): at first its own process, whose run goes on, then the
run's supervisor besides, and the run goes on from its checkpoint. Exit 1 where the loss is more
than 2 % beside what was said. It takes half an hour; begun again in the same FOLDER it goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from trainkit.cli.checkout.machine import describe, machine
from trainkit.runs.folder import RunFolder
from trainkit.runs.metrics import read_rows
from trainkit.runs.record import SupervisorStatus
from trainkit.scaling.picture import draw_law
from trainkit.scaling.points import read_points
from trainkit.scaling.report import Prediction, ScalingLaw

GOAL = 0.02
BUDGET = "1.33e13"  # FLOPs: 8 layers
LADDER = "2,3,4,5,6"
TOKENS_PER_PARAMETER = "10"
INCLUDE = 'include = ["big.toml"]\n'
JOBS = f"""
{INCLUDE}
[clusters.here]
launcher = "local"
device = "cpu"
ranks_per_node = 1
node_folder = "FOLDER"

[tokenizers.small]
type = "bpe"
vocab_size = 512

[datasets.python]
source = "stdlib"
tokenizer = "small"
split = "90,10,0"
shuffle_documents = true

[models.base]
family = "llama"
num_layers = 4
hidden_size = 32
ffn_hidden_size = 88
num_attention_heads = 4
seq_length = 32
init_method_std = 0.05
parametrization = "mup"
mup_base_hidden_size = 32

[jobs.base]
cluster = "here"
model = "base"
dataset = "python"

[jobs.base.training]
micro_batch_size = 16
global_batch_size = 16
train_iters = 8500
lr = 7e-3
min_lr = 7e-4
lr_warmup_iters = 850
weight_decay = 2.4e-3
adam_beta2 = 0.98
eval_interval = 8500
eval_iters = 200
save_interval = 2125
"""


def words(folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "trainkit", "--search-root", str(folder), *arguments]


def task(folder: Path, *arguments: str) -> Any:
    """Run a task; its document."""
    done = subprocess.run(
        [*words(folder, *arguments), "--json"],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def runs_of(folder: Path) -> list[RunFolder]:
    found = sorted((folder / "runs" / "big-ladder").glob("*"))
    return [RunFolder(path) for path in found if (path / "job.json").is_file()]


def killed_sweep(folder: Path, runs: int, *, supervisor: bool) -> None:
    """Begin or go on with the sweep, and kill it in the middle of its run of this number."""
    sweep = subprocess.Popen(
        words(folder, "sweep", "big-ladder"),
        cwd=folder,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    while sweep.poll() is None:
        time.sleep(0.2)
        found = runs_of(folder)
        if len(found) >= runs and any("eval" not in row for row in read_rows(found[-1].metrics)):
            os.killpg(sweep.pid, signal.SIGKILL)
            if supervisor:
                status = SupervisorStatus.from_file(found[-1].supervisor)
                os.kill(status.identity.pid, signal.SIGKILL)
            print(f"killed in run {len(found)} of 15", flush=True)
            break
    sweep.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description="a law of a ladder against a larger run")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(exist_ok=True)
    print(describe(machine()), flush=True)
    begun = time.monotonic()
    if not (folder / "jobs.toml").is_file():
        # slots of its own: what else runs on the machine is not waited for
        jobs = JOBS.replace("FOLDER", str(folder))
        (folder / "jobs.toml").write_text(jobs.replace(INCLUDE, ""))
        task(folder, "prep-data", "--dataset", "python")
        how = ("--tokens-per-parameter", TOKENS_PER_PARAMETER, "--ladder", LADDER)
        task(folder, "scale", BUDGET, "--job", "base", *how, "--write", str(folder / "big.toml"))
        (folder / "jobs.toml").write_text(jobs)
        killed_sweep(folder, 3, supervisor=False)
        killed_sweep(folder, 9, supervisor=True)
    swept = task(folder, "sweep", "big-ladder")
    assert len(swept["members"]) == len({each["run"] for each in swept["members"]}) == 15
    attempts = [len(list((run.path / "attempts").glob("*"))) for run in runs_of(folder)]
    task(folder, "scaling-law", "big-ladder", "--write", str(folder / "scaling-law.json"))
    trained = task(folder, "train", "big")
    run = RunFolder(folder / "runs" / "big" / trained["run"])
    (point,) = read_points([run]).points
    law = ScalingLaw.from_file(folder / "scaling-law.json")
    said: Prediction = law.predict(point.parameters, point.tokens)
    if options.picture:
        draw_law(law, options.picture, [(point.flops, said)], [point])
    largest = max(each.parameters for each in law.points)
    off = said.loss / point.loss - 1
    print(f"ladder: {len(law.points)} runs, {sum(attempts) - len(attempts)} resumed", flush=True)
    print(f"law: {law.law}; alpha {law.intervals['alpha']}, beta {law.intervals['beta']}")
    print(f"residuals: at most {max(map(abs, law.residuals)):.2%}")
    print(f"big: {point.parameters:,} parameters, {point.parameters / largest:.2f} x the largest")
    print(f"said {said.loss:.4f} ({said.low:.4f} to {said.high:.4f}), measured {point.loss:.4f}")
    print(f"{off:+.2%} (goal {GOAL:.0%}); {time.monotonic() - begun:,.0f} s")
    return int(abs(off) > GOAL)


if __name__ == "__main__":
    sys.exit(main())
