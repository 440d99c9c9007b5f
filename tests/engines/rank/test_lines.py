"""Lines as the engines printed them when they were run on CPUs, changed where a test says so, and
lines of their formats with any numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from trainkit.engines.rank import gpt_neox, megatron_lm
from trainkit.engines.rank.readings import EvaluationLine, Iteration

Reader = Callable[[str], Iteration | EvaluationLine | None]
READERS: list[Reader] = [megatron_lm.read_line, gpt_neox.read_line]

# Megatron-LM core 0.12.0, two ranks, torch 2.13
CORE_0_12 = (
    " [2026-11-22 17:59:18] iteration        3/       6 | consumed samples:           12 | elapsed"
    " time per iteration (ms): 1264.3 | learning rate: 6.890576E-04 | global batch size:     4 | lm"
    " loss: 1.075129E+01 | loss scale: 1.0 | grad norm: 1.939 | num zeros: 35.0 | number of skipped"
    " iterations:   0 | number of nan iterations:   0 |"
)
STEP_3 = Iteration(
    step=3,
    train_iters=6,
    elapsed_ms=1264.3,
    learning_rate=6.890576e-04,
    lm_loss=10.75129,
    grad_norm=1.939,
    loss_scale=1.0,
    global_batch_size=4,
    consumed_samples=12,
    skipped_iterations=0,
    nan_iterations=0,
)
# GPT-NeoX ea7aefd, one rank
NEOX = (
    " samples/sec: 5.757 | iteration        1/       6 | elapsed time per iteration (ms): 347.4 |"
    " learning rate: 8.333E-04 | approx flops per GPU: 5.6GFLOPS | lm_loss: 1.084318E+01 | number"
    " of skipped iterations:   0 | number of nan iterations:   0 |"
)
STEP_1 = Iteration(
    step=1,
    train_iters=6,
    elapsed_ms=347.4,
    learning_rate=8.333e-04,
    lm_loss=10.84318,
    samples_per_second=5.757,
    skipped_iterations=0,
    nan_iterations=0,
)


def test_megatron_line() -> None:
    assert megatron_lm.read_line(CORE_0_12) == STEP_3


def test_neox_line() -> None:
    assert gpt_neox.read_line(NEOX) == STEP_1


def test_megatron_lines_of_other_versions() -> None:
    # core 0.19.0 on the same data, as 0.16.1: microseconds, no `num zeros`
    core_0_19 = (
        " [2026-11-22 19:00:06.890833] iteration        3/       6 | consumed samples:           12"
        " | elapsed time per iteration (ms): 152.0 | learning rate: 6.890576E-04 | global batch"
        " size:     4 | lm loss: 1.075129E+01 | loss scale: 1.0 | grad norm: 1.939 | number of"
        " skipped iterations:   0 | number of nan iterations:   0 |"
    )
    assert megatron_lm.read_line(core_0_19) == replace(STEP_3, elapsed_ms=152.0)
    # 825375cf38 (May 2021): no date; three digits of the learning rate
    may_2021 = (
        " iteration        3/       6 | consumed samples:           12 | elapsed time per iteration"
        " (ms): 377.3 | learning rate: 6.891E-04 | global batch size:     4 | lm loss: 1.072118E+01"
        " | loss scale: 1.0 | grad norm: 1.958 | number of skipped iterations:   0 | number of nan"
        " iterations:   0 |"
    )
    assert megatron_lm.read_line(may_2021) == replace(
        STEP_3, elapsed_ms=377.3, learning_rate=6.891e-4, lm_loss=10.72118, grad_norm=1.958
    )


def test_megatron_fields_that_come_and_go() -> None:
    """Throughput, energy, other losses, norms: beside those that are read."""
    more = CORE_0_12.replace(
        " learning rate:",
        " throughput per GPU (TFLOP/s/GPU): 412.1 | energy per GPU (J/iter/GPU): 11.0 | learning"
        " rate:",
    ).replace(" loss scale:", " mtp_1 loss: 1.1E+01 | load_balancing_loss: 1.0E+00 | loss scale:")
    assert megatron_lm.read_line(more) == STEP_3
    # a loss that is nan, and that of an iteration that was skipped, are not printed
    skipped = CORE_0_12.replace(" lm loss: 1.075129E+01 |", "").replace(
        "skipped iterations:   0", "skipped iterations:   1"
    )
    reading = megatron_lm.read_line(skipped)
    assert isinstance(reading, Iteration)
    assert reading.lm_loss is None
    assert reading.skipped_iterations == 1


def test_neox_lines_of_other_versions() -> None:
    # the format of December 2022 in fp16 with numbers of our own: Lambda's branch was not run
    with_scale = NEOX.replace("| number of skipped", "| loss scale: 4096.0 | number of skipped")
    with_scale = with_scale.replace("5.6GFLOPS", "63.2TFLOPS")
    assert gpt_neox.read_line(with_scale) == replace(STEP_1, loss_scale=4096.0)
    # 2025: utilisation beside it
    with_mfu = NEOX.replace("| lm_loss:", "| MFU: 31.20% | HFU: 41.10% | lm_loss:")
    assert gpt_neox.read_line(with_mfu) == STEP_1


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            " validation loss at iteration 3 | lm loss value: 1.069303E+01 | lm loss PPL:"
            " 4.404774E+04 | ",
            EvaluationLine(3, "valid", 10.69303),
        ),
        (
            " validation loss at iteration 6 on validation set | lm loss value: 1.058324E+01 | lm"
            " loss PPL: 3.946765E+04 | ",
            EvaluationLine(6, "valid", 10.58324),
        ),
        (
            " validation loss at iteration 6 on test set | lm loss value: 1.065056E+01 | lm loss"
            " PPL: 4.221633E+04 | ",
            EvaluationLine(6, "test", 10.65056),
        ),
        (  # May 2021
            " validation loss at the end of training for test data | lm loss value: 7.0E+00 | ",
            EvaluationLine(None, "test", 7.0),
        ),
        (  # 0.15 and later, several validation sets
            " validation-0 loss at iteration 9 | lm loss value: 7.0E+00 | ",
            EvaluationLine(9, "valid", 7.0),
        ),
        (
            " validation-1 loss at iteration 9 | lm loss value: nan | ",
            EvaluationLine(9, "valid-1", math.nan),
        ),
    ],
)
def test_megatron_evaluations(line: str, expected: EvaluationLine) -> None:
    reading = megatron_lm.read_line(line)
    assert isinstance(reading, EvaluationLine)
    assert (reading.step, reading.name) == (expected.step, expected.name)
    assert reading.lm_loss == pytest.approx(expected.lm_loss, nan_ok=True)
    assert gpt_neox.read_line(line) is None


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            " validation results at iteration 3 | lm_loss value: 1.067863E+01 | lm_loss_ppl value:"
            " 4.341806E+04 | ",
            EvaluationLine(3, "valid", 10.67863),
        ),
        (
            " validation results at the end of training for val data | lm_loss value: 1.057839E+01"
            " | lm_loss_ppl value: 3.927694E+04 | ",
            EvaluationLine(None, "valid", 10.57839),
        ),
        (
            " test results at the end of training for test data | lm_loss value: 1.06E+01 | ",
            EvaluationLine(None, "test", 10.6),
        ),
    ],
)
def test_neox_evaluations(line: str, expected: EvaluationLine) -> None:
    assert gpt_neox.read_line(line) == expected
    assert megatron_lm.read_line(line) is None


@pytest.mark.parametrize(
    "before",
    [
        "rank0: ",
        "[default0]:",
        "[1,0]<stdout>:",
        "2026-11-22T17:59:18Z node-7 3: ",
        "Epoch 0: 12%\r",
    ],
)
def test_what_stands_before_a_line_does_not_matter(before: str) -> None:
    assert megatron_lm.read_line(before + CORE_0_12 + "\n") == STEP_3
    assert gpt_neox.read_line(before + NEOX + "\r\n") == STEP_1


def test_colours_do_not_matter() -> None:
    coloured = CORE_0_12.replace("lm loss", "\x1b[1;32mlm loss\x1b[0m").replace("|", "\x1b[2m|")
    assert megatron_lm.read_line(f"\x1b[36m{coloured}\x1b[K") == STEP_3


def test_a_line_that_is_cut_off_gives_no_half_numbers() -> None:
    """A writer that was killed, or two ranks in one line: what is read is as in the whole line."""
    for line, whole, read in ((CORE_0_12, STEP_3, megatron_lm), (NEOX, STEP_1, gpt_neox)):
        for end in range(len(line)):
            reading = read.read_line(line[:end])
            if reading is None:
                continue
            assert isinstance(reading, Iteration)
            for name, value in vars(reading).items():
                assert value in (None, getattr(whole, name)), (line[:end], name)


def test_two_lines_in_one_give_the_later() -> None:
    cut = CORE_0_12[: CORE_0_12.index("grad norm") - 20].replace("      3/", "      2/")
    assert megatron_lm.read_line(cut + CORE_0_12) == STEP_3
    assert gpt_neox.read_line(NEOX[:90].replace(" 1/", " 0/") + NEOX) == STEP_1


@pytest.mark.parametrize(
    ("printed", "means"),
    [
        ("1,075129E+01", None),  # a decimal comma
        ("10'751.29", None),
        ("1٫07", None),
        ("１.５", None),
        ("1_0.5", None),
        ("0x1p3", None),
        ("--", None),
        ("nan", math.nan),
        ("inf", math.inf),
        ("-inf", -math.inf),
        ("1e400", math.inf),
        ("7", 7.0),
    ],
)
def test_numbers_in_other_forms(printed: str, means: float | None) -> None:
    reading = megatron_lm.read_line(CORE_0_12.replace("1.075129E+01", printed))
    assert isinstance(reading, Iteration)
    assert reading.lm_loss == pytest.approx(means, nan_ok=True)
    assert reading.grad_norm == 1.939


@pytest.mark.parametrize("step", ["٣", "-3", "3.5", "1,000", "{:8d}", "三"])
def test_an_iteration_without_a_number_is_none(step: str) -> None:
    assert megatron_lm.read_line(CORE_0_12.replace(" 3/", f" {step}/")) is None
    assert gpt_neox.read_line(NEOX.replace(" 1/", f" {step}/")) is None


@pytest.mark.parametrize(
    "line",
    [
        "",
        "|",
        " iteration        3/       6 |",
        "validation loss at | lm loss PPL: 3 |",
        "saving checkpoint at iteration       3 to /ck in torch format",
        "log_string = ' iteration {:8d}/{:8d} |'.format(",
        "samples/sec: 3 | 4 |",
        "[after training is done] datetime: 2026-11-22 17:58:13 ",
        "steps: 2 loss: 10.8139 iter time (s): 0.193 samples/sec: 10.378",
    ],
)
def test_other_lines_say_nothing(line: str) -> None:
    assert [read(line) for read in READERS] == [None, None]


PARTS = st.sampled_from(
    [
        *CORE_0_12.split("|"),
        *NEOX.split("|"),
        "|",
        " iteration ",
        "/",
        " validation loss at ",
        " test results at iteration 3 | lm_loss value: ",
        "9" * 5000,
        "1e999999",
        "\x1b[",
        "\x00",
        "\ud800",
        "²",
        "\r",
    ]
)


@given(
    st.lists(st.one_of(PARTS, st.text(max_size=8)), max_size=12), st.sampled_from(["", "|", "| "])
)
def test_no_line_is_too_odd(parts: list[str], between: str) -> None:
    for read in READERS:
        read(between.join(parts))


NUMBERS = st.one_of(
    st.floats(1e-12, 1e12), st.sampled_from([math.nan, math.inf]), st.floats(-1e3, -1e-3)
)
COUNTS = st.integers(0, 10**9)


@given(COUNTS, COUNTS, st.floats(0, 1e7), st.floats(0, 1), NUMBERS, NUMBERS, st.integers(0, 40))
def test_what_megatron_prints_is_read_back(
    step: int,
    train_iters: int,
    elapsed: float,
    rate: float,
    loss: float,
    norm: float,
    log_scale: int,
) -> None:
    """By the formats of training_log: every number comes back as far as it was printed."""
    scale = 2.0**log_scale
    for rate_text in (f"{rate:.3E}", f"{rate:.6E}"):
        line = f" iteration {step:8d}/{train_iters:8d} | consumed samples: {step:12d} |"
        line += f" elapsed time per iteration (ms): {elapsed:.1f} | learning rate: {rate_text} |"
        line += f" global batch size: {step:5d} | lm loss: {loss:.6E} | loss scale: {scale:.1f} |"
        line += f" grad norm: {norm:.3f} | num zeros: 3 | params norm: {norm:.3f} | number of"
        line += f" skipped iterations: {step:3d} | number of nan iterations: {step:3d} |"
        reading = megatron_lm.read_line(line)
        assert isinstance(reading, Iteration)
        assert (reading.step, reading.train_iters) == (step, train_iters)
        assert reading.consumed_samples == reading.global_batch_size == step
        assert reading.skipped_iterations == reading.nan_iterations == step
        assert reading.elapsed_ms == pytest.approx(elapsed, abs=0.05 + 1e-9)
        assert reading.learning_rate == pytest.approx(rate, rel=1e-3)
        assert reading.lm_loss == pytest.approx(loss, rel=1e-6, nan_ok=True)
        assert reading.grad_norm == pytest.approx(norm, abs=5.1e-4, rel=1e-9, nan_ok=True)
        assert reading.loss_scale == scale


@given(COUNTS, COUNTS, st.floats(0, 1e7), st.floats(0, 1), NUMBERS, st.floats(0, 1e6))
def test_what_neox_prints_is_read_back(
    step: int, train_iters: int, elapsed: float, rate: float, loss: float, speed: float
) -> None:
    line = f" samples/sec: {speed:.3f} | iteration {step:8d}/{train_iters:8d} |"
    line += f" elapsed time per iteration (ms): {elapsed:.1f} | learning rate: {rate:.3E} |"
    line += f" approx flops per GPU: 5.6GFLOPS | lm_loss: {loss:.6E} | loss scale: 4096.0 |"
    line += f" number of skipped iterations: {step:3d} | number of nan iterations: {step:3d} |"
    reading = gpt_neox.read_line(line)
    assert isinstance(reading, Iteration)
    assert (reading.step, reading.train_iters) == (step, train_iters)
    assert reading.skipped_iterations == reading.nan_iterations == step
    assert reading.elapsed_ms == pytest.approx(elapsed, abs=0.05 + 1e-9)
    assert reading.samples_per_second == pytest.approx(speed, abs=5.1e-4, rel=1e-9)
    assert reading.learning_rate == pytest.approx(rate, rel=1e-3)
    assert reading.lm_loss == pytest.approx(loss, rel=1e-6, nan_ok=True)
