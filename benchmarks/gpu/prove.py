"""The GPU proof: one command that shows on a GPU what is shown on CPUs otherwise.

    python -m benchmarks.gpu.prove [--pack FOLDER] [--parts A,B] [--time-limit SECONDS]
                                   [--results FOLDER] [--device cpu] [--again] [--dry-run]

Each part is a process of its own with a time limit of its own; when it is over it is ended with all
it started, and what it found by then is kept. Results are in FOLDER/gpu-proof.json (gpu-proof/1)
and gpu-proof.txt after each part. The same command goes on where the last one ended: parts that
came to their end with the same code on the same kind of GPU are not run again. With --time-limit a
part that would probably not come through in what is left is passed over. No network.

`--pack` names what `python -m benchmarks.gpu.pack FOLDER` made: what this Python lacks is taken
from there. Without it this Python must have all that trainkit needs.

Exit codes: 0 all parts ran and met their goals; 6 one did not; 7 there is no GPU that torch can use
(`--device cpu` rehearses what can be run without one); 12 the time was over before all had run;
3 and 10 for a packed folder that is of another Python, damaged or has no room.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.findings import Finding, table
from benchmarks.gpu.hardware import Hardware, PowerLog, hardware
from benchmarks.gpu.packed import place_kernels, prepare_python, read_pack
from benchmarks.gpu.parts import CPU_LIMIT_SECONDS, PACKED_DATA, PARTS, Part
from benchmarks.gpu.proof import ROOT, PartResult, Proof, Status, code_hash
from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.process import reap_child, start_child, stop_children

LEAST_SECONDS = 15.0  # left of the time limit: with less no part is begun
LAST_LINES = 6


@dataclass(frozen=True)
class Setting:
    """What all parts have in common.

    Args:
        device: "cuda" or "cpu".
        size: "full" or "small".
        python: their interpreter.
        environment: theirs.
        folder: of the results.
        hardware: of this machine.
        code: hash of the code.
    """

    device: str
    size: str
    python: str
    environment: Mapping[str, str]
    folder: Path
    hardware: Hardware
    code: str

    def limit(self, part: Part) -> float:
        """Seconds that a part may take."""
        return CPU_LIMIT_SECONDS if self.device == "cpu" else part.limit_seconds

    def expected(self, part: Part) -> float:
        """Seconds that a part is likely to take: with less of the time limit left it is for the
        next call."""
        return LEAST_SECONDS if self.device == "cpu" else part.expected_seconds


def run_part(name: str, setting: Setting, seconds: float) -> PartResult:
    """Run a part for so many seconds at most; what it found by then is in the result."""
    scratch = setting.folder / "scratch" / name
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    findings = scratch / "findings.json"
    argv = [setting.python, "-m", "benchmarks.gpu.run_part", name]
    argv += ["--device", setting.device, "--size", setting.size]
    argv += ["--folder", str(scratch / "run"), "--findings", str(findings)]
    log = setting.folder / "gpu-proof.log"
    print(f"\n== {name}: {PARTS[name].shows} (at most {seconds:.0f} s)", flush=True)
    began = time.monotonic()
    with PowerLog() as power, open(log, "ab") as file:
        file.write(f"== {name}\n".encode())
        file.flush()
        at = file.tell()
        child = start_child(
            argv, env=setting.environment, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            status, note = _watch(child, seconds)
        finally:
            stop_children([child])
    if status == "failed":
        note += ": " + " | ".join(_last_lines(log, at))
    found: tuple[Finding, ...] = ()
    if findings.is_file():
        found = tuple(Finding(**one) for one in json.loads(findings.read_text()))
    shutil.rmtree(scratch, ignore_errors=True)
    for finding in found:
        print("  " + "  ".join(cell for cell in finding.cells() if cell), flush=True)
    if status != "done":
        print(f"  {status}: {note}", flush=True)
    return PartResult(
        status=status,
        device=setting.device,
        size=setting.size,
        code=setting.code,
        hardware=setting.hardware,
        seconds=round(time.monotonic() - began, 1),
        findings=found,
        power=power.sampled,
        note=note,
    )


def _watch(child: subprocess.Popen[bytes], seconds: float) -> tuple[Status, str]:
    """Wait for the end of a part, or of its time."""
    deadline = time.monotonic() + seconds
    while child.poll() is None:
        if time.monotonic() >= deadline:
            return "timed out", f"it was ended after {seconds:.0f} s; this is what it had found"
        time.sleep(0.1)
    code = reap_child(child)
    return ("failed", f"its process ended with {code}") if code else ("done", "")


def _last_lines(log: Path, at: int) -> list[str]:
    with open(log, "rb") as file:
        file.seek(at)
        return file.read().decode(errors="replace").strip().splitlines()[-LAST_LINES:]


def dry_run(names: list[str], proof: Proof, setting: Setting) -> str:
    """What would be done, and how long it would take."""
    rows = []
    expected = 0
    limits = 0.0
    for name in names:
        part = PARTS[name]
        there = proof.results.get(name)
        what = "run"
        if there and there.stands_for(setting.device, setting.size, setting.code, setting.hardware):
            what = "there already"
        else:
            expected += part.expected_seconds
            limits += setting.limit(part)
        likely = f"{part.expected_seconds} s{', a guess' if part.guessed else ''}"
        rows.append([name, what, likely, f"{setting.limit(part):.0f} s", part.shows])
    lines = table(rows, head=("part", "", "expected", "limit", "shows"))
    return (
        f"{setting.hardware.words()}\n\n{lines}\n\n"
        f"expected {expected / 60:.0f} minutes on one H200, {limits / 60:.0f} minutes at most"
    )


def prove(names: list[str], setting: Setting, *, time_limit: float, again: bool) -> Proof:
    """Run parts one after the other as long as there is time.

    Args:
        names: of them.
        setting: for all.
        time_limit: seconds for all together.
        again: also those that came to their end before.
    """
    proof = Proof(setting.folder)
    deadline = time.monotonic() + time_limit
    begun = False  # the first part is tried in any case
    for name in names:
        there = proof.results.get(name)
        of = (setting.device, setting.size, setting.code, setting.hardware)
        if there and there.stands_for(*of) and not again:
            print(f"\n== {name}: there already", flush=True)
            continue
        left = deadline - time.monotonic()
        if left < (setting.expected(PARTS[name]) if begun else LEAST_SECONDS):
            note = f"of the {time_limit:.0f} s of --time-limit too few were left"
            if not (there and there.is_of(*of)):
                proof.put(name, _not_run(setting, note))
            continue
        begun = True
        proof.put(name, run_part(name, setting, min(left, setting.limit(PARTS[name]))))
    return proof


def _not_run(setting: Setting, note: str) -> PartResult:
    return PartResult(
        status="not run",
        device=setting.device,
        size=setting.size,
        code=setting.code,
        hardware=setting.hardware,
        note=note,
    )


def verdict(proof: Proof, names: list[str]) -> Exit:
    """Say how it ended, in a line, and as a code."""
    failed = proof.failed(names)
    absent = proof.not_run(names)
    if failed:
        print(f"\nmissed their goals: {', '.join(failed)}")
    if absent:
        print(f"\nnot run: {', '.join(absent)}; the same command goes on with them")
    if failed:
        return Exit.STAGE_FAILED
    if absent:
        return Exit.PREEMPTED
    unseen = proof.not_shown(names)
    print(f"\nall parts ran and met their goals; {unseen} rows say what was not shown here")
    return Exit.DONE


def selected(words: str) -> list[str]:
    """The parts that were asked for, in their order. Raises ConfigError for another name."""
    asked = [word for word in words.split(",") if word]
    unknown = [word for word in asked if word not in PARTS]
    if unknown:
        raise ConfigError(
            f"no such part: {', '.join(unknown)}", hint=f"there are: {', '.join(PARTS)}"
        )
    return [name for name in PARTS if not asked or name in asked]


def make_setting(given: argparse.Namespace) -> Setting:
    """What the words on the command line come to. Raises TrainkitError as the module says."""
    python = Path(sys.executable)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    # the checkout is where this module is, whatever is installed
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    if given.pack is not None:
        pack = read_pack(given.pack.absolute())
        environment[PACKED_DATA] = str(pack.data)
        if not given.dry_run:
            python = prepare_python(pack, given.results.absolute() / "python")
            if given.device == "cpu":  # a GPU has Triton's
                place_kernels(python)
    return Setting(
        device=given.device,
        size=given.size or ("full" if given.device == "cuda" else "small"),
        python=str(python),
        environment=environment,
        folder=given.results.absolute(),
        hardware=hardware(str(python)),
        code=code_hash(),
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pack", type=Path, help="the folder that benchmarks.gpu.pack made")
    parser.add_argument("--results", type=Path, default=Path("gpu-proof"), help="their folder")
    parser.add_argument("--parts", default="", help=f"only these of {', '.join(PARTS)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=("full", "small"), help="by default full on CUDA")
    parser.add_argument("--time-limit", type=float, default=1800.0, help="seconds in all")
    parser.add_argument("--again", action="store_true", help="also what is there already")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be done")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    given = parse(argv)
    try:
        names = selected(given.parts)
        setting = make_setting(given)
    except TrainkitError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return int(error.exit)
    if given.dry_run:
        print(dry_run(names, Proof(setting.folder), setting))
        return int(Exit.DONE)
    print(setting.hardware.words(), flush=True)
    if setting.device == "cuda" and setting.hardware.gpu is None:
        proof = Proof(setting.folder)
        for name in proof.not_run(names):
            proof.put(name, _not_run(setting, setting.hardware.why))
        print(f"\nERROR: torch can use no GPU: {setting.hardware.why}", file=sys.stderr)
        for name in names:
            print(f"  not shown: {name}: {PARTS[name].shows}", file=sys.stderr)
        print("  --device cpu rehearses what can be run without one", file=sys.stderr)
        return int(Exit.HEALTH)
    proof = prove(names, setting, time_limit=given.time_limit, again=given.again)
    print(f"\n{proof.words()}")
    return int(verdict(proof, names))


if __name__ == "__main__":
    sys.exit(main())
