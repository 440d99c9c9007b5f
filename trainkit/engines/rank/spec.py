"""launch/engine-rank-N.json: what the program beside a foreign engine's rank must know, the
document engine-rank/1. One writer (engines/foreign.py), one reader (engines/rank/main.py)."""

from __future__ import annotations

import json
from pathlib import Path

from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.base.records import Record
from trainkit.engines.rank.node_setup import NodeSetup


@dataclass(frozen=True)
class RequiredModule:
    """A module that the engine imports and without which it fails late, or not at all.

    Args:
        name: as it is imported; "ONE or OTHER" where either will do.
        mend: what a person does where it is missing.
    """

    name: str
    mend: str


@dataclass(frozen=True)
class RankSpec(Record):
    """The same for all ranks of an attempt.

    Args:
        engine: its name in jobs.toml: who reads its lines and checkpoints.
        argv: the program; ${LOCAL_RANK} in a word stands for the rank's number on its node,
            ${NODE_RANK}, ${MASTER_ADDR} and ${MASTER_PORT} for torchrun's.
        cwd: its working folder: the engine's tree.
        checkpoints: the folder it saves to and loads from.
        metrics: metrics.jsonl of the run.
        train_iters: the last iteration.
        log_interval: iterations between two lines of its log.
        global_batch_size: samples of one iteration.
        seq_length: tokens of a sample.
        world_size: ranks.
        model_flops: FLOPs a token, of the model.
        hardware_flops: the same with what is computed again.
        peak_tflops: of one device; None where it is not known.
        peak: the same in words.
        saves_on_term: the engine saves and ends with 0 when it gets TERM.
        modules: what its interpreter must be able to import.
        reads: files that every node must see.
        versions: requirement lines that the engine is known to run with; others are noted.
        eval_interval: iterations between two evaluations, eval_iters: batches of one; 0: not known.
        before: a program that is run before it in each rank, whose end decides nothing.
        python_path: folders that come first on PYTHONPATH.
        ends_in_time: the engine saves and ends with 0 by itself when its own time is up.
        save_interval: iterations between two checkpoints; 0: not known.
        saves: it writes checkpoints; without any, its last line says whether training is done.
        seen_seconds: until a file that one rank has written is seen by all.
        path: folders that come first on PATH, so that the engine's Makefiles find the python3 and
            python3-config of its interpreter.
        python: the engine's interpreter, where argv begins with another program.
        starts_ranks: the program starts the ranks of its node itself, and names them.
        node: what is set on each node before.
        compiled: the program compiles graphs instead of training: the file, of this attempt and
            node, that says which; "": it trains. ${NODE_RANK} stands for the node's number.
        compiled_for: what they were compiled for, kept in that file.
    """

    SCHEMA = "engine-rank/1"
    engine: str
    argv: tuple[str, ...]
    cwd: str
    checkpoints: str
    metrics: str
    train_iters: int
    log_interval: int
    global_batch_size: int
    seq_length: int
    world_size: int
    model_flops: float
    hardware_flops: float
    peak_tflops: float | None
    peak: str | None
    saves_on_term: bool
    modules: tuple[RequiredModule, ...]
    reads: tuple[str, ...]
    seen_seconds: float
    path: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()
    python: str = ""
    starts_ranks: bool = False
    node: NodeSetup = field(default_factory=NodeSetup)
    compiled: str = ""
    compiled_for: str = ""
    eval_interval: int = 0
    eval_iters: int = 0
    saves: bool = True
    before: tuple[str, ...] = ()
    python_path: tuple[str, ...] = ()
    ends_in_time: bool = False
    save_interval: int = 0

    @property
    def interpreter(self) -> str:
        """That has what the engine needs."""
        return self.python or self.argv[0]


def read_spec(path: Path) -> RankSpec:
    """Read the document. Raises OSError, and ValueError where it is another one."""
    return RankSpec.from_json(json.loads(path.read_text(encoding="utf-8")))
