"""Losses, gradient norms and every gradient in every layout against a plain loop over one
process; checkpoints from one layout in others; an overflow that one rank has. One world of
eight, one of four, one of two and one of one rank do all of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.once import once
from tests.ops.op_cases import fused, why_no_kernels
from tests.train.layout_cases import (
    EXACT,
    LONG,
    MUON,
    SHORT,
    SHORT_FUSED,
    in_fp32,
    layout,
    limit,
    runs_here,
    words,
)
from tests.train.layouts import (
    Apart,
    Case,
    Tasks,
    apart,
    compare,
    comparisons,
    run_worlds,
)
from tests.train.plain_loop import StepFound, reference
from tests.train.resharding import MORE, SAVED_AT, State
from tests.train.support import same

SMALL: dict[str, Any] = {"train_iters": 4, "global_batch_size": 8, "micro_batch_size": 2}
# TP2, PP2, DP2: the widest cut there is
SAVED = Case("gpt", layout(2, 2, sp=True, zero=3), 8, SMALL)
LOADED = [
    Case("gpt", layout(), 1, SMALL),
    Case("gpt", layout(zero=3), 8, {**SMALL, "micro_batch_size": 1}),
    Case("gpt", layout(4), 4, SMALL),
    Case("gpt", layout(1, 4), 4, SMALL),
    Case("gpt", layout(2, 1, sp=True, zero=0), 4, SMALL),
    Case("gpt", layout(1, 2, "zbv"), 2, SMALL),  # tied weights twice on one rank
    Case("gpt", layout(zero=3, cp=2), 4, SMALL),
    Case("gpt", layout(zero=0, cp=4, comm="a2a"), 4, SMALL),
]
LOADED = [case for case in LOADED if runs_here(case.parallelism)]
# Muon, from layout to layout: each reads the last one's save. Then all of it on one rank.
MUON_SMALL = {**SMALL, **MUON, "train_iters": 18}
CHAIN = [
    Case("llama-tied", each, 4, MUON_SMALL)
    for each in (
        layout(2, sp=True),
        layout(1, 2, "zbv"),
        layout(zero=1),
        layout(zero=3, cp=2),
        layout(cp=4),
        layout(zero=3),
        layout(2, zero=2),
    )
    if runs_here(each)
]
ALONE = Case("llama-tied", layout(), 1, MUON_SMALL)
# Experts, whose biases are no parameters, from layout to layout, and at last on one rank.
_EXPERTS = [
    (4, layout(ep=4)),
    (4, layout(zero=3)),
    (4, layout(2, sp=True, ep=2, etp=2)),
    (4, layout(1, 2, "zbv", ep=2)),
    (1, layout()),
]
EXPERT_CHAINS = {
    "experts": [
        Case("moe-biased", each, ranks, {**SMALL, "train_iters": 14}) for ranks, each in _EXPERTS
    ],
    "experts by Muon": [
        Case("moe-biased", each, ranks, MUON_SMALL) for ranks, each in _EXPERTS[::2]
    ],
    "experts and loads of the step before": [
        Case("moe-global", each, ranks, {**SMALL, "train_iters": 14})
        for ranks, each in _EXPERTS[::2]
    ],
    "one token more": [
        Case("deepseek-mtp", each, ranks, {**SMALL, "train_iters": 8})
        for ranks, each in ((4, layout(1, 2, ep=2)), (2, layout(2, sp=True, zero=3)), (1, layout()))
    ],
}
EXPERT_CHAINS = {
    name: [case for case in chain if runs_here(case.parallelism, experts=True)]
    for name, chain in EXPERT_CHAINS.items()
}
# Muon again: of two saves the older is read, where it was written
AGAIN = [
    Case(
        model, each, ranks, {**SMALL, **MUON, "global_batch_size": 4, "micro_batch_size": 1}, "fp32"
    )
    for model, each, ranks in (
        ("llama-tied", layout(2, sp=True), 2),
        ("llama-tied", layout(copies=2, zero=1), 4),
        ("llama-tied", layout(copies=2, zero=3), 4),
        ("llama-tied", layout(1, 2, "zbv"), 2),
        ("moe-biased", layout(2, sp=True, ep=2), 2),
    )
    if runs_here(each, experts=model == "moe-biased")
]
FORGETFUL = replace(AGAIN[-1], sabotage="some ranks forget momenta")
FP16 = {**SMALL, "precision": "fp16", "initial_loss_scale": 2.0**10, "hysteresis": 1}
OVERFLOWS = {  # a layout, and the rank whose gradient is infinite: of the first stage, of the last
    "TP2, PP2 1F1B": (Case("gpt", layout(2, 2), 4, FP16, "fp32"), 1),
    "TP2 + SP, PP2 interleaved, DP2 ZeRO 3": (
        Case("llama", layout(2, 2, "interleaved", sp=True, zero=3), 8, FP16, "fp32"),
        6,
    ),
    "PP2 ZBV": (Case("gpt", layout(1, 2, "zbv"), 2, FP16, "fp32"), 1),
}
OVERFLOWS = {
    name: (case, rank) for name, (case, rank) in OVERFLOWS.items() if runs_here(case.parallelism)
}
# Three steps in bf16, so many micro-batches each. Clipping is off: its divisor is one number of all
# gradients, whose last bit is the order's of a sum.
BF16 = {"train_iters": 3, "global_batch_size": 4, "precision": "bf16", "clip_grad": 0.0}
ONE = Case("gpt-untied", layout(), 1, BF16, "fp32")
PAIRS = replace(ONE, training={**BF16, "micro_batch_size": 2})
ALIKE = [  # two ranks that compute the bits of one
    (replace(ONE, ranks=2), ONE),
    (replace(ONE, ranks=2, parallelism=layout(1, 2, "interleaved")), ONE),
    (replace(PAIRS, ranks=2, parallelism=layout(zero=3)), PAIRS),
]
ZERO_3, SPLIT = (
    replace(ONE, ranks=2, parallelism=layout(zero=3)),
    replace(ONE, ranks=2, parallelism=layout(2, sp=True)),
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What every task of SHORT, of SAVED and LOADED, and of OVERFLOWS gave, by rank."""
    return once(tmp_path_factory, "layouts", _found)


def _found(root: Path) -> dict[str, list[Any]]:
    fused = {} if why_no_kernels() else SHORT_FUSED
    tasks = comparisons({**SHORT, **fused}, root)
    tasks[8] = {"saved": ("tests.train.resharding:save_in", (SAVED, root)), **tasks[8]}
    for case in LOADED:
        tasks.setdefault(case.ranks, {})[f"loaded {words(case)}"] = (
            "tests.train.resharding:load_in",
            (case, root, root / words(case)),
        )
    chains = {"chain": CHAIN, "alone": [ALONE] * len(CHAIN), **EXPERT_CHAINS}
    for name, chain in EXPERT_CHAINS.items():
        chains[f"{name} alone"] = chain[-1:] * len(chain)
    for name, chain in chains.items():
        for ranks, of_world in _from_layout_to_layout(chain, root / name).items():
            tasks[ranks] |= of_world
    for case in AGAIN:
        of_case = root / f"again {words(case)}"
        tasks[case.ranks] |= {
            f"saved {words(case)}": ("tests.train.resharding:save_in", (case, of_case)),
            f"again {words(case)}": (
                "tests.train.resharding:load_in",
                (case, of_case, of_case / "again"),
            ),
        }
    of_case = root / f"again {words(AGAIN[-1])}"
    forgets = (FORGETFUL, of_case, of_case / "forgetful")
    tasks[FORGETFUL.ranks]["forgetful"] = ("tests.train.resharding:load_in", forgets)
    for name, (case, where) in OVERFLOWS.items():
        tasks[case.ranks][f"overflow {name}"] = (
            "tests.train.resharding:overflow_in",
            (case, root, where),
        )
    for case in (ONE, PAIRS, *(case for case, _ in ALIKE), ZERO_3, SPLIT):
        tasks[case.ranks][words(case)] = ("tests.train.layouts:train_case", (case, root))
    return run_worlds(tasks)


def _from_layout_to_layout(cases: list[Case], root: Path) -> dict[int, Tasks]:
    """Each goes on from the save of the one before it, on as many ranks or fewer; by "FOLDER
    NUMBER"."""
    first: Tasks = {f"{root.name} 0": ("tests.train.resharding:save_in", (cases[0], root))}
    tasks = {cases[0].ranks: first}
    for i, case in enumerate(cases[1:], start=1):
        words = (case, root, root, SAVED_AT + i * MORE)
        of_world = tasks.setdefault(case.ranks, {})
        of_world[f"{root.name} {i}"] = ("tests.train.resharding:load_in", words)
    return tasks


@pytest.mark.parametrize("name", [name for name, case in SHORT.items() if not case.sabotage])
def test_a_layout_equals_the_plain_loop(found: dict[str, list[Any]], name: str) -> None:
    close(SHORT[name], found[name][0])


@pytest.mark.parametrize("name", SHORT_FUSED)
def test_a_layout_with_fused_kernels_equals_the_plain_loop(
    found: dict[str, list[Any]], name: str
) -> None:
    if why := why_no_kernels():
        pytest.skip(why)
    close(SHORT_FUSED[name], found[name][0])


@pytest.mark.parametrize("name", [name for name, case in SHORT.items() if case.sabotage])
def test_a_mistake_would_be_seen(found: dict[str, list[Any]], name: str) -> None:
    """The same comparison, of a trainer with a mistake."""
    a = found[name][0]
    assert max(a.norm, a.gradient) > 1e-3 or a.loads > 0, a


def close(case: Case, a: Apart) -> None:
    assert a.loss <= limit(case) and a.norm <= limit(case), a
    assert a.gradient <= limit(case) and a.loads == 0, a


def test_the_comparison_sees_one_element() -> None:
    gradients = {
        "large": np.array([1.0, -2.0]),
        "small": np.array([1e-9, 0.0]),
        "middle": np.array([[0.5, 0.25]]),
    }
    expected = [StepFound(2.0, 3.0, gradients)]
    places: list[tuple[str, Any, float]] = [
        ("large", 1, 1e-9),
        ("middle", (0, 1), 1e-9),
        ("small", 0, 1e-10),
    ]
    for name, at, change in places:
        changed = {key: value.copy() for key, value in gradients.items()}
        changed[name][at] += change
        a = apart([StepFound(2.0, 3.0, changed)], expected, 0.0)
        assert a.gradient > 1e-10 and a.worst == name and a.loss == a.norm == 0
    assert apart([StepFound(2.0 + 1e-9, 3.0, gradients)], expected, 0.0).loss > 1e-10
    for nowhere in (np.nan, np.inf):
        broken = {**gradients, "middle": np.array([[0.5, nowhere]])}
        assert not apart([StepFound(2.0, 3.0, broken)], expected, 0.0).gradient <= 1e-10


@pytest.mark.parametrize("name", [words(case) for case in LOADED])
def test_a_checkpoint_goes_from_any_layout_to_any(found: dict[str, list[Any]], name: str) -> None:
    """Weights and both moments bit for bit, by name and global shape; then the same samples and,
    in fp64, the same losses."""
    state, _, losses, checksums = found["saved"][0]
    assert len(state) == 3 * 64 and all(np.isfinite(value).all() for value in state.values())
    matrix = state["model.layers.1.attention.qkv.weight"]
    assert matrix.shape == (96, 32) and all(
        np.abs(matrix[rows] - matrix[others]).min() > 0
        for rows, others in ((0, 32), (31, 64), (1, 2))
    )
    assert all(
        np.abs(state[f"optimizer.exp_avg_sq.{key[6:]}"]).max() > 0
        for key in state
        if key.startswith("model.")
    )
    loaded, _, losses_here, checksums_here = found[f"loaded {name}"][0]
    assert same(loaded, state)
    assert checksums_here == checksums and losses_here == pytest.approx(losses, rel=1e-12)


def test_muon_goes_from_layout_to_layout(found: dict[str, list[Any]]) -> None:
    """TP2, PP2, DP4, CP2, CP4, ZeRO 3 and TP2 again: at each step what one process has, in
    fp64, and what is read is what was written, to the bit, on every rank that holds it."""
    _equals_one_process(found, "chain", "alone", len(CHAIN))
    for i in range(len(CHAIN)):
        whole_with_momenta(found[f"chain {i}"][0].state)


@pytest.mark.parametrize("name", EXPERT_CHAINS)
def test_experts_go_from_layout_to_layout(found: dict[str, list[Any]], name: str) -> None:
    """EP4, EP1, TP2 with EP2 x ETP2, PP2 with EP2 and one rank. Biases are to the bit those of
    one process: they move by loads, which are whole numbers. So are these where they are kept."""
    _equals_one_process(found, name, f"{name} alone", len(EXPERT_CHAINS[name]))
    for i in range(len(EXPERT_CHAINS[name])):
        here, alone = found[f"{name} {i}"][0], found[f"{name} alone {i}"][0]
        rules = (".expert_bias", "expert_loads")
        biases = {key: bias for key, bias in here.end.items() if key.endswith(rules)}
        assert len(biases) == (1 if "loads" in name else 4) and any(
            np.abs(bias).max() > 0 for bias in biases.values()
        )
        assert all(np.array_equal(alone.end[key], bias) for key, bias in biases.items())


def _equals_one_process(found: dict[str, list[Any]], name: str, one: str, count: int) -> None:
    end = None
    for i in range(count):
        here, alone = found[f"{name} {i}"][0], found[f"{one} {i}"][0]
        assert all(np.isfinite(value).all() for value in here.state.values())
        assert end is None or same(here.state, end)
        end = here.end
        assert here.checksums == alone.checksums
        assert here.losses == pytest.approx(alone.losses, rel=EXACT)
        for key, value in alone.end.items():
            assert np.abs(end[key] - value).max() <= EXACT * np.abs(value).max(), key


@pytest.mark.parametrize("name", [words(case) for case in AGAIN])
def test_muon_goes_on_from_the_older_save(found: dict[str, list[Any]], name: str) -> None:
    """All ranks begin with what the older of two saves holds, before any step, and end with the
    bits of the run that wrote it."""
    saved, again = found[f"saved {name}"][0], found[f"again {name}"][0]
    whole_with_momenta(saved.state)
    assert same(again.state, saved.state) and same(again.end, saved.end)
    assert not any(np.array_equal(saved.state[key], saved.end[key]) for key in saved.state)
    assert again.losses == saved.losses and again.checksums == saved.checksums


def test_momenta_that_some_ranks_forget_would_be_seen(found: dict[str, list[Any]]) -> None:
    saved, again = found[f"saved {words(AGAIN[-1])}"][0], found["forgetful"][0]
    assert not same(again.end, saved.end)


def whole_with_momenta(state: State) -> None:
    """All of it is there, ranks that hold the same have the same, and matrices have a momentum."""
    assert all(np.isfinite(value).all() for value in state.values())
    momenta = [name for name in state if name.startswith("optimizer.momentum_buffer.")]
    matrices = [
        name for name, value in state.items() if name.startswith("model.layers.") and value.ndim > 1
    ]
    assert len(momenta) == len(matrices) > 0
    assert all(np.abs(state[name]).max() > 0 for name in momenta)


@pytest.mark.parametrize("name", OVERFLOWS)
def test_an_overflow_of_one_rank_is_skipped_by_all(found: dict[str, list[Any]], name: str) -> None:
    """In fp16, on a rank of the first or of the last stage: no rank changes a weight or a
    moment, all halve the scale, and all go on."""
    ranks = found[f"overflow {name}"]
    assert len(ranks) == OVERFLOWS[name][0].ranks
    for rank in ranks:
        assert (rank["kept"], rank["went on"], rank["applied"]) == (True, True, 2)
        assert rank["overflows"] == [0, 1, 0] and rank["scales"] == [2.0**10, 2.0**10, 2.0**9]
        assert rank["losses"] == ranks[0]["losses"] and np.isfinite(rank["losses"]).all()


@pytest.mark.parametrize(
    ("case", "alone"), ALIKE, ids=lambda case: words(case) if case.ranks > 1 else ""
)
def test_bf16_is_the_same_to_the_bit(found: dict[str, list[Any]], case: Case, alone: Case) -> None:
    """Data-parallel ranks and stages compute what one rank computes, micro-batch by micro-batch,
    and what they round to bf16 is the same: gradients are summed in fp64, where the sum of so
    few numbers of 8 bits is exact, and rounded to fp32 once. So the bits are equal, after
    updates too. Under ZeRO 3 that holds where a rank has one micro-batch a step."""
    for step, expected in zip(found[words(case)][0], found[words(alone)][0], strict=True):
        assert step.loss == expected.loss and same(step.gradients, expected.gradients)
        assert step.norm == pytest.approx(expected.norm, rel=1e-12)


def test_bf16_under_zero_3_adds_shards_up_in_fp32(found: dict[str, list[Any]]) -> None:
    """Of several micro-batches each sum is rounded to fp32, not the last alone: the first step's
    gradients are as far apart as that, its loss is not."""
    (step, *_), (expected, *_) = found[words(ZERO_3)][0], found[words(ONE)][0]
    a = apart([step], [expected], 0.0)
    assert a.loss == 0 and a.gradient <= 2**-22


def test_bf16_of_split_layers_is_as_far_from_fp32_as_of_whole_ones(
    found: dict[str, list[Any]],
) -> None:
    """Tensor parallelism rounds partial sums to bf16 that one rank does not round, so the bits
    are others; the error must be that of bf16 and no larger."""
    exact = reference(
        replace(ONE, training={**BF16, "precision": "fp32"}).alone(Path()), torch.float64
    )[0]

    def error(case: Case) -> dict[str, float]:
        gradients = found[words(case)][0][0].gradients
        return {
            name: float(np.linalg.norm(gradients[name] - g) / np.linalg.norm(g))
            for name, g in exact.gradients.items()
        }

    whole, split = error(ONE), error(SPLIT)
    assert all(split[name] < 2 * whole[name] for name in whole) and max(whole.values()) < 0.05
    assert np.mean(list(split.values())) < 1.25 * np.mean(list(whole.values()))


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)  # hundreds of worlds: a guard against hanging only
@pytest.mark.parametrize("kernels", ["reference", "fused"])
def test_every_layout_equals_the_plain_loop(tmp_path: Path, kernels: str) -> None:
    cases = {**LONG, **{f"{name}, fp32": in_fp32(case) for name, case in LONG.items()}}
    if kernels == "fused":
        fused()  # or it is skipped
        cases = {name: replace(case, kernels="fused") for name, case in cases.items()}
    for name, a in compare(cases, tmp_path).items():
        print(name, a)
        close(cases[name], a)
