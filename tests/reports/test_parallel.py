"""A sweep as one picture of parallel coordinates, and its means over seeds."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from trainkit.reports.parallel import axis_of, parallel_svg
from trainkit.reports.sweep import T_975, MemberResult, SweepResults

SVG = "{http://www.w3.org/2000/svg}"


def member(number: int, lr: float, model: str, loss: float | None) -> MemberResult:
    values = {"training.lr": lr, "model": model, "training.seed": number}
    return MemberResult(number, values, f"run{number}", "succeeded", 9, loss, loss)  # type: ignore[arg-type]


def test_a_line_for_each_run_that_has_a_loss(tmp_path: Path) -> None:
    """The best over the others, stopped ones by their class, a failed one above the axis."""
    members = [
        member(1, 1e-4, "<small>", 2.0),
        replace(member(2, 1e-3, "wide", 3.0), state="stopped"),
        replace(member(3, 1e-2, "wide", None), state="diverged", own_fault=True),
        replace(member(4, 1e-2, "wide", None), state="waiting"),
    ]
    root = ElementTree.fromstring(parallel_svg(SweepResults("id", "a&b", tmp_path, members)))
    lines = root.findall(f"{SVG}polyline")
    assert [line.attrib["class"] for line in lines] == [
        "run failed",
        "run stopped",
        "run succeeded",
    ]
    assert "model=<small>" in (lines[-1].findtext(f"{SVG}title") or "")
    assert "".join(root.findtext(f"{SVG}text") or "") == "training.lr"
    axes = root.findall(f"{SVG}line")
    assert len(axes) == 3, "rate, model and loss; seeds are replicas"
    tops = [float(line.attrib["points"].split(",")[-1]) for line in lines]
    top, bottom = float(axes[0].attrib["y2"]), float(axes[0].attrib["y1"])
    assert tops[0] < top == tops[1] and tops[2] == bottom
    colours = [line.attrib.get("stroke") for line in lines]
    assert colours == [None, "rgb(213,94,0)", "rgb(0,114,178)"]


def test_axes_of_numbers_and_of_words() -> None:
    log = axis_of("lr", [1e-4, 1e-3, 1e-2])
    assert [round(place, 6) for _, place in log.ticks] == [0.0, 0.5, 1.0]
    linear = axis_of("beta", [0.9, 0.95, 0.99])
    assert round(linear.places["0.95"], 3) == 0.556
    words = axis_of("model", ["a", "b", 3])
    assert [name for name, _ in words.ticks] == ["a", "b", "3"] and words.places["3"] == 1.0
    many = axis_of("steps", [float(each) for each in range(10)])
    assert [name for name, _ in many.ticks] == ["0", "4.5", "9"]
    assert axis_of("one", [5]).places == {"5": 0.5}


@pytest.mark.parametrize("freedom", [1, 2, 7, 30])
def test_student_s_quantiles(freedom: int) -> None:
    """0.475 of the density lies between 0 and them."""
    top = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
    scale = top / math.sqrt(freedom * math.pi)
    width = T_975[freedom - 1] / 20_000
    middles = (width * (number + 0.5) for number in range(20_000))
    area = sum((1 + x * x / freedom) ** (-(freedom + 1) / 2) for x in middles) * scale * width
    assert area == pytest.approx(0.475, abs=2e-5)
