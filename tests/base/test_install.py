"""The installer: what makes an installation stale, two at once, and being stopped. pip and uv are
fakes here; the README's test runs the real ones."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import wait_for
from tests.programs import put_program
from trainkit.base import install as installer
from trainkit.base.install import (
    InstallError,
    build_extension,
    csrc_sha256,
    ensure,
    extension_path,
    fingerprint,
    missing_tools,
)

ROOT = Path(__file__).resolve().parents[2]
Commands = list[list[str]]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files of a checkout that an installation depends on, and a .venv/bin/python that does
    nothing."""
    root = tmp_path / "a clone"
    for name in (
        *installer.CHECKOUT_FILES,
        "csrc/index/a.cpp",
        "csrc/index/a.h",
        "trainkit/base/install.py",
        "inv",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n")
    (root / "pyproject.toml").write_text(
        '[project]\n[project.optional-dependencies]\ntest = ["pytest>=8", "ruff"]\n'
    )
    shutil.copy(
        ROOT / "trainkit" / "base" / "install.py", root / "trainkit" / "base" / "install.py"
    )
    shutil.copy(ROOT / "inv", root / "inv")
    return root


def _fake_python(root: Path, body: str = "exit 0") -> None:
    """Put a shell script where .venv's Python is looked for."""
    python = root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(f"#!/bin/sh\n{body}\n")
    python.chmod(0o755)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    """What would have been run; `venv` makes the fake Python, setup.py an extension that holds
    the hash of csrc/, uv and pip do nothing. pip is configured with nothing."""
    run: Commands = []

    def fake(command: list[str], root: Path, lock: int, *_: object, shown: bool = False) -> None:
        if "uv" not in command:
            run.append(command)
        if "venv" in command:
            _fake_python(root, f"echo {sys.implementation.cache_tag}")
        elif "setup.py" in command:
            made = (
                Path(command[command.index("--build-lib") + 1])
                / "trainkit"
                / extension_path(root).name
            )
            made.parent.mkdir(parents=True)
            made.write_text(csrc_sha256(root))
        elif command[0].startswith(str(root)):
            assert not (root / ".venv" / "trainkit-install.json").exists(), (
                "nothing may count as installed meanwhile"
            )

    monkeypatch.setattr(installer, "run_step", fake)
    monkeypatch.setattr(installer, "pip_settings", lambda environment: {})
    monkeypatch.setattr(installer, "missing_tools", list)
    return run


def _steps(commands: Commands) -> list[str]:
    """uv, or what Python was given: a module or setup.py."""
    return [
        next(word for word in (Path(command[0]).name, *command[1:]) if word in PROGRAMS)
        for command in commands
    ]


PROGRAMS = ("pip", "setup.py", "uv", "venv")


def _rewrite(name: str) -> Callable[[Path], object]:
    return lambda root: (root / name).write_text("changed")


CHANGES: dict[str, Callable[[Path], object]] = {
    **{name: _rewrite(name) for name in (*installer.CHECKOUT_FILES, "trainkit/base/install.py")},
}
SOURCES: dict[str, Callable[[Path], object]] = {
    "a changed source": _rewrite("csrc/index/a.h"),
    "a new source": lambda root: (root / "csrc" / "index" / "b.cpp").write_text(""),
    "a removed source": lambda root: (root / "csrc" / "index" / "a.h").unlink(),
    "a renamed source": (
        lambda root: (root / "csrc" / "index" / "a.h").rename(root / "csrc" / "index" / "b.h")
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_input_changes_the_fingerprint(
    change: str, checkout: Path, commands: Commands
) -> None:
    before = fingerprint(checkout, [])
    ensure(checkout, [])
    CHANGES[change](checkout)
    assert fingerprint(checkout, []) != before
    ensure(checkout, [])
    assert _steps(commands) == ["venv", "uv", "uv"]


@pytest.mark.parametrize("change", SOURCES)
def test_a_changed_source_is_compiled_and_nothing_else_is_done(
    change: str, checkout: Path, commands: Commands
) -> None:
    ensure(checkout, ["test"], extension=True)
    stamp = (checkout / ".venv" / "trainkit-install.json").read_bytes()
    SOURCES[change](checkout)
    ensure(checkout, ["test"])  # for a task that needs no extension, or compiles it itself
    assert _steps(commands) == ["venv", "uv", "setup.py"]
    ensure(checkout, ["test"], extension=True)
    ensure(checkout, ["test"], extension=True)
    assert _steps(commands) == ["venv", "uv", "setup.py", "setup.py"]
    assert (checkout / ".venv" / "trainkit-install.json").read_bytes() == stamp
    assert extension_path(checkout).read_text() == csrc_sha256(checkout) and not list(
        (checkout / "build").iterdir()
    )


def test_being_killed_while_compiling_spoils_no_environment(
    checkout: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure(checkout, [], extension=True)
    (checkout / "csrc" / "index" / "a.cpp").write_text("changed")
    with monkeypatch.context() as patch:
        patch.setattr(
            installer, "_compile", lambda *_: (_ for _ in ()).throw(RuntimeError("killed"))
        )
        with pytest.raises(RuntimeError):
            ensure(checkout, [], extension=True)
    ensure(checkout, [], extension=True)
    assert _steps(commands) == ["venv", "uv", "setup.py", "setup.py"]


def test_the_fingerprint_knows_extras_folder_and_python(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fingerprint(checkout, ["report", "test"])
    assert fingerprint(checkout, ["test", "report", "test"]) == before
    # an editable installation names its folder
    moved = checkout.rename(checkout.with_name("moved"))
    assert (
        len(
            {
                before,
                fingerprint(moved, ["report", "test"]),
                fingerprint(moved, ["test"]),
                fingerprint(moved, []),
            }
        )
        == 4
    )
    before = fingerprint(moved, [])
    os.utime(moved / "setup.py", (0, 0))
    assert fingerprint(moved, []) == before
    monkeypatch.setattr(sys.implementation, "cache_tag", "cpython-399")
    assert fingerprint(moved, []) != before


def test_csrc_hash_is_about_csrc_only(checkout: Path) -> None:
    before = csrc_sha256(checkout)
    (checkout / "setup.py").write_text("changed")
    assert csrc_sha256(checkout) == before
    (checkout / "csrc" / "index" / "a.cpp").write_text("changed")
    assert csrc_sha256(checkout) != before


def test_extras_are_added_once_and_kept(checkout: Path, commands: Commands) -> None:
    for extras in ([], ["test"], [], ["test"]):
        ensure(checkout, extras)
    assert _steps(commands) == ["venv", "uv", "uv"]
    # what is installed is not compiled again for it
    assert commands[-1][-4:] == ["pytest>=8", "ruff", "-c", "constraints.txt"]
    (checkout / "setup.py").write_text("changed")
    ensure(checkout, [])
    assert ".[test]" in commands[-1]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "[]",
        "null",
        '{"extras": 1, "fingerprint": "x"}',
        '{"extras": [], "fingerprint": "x"}',
    ],
)
def test_a_damaged_stamp_is_not_fresh(content: str, checkout: Path, commands: Commands) -> None:
    ensure(checkout, [])
    (checkout / ".venv" / "trainkit-install.json").write_text(content)
    ensure(checkout, [])
    assert _steps(commands) == ["venv", "uv", "uv"]


def test_a_broken_python_is_replaced(
    checkout: Path, commands: Commands, capfd: pytest.CaptureFixture[str]
) -> None:
    ensure(checkout, [])
    _fake_python(checkout, "exit 1")
    (checkout / ".venv" / "trainkit-install.json").unlink()
    ensure(checkout, [])
    assert _steps(commands) == ["venv", "uv", "venv", "uv"]
    assert "has no working Python; it is made again" in capfd.readouterr().err


def test_a_failed_installation_leaves_what_was_before(
    checkout: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure(checkout, [])
    stamp = (checkout / ".venv" / "trainkit-install.json").read_bytes()
    with monkeypatch.context() as patch:

        def fail(*_: object, **named: object) -> None:
            raise InstallError("no network")

        patch.setattr(installer, "run_step", fail)
        with pytest.raises(InstallError):
            ensure(checkout, ["test"])
    assert (checkout / ".venv" / "trainkit-install.json").read_bytes() == stamp
    ensure(checkout, [])
    assert _steps(commands) == ["venv", "uv"]


def test_the_build_stage_compiles_with_its_own_python(
    checkout: Path, commands: Commands, tmp_path: Path
) -> None:
    ensure(checkout, ["test"])
    (checkout / "csrc" / "index" / "a.cpp").write_text("changed")
    elsewhere = tmp_path / "elsewhere" / "bin" / "python"
    build_extension(checkout, elsewhere)
    assert _steps(commands) == ["venv", "uv", "setup.py"] and commands[-1][0] == str(elsewhere)
    ensure(checkout, ["test"], extension=True)
    assert len(commands) == 3


def test_the_last_words_of_a_step_are_shown(checkout: Path) -> None:
    script = (
        "import sys; [print('line', i, flush=True) for i in range(100)]; print('no space left',"
        " file=sys.stderr); sys.exit(3)"
    )
    with open(checkout / ".venv.lock", "w") as lock, pytest.raises(InstallError) as caught:
        installer.run_step([sys.executable, "-c", script], checkout, lock.fileno())
    assert "exit code 3" in str(caught.value)
    assert str(caught.value).endswith("| line 99\n  | no space left")
    assert "line 50" not in str(caught.value)


def test_a_missing_compiler_or_header_is_said_first(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: "/nowhere")
    monkeypatch.delenv("CPATH", raising=False)
    compiler, headers = missing_tools()
    assert "looked for no-such-compiler): apt-get install g++" in compiler
    assert "looked for /nowhere/Python.h): apt-get install python3-dev" in headers
    with pytest.raises(InstallError, match="cannot be compiled here"):
        ensure(checkout, [])
    assert not (checkout / ".venv").exists()


# -- as a program, by path, with pip and uv replaced by scripts
# --------------------------------------------------------------

HANGS = 600.0  # seconds; only against a test that would never end
PYTHON = """case "$*" in
*"import sys, pip"*) echo {tag} ;;
*"pip config list"*) {config} ;;
*"--only-binary uv"*) {get_uv} ;;
*"-m pip"*) echo pip started >> "{root}/log"; {pip}; echo ended >> "{root}/log" ;;
esac"""
UV = """#!/bin/sh
echo started >> "{root}/log"
{body}
echo ended >> "{root}/log"
"""
UNTIL_TOLD = "while [ ! -e '{root}/go' ]; do sleep 0.05; done"


def _start(root: Path) -> subprocess.Popen[str]:
    argv = [sys.executable, "-I", "-S", str(root / "trainkit" / "base" / "install.py"), "ensure"]
    env = {**os.environ, "CXX": "true"}
    return subprocess.Popen(
        argv, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def _wait_for(root: Path, word: str) -> None:
    wait_for(
        lambda: (root / "log").exists() and word in (root / "log").read_text(),
        f"uv to have {word}",
        timeout=HANGS,
    )


def _words(root: Path) -> list[str]:
    return (root / "log").read_text().split()


def _fake_tools(
    root: Path, uv: str = "true", pip: str = "true", config: str = "true", get_uv: str = "true"
) -> None:
    """Lines of shell for what uv and pip do, what `pip config list` says, and how pip gets uv."""
    tag = sys.implementation.cache_tag
    body = PYTHON.format(tag=tag, root=root, pip=pip, config=config, get_uv=get_uv)
    _fake_python(root, body)
    put_program(root / ".venv" / "bin", "uv", UV.format(root=root, body=uv.format(root=root)))


def test_two_first_uses_at_once_wait_for_one_another(checkout: Path) -> None:
    _fake_tools(checkout, UNTIL_TOLD)
    first = _start(checkout)
    _wait_for(checkout, "started")
    second = _start(checkout)
    assert second.stderr is not None
    second_words = second.stderr.readline()  # it waits, and the first is still at it
    (checkout / "go").touch()
    (_, first_words), (_, more_words) = (
        first.communicate(timeout=HANGS),
        second.communicate(timeout=HANGS),
    )
    assert more_words == ""
    assert (first.returncode, second.returncode) == (0, 0)
    assert (
        second_words
        == f"trainkit: process {first.pid} is installing this checkout; waiting for it\n"
    )
    assert "waiting" not in first_words
    assert _words(checkout) == ["started", "ended"]


def test_a_failed_installation_ends_with_6_and_its_words(checkout: Path) -> None:
    _fake_tools(checkout, "echo uv finds no torch; exit 2", "echo could not find torch; exit 1")
    child = _start(checkout)
    _, words = child.communicate(timeout=HANGS)
    assert child.returncode == 6
    assert "\nuv finds no torch\ntrainkit: pip does it, as uv cannot: " in words
    assert "\ncould not find torch\ntrainkit: the installation failed (exit code 1)" in words
    assert words.endswith("\n  The next ./inv tries again.\n")
    assert "Traceback" not in words
    assert not (checkout / ".venv" / "trainkit-install.json").exists()


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        ({"get_uv": "echo no such wheel; exit 1"}, "  | no such wheel"),
        ({"config": "echo no such file >&2; exit 1"}, "read its configuration: no such file"),
        (
            {"config": """echo "global.no-binary='torch'" """},
            "uv has no word for pip's setting no-binary = 'torch'",
        ),
        ({"uv": "exit 2"}, "exit code 2"),
    ],
    ids=["no uv", "a broken configuration", "an unknown setting", "uv fails"],
)
def test_pip_does_what_uv_cannot(tools: dict[str, str], reason: str, checkout: Path) -> None:
    _fake_tools(checkout, **tools)
    child = _start(checkout)
    _, words = child.communicate(timeout=HANGS)
    assert child.returncode == 0 and reason in words
    assert "trainkit: pip does it, as uv cannot: " in words
    assert _words(checkout)[-3:] == ["pip", "started", "ended"]


def test_an_environment_that_uv_left_half_done_is_made_again(
    checkout: Path, commands: Commands
) -> None:
    packages = checkout / ".venv" / "lib" / "python3" / "site-packages"
    packages.mkdir(parents=True)
    _fake_tools(checkout, f"mkdir '{packages}/torch'; exit 2")
    child = _start(checkout)
    child.communicate(timeout=HANGS)
    assert child.returncode == 6 and _words(checkout) == ["started"]  # and not pip
    ensure(checkout, [])
    assert _steps(commands) == ["venv", "uv"]


def test_uv_is_given_what_pip_is_configured_with(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PIP_* counts before pip's files, and what is said to uv itself before both."""
    said = """
        global.cert='/ca'
        global.constraint='/etc/cpu.txt /etc/more.txt'
        global.extra-index-url='\\nfile:///a\\nfile:///b'
        global.find-links='/wheels'
        global.timeout='7'
        install.index-url='file:///c'
        install.no-index='true'
        list.format='columns'
        :env:.find-links='/wheels /more'
    """
    for name in ("UV_INDEX", "UV_FIND_LINKS", "UV_DEFAULT_INDEX", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("UV_HTTP_TIMEOUT", "9")
    _fake_tools(
        checkout,
        f'env > "{checkout}/variables"; echo "$@" > "{checkout}/words"',
        config="cat <<'END'\n" + "\n".join(map(str.strip, said.splitlines())) + "\nEND\n",
    )
    child = _start(checkout)
    child.communicate(timeout=HANGS)
    assert child.returncode == 0
    found = (checkout / "variables").read_text().splitlines()
    assert {
        "SSL_CERT_FILE=/ca",
        "UV_DEFAULT_INDEX=file:///c",
        "UV_FIND_LINKS=/wheels,/more",
        "UV_HTTP_TIMEOUT=9",
        "UV_INDEX=file:///a file:///b",
        "UV_INDEX_STRATEGY=unsafe-best-match",
    } <= set(found)
    words = (checkout / "words").read_text().strip()
    python = checkout / ".venv" / "bin" / "python"
    assert words == (
        f"pip install --python {python} -c /etc/cpu.txt -c /etc/more.txt --no-index"
        " -e . -c constraints.txt"
    )


def test_ctrl_c_ends_with_130_and_one_line(checkout: Path) -> None:
    _fake_tools(checkout, UNTIL_TOLD)
    child = _start(checkout)
    _wait_for(checkout, "started")
    os.killpg(child.pid, signal.SIGINT)
    _, words = child.communicate(timeout=HANGS)
    assert child.returncode == 130
    assert words.splitlines()[1:] == [
        "trainkit: interrupted; the next ./inv starts the installation again"
    ]
    assert _words(checkout) == ["started"]
    assert not (checkout / ".venv" / "trainkit-install.json").exists()


def test_sigkill_leaves_nothing_fresh_and_the_orphan_keeps_the_lock(
    checkout: Path,
    commands: Commands,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holder = installer._holder
    _fake_tools(checkout, UNTIL_TOLD)
    child = _start(checkout)
    _wait_for(checkout, "started")
    child.kill()
    child.wait(timeout=HANGS)
    assert not (checkout / ".venv" / "trainkit-install.json").exists()

    def asked(handle: int) -> dict[str, object]:  # as is done when somebody has to wait
        (checkout / "go").touch()
        return holder(handle)

    monkeypatch.setattr(installer, "_holder", asked)
    # begins when the killed one's uv has ended, and starts from an empty .venv
    ensure(checkout, [])
    assert _words(checkout) == ["started", "ended"]
    assert _steps(commands) == ["venv", "uv"]
    said = capfd.readouterr().err
    assert "waiting for it" in said and ".venv is unfinished" in said
    assert json.loads((checkout / ".venv" / "trainkit-install.json").read_text())["extras"] == []


# -- inv


def _inv(
    root: Path, *words: str, path: str | None = None, through: Path | None = None
) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "CXX": "true", **({} if path is None else {"PATH": path})}
    return subprocess.run(
        [str(through or root / "inv"), *words],
        cwd=root.parent,
        env=env,
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )


def test_inv_passes_words_and_folder_on_through_links(checkout: Path, tmp_path: Path) -> None:
    real = sys.executable
    body = (
        f'case "$*" in *install.py*) exec "{real}" "$@" ;; *"-m trainkit"*) pwd; for w in "$@"; do'
        ' echo "[$w]"; done; exit 7 ;; esac'
    )
    _fake_tools(checkout)
    script = checkout / ".venv" / "bin" / "python"
    script.write_text(script.read_text() + body + "\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "link").symlink_to("../a clone/inv")
    (tmp_path / "inv").symlink_to(tmp_path / "bin" / "link")
    done = _inv(checkout, "train", "a b", "--set", "x=*", through=tmp_path / "inv")
    assert done.stdout.splitlines() == [
        str(tmp_path),
        "[-P]",
        "[-m]",
        "[trainkit]",
        "[--search-root]",
        f"[{checkout}]",
        "[train]",
        "[a b]",
        "[--set]",
        "[x=*]",
    ]
    assert done.returncode == 7
    assert json.loads((checkout / ".venv" / "trainkit-install.json").read_text())["extras"] == []
    _inv(checkout, "test")
    assert json.loads((checkout / ".venv" / "trainkit-install.json").read_text())["extras"] == [
        "test"
    ]


def test_inv_says_which_pythons_it_looked_for(checkout: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("dirname", "readlink", "head"):
        (tools / name).symlink_to(shutil.which(name) or "")
    old = put_program(
        tools, "python3", '#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2\nexit 1\n'
    )
    done = _inv(checkout, "jobs", path=str(tools))
    assert done.returncode == 3
    assert f"python3: {old} is Python 3.9.2" in done.stderr
    assert "python3.12: not found" in done.stderr
    assert "needs Python 3.11 or newer" in done.stderr
