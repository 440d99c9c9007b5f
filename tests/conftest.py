"""Fixtures for tests that run the real tasks in a project of their own."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import forkserver, interpreters, limits
from tests.fork_worker import fork_workers
from tests.mounts import unmount
from trainkit.ops.build import CHECKOUT, build_kernels, missing_tools, staleness

pytest_plugins = ("tests.images.fixtures",)
# Read when torch is loaded. One thread: tensors here are tiny, and several workers of pytest share
# the cores. PASSIVE: what waits does not spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# No deadlines: an example that another process delays is not a finding. ./inv test --slow asks for
# the second.
settings.register_profile(
    "ci", deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "slow", deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci")

# variable: the folder of a test run, gone after it
TEST_RUN = "TRAINKIT_TEST_RUN"
HANGS = limits.HANGS
TASKS = "from trainkit.cli.tasks import namespace\n"
JOBS = """
[defaults]
job = "text"

[clusters.here]
ranks_per_node = 2

[tokenizers.bpe]
type = "bpe"
vocab_size = 300

[datasets.lines]
source = "files"
paths = ["corpus/*.jsonl"]
tokenizer = "bpe"
split = "80,20,0"

[models.tiny]
num_layers = 2
hidden_size = 32
num_attention_heads = 2
seq_length = 16

[models.tiny-mock]
extends = "tiny"
vocab_size = 128

[jobs.text]
cluster = "here"
model = "tiny"
dataset = "lines"
training.micro_batch_size = 2
training.global_batch_size = 8
training.train_iters = 20
training.lr = 1e-2
training.lr_warmup_iters = 2
training.eval_iters = 1
training.save_interval = 5
generate = { prompt = "the ", max_new_tokens = 8 }

[jobs.random]
cluster = "here"
model = "tiny-mock"
dataset = "mock"
training.micro_batch_size = 2
training.global_batch_size = 8
training.train_iters = 30
training.lr = 1e-2
training.eval_iters = 1
training.eval_interval = 10
training.save_interval = 5
"""


SERVER: pytest.StashKey[forkserver.Server] = pytest.StashKey()
ADDRESS = "forkserver"  # what pytest-xdist tells its workers


def pytest_configure(config: pytest.Config) -> None:
    """One fork server a test run, of the process that is nobody's worker."""
    gc.disable()  # until all is imported, which takes a third less time so
    # `pytest &` in a script: all that tests start would ignore it too
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if (given := getattr(config, "workerinput", None)) is not None:
        forkserver.use(lambda: str(given[ADDRESS]))
        return
    compile_kernels()
    folder = tempfile.mkdtemp(prefix="trainkit-tests-")
    os.environ[TEST_RUN] = folder  # for the workers too
    config.add_cleanup(lambda: remove_folder(Path(folder)))
    config.stash[SERVER] = server = forkserver.Server(Path(folder))
    config.add_cleanup(server.close)
    forkserver.use(server.address)
    if getattr(config.option, "tx", None):  # workers of pytest-xdist
        fork_workers()


def pytest_sessionstart(session: pytest.Session) -> None:
    plugins = session.config.pluginmanager
    if (terminal := plugins.get_plugin("terminalreporter")) is not None:
        plugins.register(FailuresAtOnce(terminal))


def compile_kernels() -> None:
    """Before the first test, which would find the package changed by another: what tests train
    with, where it can be compiled."""
    if staleness(CHECKOUT) and not missing_tools():
        build_kernels(CHECKOUT, Path(sys.executable))


def remove_folder(folder: Path) -> None:
    """Remove the folder of a test run, in which images may be mounted."""
    unmount(folder)
    shutil.rmtree(folder)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """pytest-xdist makes a worker."""
    node.workerinput[ADDRESS] = node.config.stash[SERVER].address()


# What takes longest, and waits most: by a fixture, or by where it lies. What needs one cluster is
# for one worker: each that is brought up costs as much as many tests.
LONG: tuple[str | set[str], ...] = (
    {"slurm_machines", "accounting_machines"},
    {"machines"},
    {"kubernetes_machines"},
    "tests/images/test_cpu_image",
    "tests/torture/",
    "tests/train/parallel/",
    "tests/launch/",
)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that needs a GPU is skipped, with the reason, where torch can use none."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if torch.version.cuda is None:
        pytest.skip(f"no GPU: torch {torch.__version__} was built without CUDA")
    if not torch.cuda.is_available():
        pytest.skip("no GPU that torch can use: no device, or its driver is too old")


def _pile(item: pytest.Item) -> int | None:
    """The first of LONG that a test is of."""
    fixtures = getattr(item, "fixturenames", ())
    for number, long in enumerate(LONG):
        if isinstance(long, str):
            found = item.nodeid.startswith(long)
        else:
            found = not long.isdisjoint(fixtures)
        if found:
            return number
    return None


@pytest.hookimpl(trylast=True)  # when those that are not asked for are gone
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes longest begins first, each on a worker of its own; all others are done beside
    it. pytest-xdist gives each worker as many items in a row."""
    piles: list[list[pytest.Item]] = [
        [] for _ in range(getattr(config, "workerinput", {}).get("workercount", 1))
    ]
    others: list[pytest.Item] = []
    for item in items:
        which = _pile(item)
        (others if which is None else piles[which % len(piles)]).append(item)
    for number, pile in enumerate(piles):
        room = max(
            0, (len(items) - sum(map(len, piles[:number]))) // (len(piles) - number) - len(pile)
        )
        pile += others[:room]
        others = others[room:]
    items[:] = [item for pile in piles for item in pile] + others


def pytest_collection_finish() -> None:
    """All that tests need is imported; see pytest_configure."""
    gc.freeze()
    gc.enable()


DESELECTED: pytest.StashKey[int] = pytest.StashKey()


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Count them; the workers of pytest-xdist, who all deselect the same, tell who has them."""
    if items:
        config = items[0].config
        config.stash[DESELECTED] = config.stash.get(DESELECTED, 0) + len(items)
        if hasattr(config, "workeroutput"):
            config.workeroutput["deselected"] = config.stash[DESELECTED]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker has ended."""
    node.config.stash[DESELECTED] = getattr(node, "workeroutput", {}).get("deselected", 0)


class FailuresAtOnce:
    """Says what fails when it fails: a test run that is ended from outside prints no summary."""

    def __init__(self, terminal: Any) -> None:
        self.terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.terminal.ensure_newline()
            self.terminal.write_line(f"{report.when} of {report.nodeid} failed:")
            self.terminal.write_line("\n".join(report.longreprtext.splitlines()[-15:]))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """What was left out, and why, in a table."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in skipped
        if isinstance(report.longrepr, tuple)
    )
    rows = [(count, reason) for reason, count in reasons.most_common()]
    if slow := config.stash.get(DESELECTED, 0):
        rows.append((slow, "slow, or not asked for: ./inv test --slow runs all"))
    if rows:
        terminalreporter.section("left out")
        for count, reason in rows:
            terminalreporter.write_line(f"{count:5}  {reason}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-cluster",
        action="store_true",
        help="fail, not skip, where tests cannot have hosts or podman",
    )


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A world of this process alone, in which checkpoints are saved."""
    import torch.distributed as dist

    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield
    dist.destroy_process_group()


@dataclass
class Project:
    """A folder with tasks.py and jobs.toml, as a user has one."""

    path: Path

    def environment(self, **more: str) -> dict[str, str]:
        """The caller's environment; a folder for temporary files of its own."""
        temporary = self.path / "tmp"
        temporary.mkdir(exist_ok=True)
        return {**os.environ, "TMPDIR": str(temporary), "COLUMNS": "200", **more}

    def start(self, *words: str, **more: str) -> subprocess.Popen[str]:
        """Start `invoke WORDS...` in a session of its own."""
        argv, pipe, env = (
            [sys.executable, "-m", "invoke", *words],
            subprocess.PIPE,
            self.environment(**more),
        )
        return forkserver.Popen(
            argv,
            cwd=self.path,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
            start_new_session=True,
        )

    def invoke(
        self, *words: str, exit: int = 0, timeout: float = HANGS, **more: str
    ) -> subprocess.CompletedProcess[str]:
        """Run `invoke WORDS...`; fails unless it ends with `exit`. No task may ever show a
        traceback."""
        process = self.start(*words, **more)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            pytest.fail(f"invoke {' '.join(words)} took over {timeout} s\n{out}\n{err}")
        assert process.returncode == exit, (
            f"invoke {' '.join(words)} ended with {process.returncode}, not {exit}\n{out}\n{err}"
        )
        assert "Traceback" not in err, err
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def document(self, *words: str, exit: int = 0) -> dict[str, Any]:
        """The one JSON document that `invoke WORDS... --json` prints."""
        value = json.loads(self.invoke(*words, "--json", exit=exit).stdout)
        assert isinstance(value, dict)
        return value

    def edit_jobs(self, old: str, new: str, *, count: int = -1) -> None:
        """Change jobs.toml, where `old` stands."""
        text = (self.path / "jobs.toml").read_text()
        assert old in text
        (self.path / "jobs.toml").write_text(text.replace(old, new, count))

    def add_to_jobs(self, text: str) -> None:
        """More at the end of jobs.toml."""
        with open(self.path / "jobs.toml", "a") as file:
            file.write(text)

    def runs(self) -> list[Path]:
        """Run folders, oldest first."""
        return sorted(
            (p for p in (self.path / "runs").glob("*/*") if (p / "job.json").is_file()),
            key=lambda p: p.name,
        )

    def metrics(self, run: Path) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl."""
        return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]

    def losses(self, run: Path) -> dict[int, float]:
        """{step: training loss}; every step once."""
        rows = [r for r in self.metrics(run) if "eval" not in r]
        losses = {r["step"]: r["lm_loss"] for r in rows}
        assert len(losses) == len(rows), "a step was logged twice"
        return losses


def make_corpus(folder: Path) -> None:
    """Some lines of text in two files."""
    (folder / "corpus").mkdir()
    for shard in range(2):
        lines = [
            json.dumps(
                {
                    "text": (
                        f"the quick brown fox number {i} of shard {shard} jumps over the lazy dog"
                        " and then rests"
                    )
                }
            )
            for i in range(150)
        ]
        (folder / "corpus" / f"part-{shard}.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A project with a small text corpus, a job on it, and a job on random tokens."""
    (tmp_path / "tasks.py").write_text(TASKS)
    # slots of its own
    (tmp_path / "jobs.toml").write_text(
        JOBS.replace("[clusters.here]", f'[clusters.here]\nnode_folder = "{tmp_path}/node"')
    )
    make_corpus(tmp_path)
    return Project(tmp_path)


@pytest.fixture(scope="session", params=interpreters.VERSIONS)
def image_python(request: pytest.FixtureRequest) -> str:
    """An interpreter of the images of others: each of interpreters.VERSIONS that is here."""
    version: str = request.param
    return interpreters.found_or_skip(version)


@pytest.fixture(scope="session")
def old_python() -> str:
    """The oldest of them: TRAINKIT_OLD_PYTHON names it, or it is found."""
    return os.environ.get("TRAINKIT_OLD_PYTHON") or interpreters.found_or_skip(
        interpreters.VERSIONS[0]
    )


def wait_for(condition: Callable[[], Any], what: str, timeout: float = HANGS) -> Any:
    """Poll until `condition()` is true and return its value; fail after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while (began := time.monotonic()) < deadline:
        value = condition()
        if value:
            return value
        # asking may cost more than what is waited for
        time.sleep(max(0.02, 2 * (time.monotonic() - began)))
    pytest.fail(f"waited {timeout} s for {what}")


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
