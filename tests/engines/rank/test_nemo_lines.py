"""The progress bar of NeMo as a terminal gets it: written by pytorch-lightning 1.7.7 and 2.4.0 in
trainings of seven steps on a CPU, validated after each third; bars shortened."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, strategies as st

from trainkit.engines.rank import nemo
from trainkit.engines.rank.nemo_lines import NemoLines
from trainkit.engines.rank.readers import line_reader
from trainkit.engines.rank.readings import EvaluationLine, Iteration
from trainkit.engines.rank.spec import RankSpec

LIGHTNING_1 = """\
Sanity Checking DataLoader 0: 100%|##########| 2/2 [00:00<00:00, 100.42it/s]
Training: 0it [00:00, ?it/s]
Epoch 0:   0%|          | 0/26 [00:00<?, ?it/s]\x20
Epoch 0:   4%|▍         | 1/26 [00:00<00:01, 15.92it/s]
Epoch 0:   4%|▍         | 1/26 [00:00<00:01, 15.79it/s, loss=0.0992, reduced_train_loss=0.0992, \
global_step=0.000, consumed_samples=0.000]
Epoch 0:   8%|▊         | 2/26 [00:00<00:01, 16.96it/s, loss=0.0992, reduced_train_loss=0.0992, \
global_step=0.000, consumed_samples=0.000]
Epoch 0:   8%|▊         | 2/26 [00:00<00:01, 16.89it/s, loss=0.0898, reduced_train_loss=0.0803, \
global_step=1.000, consumed_samples=4.000]
Epoch 0:  12%|#         | 3/26 [00:00<00:01, 16.73it/s, loss=0.0815, reduced_train_loss=0.0651, \
global_step=2.000, consumed_samples=8.000]
Validation: 0it [00:00, ?it/s]\x1b[A
Validation DataLoader 0:   0%|          | 0/2 [00:00<?, ?it/s]\x1b[A
Validation DataLoader 0:  50%|#####     | 1/2 [00:00<00:00, 1431.99it/s]\x1b[A
Epoch 0:  15%|#▌        | 4/26 [00:00<00:01, 20.93it/s, loss=0.0815, reduced_train_loss=0.0651, \
global_step=2.000, consumed_samples=8.000]
Validation DataLoader 0: 100%|##########| 2/2 [00:00<00:00, 1215.39it/s]\x1b[A
Epoch 0:  19%|#▉        | 5/26 [00:00<00:00, 26.04it/s, loss=0.0815, reduced_train_loss=0.0651, \
global_step=2.000, consumed_samples=8.000]
Epoch 0:  19%|#▉        | 5/26 [00:00<00:00, 25.89it/s, loss=0.0815, reduced_train_loss=0.0651, \
global_step=2.000, consumed_samples=8.000, val_loss=0.0527]
Epoch 0:  23%|##▎       | 6/26 [00:00<00:00, 21.90it/s, loss=0.0815, reduced_train_loss=0.0651, \
global_step=2.000, consumed_samples=8.000, val_loss=0.0527]
Epoch 0:  23%|##▎       | 6/26 [00:00<00:00, 21.87it/s, loss=0.0743, reduced_train_loss=0.0527, \
global_step=3.000, consumed_samples=12.00, val_loss=0.0527]
Epoch 0:  31%|###       | 8/26 [00:00<00:00, 20.83it/s, loss=0.0624, reduced_train_loss=0.0346, \
global_step=5.000, consumed_samples=20.00, val_loss=0.0527]
Validation DataLoader 0:  50%|#####     | 1/2 [00:00<00:00, 1510.37it/s]\x1b[A
Epoch 0:  35%|###▍      | 9/26 [00:00<00:00, 23.08it/s, loss=0.0624, reduced_train_loss=0.0346, \
global_step=5.000, consumed_samples=20.00, val_loss=0.0527]
Validation DataLoader 0: 100%|##########| 2/2 [00:00<00:00, 1350.61it/s]\x1b[A
Epoch 0:  38%|###▊      | 10/26 [00:00<00:00, 25.60it/s, loss=0.0624, reduced_train_loss=0.0346, \
global_step=5.000, consumed_samples=20.00, val_loss=0.0527]
Epoch 0:  38%|###▊      | 10/26 [00:00<00:00, 25.53it/s, loss=0.0624, reduced_train_loss=0.0346, \
global_step=5.000, consumed_samples=20.00, val_loss=0.028]\x20
Epoch 0:  42%|####      | 11/26 [00:00<00:00, 24.39it/s, loss=0.0575, reduced_train_loss=0.028, \
global_step=6.000, consumed_samples=24.00, val_loss=0.028]\x20
"""
# NeMo 2.1 draws no speed, and says how long an iteration took
LIGHTNING_2 = """\
Epoch 0: :   0%|          | 0/7 [00:00<?]
Epoch 0: :  14%|#▍        | 1/7 [00:00<00:01]
Epoch 0: :  14%|#▍        | 1/7 [00:00<00:01, reduced_train_loss=0.011, global_step=0.000, \
consumed_samples=4.000, train_step_timing in s=0.520]
Epoch 0: :  29%|##▊       | 2/7 [00:00<00:00, reduced_train_loss=0.011, global_step=0.000, \
consumed_samples=4.000, train_step_timing in s=0.520]
Epoch 0: :  29%|##▊       | 2/7 [00:00<00:00, reduced_train_loss=0.00889, global_step=1.000, \
consumed_samples=8.000, train_step_timing in s=0.250]
Validation: |          | 0/? [00:00<?, ?it/s]\x1b[A
Validation DataLoader 0: 100%|##########| 2/2 [00:00<00:00, 1423.49it/s]\x1b[A
Epoch 0: :  29%|##▊       | 2/7 [00:00<00:00, reduced_train_loss=0.00889, global_step=1.000, \
consumed_samples=8.000, train_step_timing in s=0.250, val_loss=3.000]
Epoch 0: :  43%|####▎     | 3/7 [00:00<00:00, reduced_train_loss=0.00889, global_step=1.000, \
consumed_samples=8.000, train_step_timing in s=0.250, val_loss=3.000]
Epoch 0: :  43%|####▎     | 3/7 [00:00<00:00, reduced_train_loss=0.0072, global_step=2.000, \
consumed_samples=12.00, train_step_timing in s=0.260, val_loss=3.000]
"""
# neuronx-nemo-megatron-gpt-job.md
NEURON = (
    "Epoch 0: 0%| 189/301501 [59:12<1573:03:24, 18.79s/it, loss=7.75, v_num=3-16,"
    " reduced_train_loss=7.560, global_step=188.0, consumed_samples=24064.0]"
)


def spec_of(tmp_path: Path, **changes: int) -> RankSpec:
    """Of seven steps, validated by two batches after each third."""
    spec = RankSpec(
        engine="nemo",
        argv=("python3", "megatron_gpt_pretraining.py"),
        cwd="/opt/NeMo",
        checkpoints=str(tmp_path / "results" / "checkpoints"),
        metrics=str(tmp_path / "metrics.jsonl"),
        global_batch_size=4,
        seq_length=8,
        world_size=1,
        model_flops=0.0,
        hardware_flops=0.0,
        peak_tflops=None,
        peak=None,
        saves_on_term=False,
        modules=(),
        reads=(),
        seen_seconds=0.0,
        train_iters=7,
        log_interval=1,
        eval_interval=3,
        eval_iters=2,
    )
    return replace(spec, **changes)  # type: ignore[arg-type]


def readings(text: str, spec: RankSpec, seconds: float = 2.0) -> list[Iteration | EvaluationLine]:
    """What is read of lines that come `seconds` after each other."""
    lines = text.replace("\r", "\n").splitlines()
    times = iter([seconds * number for number in range(len(lines))])
    reader = NemoLines(spec, clock=lambda: next(times))
    return [each for line in lines for each in reader.read(line)]


def steps(found: list[Iteration | EvaluationLine]) -> list[tuple[str, int | None, float | None]]:
    """(kind, step, loss) of each."""
    return [
        ("valid" if isinstance(each, EvaluationLine) else "step", each.step, each.lm_loss)
        for each in found
    ]


def test_lines_of_lightning_1(tmp_path: Path) -> None:
    found = readings(LIGHTNING_1, spec_of(tmp_path))
    assert steps(found) == [
        ("step", 1, 0.0992),
        ("step", 2, 0.0803),
        ("step", 3, 0.0651),
        ("valid", 3, 0.0527),
        ("step", 4, 0.0527),
        ("step", 6, 0.0346),
        ("valid", 6, 0.028),
        ("step", 7, 0.028),
    ]
    # each new step reads the clock once; the bar's own speed is never taken, a validation is no
    # part of a step
    timed = [each.elapsed_ms for each in found if isinstance(each, Iteration)]
    assert timed == [None, 2000.0, 2000.0, None, 1000.0, None]


def test_lines_of_nemo_2(tmp_path: Path) -> None:
    found = readings(LIGHTNING_2, spec_of(tmp_path))
    assert steps(found) == [
        ("step", 1, 0.011),
        ("step", 2, 0.00889),
        ("valid", 2, 3.0),
        ("step", 3, 0.0072),
    ]
    timed = [each.elapsed_ms for each in found if isinstance(each, Iteration)]
    assert timed == [520.0, 250.0, 260.0]


def test_line_of_the_neuron_document() -> None:
    reading = nemo.read_line(NEURON)
    assert isinstance(reading, Iteration)
    assert (reading.step, reading.lm_loss) == (189, 7.56)


def test_rows_come_every_log_interval_and_at_the_end(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, log_interval=3)
    found = readings(LIGHTNING_1, spec)
    assert [each.step for each in found if isinstance(each, Iteration)] == [1, 3, 6, 7]
    # two steps in two clocks; the second begins after the validation, at step 4
    timed = [each.elapsed_ms for each in found if isinstance(each, Iteration)]
    assert timed == [None, 2000.0, 1000.0, None]


def bars(step: int, spec: RankSpec, *, lightning: int) -> list[str]:
    """The two lines that the bar is after a step: with the old words, then with its own."""
    count = step
    if lightning == 1:
        count += spec.eval_iters * ((step - 1) // spec.eval_interval)
    lines = []
    for said in (step - 1, step):
        words = f"reduced_train_loss={nemo.as_tqdm(said / 1e6)}"
        words += f", global_step={nemo.as_tqdm(said - 1)}"
        lines.append(f"Epoch 0:  12%|#   | {count}/900000 [1:00:00<2:00:00,  1.23it/s, {words}]")
    return lines


@pytest.mark.parametrize("lightning", [1, 2])
@given(first=st.integers(99_990, 700_000))
def test_rounded_steps_are_exact(tmp_path_factory: object, lightning: int, first: int) -> None:
    """From 100,000 on the bar says 1.23e+5: of each step exactly one row, with its own loss."""
    spec = spec_of(Path("."), train_iters=10**6, eval_interval=2000, eval_iters=50)
    reader = NemoLines(spec, clock=lambda: 0.0)
    found = []
    for step in range(first, first + 30):
        for line in bars(step, spec, lightning=lightning):
            found += reader.read(line)
    assert [(each.step, each.lm_loss) for each in found] == [
        (step, float(nemo.as_tqdm(step / 1e6))) for step in range(first, first + 30)
    ]


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (188.0, "188.0"),
        (0.0, "0.000"),
        (24064.0, "24064.0"),
        (75000.0, "7.5e+4"),
        (123456.0, "1.23e+5"),
        (0.0992, "0.0992"),
        (3.0, "3.000"),
        (7.56, "7.560"),
    ],
)
def test_numbers_as_tqdm_writes_them(number: float, said: str) -> None:
    assert nemo.as_tqdm(number) == said


@pytest.mark.parametrize(
    "line",
    [
        "",
        "Epoch 0:   0%|          | 0/26 [00:00<?, ?it/s]",
        "Epoch 0:  12%|#  | 3/26 [00:00<00:01, 16.73it/s, reduced_train_loss=0.0651, global_ste",
        "Validation DataLoader 0: 100%|##########| 2/2 [00:00<00:00, 1350.61it/s]",
        "[NeMo I 2022-10-14 08:00:00 megatron_gpt_model:640] Consumed 1024 samples [of 2]",
        "Epoch 0:  12%|#  | 3/26 [00:00<00:01, global_step=1.000]",
    ],
)
def test_other_lines_say_nothing(line: str, tmp_path: Path) -> None:
    assert nemo.read_line(line) is None
    assert line_reader(spec_of(tmp_path))(line) == []


@given(st.text(max_size=200))
@example("INF")
@example("nan")
def test_any_line_is_read_without_an_error(text: str) -> None:
    reader = NemoLines(spec_of(Path(".")), clock=lambda: 0.0)
    for line in (text, f"Epoch 0: 1%|#| 3/26 [00:00<00:01, global_step={text}]"):
        reader.read(line)
        nemo.read_line(line)
