"""Make the pictures of README.md from real output: `python docs/pictures.py`, in the environment
of the tests, a few minutes on two cores.

docs/plan.svg is what `plan` prints. docs/resume.svg is the loss of one run of `demo` that nobody
touched and of one that was killed with SIGKILL and resumed; it is drawn only if every loss of
both is equal, bit for bit. docs/report.png is the page that `report --html` writes of such a run,
docs/phone.png the same on 400 pixels, docs/comparison.png what `compare --html` writes of it and of
one with another learning rate, docs/board.png the page of `board`, docs/stages.svg what `graph`
draws (all but that need chromium). Names as arguments make only those. docs/demo.svg is another:
`./inv report last --picture docs/demo.svg`, after `./inv train demo`. docs/curation.svg is of the
pages of docs/from-web-text.md: `./inv data-stats pages --curation --picture docs/curation.svg`.
docs/halving.svg: `python benchmarks/halving.py --svg docs/halving.svg`. docs/widths.svg: `python
docs/pictures.py widths.svg`, after `./inv sweep mup` and `./inv sweep mup-standard`.
docs/scaling.svg: benchmarks/scaling_ladder.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).resolve().parent
PLANNED = "gpt-neox-20b-lambda"
STEPS = 60
SAVED_EVERY = 20
KILLED_AFTER = 47
WIDTH = 76  # columns of the page of `plan`


def command(root: Path, *arguments: str) -> list[str]:
    """A task of the checkout, or of a copy of its jobs in another folder."""
    return [sys.executable, "-P", "-m", "trainkit", "--search-root", str(root), *arguments]


def draw_plan(path: Path) -> None:
    """What `plan` prints on a terminal, as a picture."""
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(WIDTH)}
    terminal, there = os.openpty()  # it breaks its lines by itself
    with subprocess.Popen(
        command(DOCS.parent, "plan", PLANNED), cwd=DOCS.parent, env=environment, stdout=there
    ) as plan:
        os.close(there)
        printed = b""
        with contextlib.suppress(OSError):  # EIO: the other end is closed
            while part := os.read(terminal, 2**16):
                printed += part
    os.close(terminal)
    if plan.returncode:
        raise SystemExit(f"plan ended with {plan.returncode}")
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, force_terminal=True)
        for line in Text.from_ansi(printed.decode().replace("\r\n", "\n")).split():
            line.rstrip()
            console.print(line, soft_wrap=False)
        picture = console.export_svg(title=f"trainkit plan {PLANNED}", unique_id="plan")
    # fonts of another server are not asked for
    path.write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL))


def losses(folder: Path) -> dict[int, float]:
    """Training loss by step, as a run has logged it so far."""
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return {}
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return {row["step"]: row["lm_loss"] for row in rows if "eval" not in row}


def copy_jobs(root: Path) -> None:
    """A copy of the checkout's jobs in a folder of its own."""
    shutil.copy(DOCS.parent / "jobs.toml", root)
    shutil.copytree(DOCS.parent / "jobs", root / "jobs")
    (root / "jobs.local.toml").write_text(f'[clusters.here]\nnode_folder = "{root}/node"\n')


def train(root: Path, **more: float) -> subprocess.Popen[bytes]:
    """Start `demo` in such a folder. `more`: further options of its training."""
    if not (root / "jobs.toml").exists():
        copy_jobs(root)
    keys: dict[str, float] = {
        "train_iters": STEPS,
        "save_interval": SAVED_EVERY,
        "log_interval": 1,
        "micro_batch_size": 2,
        "global_batch_size": 4,  # of 16: a minute on two cores
        **more,
    }
    sets = [word for key, value in keys.items() for word in ("--set", f"training.{key}={value}")]
    return subprocess.Popen(command(root, "train", "demo", *sets), cwd=root)


def run_folder(root: Path) -> Path | None:
    """The only run below `root`, if it has begun."""
    return next((root / "runs/demo").glob("*-*"), None)


def untouched(root: Path) -> dict[int, float]:
    """The losses of a run that nobody touched."""
    if train(root).wait():
        raise SystemExit("training failed")
    folder = run_folder(root)
    assert folder is not None
    return losses(folder)


def killed_and_resumed(root: Path) -> tuple[dict[int, float], dict[int, float]]:
    """(losses logged before SIGKILL, losses after `resume`)."""
    process = train(root)
    while (folder := run_folder(root)) is None or len(losses(folder)) < KILLED_AFTER:
        if process.poll() is not None:
            raise SystemExit("training ended before it was killed")
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = losses(folder)
    if subprocess.run(command(root, "resume", "last"), cwd=root, check=False).returncode:
        raise SystemExit("resume failed")
    return before, losses(folder)


def draw_resume(path: Path) -> None:
    """Both runs in one picture. Raises SystemExit if one loss differs."""
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        whole = untouched(Path(one))
        before, after = killed_and_resumed(Path(other))
    resumed_at = max(before) // SAVED_EVERY * SAVED_EVERY
    if whole != after or any(whole[step] != loss for step, loss in before.items()):
        raise SystemExit("the losses differ; nothing was drawn")
    with rc_context({"svg.hashsalt": "resume", "svg.fonttype": "none", "font.size": 10}):
        figure = Figure(figsize=(8, 3.4), layout="constrained")
        axes = figure.subplots()
        axes.plot(list(whole), list(whole.values()), linewidth=5, alpha=0.3, label="never killed")
        axes.plot(list(before), list(before.values()), "C3", label="killed with SIGKILL")
        axes.plot(max(before), before[max(before)], "C3X", markersize=10)
        rest = {step: loss for step, loss in after.items() if step > resumed_at}
        axes.plot(list(rest), list(rest.values()), "k.", label=f"resumed from step {resumed_at}")
        axes.set(
            xlabel="step",
            ylabel="training loss (nats per token)",
            title=f"demo: all {len(after)} losses are equal, bit for bit",
        )
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None})


def draw_pages(folder: Path) -> None:
    """Pages of a run that was killed with SIGKILL and resumed, and of one beside it, as Chromium
    shows them."""
    sys.path.insert(0, str(DOCS.parent))
    from tests.reports.browser import Browser

    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        killed_and_resumed(root)
        first = run_folder(root)
        assert first is not None
        if train(root, lr=3e-4).wait():
            raise SystemExit("training failed")
        report = root / "report.html"
        comparison = root / "comparison.html"
        for words in (
            ("report", first.name, "--html", str(report)),
            ("compare", first.name, "last", "--html", str(comparison)),
        ):
            subprocess.run(command(root, *words), cwd=root, check=True)
        board = subprocess.Popen(
            command(root, "board", "--port", "0"), cwd=root, stdout=subprocess.PIPE, text=True
        )
        assert board.stdout is not None
        address = board.stdout.readline().split()[-1]
        browser = Browser()
        try:
            for url, name, width, height in (
                (report.as_uri(), "report.png", 1280, 2300),
                (report.as_uri(), "phone.png", 400, 1100),
                (comparison.as_uri(), "comparison.png", 1280, 1500),
                (address, "board.png", 1280, 260),
            ):
                browser.visit(url, width, folder / name, height)
        finally:
            browser.close()
            board.send_signal(signal.SIGINT)
            board.wait()


def draw_stages(path: Path) -> None:
    """What `graph` draws of a job that begins with nothing."""
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        copy_jobs(root)
        words = ("graph", "demo", "--set", "sample_order=megatron", "--svg", str(path))
        subprocess.run(command(root, *words), cwd=root, check=True)


TITLES = {"mup-standard": "standard", "mup": "muP"}


def draw_widths(path: Path) -> None:
    """Losses over rates of the sweeps `mup` and `width` of this checkout, a line for each width."""
    with rc_context({"svg.hashsalt": "widths", "svg.fonttype": "none", "font.size": 10}):
        figure = Figure(figsize=(8, 3.4), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for axes, job in zip(panels, ("mup-standard", "mup"), strict=True):
            words = command(DOCS.parent, "sweep", job, "--show", "--json")
            shown = subprocess.run(words, cwd=DOCS.parent, check=True, stdout=subprocess.PIPE)
            lines: dict[str, list[tuple[float, float]]] = {}
            for point in json.loads(shown.stdout)["points"]:
                place = (point["values"]["training.lr"], point["mean"]["validation_loss"])
                lines.setdefault(point["values"]["model"].partition("-")[2], []).append(place)
            for colour, (width, places) in enumerate(lines.items(), start=4 - len(lines)):
                rates, heights = zip(*sorted(places), strict=True)
                axes.plot(rates, heights, f"C{colour}o-", markersize=4, label=f"width {width}")
            axes.set_xscale("log", base=2)
            axes.set(xlabel="learning rate", title=TITLES[job])
            axes.grid(alpha=0.3)
            axes.legend(frameon=False)
        panels[0].set_ylabel("validation loss (nats per token)")
        figure.savefig(path, format="svg", metadata={"Date": None})


PAGES = ("report.png", "phone.png", "comparison.png", "board.png")
PICTURES = {"plan.svg": draw_plan, "resume.svg": draw_resume, "stages.svg": draw_stages}

OF_SWEEPS = {"widths.svg": draw_widths}  # by name alone: they take half an hour

if __name__ == "__main__":
    asked = sys.argv[1:] or [*PICTURES, *PAGES]
    for name in asked:
        if draw := (PICTURES | OF_SWEEPS).get(name):
            draw(DOCS / name)
    if set(PAGES).intersection(asked):  # they are of the same runs
        draw_pages(DOCS)
