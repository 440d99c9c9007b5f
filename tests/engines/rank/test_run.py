"""The program beside a foreign engine's rank: what it passes on, what it records, how it judges.

The engine here is a small script that prints Megatron-LM's lines and writes its folders; the real
engines run in tests/engines/test_real_engines.py.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.engines.rank.made_engine import MAIN, PYTHON, environment, spec_of
from trainkit.engines.rank.end import last_error
from trainkit.engines.rank.spec import RequiredModule


def run(tmp_path: Path, body: str, **changes: Any) -> subprocess.CompletedProcess[str]:
    argv = [PYTHON, "-I", "-S", str(MAIN), str(spec_of(tmp_path, body, **changes))]
    return subprocess.run(
        argv, env=environment(tmp_path), capture_output=True, text=True, check=False, timeout=300
    )


def error_of(tmp_path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((tmp_path / "error.json").read_text())
    return value


def rows_of(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


def beat_of(tmp_path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((tmp_path / "beat.json").read_text())
    return value


def test_a_whole_run_succeeds_and_is_recorded(tmp_path: Path) -> None:
    done = run(tmp_path, "for step in range(1, 5):\n    line(step)\nsave(4)\n", peak_tflops=1.0)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("iteration") >= 4  # passed on as it was
    assert beat_of(tmp_path)["phase"] == "done"
    assert not (tmp_path / "error.json").exists()
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    row = rows[-1]
    assert row["lm_loss"] == pytest.approx(10.78138)
    assert row["grad_norm"] == 1.59
    assert row["consumed_samples"] == 16
    assert row["samples_per_second"] == 16.0
    assert row["tokens_per_second"] == 128.0
    assert row["model_tflops"] == pytest.approx(128 * 6e6 / 1e12)
    assert row["mfu"] == pytest.approx(128 * 6e6 / 1e12)


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        pytest.param("", "EngineEndedEarly", "no checkpoint in", id="nothing was trained"),
        pytest.param(
            "line(1)\nline(2)\nsave(2)\n",
            "EngineEndedEarly",
            "after iteration 2 of 4",
            id="it ended early",
        ),
        pytest.param(
            "for step in range(1, 5):\n    line(step)\nsave(2)\n",
            "EngineEndedEarly",
            "its last checkpoint is of iteration 2",
            id="its last save is missing",
        ),
        pytest.param(
            "for step in range(1, 5):\n    line(step)\nsave(4)\n"
            "open(folder / 'iter_0000004' / 'mp_rank_00' / 'model_optim_rng.pt', 'w').close()\n",
            "DamagedCheckpoint",
            "is not whole",
            id="its last save is damaged",
        ),
        pytest.param(
            "line(1)\nsave(4)\n",
            "EngineEndedEarly",
            "after iteration 1 of 4",
            id="an old checkpoint lies there",
        ),
    ],
)
def test_exit_code_0_without_training_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, kind: str, words: str
) -> None:
    done = run(tmp_path, body)
    assert done.returncode == 9, done.stderr
    error = error_of(tmp_path)
    assert error["type"] == kind
    assert words in error["message"]
    assert error["exit"] == 9
    assert beat_of(tmp_path)["phase"] != "done"


def test_the_engines_own_error_is_the_ranks(tmp_path: Path) -> None:
    done = run(tmp_path, "line(1)\nraise ValueError('vocab size 7 is too small')\n")
    assert done.returncode == 9
    error = error_of(tmp_path)
    assert (error["type"], error["message"]) == ("ValueError", "vocab size 7 is too small")
    assert "Traceback" in done.stderr
    assert error["step"] == 1


AT_ONCE = f"""
import sys
sys.path.insert(0, {str(MAIN.parents[3])!r})
from pathlib import Path
from trainkit.engines.rank import run, spec
run.EXIT_SECONDS = 0.0
sys.exit(run.run_engine(spec.read_spec(Path(sys.argv[1]))))
"""
STAYS = """
import threading
threading.Thread(target=lambda: [time.sleep(60) for _ in range(60)]).start()
def main():
    raise ValueError('vocab size 7')
line(1)
main()
"""


@pytest.mark.parametrize("prefix", ["", "[rank0]: "])
def test_an_engine_that_hangs_in_its_exit_ends_with_its_tracebacks_cause(
    tmp_path: Path, prefix: str
) -> None:
    hook = (  # torch.distributed's
        "import traceback\ndef hook(*error):\n"
        f"    text = ''.join(traceback.format_exception(*error)).replace('\\n', '\\n{prefix}')\n"
        f"    print('{prefix}' + text, file=sys.stderr)\n"
        "sys.excepthook = hook\n"
    )
    argv = [PYTHON, "-I", "-S", "-c", AT_ONCE, str(spec_of(tmp_path, hook + STAYS))]
    done = subprocess.run(
        argv, env=environment(tmp_path), capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 9, done.stderr
    error = error_of(tmp_path)
    assert (error["type"], error["message"]) == ("ValueError", "vocab size 7")
    assert "pretrain_gpt.py had not left 0 s after its traceback" in done.stderr


SURVIVES = """
import threading, traceback
def attempt():
    try:
        raise ValueError('no fused kernel')
    except ValueError:
        traceback.print_exc()
        traceback.print_stack()
attempt()
threading.Thread(target=lambda: 1 / 0).start()
while not (folder.parent / "go").exists():
    time.sleep(0.05)
for step in range(1, 5):
    line(step)
save(4)
"""


def goes_on(folder: Path, starter: str, program: str, until: bytes) -> None:
    """A rank whose engine has printed `until` on stderr, and then prints its steps, ends well."""
    argv = [PYTHON, "-I", "-S", "-c", starter, str(spec_of(folder, program))]
    process = subprocess.Popen(
        argv, env=environment(folder), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    while until not in process.stderr.readline():
        assert process.poll() is None
    (folder / "go").touch()  # what is printed from now on is read after it has judged that
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err


def test_a_traceback_that_the_engine_survives_ends_nothing(tmp_path: Path) -> None:
    goes_on(tmp_path, AT_ONCE, SURVIVES, b"ZeroDivisionError")


def test_a_caught_traceback_of_the_script_itself_ends_no_rank_that_works(tmp_path: Path) -> None:
    program = (
        "import traceback\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n"
        "    traceback.print_exc()\nprint('caught', file=sys.stderr, flush=True)\n"
        "while not (folder.parent / 'go').exists():\n    time.sleep(0.05)\n"
        "for step in range(1, 5):\n    line(step)\nsave(4)\n"
    )
    works = AT_ONCE.replace("sys.exit", "run.IDLE_SECONDS = -1.0\nsys.exit")
    goes_on(tmp_path, works, program, b"caught")


def test_a_rank_that_prints_no_line_fails_where_the_others_are(tmp_path: Path) -> None:
    rows = [{"step": 5, "lm_loss": 1.0}, {"step": 6, "lm_loss": 1.0}, {"step": 6, "eval": "valid"}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run(tmp_path, "raise RuntimeError('DataLoader worker (pid 7) is killed by signal: 9')\n")
    assert done.returncode == 9
    assert error_of(tmp_path)["step"] == 6


def test_an_engine_that_a_signal_ends_ends_its_rank_the_same_way(tmp_path: Path) -> None:
    done = run(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)\n")
    assert done.returncode == -signal.SIGKILL
    done = run(tmp_path, "os.kill(os.getpid(), signal.SIGSEGV)\n")
    assert done.returncode == -signal.SIGSEGV


def test_an_exit_code_that_is_trainkits_own_is_not_mistaken(tmp_path: Path) -> None:
    done = run(tmp_path, "sys.exit(12)\n")
    assert done.returncode == 9
    assert "ended with 12" in error_of(tmp_path)["message"]


def started(tmp_path: Path, body: str, **changes: Any) -> subprocess.Popen[str]:
    argv = [PYTHON, "-I", "-S", str(MAIN), str(spec_of(tmp_path, body, **changes))]
    process = subprocess.Popen(
        argv, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert "iteration" in process.stdout.readline()
    return process


WAITS = "line(1)\nwhile True:\n    time.sleep(0.05)\n"
SAVES = "def stop(*_):\n    save(1)\n    sys.exit(0)\nsignal.signal(signal.SIGTERM, stop)\n" + WAITS


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_asked_to_save_it_leaves_with_12_where_the_engine_has_saved(
    tmp_path: Path, number: signal.Signals
) -> None:
    """By the supervisor, or by a scheduler that signals this process alone."""
    process = started(tmp_path, SAVES)
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 12, (out, err)
    assert not (tmp_path / "error.json").exists()


def test_asked_to_save_it_does_not_claim_what_the_engine_did_not_do(tmp_path: Path) -> None:
    process = started(tmp_path, WAITS, saves_on_term=False)
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=300)
    assert process.returncode not in (0, 12)  # TERM has ended the engine, nothing is saved


def test_when_its_rank_is_killed_the_engine_dies_too(tmp_path: Path) -> None:
    body = "print(os.getpid(), 'iteration', flush=True)\n" + WAITS
    argv = [PYTHON, "-I", "-S", str(MAIN), str(spec_of(tmp_path, body))]
    process = subprocess.Popen(
        argv, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    pid = int(process.stdout.readline().split()[0])
    process.kill()
    process.communicate(timeout=300)
    for _ in range(6000):
        if not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text():
            break
        time.sleep(0.05)
    else:
        pytest.fail("the engine outlived its rank")


def test_what_is_missing_on_a_host_is_said_before_the_start(tmp_path: Path) -> None:
    modules = (
        RequiredModule("no_such_module", "pip install it"),
        RequiredModule("json", "never"),
        RequiredModule("no_such_module or json", "never"),
        RequiredModule("no_such_one or no_such_other", "take one"),
    )
    done = run(tmp_path, "line(1)\n", modules=modules, reads=(str(tmp_path / "vocab.json"),))
    assert done.returncode == 7
    message = error_of(tmp_path)["message"]
    assert "no module no_such_module: pip install it" in message
    assert "no module no_such_one or no_such_other: take one" in message
    assert f"{tmp_path / 'vocab.json'} is not there" in message
    assert "never" not in message
    assert "iteration" not in done.stdout


def test_a_version_that_it_is_not_known_to_run_with_is_noted(tmp_path: Path) -> None:
    """Noted, not refused: many versions work that nobody has tried."""
    site = tmp_path / "site" / "other-1.2.3.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.2.3\n")
    argv = [PYTHON, "-I", "-S", str(MAIN)]
    spec = spec_of(tmp_path, "line(4); save(4)\n", versions=("no-such-package==1", "other==1.2.*"))
    variables = environment(tmp_path, PYTHONPATH=str(tmp_path / "site"))
    done = subprocess.run(
        [*argv, str(spec)], env=variables, capture_output=True, check=False, text=True, timeout=300
    )
    assert done.returncode == 0
    notes = [line for line in done.stderr.splitlines() if line.startswith("trainkit: ")]
    assert not any("other" in line or "no-such-package" in line for line in notes)
    spec = spec_of(tmp_path, "line(4); save(4)\n", versions=("other>=2",))
    done = subprocess.run(
        [*argv, str(spec)], env=variables, capture_output=True, check=False, text=True, timeout=300
    )
    host = os.uname().nodename
    said = f"trainkit: {host} has other 1.2.3; megatron-lm is known to run with other>=2"
    assert said in done.stderr.splitlines()


def test_a_tree_or_an_interpreter_that_is_not_there_is_said(tmp_path: Path) -> None:
    assert run(tmp_path, "", cwd=str(tmp_path / "nowhere")).returncode == 7
    assert "is not there" in error_of(tmp_path)["message"]
    assert run(tmp_path, "", argv=(str(tmp_path / "python"), "x.py")).returncode == 8
    assert "cannot be started" in error_of(tmp_path)["message"]


def test_output_is_passed_on_byte_for_byte(tmp_path: Path) -> None:
    body = (
        "sys.stdout.buffer.write(b'\\xff\\x00a\\rb' * 50000 + b'no end of line')\n"
        "sys.stderr.buffer.write(b'e' * 300000)\n"
    )
    argv = [PYTHON, "-I", "-S", str(MAIN), str(spec_of(tmp_path, body))]
    done = subprocess.run(
        argv, env=environment(tmp_path), capture_output=True, check=False, timeout=300
    )
    assert done.stdout == b"\xff\x00a\rb" * 50000 + b"no end of line"
    assert done.stderr.startswith(b"e" * 300000)


def test_the_engine_sees_its_own_interpreter_first_and_not_our_files(tmp_path: Path) -> None:
    body = "print(os.environ['PATH'].split(':')[0], sorted(os.environ))\n"
    done = run(tmp_path, body)
    assert done.stdout.startswith(str(Path(sys.executable).parent) + " ")
    assert "TRAINKIT_HEARTBEAT_FILE" not in done.stdout
    assert "TORCHELASTIC_ERROR_FILE" not in done.stdout
    done = run(tmp_path, body, path=("/its tools",))
    assert done.stdout.startswith("/its tools ")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["x", "torch.cuda.OutOfMemoryError: CUDA out of memory.", "y"], "OutOfMemoryError"),
        (["[rank0]: RuntimeError: NCCL error"], "RuntimeError"),
        (["AssertionError"], "AssertionError"),
        (["AssertionError: OptimizerParamScheduler: class input value 20"], "AssertionError"),
        (["no error here"], ""),
    ],
)
def test_the_last_error_of_an_output_is_found(lines: list[str], expected: str) -> None:
    assert last_error(lines)[0] == expected


def test_rows_that_cannot_be_written_do_not_end_the_training(tmp_path: Path) -> None:
    body = "for step in range(1, 5):\n    line(step)\nsave(4)\n"
    done = run(tmp_path, body, metrics=str(tmp_path / "no" / "metrics.jsonl"))
    assert done.returncode == 0
    assert "no metrics" in done.stderr


def test_a_python_that_is_too_old_says_so() -> None:
    """Told so by a newer one: the check must come before anything that an old one cannot read."""
    code = (
        f"import runpy, sys; sys.version_info = (3, 7, 16); runpy.run_path({str(MAIN)!r},"
        " run_name='__main__')"
    )
    argv = [sys.executable, "-I", "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
    assert "3.8 or newer is needed: engines.X.python" in done.stderr
    assert "Traceback" not in done.stderr
    ast.parse(MAIN.read_text(), feature_version=(3, 6))
    assert "from __future__ import annotations" not in MAIN.read_text().splitlines()
