"""How many of random small mistakes in the package the tests of their area find.

    python benchmarks/mutations.py [--count 60] [--seed 1] [--jobs 2] [--since REV] [--work FOLDER]
    python benchmarks/mutations.py --again FILE [--rev REV] [--survivors] [--limit 900]

A mutation turns one comparison, sum, condition, constant, `and` or `return` of a Python file of
trainkit into another; each place is as likely as any other. The tests that name the mutated
module run first, then all fast tests of its folder's area, until one fails: "killed". What
passes them all "survived". A mutation may change nothing that matters, so not every survivor is
a gap: read them.

Mutations are made in clones of this checkout below --work, each with an environment of its own
(hard links to this one's where that is current), never in the checkout itself. --again takes the
mutations of a former FILE of results, so that two revisions are compared on the same ones (--rev:
of which the clones are made); --since leaves out lines that REV did not have. Each verdict goes at
once to REV.json in --work: what is interrupted goes on with those that are not judged yet. A
mutation whose tests take more than --limit seconds "hangs", which counts as killed: take it larger
than the longest area needs.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue

CHECKOUT = Path(__file__).resolve().parent.parent
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
SUMS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
}


@dataclass(frozen=True)
class Mutation:
    """One line of a file, and what becomes of it."""

    file: str
    line: int
    before: str
    after: str


@dataclass(frozen=True)
class Result:
    """What the tests said of a mutation: "killed", "survived" or "hangs", and the test that
    failed."""

    mutation: Mutation
    verdict: str
    by: str


# --- Mutations


def changed(node: ast.AST) -> ast.AST | None:
    """Another expression or statement in its place; None where there is no mutation for it."""
    match node:
        case ast.Compare(ops=[op], left=left, comparators=[right]) if type(op) in COMPARISONS:
            return ast.Compare(left, [COMPARISONS[type(op)]()], [right])
        case ast.BinOp(left=left, op=op, right=right) if (
            type(op) in SUMS and not _is_text(left) and not _is_text(right)
        ):
            return ast.BinOp(left, SUMS[type(op)](), right)
        case ast.BoolOp(op=op, values=values):
            return ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.Constant(value=bool(value)):
            return ast.Constant(not value)
        case ast.Constant(value=int(value)):
            return ast.Constant(value + 1)
        case ast.Break():
            return ast.Continue()
        case ast.Continue():
            return ast.Break()
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            return ast.Return(ast.Constant(None))
    return None


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )


def mutations_of(file: str, text: str) -> Iterator[Mutation]:
    """All that a file offers; of nodes on one line only, outside of annotations and of `if
    TYPE_CHECKING`."""
    lines = text.splitlines()
    for node in _code(ast.parse(text)):
        other = changed(node)
        if (
            other is None
            or not isinstance(node, ast.expr | ast.stmt)
            or node.lineno != node.end_lineno
        ):
            continue
        line = lines[node.lineno - 1].encode()
        start, end = node.col_offset, node.end_col_offset
        new = ast.unparse(ast.fix_missing_locations(other))
        if isinstance(other, ast.expr):
            new = f"({new})"
        yield Mutation(
            file, node.lineno, line.decode(), (line[:start] + new.encode() + line[end:]).decode()
        )


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.AnnAssign | ast.arg | ast.FunctionDef | ast.AsyncFunctionDef):
            skipped = (
                {id(node.annotation)}
                if isinstance(node, ast.AnnAssign | ast.arg)
                else {id(node.returns)}
            )
            parts: list[ast.AST] = [
                part for part in ast.iter_child_nodes(node) if id(part) not in skipped
            ]
            yield from (found for part in parts for found in [part, *_code(part)])
        elif not isinstance(node, ast.JoinedStr):
            yield node
            yield from _code(node)


def choose(count: int, seed: int, since: str) -> list[Mutation]:
    """Some of all; `since`: only of lines that this revision has too."""
    found: list[Mutation] = []
    for file in git(CHECKOUT, "ls-files", "trainkit/*.py").split():
        text = (CHECKOUT / file).read_text()
        former = (
            Counter(_text_at(since, file).splitlines()) if since else Counter(text.splitlines())
        )
        lines = Counter(text.splitlines())
        found += [
            m
            for m in mutations_of(file, text)
            if not since or former[m.before] == lines[m.before] == 1
        ]
    return random.Random(seed).sample(found, count)


def _text_at(revision: str, file: str) -> str:
    done = subprocess.run(
        ["git", "show", f"{revision}:{file}"],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout


def git(folder: Path, *words: str) -> str:
    """What git prints."""
    return subprocess.run(
        ["git", *words], cwd=folder, check=True, capture_output=True, text=True
    ).stdout


# --- Tests


def clone(folder: Path, revision: str) -> Path:
    """A clone with an environment of its own."""
    if not (folder / ".git").exists():
        git(CHECKOUT, "clone", "--quiet", str(CHECKOUT), str(folder))
        copy_environment(folder)
    git(folder, "fetch", "--quiet", "origin")
    git(folder, "checkout", "--quiet", "--force", revision)
    subprocess.run(["./inv", "test", "--help"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return folder


def copy_environment(folder: Path) -> None:
    """Hard links to this checkout's environment; what names the checkout in it names the clone.
    `./inv` installs what the clone's revision needs beside it."""
    environment = folder / ".venv"
    shutil.copytree(CHECKOUT / ".venv", environment, symlinks=True, copy_function=os.link)
    (packages,) = environment.glob("lib/python3*/site-packages")
    own = [*packages.glob("__editable__*"), *packages.glob("trainkit*/direct_url.json")]
    for path in (environment / "pyvenv.cfg", *(environment / "bin").iterdir(), *own):
        if path.is_symlink() or not path.is_file():
            continue
        content = path.read_bytes()
        named = content.replace(os.fsencode(CHECKOUT), os.fsencode(folder))
        if named != content:
            mode = path.stat().st_mode
            path.unlink()  # the link, not what it is a link to
            path.write_bytes(named)
            path.chmod(mode)


def steps(folder: Path, file: str) -> list[list[str]]:
    """The tests of a file, most telling first: those that name its module, then those of its
    area."""
    module = file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    package, _, name = module.rpartition(".")
    names = re.compile(rf"{re.escape(module)}\b|from {re.escape(package)} import [^\n]*\b{name}\b")
    tests = sorted(str(p.relative_to(folder)) for p in (folder / "tests").rglob("test_*.py"))
    area = f"tests/{file.split('/')[1]}/"
    naming = [
        test
        for test in tests
        if test.startswith(area) and names.search((folder / test).read_text())
    ]
    return [
        words
        for words in (
            naming,
            [test for test in tests if test.startswith(area) and test not in naming],
        )
        if words
    ]


def run_tests(folder: Path, words: list[str], limit: float) -> tuple[int, str]:
    """The exit code of pytest, and what it said. Raises TimeoutExpired once all that it started
    and that is still of its session has ended."""
    argv = [".venv/bin/python", "-m", "pytest", "-x", "-q", "-m", "not slow"]
    child = subprocess.Popen(
        [*argv, "-p", "no:cacheprovider", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        start_new_session=True,
    )
    try:
        out, _ = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGINT)  # fixtures take their hosts and processes away
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        raise
    return child.returncode, out


def judge(folder: Path, mutation: Mutation, limit: float) -> Result:
    """Mutate, run the tests for so many seconds at most, restore."""
    path = folder / mutation.file
    lines = path.read_text().split("\n")
    number = (
        lines.index(mutation.before) if lines.count(mutation.before) == 1 else mutation.line - 1
    )
    if lines[number] != mutation.before:
        return Result(mutation, "absent", "")
    lines[number] = mutation.after
    path.write_text("\n".join(lines))
    deadline = time.monotonic() + limit
    try:
        for words in steps(folder, mutation.file):
            try:
                code, out = run_tests(folder, words, deadline - time.monotonic())
            except subprocess.TimeoutExpired:
                return Result(mutation, "hangs", words[0])
            if code not in (0, 5):  # 5: no test is left by the marks
                failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", out, re.MULTILINE)
                return Result(mutation, "killed", failed[0] if failed else f"exit {code}")
        return Result(mutation, "survived", "")
    finally:
        git(folder, "checkout", "--quiet", "--", mutation.file)


def judge_all(
    mutations: list[Mutation],
    folders: list[Path],
    said: Callable[[Result], None],
    limit: float,
) -> list[Result]:
    """Each clone takes the next one as soon as it is free."""
    free: Queue[Path] = Queue()
    for folder in folders:
        free.put(folder)

    def one(mutation: Mutation) -> Result:
        folder = free.get()
        try:
            result = judge(folder, mutation, limit)
        finally:
            free.put(folder)
        said(result)
        return result

    with concurrent.futures.ThreadPoolExecutor(len(folders)) as pool:
        return list(pool.map(one, mutations))


def show(result: Result) -> None:
    """One line, two for what survived."""
    mutation = result.mutation
    print(f"{result.verdict:9} {mutation.file}:{mutation.line}  {result.by}", flush=True)
    if result.verdict == "survived":
        print(
            f"          - {mutation.before.strip()}\n          + {mutation.after.strip()}",
            flush=True,
        )


def known_results(file: Path) -> dict[Mutation, Result]:
    """Those of a run before."""
    rows = json.loads(file.read_text()) if file.exists() else []
    found = [Result(Mutation(**row["mutation"]), row["verdict"], row["by"]) for row in rows]
    return {result.mutation: result for result in found}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=60, help="mutations")
    parser.add_argument("--seed", type=int, default=1, help="of the choice")
    parser.add_argument("--jobs", type=int, default=2, help="clones at work at once")
    parser.add_argument("--since", default="", help="a revision whose lines alone are mutated")
    parser.add_argument("--rev", default="HEAD", help="the revision of the clones")
    parser.add_argument("--again", type=Path, help="results whose mutations are judged again")
    parser.add_argument(
        "--survivors", action="store_true", help="with --again: only of those that survived"
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=CHECKOUT / "build" / "mutations",
        help="where clones and results go",
    )
    parser.add_argument("--limit", type=float, default=900, help="seconds for one mutation")
    parser.add_argument("--quick", action="store_true", help="two mutations")
    given = parser.parse_args()
    if given.again:
        former = json.loads(given.again.read_text())
        chosen = [
            Mutation(**row["mutation"])
            for row in former
            if not given.survivors or row["verdict"] == "survived"
        ]
    else:
        chosen = choose(2 if given.quick else given.count, given.seed, given.since)
    work = given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    revision = git(CHECKOUT, "rev-parse", given.rev).strip()
    file = work / f"{revision[:12]}.json"
    known = known_results(file)
    left = [mutation for mutation in chosen if mutation not in known]
    folders = [clone(work / f"clone-{number}", revision) for number in range(given.jobs)]
    saying = threading.Lock()

    def said(result: Result) -> None:
        with saying:
            show(result)
            known[result.mutation] = result
            text = json.dumps([asdict(result) for result in known.values()], indent=1)
            file.with_suffix(".tmp").write_text(text)
            file.with_suffix(".tmp").replace(file)

    judge_all(left, folders, said, given.limit)
    results = [known[mutation] for mutation in chosen]
    counts = Counter(result.verdict for result in results)
    judged = sum(counts.values()) - counts["absent"]
    found = counts["killed"] + counts["hangs"]
    print(
        f"{found} of {judged} mutations killed ({found / max(1, judged):.0%}) at {revision[:12]}:"
        f" {dict(counts)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
